"""The clouds' own client libraries, where they are installed, against fakes of their HTTP APIs."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from provider_fakes import function_request, in_shell, serving

from ctrl_megatron.rewards.providers import ProviderError, ProviderSetupError, make_provider
from ctrl_megatron.rewards.providers.cloud import _E2B_CONNECTION

REQUEST = function_request("def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3"])


def morph(folder: Path, seen: list[str]) -> web.Application:
    async def start(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        body = await request.json()
        seen.append(f"start {request.query['snapshot_id']} {body['ttl_seconds']}")
        spec = {"vcpus": 1, "memory": 512, "disk_size": 1024}
        refs = {"snapshot_id": "s", "image_id": "i"}
        answer = {"id": "m1", "created": 1, "status": "ready", "spec": spec, "refs": refs}
        return web.json_response({**answer, "networking": {}})

    async def execute(request: web.Request) -> web.Response:
        (command,) = (await request.json())["command"]
        out, err, code = await in_shell(folder, command, 60)
        return web.json_response({"exit_code": code, "stdout": out, "stderr": err})

    async def stop(request: web.Request) -> web.Response:
        seen.append("stop")
        return web.json_response({})

    application = web.Application(client_max_size=1 << 24)
    application.router.add_post("/instance", start)
    application.router.add_post("/instance/m1/exec", execute)
    application.router.add_delete("/instance/m1", stop)
    return application


def refusing(path: str, status: int) -> web.Application:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"code": status, "message": "no", "detail": "no"}, status=status)

    application = web.Application()
    application.router.add_post(path, refuse)
    return application


def test_morphs_library_judges(tmp_path: Path) -> None:
    pytest.importorskip("morphcloud.api")
    seen: list[str] = []

    async def main() -> None:
        async with serving(morph(tmp_path, seen)) as url:
            made = make_provider("morph", api_key="secret", snapshot_id="s", base_url=url)
            result = await made.submit(REQUEST)
            assert [test.passed for test in result.tests] == [True, False]

    asyncio.run(main())
    assert seen == ["start s 600", "stop"]


def test_e2bs_library_takes_what_it_is_given() -> None:
    library = pytest.importorskip("e2b_code_interpreter")
    signature = inspect.signature(library.AsyncSandbox.create)
    signature.bind(
        template=None, timeout=3, allow_internet_access=False, api_key="k", request_timeout=3.0
    )


def test_unknown_options_of_e2b_are_refused_at_the_start() -> None:
    library = pytest.importorskip("e2b.connection_config")
    assert set(_E2B_CONNECTION) <= library.ApiParams.__annotations__.keys()
    make_provider("e2b", api_key="k", **dict.fromkeys(_E2B_CONNECTION))
    with pytest.raises(ProviderSetupError, match="e2b has no option 'router'; it has"):
        make_provider("e2b", api_key="k", router="http://127.0.0.1:1")


@pytest.mark.parametrize(("status", "kind"), [(401, ProviderSetupError), (503, ProviderError)])
@pytest.mark.parametrize("name", ["e2b", "morph"])
def test_the_libraries_errors_are_understood(name: str, status: int, kind: type[Exception]) -> None:
    pytest.importorskip("e2b_code_interpreter" if name == "e2b" else "morphcloud.api")
    path = "/v2/sandboxes" if name == "e2b" else "/instance"

    async def main() -> None:
        async with serving(refusing(path, status)) as url:
            options: dict[str, Any] = {"api_url": url, "retries": 0}
            if name == "morph":
                options = {"base_url": url, "snapshot_id": "s"}
            key = "e2b_" + "0" * 40
            made = make_provider(name, api_key=key, attempts=1, **options)
            with pytest.raises(kind, match=f"{status}"):
                await made.submit(REQUEST)

    asyncio.run(main())
