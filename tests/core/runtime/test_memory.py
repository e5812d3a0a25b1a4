"""Memory: threads share malloc heaps on request; compiler code and model files leave memory after use."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lathe
from lathe.core.compiler import compile as compile_module
from lathe.core.compiler.options import make_options
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.runtime.host.memory import aligned_bytes, owner_of, release_pages
from tests.core.runtime import graphs

SCRIPT = """
import ctypes, sys, tempfile, threading
from lathe.core.runtime.host.memory import share_heaps

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
import sys
import numpy as np
import lathe
from tests.core.runtime.test_memory import large

def resident():
    lines = open("/proc/self/smaps").read().splitlines()
    starts = [index for index, line in enumerate(lines) if " r-xp " in line and "libllvmlite" in line]
    found = [next(line for line in lines[index:] if line.startswith("Rss:")) for index in starts]
    return sum(int(line.split()[1]) for line in found) // 1024

for width in (2200, 2300, 2400):
    x = np.ones((3, width), np.float32)
    with lathe.compile(large(width), threads=1, cache_dir=sys.argv[1], tune="off") as session:
        (found,) = session.run({"x": x}).values()
        np.testing.assert_allclose(found.sum(axis=1), [1, 1, 1], rtol=1e-4)
        print(resident())
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="memory is listed in Linux's /proc")
@pytest.mark.slow
def test_compiler_code_leaves_memory_and_is_paged_in_when_called(tmp_path: Path) -> None:
    made = subprocess.run([sys.executable, "-c", COMPILE, tmp_path], capture_output=True, text=True, check=True)
    assert all(int(line) < 16 for line in made.stdout.split()) and len(made.stdout.split()) == 3


def resident(path: Path) -> int:
    """KiB of a file that this process has in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if line.endswith(str(path))]
    return sum(int(next(line for line in lines[index:] if line.startswith("Rss:")).split()[1]) for index in starts)


def large(width: int) -> Graph:
    """[batch, width] times a square of weights."""
    graph = Graph("large")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (graphs.N, width)))
    w = b.constant(np.random.default_rng(0).standard_normal((width, width), np.float32), "w")
    graph.outputs = [b("Softmax", b("MatMul", x, w), axis=1)]
    return graph


def wide() -> Graph:
    """[batch, length, 1000] times 4 MB of weights."""
    graph = Graph("wide")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (graphs.N, symbol("length"), 1000)))
    w = b.constant(np.random.default_rng(0).standard_normal((1000, 1000), np.float32) / 32, "w")
    graph.outputs = [b("Softmax", b("MatMul", x, w), axis=1)]
    return graph


@pytest.mark.skipif(platform.system() != "Linux", reason="memory is listed in Linux's /proc")
def test_a_checked_graph_leaves_memory_until_it_is_compiled(tmp_path: Path) -> None:
    path, x = tmp_path / "model.lathe", np.ones((1, 3, 1000), np.float32)
    compile_module.compile_to(path, wide(), make_options(threads=1))
    cache = tmp_path / "cache"
    with lathe.load_compiled(path, threads=1, cache_dir=cache, new_shapes="wait", tune="off") as session:
        assert resident(path) < 1000
        (found,) = session.run({"x": x}).values()
        assert resident(path) < 1000
    (expected,) = lathe.interpret(wide(), {"x": x}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_only_file_pages_are_released() -> None:
    array = np.arange(1 << 16)
    part = array[5:]
    assert owner_of(part) is owner_of(array) is array
    release_pages(part)
    release_pages(array)
    assert (array == np.arange(1 << 16)).all()


FREED = """
import resource, sys
from lathe.core.runtime.host.memory import keep_freed, return_to_system, touch_heap

size = 60 << 20
if sys.argv[1] != "returned":
    keep_freed(size + (16 << 20))
if sys.argv[1] == "touched":
    touch_heap(size + (8 << 20))

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytes(bytearray(size))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
blocks = [bytearray(size) for _ in range(4)]  # more than is kept
blocks.clear()
return_to_system(size)
print(first, faults())
"""


def test_freed_memory_is_reused_for_later_blocks() -> None:
    """Two blocks of 60 MiB are 30,720 pages of 4 KiB. What is kept stays, however much was freed."""
    if platform.libc_ver()[0] != "glibc" or "MALLOC_CHECK_" in os.environ:
        return  # other C libraries number their options otherwise; checks of the heap have blocks of their own
    faults = {}
    for case in ("kept", "touched", "returned"):
        done = subprocess.run([sys.executable, "-c", FREED, case], capture_output=True, text=True, check=True)
        faults[case] = tuple(map(int, done.stdout.split()))
    first, later = faults["returned"]
    assert faults["kept"][0] > first / 2 > 5 * faults["touched"][0]
    assert faults["kept"][1] < later / 10 > faults["touched"][1]


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text(), reason="this system has no huge pages"
)
def test_large_blocks_have_huge_pages() -> None:
    """The first use of 64 MiB is a fault for each 2 MiB; with pages of 4 KiB it is 16,384 faults."""
    block = aligned_bytes(64 << 20)
    assert block.nbytes == 64 << 20
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    block[::4096] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 4000  # memory may lack some whole pages


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 5 << 19, (2 << 20) - 1])
def test_blocks_have_the_size_that_was_asked_for(size: int) -> None:
    block = aligned_bytes(size)
    assert block.nbytes == size and (size == 0 or block.ctypes.data % 64 == 0)
    block[:] = 7
    assert int(block.sum(dtype=np.int64)) == 7 * size
