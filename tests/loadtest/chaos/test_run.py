"""A short run against real servers that are killed: the history is complete and valid, and violations are seen."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from loadtest.__main__ import main
from loadtest.chaos import process, run
from loadtest.chaos.clients import MODELS, model_file
from loadtest.chaos.history import read_history, write_history
from loadtest.chaos.run import HISTORY, describe_starts


def test_each_model_multiplies_by_its_factor() -> None:
    first, second = model_file(3), model_file(4)
    assert first != second
    (constant,) = onnx.load_from_string(first).graph.initializer
    assert onnx.numpy_helper.to_array(constant) == 3.0


def test_a_run_without_starts_has_an_empty_description() -> None:
    assert list(describe_starts([], [])) == []


SERVERS = {  # programs in place of the server, and the broken promise with what was measured
    "deaf": (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); READY",
        "the last server ends in order",
        "no end within 1 s of SIGTERM after 0 kills",
    ),
    "failing": ("READY; sys.exit(3)", "the last server ends in order", "exit status 3 after 0 kills"),
    "ended": (
        "import sys; sys.exit('no [/models]')",
        "each server becomes ready, and runs until it is killed",
        "the server ended by itself: no [/models]\n",
    ),
    "never ready": (
        "import time; time.sleep(60)",
        "each server becomes ready, and runs until it is killed",
        "the server was not ready within 1 s: ",
    ),
}
READY = """
import http.server, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_misbehaves_is_a_finding_with_a_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def starts_only(self: run.Chaos, seconds: float) -> None:
        await self.start()

    program, promise, measured = SERVERS[name]
    monkeypatch.setattr(process, "COMMAND", program.replace("; sys.exit(3)", "").replace("READY", READY))
    monkeypatch.setattr(process, "PATIENCE", 1.0)
    monkeypatch.setattr(run, "PATIENCE", 1.0)
    monkeypatch.setattr(run.Chaos, "run", starts_only)
    assert main(["chaos", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "chaos.json").read_text())
    found = {verdict["promise"]: verdict for verdict in report["verdicts"]}
    assert (found[promise]["held"], found[promise]["measured"]) == (False, measured)
    assert "Traceback" not in (tmp_path / "chaos.log").read_text()
    assert (tmp_path / HISTORY).exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_server_keeps_what_it_acknowledged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["chaos", "--seconds", "20", "--every", "8", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "nothing acknowledged is lost: 0 violations" in said
    history = read_history(tmp_path / HISTORY)
    kinds = Counter(operation.kind for operation in history)
    assert kinds["start"] >= 3
    assert kinds["audit"] >= 2 * len(MODELS)
    assert kinds["move"] > 10 and kinds["infer"] > 10

    moved = random.Random(1).choice([op for op in history if op.kind == "aliases" and op.found.get("live")])
    history[history.index(moved)] = replace(moved, found={**moved.found, "live": 10**6})
    write_history(tmp_path / "broken.jsonl", history)
    assert main(["chaos", "--check", str(tmp_path / "broken.jsonl")]) == 1
    assert main(["chaos", "--check", str(tmp_path / HISTORY)]) == 0
