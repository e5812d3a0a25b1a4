"""Fakes of the commands of `lathe.core.compiler.child_stages` for toy models: a byte 8, then JSON.

A toy scales its input: {"scale": 2.0, "shape": [-1, 4], "do": "how the compiler misbehaves"}."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def parse(source: Path, out: Path) -> int:
    content = source.read_bytes()
    try:
        model = json.loads(content[1:])
    except ValueError:
        print(json.dumps({"error": f"{source}: no operator 'Bad' in opset 21"}))
        return 2
    if model.get("do") == "find a device full":
        print(json.dumps({"error": f"{source} needs more than cuda:0 has"}))
        return 5
    _misbehave(model.get("do", ""))
    out.mkdir(parents=True, exist_ok=True)  # as in the real stages: an earlier attempt may have been interrupted
    (out / "graph.json").write_text(json.dumps(model))
    return 0


def compile_(source: Path, out: Path) -> int:
    out.mkdir(exist_ok=True)
    shutil.copy(source / "graph.json", out / "toy.json")
    (out / "weights.bin").write_bytes(bytes(range(64)))
    return 0


def _misbehave(how: str) -> None:
    if how == "sleep":
        time.sleep(60)
    elif how == "spin":
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pass
    elif how == "spin while idle":
        while os.sched_getscheduler(0) == os.SCHED_IDLE:
            pass
    elif how == "eat memory":
        held = [bytearray(b"x" * (16 << 20)) for _ in range(40)]
        time.sleep(60)
        del held
    elif how == "ask for too much memory":
        bytearray(1 << 50)
    elif how == "fill the disk":
        raise OSError(errno.ENOSPC, "full")
    elif how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "break":
        raise RuntimeError("a fault in the compiler")
    elif how == "wait for a file":
        while not Path(f"{sys.argv[2]}.go").exists():
            time.sleep(0.01)
    elif how == "start a child":
        os.system("sleep 61.0427")


if __name__ == "__main__":
    task, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    sys.exit(parse(source, out) if task == "parse" else compile_(source, out))
