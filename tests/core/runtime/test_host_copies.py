"""Copies of large arrays in pieces."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from lathe.core.runtime.host.host_copies import copy_in_pieces, copy_pool, pieces_of


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 1 << 20, (1 << 20) + 1, (9 << 20) - 3, 100 << 20])
def test_pieces_cover_all_bytes_once_in_order(nbytes: int) -> None:
    pieces = pieces_of(nbytes)
    assert len(pieces) <= 8 and all(begin < end for begin, end in pieces)
    assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces)][: len(pieces)]
    assert (pieces[-1][1] if pieces else 0) == nbytes


@pytest.mark.parametrize("shape", [(), (3, 0), (3 << 18,), (5, 1 << 20)])
def test_an_array_is_copied_piece_by_piece(shape: tuple[int, ...]) -> None:
    source = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    target = np.full_like(source, np.nan)
    for begin, end in copy_in_pieces(target, source):
        np.testing.assert_array_equal(
            target.reshape(-1).view(np.uint8)[begin:end], source.reshape(-1).view(np.uint8)[begin:end]
        )
    np.testing.assert_array_equal(target, source)


def test_a_caller_that_stops_early_gets_its_arrays_back() -> None:
    """No thread writes to the array afterwards."""
    source, target = np.ones(8 << 20, np.uint8), np.zeros(8 << 20, np.uint8)
    pieces = copy_in_pieces(target, source)
    next(pieces)
    pieces.close()
    assert target.all()


def test_a_forked_process_gets_threads_of_its_own() -> None:
    parent = copy_pool()
    child = os.fork()
    if child == 0:
        target = np.zeros(4 << 20, np.uint8)
        list(copy_in_pieces(target, np.ones(4 << 20, np.uint8)))
        os._exit(0 if target.all() and copy_pool() is not parent else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_systems_without_fork_can_import_the_module() -> None:
    """Windows has no `os.register_at_fork`; `import lathe` imports this module there, too."""
    code = "import os; del os.register_at_fork; import lathe.core.runtime.host.host_copies"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
