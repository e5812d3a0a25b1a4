"""The weight block: constants as they are or in a kernel's layout, each stored once, and tables of kernels."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping

import numpy as np

from lathe.core.ir.graph import Array, Node, Value
from lathe.core.kernels.call import Block, Packed
from lathe.core.plan.liveness import ALIGNMENT
from lathe.core.plan.plan import WeightItem


class WeightBlock:
    """Arrays one after the other, each at a multiple of 64 bytes. `nbytes` is the size of the block so far."""

    def __init__(self, constants: Mapping[Value, Array]) -> None:
        self.constants = constants
        self.nbytes = 0
        self._items: dict[tuple[Value, str], WeightItem] = {}

    @property
    def by_key(self) -> Mapping[tuple[Value, str], WeightItem]:
        """The items by value and layout; a table has the first output of its node in place of a value."""
        return self._items

    def item_at(self, offset: int) -> WeightItem:
        """The item that holds the byte at this offset."""
        offsets = [item.offset for item in self.items]  # ascending, as items are added at the end
        return self.items[bisect_right(offsets, offset) - 1]

    @property
    def items(self) -> tuple[WeightItem, ...]:
        return tuple(self._items.values())

    def constant(self, value: Value) -> WeightItem:
        """The item of the block with a constant as it is, added if it is new."""
        return self._item(value, "", lambda: self.constants[value])

    def packed(self, value: Value, packed: Packed) -> WeightItem:
        """The item of the block with a constant in a kernel's layout, added if it is new."""
        return self._item(value, packed.key, lambda: packed.pack(self.constants[value]), packed.nbytes)

    def block(self, node: Node, block: Block) -> WeightItem:
        """The item with an array that a node's kernel needs besides the node's inputs, added if it is new."""
        return self._item(node.output, block.key, lambda: block.data)

    def _item(self, value: Value, key: str, make: Callable[[], Array], nbytes: int | None = None) -> WeightItem:
        """The item for a value and layout (`key`), added if it is new; `make` makes its array.

        The array is made now if its size is unknown (`nbytes` is None); otherwise only when it is read.
        """
        if (value, key) not in self._items:
            if nbytes is None:
                data = np.ascontiguousarray(make())
                make, nbytes = (lambda: data), data.nbytes
            self._items[value, key] = WeightItem(self.nbytes, nbytes, make)
            self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._items[value, key]
