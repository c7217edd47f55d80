"""The languages of E2B and Morph, and E2B's router, by stand-ins that run programs."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from provider_fakes import (
    FakeService,
    Machines,
    e2b_router,
    fake_e2b,
    fake_morph,
    function_request,
    serving,
    stdio_request,
)
from reward_samples import stdio_row

from ctrl_megatron.rewards import RewardItem, make_reward
from ctrl_megatron.rewards.providers import ProviderError, ProviderSetupError, make_provider
from ctrl_megatron.rewards.providers.languages import LANGUAGES

CASES = [("3", "6"), ("5", "10"), ("4", "9")]
DOUBLE = {
    "python": "print(2 * int(input()))",
    "cpp": "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n; }",
    "java": (
        "import java.util.Scanner;\npublic class Main { public static void main(String[] a) {"
        "System.out.println(2 * new Scanner(System.in).nextInt()); } }"
    ),
    "javascript": "console.log(2 * Number(require('fs').readFileSync(0, 'utf8')))",
    "r": "cat(2 * as.integer(readLines(file('stdin'), n = 1)))",
    "bash": "read n; echo $((2 * n))",
}
BROKEN = {"cpp": "int main() { return 0", "java": "public class Main {"}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of R, which few machines have, something that answers as the program would."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "Rscript").write_text(
        "#!/bin/bash\ngrep -q 'cat(2' $1 || exit 1; read n; echo $((2 * n))\n"
    )
    (folder / "Rscript").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@asynccontextmanager
async def provider(
    name: str, folder: Path, service: FakeService | None = None
) -> AsyncIterator[Any]:
    machines, options = Machines(folder), {"attempts": 1, "backoff": 0.01}
    if name == "router":
        async with serving(e2b_router(service or FakeService())) as url:
            made = make_provider("e2b", e2b_router_url=url.removeprefix("http://"), **options)
            yield made
            await made.close()
        return
    own = {"e2b": {"create": fake_e2b(machines)}}
    own["morph"] = {"connect": fake_morph(machines), "snapshot_id": "s"}
    made = make_provider(name, api_key="secret", **own[name], **options)
    made.machines = machines
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("language", "name"),
    [
        pytest.param(
            *(language, name),
            # Its compiler takes long to start.
            marks=pytest.mark.long if language == "java" and name != "morph" else (),
        )
        for name in ("e2b", "morph", "router")
        for language in LANGUAGES
    ],
)
@pytest.mark.usefixtures("tools")
def test_programs_of_every_language_are_judged(name: str, language: str, tmp_path: Path) -> None:
    if missing := [t for t in LANGUAGES[language].tools.split() if shutil.which(t) is None]:
        pytest.skip(f"{missing[0]} is not installed")

    async def main() -> None:
        async with provider(name, tmp_path) as made:
            request = stdio_request(DOUBLE[language], CASES, language=language, seconds=20)
            found = await made.submit(request)
            assert [test.passed for test in found.tests] == [True, True, False]
            if language in BROKEN:
                broken = stdio_request(BROKEN[language], CASES, language=language)
                found = await made.submit(broken)
                assert [test.passed for test in found.tests] == [False] * 3
                assert "does not compile" in str(found.tests[0].test_info)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["e2b", "morph", "router"])
def test_a_machine_without_a_compiler_is_no_wrong_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    needed = "bash python3 timeout head tail base64 mkdir cat rm"
    for tool in needed.split():
        (folder / tool).symlink_to(shutil.which(tool) or f"/nowhere/{tool}")
    monkeypatch.setenv("PATH", str(folder))

    async def main() -> None:
        async with provider(name, tmp_path) as made:
            with pytest.raises(ProviderSetupError, match=r"lacks? javac, java"):
                await made.submit(stdio_request(DOUBLE["java"], CASES, language="java"))

    asyncio.run(main())


def test_the_router_judges_asserts_and_says_what_failed(tmp_path: Path) -> None:
    service = FakeService()
    asserts = function_request("def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3"])
    endless = stdio_request("while True: pass", CASES[:1], seconds=1)

    async def main() -> None:
        async with provider("router", tmp_path, service) as made:
            assert [t.passed for t in (await made.submit(asserts)).tests] == [True, False]
            (test,) = (await made.submit(endless)).tests
            assert not test.passed and "time limit" in str(test.test_info)
            loud = stdio_request("print('x\\n' * (1 << 20))", CASES[:1])
            assert not (await made.submit(loud)).tests[0].passed
            lost = [{"execution": None, "exception_str": "no sandbox left"}]
            service.faults = [(200, lost), (500, {}), (422, {"detail": "languages"})]
            for error, said in (
                (ProviderError, "no sandbox left"),
                (ProviderError, "status 500"),
                (ProviderSetupError, "status 422"),
            ):
                with pytest.raises(error, match=said):
                    await made.submit(asserts)

    asyncio.run(main())
    with pytest.raises(ProviderSetupError, match="no_such"):
        make_provider("e2b", e2b_router_url="x:1", no_such=1)


def test_an_olympiads_points_through_morph(tmp_path: Path) -> None:
    """The cases of a subtask, of which the weakest decides, in C++."""
    subtasks = [{"points": 20, "tests": [0, 1]}, {"points": 80, "tests": [1, 2]}]
    cases = [{"input": i, "output": o} for i, o in CASES]
    row = stdio_row(selected_uts=cases, subtasks=subtasks, language="cpp")

    async def main() -> list[float | None]:
        async with provider("morph", tmp_path) as made:
            function = make_reward("ioi_code", provider=made)
            return await function([RewardItem(text=f"```cpp\n{DOUBLE['cpp']}\n```", row=row)])

    assert asyncio.run(main()) == [20.0]


def test_the_reward_code_reads_the_language_of_a_row(tmp_path: Path) -> None:
    cases = [{"input": i, "output": o} for i, o in CASES[:2]]
    row = stdio_row(selected_uts=cases, language="bash")
    answer = f"Read, then double.\n```bash\n{DOUBLE['bash']}\n```\n"

    async def main() -> None:
        async with provider("e2b", tmp_path) as made:
            function = make_reward("code", provider=made, require_format=True)
            texts = [answer, answer.replace("2 *", "3 *"), answer.replace("```bash", "```python")]
            items = [RewardItem(text=text, row=row) for text in texts]
            assert await function(items) == [1.0, 0.0, 0.0]
            assert await make_reward("code_format")(items) == [1.0, 1.0, 0.0]

    asyncio.run(main())
