"""The critic's page in a real browser, over a real sandbox: ``make test-page``.

The models are scripted. Screenshots of every case are left in ``build/page``.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from free_port import free_port

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.generation.chat import ChatAnswer, ChatError, TextListener
from ctrl_megatron.generation.critic_service import CriticService, serve_forever
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.types import Message, SamplingParams

BUILD = Path(__file__).parents[2] / "build"
PICTURES = BUILD / "page"
EXAMPLES = Path(__file__).parents[2] / "examples"
STUDY, PROBLEMS = EXAMPLES / "study_smollm2/transcripts", EXAMPLES / "problems/level1.jsonl"
MUTANT = "builtin/sum_even/mutant2"
PATIENCE = 60_000.0
"""Milliseconds; a machine may be several times slower than an idle one."""

pytestmark = pytest.mark.page

PROBLEM = "Write a function add(a, b) that returns the sum of two numbers."
WRONG, RIGHT = "def add(a, b):\n    return a - b", "def add(a, b):\n    return a + b"
TESTS = "assert add(1, 2) == 3\n\nassert add(0, 0) == 0\nassert add(-1, 1) == 0\n"
INCORRECT = (
    "The function subtracts b from a, but the problem asks for the sum. For add(1, 2) it returns "
    "-1.\n\nReplace `a - b` by `a + b`.\n\nOverall judgment: Incorrect"
)
CORRECT = "The function returns the sum of its arguments.\n\nOverall judgment: Correct"
REVISED = f"```python\n{RIGHT}\n```"
EVIL = (
    "</script><script>window.ran = 1; alert(1)</script></textarea></pre>"
    '<img src="http://127.0.0.1:9/stolen" onerror="window.ran = 2; alert(2)">'
    '<svg onload="alert(3)"></svg><iframe src="javascript:alert(4)"></iframe>'
    '<a href="javascript:alert(5)" onfocus="alert(6)" autofocus>x</a>'
    "<style>body { display: none }</style><base href=//evil.example/> &lt;b&gt; ${alert(7)} {{7*7}}"
)
TOKEN = "0123456789abcdef"


class Script:
    """A ``Chat`` that writes given texts, a few characters at a time. It stops in the middle of
    the one called ``wait_in`` until ``go_on`` is set, and of the one called ``fail_in`` for ever.
    """

    def __init__(self, critique: str = INCORRECT, revision: str = REVISED) -> None:
        self.texts = {"critique": critique, "revision": revision}
        self.wait_in = self.fail_in = ""
        self.fail_at_once = False
        self.go_on, self.left = Event(), Event()

    async def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams,
        listener: TextListener | None = None,
    ) -> list[list[ChatAnswer]]:
        name = "revision" if len(conversations[0]) == 3 else "critique"
        text = self.texts[name]
        if self.fail_at_once:
            raise ChatError("the model's server answered 500: out of memory")
        try:
            for start in range(0, len(text), 7):
                if listener is not None:
                    listener(0, text[start : start + 7])
                if start > len(text) // 2 and name == self.fail_in:
                    raise ChatError("the model's server went away")
                while start > len(text) // 2 and name == self.wait_in and not self.go_on.is_set():
                    await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.left.set()
            raise
        answer = ChatAnswer(text=text, finish_reason="stop", prompt_tokens=9, completion_tokens=9)
        return [[answer] * params.n]

    async def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[str]:
    with EmbeddedSandbox.start(workers=1) as service:
        yield service.endpoint


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium")
    assert program, "apt install chromium"
    sys.path.append(str(BUILD / "playwright"))
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found]

    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path=program, chromium_sandbox=os.geteuid() != 0, timeout=PATIENCE
        )
        yield opened
        opened.close()


@contextmanager
def served(chat: Script, sandbox: str, token: str | None) -> Iterator[str]:
    loop, port = BackgroundLoop(), free_port()
    judge = SandboxClient(sandbox)
    service = CriticService(
        chat, chat, judge, model="scripted", max_tokens=64, loopback=token is None, token=token
    )
    serving = loop.submit(serve_forever(service, "127.0.0.1", port))
    url = f"http://127.0.0.1:{port}/"
    deadline = time.monotonic() + 30
    while True:
        try:
            urlopen(url).close()
            break
        except URLError:
            assert time.monotonic() < deadline and not serving.done()
            time.sleep(0.05)
    try:
        yield url
    finally:
        serving.cancel()
        loop.run(judge.close())
        loop.close()


class Shown:
    """The page as a user has it in front of them."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        """Errors that the browser reported."""

    def write(self, **fields: str) -> None:
        for name, text in fields.items():
            self.page.fill(f"#{name}", text)

    def send(self, until: str = "Done.") -> None:
        self.page.click("#send")
        self.wait("status", until)

    def wait(self, place: str, text: str) -> None:
        self.page.locator(f"#{place}", has_text=text).wait_for(timeout=PATIENCE)

    def text(self, place: str) -> str:
        return self.page.text_content(f"#{place}")

    def lines(self, place: str) -> list[str]:
        return self.page.locator(f"#{place} > span").all_text_contents()

    def results(self) -> list[list[str]]:
        """The words in the cells of each test."""
        rows = self.page.locator("#results tr").all()
        return [row.locator("td:first-child, .badge").all_text_contents() for row in rows]

    def visible(self, place: str) -> bool:
        return self.page.is_visible(f"#{place}")

    def picture(self, name: str) -> None:
        self.page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


@pytest.fixture
def open_page(browser: Any, sandbox: str) -> Iterator[Callable[..., Shown]]:
    """Opens the page over a script; fails afterwards on a dialog, an error or a foreign request."""
    ends: list[Callable[[], None]] = []

    def opened(chat: Script, *, token: str | None = None, **context: Any) -> Shown:
        serving = served(chat, sandbox, token)
        url = serving.__enter__()
        window = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        page = window.new_page()
        page.set_default_timeout(PATIENCE)
        shown, dialogs, asked = Shown(page), [], []

        def hear(said: Any) -> None:
            # The browser reports statuses other than 2xx here, too.
            if said.type == "error" and not said.text.startswith("Failed to load resource"):
                shown.errors.append(said.text)

        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        page.on("pageerror", lambda error: shown.errors.append(str(error)))
        page.on("console", hear)
        window.on("request", lambda request: asked.append(request.url))

        def end() -> None:
            window.close()
            serving.__exit__(None, None, None)
            assert (dialogs, shown.errors) == ([], [])
            assert asked and {a for a in asked if not a.startswith("data:")} <= {
                url,
                url + "v1/critiques",
            }

        ends.append(end)
        page.goto(url)
        return shown

    yield opened
    for end in ends:
        end()


def test_empty_input_is_not_sent(open_page: Callable[..., Shown]) -> None:
    chat = Script()
    chat.fail_at_once = True
    shown = open_page(chat)
    shown.picture("fresh")
    for field, text in (("problem", PROBLEM), ("solution", " \n")):
        shown.page.click("#send")
        assert shown.text("error") == f"Please enter a {field}."
        assert shown.page.evaluate("document.activeElement.id") == field
        shown.picture(f"empty_{field}")
        shown.write(**{field: text})
    shown.page.click("#send")
    assert shown.text("error") == "Please enter a solution." and not shown.text("status")
    shown.write(solution=RIGHT, critiques="0")
    shown.page.click("#send")
    assert "from 1 to 16" in shown.text("error")
    # The service refuses, with a sentence, input that the page would not send.
    shown.write(critiques="1", tests="assert add(1, 2 == 3")
    shown.page.click("#send")
    shown.wait("error", "That failed: ")
    assert not shown.visible("critique-part") and shown.page.is_enabled("#send")
    shown.picture("refused")


@pytest.mark.parametrize("look", ["light", "dark"])
def test_a_wrong_program_is_criticised_revised_and_tested(
    open_page: Callable[..., Shown], look: str
) -> None:
    chat = Script()
    chat.wait_in = "critique"
    shown = open_page(chat, color_scheme=look)
    shown.write(problem=PROBLEM, solution=WRONG, tests=TESTS)
    shown.send("Writing the critique")
    # The critique grows and the tests are there while the model still writes.
    shown.wait("results", "failed")
    half = shown.text("critique")
    assert half and half != INCORRECT and INCORRECT.startswith(half)
    assert not shown.page.is_enabled("#send") and not shown.visible("judgment")
    shown.picture(f"while_it_writes_{look}")
    chat.go_on.set()
    shown.wait("status", "Done.")
    assert shown.text("critique") == INCORRECT and shown.text("verdict") == "incorrect"
    assert shown.results() == [
        ["assert add(1, 2) == 3", "failed", "passed"],
        ["assert add(0, 0) == 0", "passed", "passed"],
        ["assert add(-1, 1) == 0", "failed", "passed"],
    ]
    changes = ["@@ -1,2 +1,2 @@", " def add(a, b):", "-    return a - b", "+    return a + b"]
    assert shown.lines("diff") == changes
    shown.page.click("#whole summary")
    assert shown.lines("code") == RIGHT.split("\n")
    shown.picture(f"wrong_{look}")


def test_a_trained_critic_repairs_a_mutant(open_page: Callable[..., Shown]) -> None:
    """The texts of the study's SFT + GRPO critic; docs/images/critic_page.png is this picture."""
    with gzip.open(STUDY / "unseen_mutants.SFT_GRPO.seed2.jsonl.gz", "rt") as lines:
        turns = [json.loads(line) for line in lines]
    repaired = (t for t in turns if t["attempt"] == MUTANT and t["after"]["accepted"])
    turn = next(repaired)
    problems = PROBLEMS.read_text().splitlines()
    problem = next(p for p in map(json.loads, problems) if p["id"] == turn["problem_id"])
    program = turn["solution"].removeprefix("```python\n").removesuffix("\n```")
    shown = open_page(Script(turn["critique"], turn["revision"]))
    shown.write(problem=problem["statement"], solution=program, tests="\n".join(problem["tests"]))
    shown.send()
    assert shown.text("verdict") == "incorrect"
    assert {row[2] for row in shown.results()} == {"passed"}
    shown.picture("trained_critic")


