"""Classes of outcomes that do not count as disagreements, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

import onnx


@dataclass(frozen=True)
class Exclusion:
    """`kind` and `text` are patterns of an outcome; `operator`, if given, is in the model."""

    reason: str
    kind: str = ""
    text: str = ""
    operator: str = ""


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "Lathe does not interpolate between integers",
        kind="refused: ModelError",
        text=r"\(GridSample, opset \d+\): input 0 \(X\) is u?int\d+, expected a floating-point type",
    ),
    Exclusion(
        "ONNX Runtime does not look at the axes of a number",
        kind="refused: ModelError",
        text=r"\(Reduce\w+, opset \d+\): axis -?\d+ is out of range for rank 0",
    ),
    Exclusion(
        "the model declares a wrong extent, 77, where no node tells another one: it is believed, and shows in the run",
        kind="refused: (Model|Feed)Error",
        text=r"^(?!.*is declared).*\b77\b",  # but a contradiction with the nodes is no reason to refuse the model
    ),
    Exclusion(
        "ONNX Runtime reads beyond the end where there are no images",
        kind="(Model|Feed)Error",
        text="a batch index lies outside the 0 images",
        operator="RoiAlign",
    ),
    Exclusion(
        "ONNX Runtime takes as many regions as there are batch indices, however many regions are given",
        kind="refused: FeedError",
        text=r"\(RoiAlign\): batch_indices is int64\[\d+\], expected \[\d+\]",
    ),
    Exclusion(
        "ONNX Runtime does not look at the other extents of an empty tensor in Concat",
        kind="refused: FeedError",
        text=r"\(Concat(FromSequence)?\): all the input array dimensions except for the concatenation axis must match",
    ),
    Exclusion(
        "ONNX Runtime does not look at the axis of an empty tensor",
        kind="(Model|Feed)Error",
        text=r"\(Cum(Sum|Prod)\): axis \d+ is out of range",
    ),
)


def exclusion(kind: str, text: str, model: onnx.ModelProto) -> str:
    """Why an outcome is not counted; "" if it is."""
    operators = {node.op_type for node in model.graph.node}
    for each in EXCLUSIONS:
        if (
            re.search(each.kind, kind)
            and re.search(each.text, text)
            and (not each.operator or each.operator in operators)
        ):
            return each.reason
    return ""
