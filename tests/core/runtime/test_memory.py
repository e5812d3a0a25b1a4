"""Threads share heaps of the C library once somebody says so; the compiler's code leaves memory when it is done."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, sys, tempfile, threading
from core.runtime.memory import share_heaps

share_heaps(int(sys.argv[1]))
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
together = threading.Barrier(8)

def work():
    together.wait()
    for size in range(600, 1600):
        libc.malloc(size)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap "))
"""


@pytest.mark.parametrize("most", [2, 4])
def test_threads_share_heaps(most: int) -> None:
    if platform.libc_ver()[0] != "glibc":
        return  # nothing to hold elsewhere: share_heaps leaves other C libraries alone
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(most)], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= most


COMPILE = """
import sys, tempfile
import numpy as np
import core
from core.runtime.memory import drop_code
from tests.core.runtime import graphs

def resident():
    lines = open("/proc/self/smaps").read().splitlines()
    starts = [index for index, line in enumerate(lines) if " r-xp " in line and "libllvmlite" in line]
    found = [next(line for line in lines[index:] if line.startswith("Rss:")) for index in starts]
    return sum(int(line.split()[1]) for line in found) // 1024

x = np.ones((3, 20), np.float32)
for seed in range(3):
    with core.compile(graphs.mlp(seed=seed), threads=1, cache_dir=sys.argv[1], tune="off") as session:
        np.testing.assert_allclose(session.run({"x": x})["add_2"], session.run({"x": x})["add_2"])
        print(resident())
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="memory is listed in Linux's /proc")
def test_the_compilers_code_leaves_memory_and_comes_back_when_it_is_called(tmp_path: Path) -> None:
    made = subprocess.run([sys.executable, "-c", COMPILE, tmp_path], capture_output=True, text=True, check=True)
    assert all(int(line) < 16 for line in made.stdout.split()) and len(made.stdout.split()) == 3
