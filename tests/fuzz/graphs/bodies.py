"""Nested graphs: the branches of If, the bodies of Loop and Scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx
from onnx import helper

from tests.fuzz.graphs.evaluate import live, tensor_type
from tests.fuzz.graphs.values import Item

if TYPE_CHECKING:
    from tests.fuzz.graphs.grower import Grower


def body_of(inner: Grower, inputs: Sequence[Item], outputs: Sequence[Item]) -> onnx.GraphProto:
    """A graph of the nodes that the outputs of a body need."""
    nodes = live(inner.nodes, [item.name for item in outputs])
    ports = [[_port(item) for item in items] for items in (inputs, outputs)]
    return helper.make_graph(nodes, inner.world.name("body"), *ports, inner.constants)


def _port(item: Item) -> onnx.ValueInfoProto:
    """The type of an input or output of a body; the rank and extents that differ between cases are unknown."""
    cases = list(item.arrays)
    rank = item.rank(cases)
    shape = None if rank is None else [item.fixed(axis, cases) for axis in range(rank)]
    return helper.make_tensor_value_info(item.name, tensor_type(item.at(cases[0])), shape)
