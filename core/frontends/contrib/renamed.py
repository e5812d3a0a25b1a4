"""Contributed operators that ONNX took over as functions: their nodes are read as those of ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from core.errors import UnsupportedError
from core.frontends.contrib.table import DOMAIN
from core.ir.graph import Attr


@dataclass(frozen=True)
class _Taken:
    """An operator of ONNX since an opset, and the values that attributes which ONNX left out must have."""

    since: int
    presets: Mapping[str, int]


_TAKEN = {
    "LinearAttention": _Taken(27, {"state_window": 0}),
    "CausalConvWithState": _Taken(
        27,
        {
            "channels_last": 0, "dilation": 1, "input_channel_offset": 0, "input_channels": 0, "ndim": 1,
            "state_channels_last": -1, "state_length": 0, "state_update_capacity": 0, "state_window": 0,
        },
    ),
}  # fmt: skip


def renamed() -> list[str]:
    """The contributed operators that are read as ONNX's of the same name."""
    return sorted(_TAKEN)


def as_standard(
    proto: onnx.NodeProto, domain: str, attrs: Mapping[str, Attr], where: str
) -> tuple[onnx.NodeProto, dict[str, Attr], int] | None:
    """The node in ONNX's own domain, its attributes, and the least opset that has it; None for other operators."""
    taken = _TAKEN.get(proto.op_type) if domain == DOMAIN else None
    if taken is None:
        return None
    for name, preset in taken.presets.items():
        if attrs.get(name, preset) != preset:
            raise UnsupportedError(f"attribute '{name}' is {attrs[name]!r}, expected {preset}", where=where)
    standard = onnx.NodeProto()
    standard.CopyFrom(proto)
    standard.domain = ""
    del standard.attribute[:]
    standard.attribute.extend(each for each in proto.attribute if each.name not in taken.presets)
    return standard, {name: value for name, value in attrs.items() if name not in taken.presets}, taken.since
