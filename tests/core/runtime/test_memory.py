"""Heaps of the C library are shared by threads once somebody says so."""

from __future__ import annotations

import platform
import subprocess
import sys

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
