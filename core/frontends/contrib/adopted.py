"""Contributed operators that ONNX has adopted under the same name: their nodes are imported as ONNX's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.lowering_table import DOMAIN
from lathe.core.ir.graph import Attr


@dataclass(frozen=True)
class _Adopted:
    """An adopted operator: the first opset that has it, and attributes that ONNX lacks, with the only allowed value."""

    since: int
    presets: Mapping[str, int]


_ADOPTED = {
    "LinearAttention": _Adopted(27, {"state_window": 0}),
    "CausalConvWithState": _Adopted(
        27,
        {
            "channels_last": 0, "dilation": 1, "input_channel_offset": 0, "input_channels": 0, "ndim": 1,
            "state_channels_last": -1, "state_length": 0, "state_update_capacity": 0, "state_window": 0,
        },
    ),
}  # fmt: skip


def adopted_operators() -> list[str]:
    """The sorted names of contributed operators that are imported as ONNX's operators of the same name."""
    return sorted(_ADOPTED)


def as_standard(
    proto: onnx.NodeProto, domain: str, attrs: Mapping[str, Attr], where: str
) -> tuple[onnx.NodeProto, dict[str, Attr], int] | None:
    """A node of an adopted operator in the default domain, its attributes, and the first opset that has the operator.

    None for every other operator. Attributes that ONNX has not adopted are dropped; UnsupportedError if one of them has
    a value other than its default.
    """
    adopted = _ADOPTED.get(proto.op_type) if domain == DOMAIN else None
    if adopted is None:
        return None
    for name, preset in adopted.presets.items():
        if attrs.get(name, preset) != preset:
            raise UnsupportedError(f"attribute '{name}' is {attrs[name]!r}, expected {preset}", where=where)
    standard = onnx.NodeProto()
    standard.CopyFrom(proto)
    standard.domain = ""
    del standard.attribute[:]
    standard.attribute.extend(each for each in proto.attribute if each.name not in adopted.presets)
    return standard, {name: value for name, value in attrs.items() if name not in adopted.presets}, adopted.since
