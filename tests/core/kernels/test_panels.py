"""Tiles for products of any size."""

from __future__ import annotations

from lathe.core.codegen.target import plain, x86_64_v3
from lathe.core.ir.types import symbol
from lathe.core.kernels.shared.panels import ranked_tiles
from lathe.core.kernels.target import Target
from tests.core.targets import x86_only

N = symbol("n")


@x86_only
def test_choosing_tiles_for_huge_widths_takes_no_memory() -> None:
    """A damaged model may declare any number of columns: the choice takes no memory for them."""
    for target in (plain(), x86_64_v3()):
        assert widths(target, 1 << 60) == widths(target, 1 << 20)


def widths(target: Target, columns: int) -> set[int]:
    return {tile.columns for tile in ranked_tiles(target, N, columns)}