def test_a_right_program_on_a_telephone(open_page: Callable[..., Shown]) -> None:
    shown = open_page(Script(critique=CORRECT), viewport={"width": 390, "height": 844})
    shown.write(problem=PROBLEM, solution=RIGHT, tests=TESTS)
    shown.send()
    assert shown.text("verdict") == "correct" and shown.visible("same")
    assert not shown.visible("diff")
    assert {word for row in shown.results() for word in row[1:]} == {"passed"}
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390
    shown.picture("right_narrow")


def test_several_critiques_vote_and_nothing_is_revised(open_page: Callable[..., Shown]) -> None:
    shown = open_page(Script(critique=CORRECT))
    shown.write(problem=PROBLEM, solution=RIGHT, critiques="3")
    shown.page.uncheck("#revise")
    # By the keyboard alone.
    shown.page.press("#solution", "Control+Enter")
    shown.wait("status", "Done.")
    said = "3 of 3 critiques say correct; probability of correct: 100 %"
    assert shown.text("votes") == said
    assert not shown.visible("tests-part") and not shown.visible("revision-part")
    shown.picture("votes")


def test_a_hostile_paste_is_text(open_page: Callable[..., Shown]) -> None:
    solution = f"def f(x):\n    raise ValueError({EVIL!r})"
    revised = f"def f(x):  # {EVIL}\n    return 1"
    tests = [f"assert f({EVIL!r}) == 1", f"assert f(0) == 1  # {EVIL}"]
    critique = f"{EVIL}\n\nOverall judgment: Incorrect"
    shown = open_page(Script(critique, f"```python\n{revised}\n```"))
    shown.write(problem=EVIL, solution=solution, tests="\n".join(tests))
    shown.send()
    assert shown.text("critique") == critique and shown.page.input_value("#problem") == EVIL
    assert [row[0] for row in shown.results()] == tests
    assert [row[1:] for row in shown.results()] == [["failed", "passed"]] * 2
    assert "window.ran = 1" in shown.text("results").replace(tests[0], "").replace(tests[1], "")
    assert shown.lines("code") == revised.split("\n")
    assert f"+def f(x):  # {EVIL}" in shown.lines("diff")
    shown.picture("hostile")
    names = "document.querySelectorAll('img, svg, iframe, a, base').length"
    assert shown.page.evaluate(names) == 0
    assert shown.page.evaluate("document.scripts.length") == 1
    assert shown.page.evaluate("window.ran") is None
    # The sentence of an error, too.
    shown.write(tests=f"assert {EVIL}")
    shown.page.click("#send")
    shown.wait("error", "That failed: ")
    assert shown.page.evaluate(names) == 0


