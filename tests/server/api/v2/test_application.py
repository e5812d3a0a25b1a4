"""Only requests for the API description wait for it, and no request waits for the routes to be built."""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest

from lathe.server.api.management.application import Application
from lathe.server.app import create_app
from lathe.server.settings import Settings


class Watched(Application):
    def openapi(self) -> dict[str, Any]:
        self.made_on.append(threading.get_ident())
        return super().openapi()

    def __init__(self) -> None:
        self.made_on: list[int] = []
        super().__init__()


def test_the_description_is_made_once_and_off_the_event_loop() -> None:
    app = Watched()
    app.get("/thing")(lambda: 1)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))

    answers = asyncio.run(ask())
    assert all("/thing" in answer.json()["paths"] for answer in answers)
    assert len(app.made_on) == 1
    assert app.made_on[0] != threading.get_ident()


def test_the_description_is_the_same_at_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a call that failed half-way."""
    (tmp_path / "models").mkdir()
    folders: dict[str, Any] = {"model_repo": tmp_path / "models", "state_dir": tmp_path / "state"}
    app = create_app(Settings(**folders))
    with monkeypatch.context() as patched:
        patched.setattr(Application, "_complete", _failing_at("/v2/models/{model}", Application._complete))
        with pytest.raises(ValueError, match="as told"):
            app.openapi()
    first = copy.deepcopy(app.openapi())
    assert app.openapi() == first
    descriptions = [op.get("description", "") for path in first["paths"].values() for op in path.values()]
    assert {description.count("Scope of the key") for description in descriptions} == {0, 1}


def _failing_at(path: str, complete: Any) -> Any:
    def fails(self: Application, method: str, at: str, operation: dict[str, Any]) -> None:
        if at == path:
            raise ValueError("as told")
        complete(self, method, at, operation)

    return fails


def test_no_request_waits_for_routes_to_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic's code for the types of a route is made with the application; later it would block all requests."""
    made = []
    make = pydantic.TypeAdapter.__init__

    def counted(self: Any, *arguments: Any, **named: Any) -> None:
        made.append(self)
        make(self, *arguments, **named)

    monkeypatch.setattr(pydantic.TypeAdapter, "__init__", counted)
    (tmp_path / "models").mkdir()
    folders: dict[str, Any] = {"model_repo": tmp_path / "models", "state_dir": tmp_path / "state"}
    app = create_app(Settings(**folders))
    assert made
    made.clear()

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            paths = ("/v2", "/api/v1/nothing", "/nothing")
            return [(await client.get(path)).status_code for path in paths]

    assert asyncio.run(ask()) == [200, 404, 404]
    assert made == []
