"""Pipes of child processes are closed only once: a second close would hit a file that another thread just opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, os, threading, time
from pathlib import Path
import uvloop
from lathe.server.processes.child_process import open_reader

wrong, ending = [], threading.Event()

def read(path):
    while not ending.is_set():
        try:
            if path.read_text() != path.name * 1000:
                wrong.append(path)
        except (OSError, ValueError) as error:
            wrong.append(error)

async def main():
    paths = [Path(name) for name in "abcd"]
    for path in paths:
        path.write_text(path.name * 1000)
    threads = [threading.Thread(target=read, args=(path,), daemon=True) for path in paths]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1
    while time.monotonic() < end and not wrong:
        reads, writes = os.pipe()
        reader = await open_reader(os.fdopen(reads, "rb", buffering=0))
        os.write(writes, b"x")
        os.close(writes)
        assert await reader.read() == b"x"
    ending.set()
    print(len(wrong), flush=True)
    os._exit(0)

uvloop.run(main())
"""


def test_files_of_other_threads_stay_open(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0\n", done.stderr[-500:]