def test_what_is_not_text_is_stopped_by_the_policy(open_page: Callable[..., Shown]) -> None:
    """Even a page that made markup of what it is given could run or ask nothing."""
    shown = open_page(Script())
    refused = """markup => { try { document.body.innerHTML = markup; return ""; }
                            catch (error) { return error.name; } }"""
    assert shown.page.evaluate(refused, EVIL) == "TypeError"
    blocked = """url => fetch(url).then(() => "reached", error => error.name)"""
    with shown.page.expect_event("console", lambda said: "Refused to connect" in said.text):
        assert shown.page.evaluate(blocked, "http://127.0.0.1:9/") == "TypeError"
    assert "TrustedHTML" in shown.errors[0] and "connect-src 'self'" in shown.errors[1]
    shown.errors.clear()


@pytest.mark.parametrize("place", ["at once", "critique", "revision"])
def test_a_fault_is_a_sentence(open_page: Callable[..., Shown], place: str) -> None:
    chat = Script()
    chat.fail_at_once, chat.fail_in = place == "at once", place
    shown = open_page(chat)
    shown.write(problem=PROBLEM, solution=WRONG)
    shown.page.click("#send")
    shown.wait("error", "That failed: the model's server ")
    assert shown.page.is_enabled("#send") and not shown.text("status")
    # The text received so far stays.
    assert shown.visible("critique-part") == (place != "at once")
    shown.picture(f"fault_{place.replace(' ', '_')}")


def test_stop_ends_the_work(open_page: Callable[..., Shown]) -> None:
    chat = Script()
    chat.wait_in = "critique"
    shown = open_page(chat)
    shown.write(problem=PROBLEM, solution=WRONG)
    shown.send("Writing the critique")
    shown.page.click("#stop")
    shown.wait("status", "Stopped.")
    assert chat.left.wait(30) and shown.page.is_enabled("#send") and not shown.visible("error")


def test_a_token_is_asked_for(open_page: Callable[..., Shown]) -> None:
    shown = open_page(Script(), token=TOKEN)
    assert not shown.visible("token")
    shown.write(problem=PROBLEM, solution=WRONG)
    shown.page.click("#send")
    shown.wait("error", "asks for its token")
    shown.write(token="wrong")
    shown.page.click("#send")
    shown.wait("error", "does not know this token")
    shown.picture("token")
    shown.write(token=TOKEN)
    shown.send()
    assert shown.text("verdict") == "incorrect" and not shown.visible("error")
