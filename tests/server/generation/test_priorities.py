"""The priority of a text is the level that its request asks for, as for other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from lathe.core.language.generation.engine import Engine
from tests.server.generation.tiny_model import NAME, serving
from tests.server.running import wait_for

CONFIG = "[dynamic_batching]\npriority_levels = 3\ndefault_priority_level = 2\n"


def test_levels_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 1 is the highest, 0 and levels that do not exist are the default level."""
    seen: list[int] = []
    submit = Engine.submit

    def noted(self: Engine, request: Any, listener: Any) -> Any:
        seen.append(request.priority)
        return submit(self, request, listener)

    monkeypatch.setattr(Engine, "submit", noted)
    folder = tmp_path / "repository"
    (folder / NAME).mkdir(parents=True)
    (folder / NAME / "config.toml").write_text(CONFIG)
    with serving(folder) as server:

        def post(path: str, status: int = 200, **body: Any) -> str:
            asked = {"max_tokens": 1, **body}
            answer = httpx.post(f"{server.url}{path}", json=asked, timeout=60, verify=False)
            assert answer.status_code == status, answer.text
            return answer.text

        def is_configured() -> bool:
            post("/v1/completions", model=NAME, prompt="One", priority=1)
            return seen[-1] == -1

        wait_for(is_configured)  # the server reads the file some time after the start
        seen.clear()
        for priority in (1, 3, 0, 9):
            post("/v1/completions", model=NAME, prompt="One", priority=priority)
        post("/v1/completions", model=NAME, prompt="One")
        post("/v1/chat/completions", model=NAME, messages=[{"role": "user", "content": "One"}], priority=3)
        post(f"/v2/models/{NAME}/generate", text_input="One", priority=1)
        post(f"/v2/models/{NAME}/generate", text_input="One", parameters={"priority": 3})
        assert "priority" in post("/v1/completions", 400, model=NAME, prompt="One", priority=-1)
    assert seen == [-1, -3, -2, -2, -2, -3, -1, -3]
