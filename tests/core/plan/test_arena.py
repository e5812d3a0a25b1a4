"""Arena allocation: buffers with overlapping lifetimes are disjoint for any batch size; memory is near the bound."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.plan.arena import place
from lathe.core.plan.liveness import Affine, Buffer, align_size, lower_bound


def overlapping(buffers: list[Buffer], n: int) -> list[tuple[Buffer, Buffer]]:
    spans = [(b, b.offset.at(n), b.offset.at(n) + b.size.at(n)) for b in buffers if b.offset is not None]
    return [
        (a, b)
        for i, (a, a0, a1) in enumerate(spans)
        for b, b0, b1 in spans[i + 1 :]
        if a.overlaps(b) and a0 < b1 and b0 < a1
    ]


def random_buffers(seed: int) -> list[Buffer]:
    rng = np.random.default_rng(seed)
    buffers = []
    for _ in range(40):
        first = int(rng.integers(0, 30))
        a, b = int(rng.integers(0, 2)) * int(rng.integers(1, 4000)), int(rng.integers(0, 500))
        buffers.append(Buffer(align_size(Affine(a, b)), first, first + int(rng.integers(0, 6))))
    return buffers


@pytest.mark.parametrize("seed", range(60))
def test_buffers_alive_together_never_overlap(seed: int) -> None:
    buffers = random_buffers(seed)
    size = place(buffers)
    for n in (1, 2, 3, 7, 32):
        assert not overlapping(buffers, n)
        assert max(b.offset.at(n) + b.size.at(n) for b in buffers if b.offset) <= size.at(n)
        assert all(b.offset.at(n) % 64 == 0 for b in buffers if b.offset)


def test_a_chain_needs_two_buffers() -> None:
    chain = [Buffer(Affine(a=1024), step, step + 1) for step in range(10)]
    assert place(chain).at(3) == 2 * 1024 * 3 == lower_bound(chain, 3)


def test_a_gap_between_longer_lived_buffers_is_used() -> None:
    low, high = Buffer(Affine(a=640), 0, 9), Buffer(Affine(a=576), 0, 9)
    first, second = Buffer(Affine(a=128), 0, 3), Buffer(Affine(a=128), 4, 9)
    assert place([low, high, first, second]).at(1) == 640 + 576 + 128


def test_the_highest_buffer_is_placed_first_if_sizes_mislead() -> None:
    """Placed by size, the third buffer lies above the second, and the fourth above the first and the third."""
    late, short = Buffer(Affine(a=320), 4, 6), Buffer(Affine(a=320), 1, 1)
    buffers = [late, short, Buffer(Affine(a=256), 1, 2), Buffer(Affine(a=192), 2, 4)]
    assert place(buffers).at(1) == 576 == lower_bound(buffers, 1)
    assert not overlapping(buffers, 3)


def test_alignment_counts_the_constant_part_once_per_row() -> None:
    assert align_size(Affine(a=40)) == Affine(a=64)
    assert align_size(Affine(a=64, b=4)) == Affine(a=128)
    assert align_size(Affine(b=65)) == Affine(b=128)
    assert align_size(Affine()) == Affine()


def test_a_constant_buffer_fills_a_gap_between_rows() -> None:
    low, gap, high = Buffer(Affine(a=640), 0, 9), Buffer(Affine(a=576), 0, 3), Buffer(Affine(a=512), 0, 9)
    scratch = Buffer(Affine(b=256), 5, 5)
    assert place([low, gap, high, scratch]) == Affine(a=640 + 576 + 512)
    assert not overlapping([low, gap, high, scratch], 5)


def test_scratch_memory_lies_above_live_rows() -> None:
    wide, narrow, scratch = Buffer(Affine(a=640), 0, 1), Buffer(Affine(a=128), 2, 4), Buffer(Affine(b=6400), 3, 3)
    other = Buffer(Affine(a=128), 1, 2)
    buffers = [wide, narrow, scratch, other]
    assert place(buffers).at(1) == 6400 + 128 == lower_bound(buffers, 1)
    for n in (1, 2, 50, 100):
        assert not overlapping(buffers, n)
