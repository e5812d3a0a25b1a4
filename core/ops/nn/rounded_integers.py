"""Finds where a scalar body rounds a float32 number, adds a zero point and saturates to 8 bits, as QuantizeLinear does.

`ScalarOps.quantized` does this in fewer instructions than the nodes one by one.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType

_MOST = 255  # largest size of a zero point


@dataclass(frozen=True)
class RoundedInteger:
    """`source`, rounded, plus `zero`, saturated to the type of a Cast."""

    source: Value
    zero: int


def rounded_integers(body: Graph) -> tuple[dict[Node, RoundedInteger], Set[Node]]:
    """For each Cast to int8 or uint8 at the end of such a chain what it converts; and the nodes that it replaces."""
    casts = [node for node in body.nodes if node.op == "Cast" and node.output.dtype in (DType.INT8, DType.UINT8)]
    if not casts:
        return {}, frozenset()
    uses, found, replaced = body.uses(), dict[Node, RoundedInteger](), set[Node]()

    def producer(value: Value | None, op: str) -> Node | None:
        """The node `op` that computes a value of which nothing else is made."""
        node = value.producer if value is not None else None
        used_once = value is not None and len(uses.get(value, [])) == 1 and value not in body.outputs
        return node if node is not None and node.op == op and used_once else None

    for cast in casts:
        rounded, zero, chain = cast.required_input(0), 0.0, []
        if (add := producer(rounded, "Add")) is not None:
            constant = body.constants.get(add.required_input(1))
            if constant is None:
                continue
            rounded, zero, chain = add.required_input(0), float(constant.item()), [add]
        nearest = producer(rounded, "Round")
        if nearest is not None and rounded.dtype is DType.FLOAT32 and zero == round(zero) and abs(zero) <= _MOST:
            found[cast] = RoundedInteger(nearest.required_input(0), int(zero))
            replaced.update(chain, [nearest])
    return found, replaced
