"""Which inputs of which operators were reached by what kind of operand, as a table; and why some cells are empty."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from tests.fuzz.graphs.grower import KINDS
from tests.fuzz.graphs.rules import RULES

Cells = Counter[tuple[str, int, str]]


@dataclass(frozen=True)
class Reason:
    """Why cells are empty: patterns of operators (whole names), of inputs by their number, and of kinds."""

    text: str
    operators: str
    inputs: str = r"\d+"
    kinds: str = ".*"

    def explains(self, op: str, index: int, kind: str) -> bool:
        parts = ((self.operators, op), (self.inputs, str(index)), (self.kinds, kind))
        return all(re.fullmatch(pattern, text) for pattern, text in parts)


_QUANTIZED = "QLinearConv|QLinearMatMul|ConvInteger|MatMulInteger"
_SHAPED = (
    "Slice|Reshape|Expand|Tile|Pad|TopK|Range|OneHot|Trilu|CumSum|CenterCropPad|Split|Gather|GatherElements|GatherND"
    "|Resize|Compress|ReverseSequence|Reduce\\w+|Loop|Squeeze|Unsqueeze|Clip"
)
REASONS = (
    Reason("scales and zero points are constants", "QLinearConv|QLinearMatMul", "1|2|4|5|6|7", "(?!constant).*"),
    Reason("scales and zero points are constants", "QuantizeLinear", "1|2", "(?!constant).*"),
    Reason("zero points are constants", "DequantizeLinear|ConvInteger", "2", "(?!constant).*"),
    Reason("zero points are constants", "MatMulInteger|ConvInteger", "2|3", "(?!constant).*"),
    Reason("extents are 64 bits wide, and nothing brings them to bytes", _QUANTIZED, kinds="count"),
    Reason("scales are constants in these opsets", "Upsample", "1", "(?!constant).*"),
    Reason("the region is read by no mode but one", "Resize", "1", "(?!constant).*"),
    Reason("factors are constants: extents are whole numbers", "Resize", "2", "(?!constant).*"),
    Reason("axes are constants", "Slice|Pad|Squeeze|Unsqueeze", "3", "(?!constant).*"),
    Reason("axes are constants", "Squeeze|Unsqueeze", "1", "(?!constant).*"),
    Reason("steps are constants", "Slice", "4", "(?!constant).*"),
    Reason("axes are constants", "CumProd", "1", "(?!constant).*"),
    Reason("sizes of images and blocks are constants", "Col2Im", "1|2", "(?!constant).*"),
    Reason("ratios are constants: runs without training ignore them", "Dropout", "1", "(?!constant).*"),
    Reason("lengths are constants: ONNX Runtime refuses others at random", "RNN|GRU|LSTM", "4", "(?!constant).*"),
    Reason("divisors are constants: zero ends ONNX Runtime", "Mod|BitShift", "1", "(?!constant).*"),
    Reason("values are constants", "OneHot", "2", "(?!constant).*"),
    Reason("what fills is a constant", "Pad", "2", "(?!constant).*"),
    Reason("regions are constants, and which image they are of", "RoiAlign", "1|2", "(?!constant).*"),
    Reason("places are constants, or computed from extents: two updates of one place have no order",
           "Scatter|ScatterElements|ScatterND", "1", "alias|part|window|plain|unknown rank"),
    Reason("a parameter of rank 0 or 1 whose rank is known",
           f"{_SHAPED}|ConstantOfShape", "[1-9]", "unknown rank"),
    Reason("the value itself takes no part where the result is an extent", "Shape|Size|EyeLike", "0", "alias|part"),
    Reason("the condition is a truth value of rank 0", "If", "0", "alias|part|unknown rank|window"),
    Reason("what shapes a value, or says where to look, is no part of it: it has another element type", _SHAPED,
           kinds="alias|part"),
    Reason("its other inputs are constants", "Mod|BitShift|Dropout|QuantizeLinear|DequantizeLinear|CumProd|Upsample"
           "|RoiAlign|Col2Im|QLinear\\w+|\\w+Integer", kinds="alias|part"),
    Reason("it has no such input here: the rule leaves out what is optional", "Attention", "3|4|5|6"),
    Reason("it has no such input here: the rule leaves out what is optional", "LSTM", "6|7"),
    Reason("it has no such input here: the rule leaves out what is optional", "TensorScatter|Dropout", "2"),
    Reason("it has no such input here: the rule leaves out what is optional", "QLinearConv", "8"),
    Reason("the rule draws its parts; the operator itself is a definition", "RotaryEmbedding"),
    Reason("inside of an If, because a sequence is no array that one node could show", "SequenceConstruct"),
    Reason("variances are positive: they come out of an addition", "BatchNormalization", "4",
           "alias|part|window|unknown rank"),
    Reason("what a rule draws is a value of the graph", ".*", "0", "constant"),
)  # fmt: skip

# Whole operators that no rule draws.
UNDRAWN = (
    Reason("draws numbers: nothing to compare with", "Random\\w+|Bernoulli|Multinomial"),
    Reason("sequences and optionals run on the references alone, and have tests of their own",
           "Sequence\\w+|Optional\\w*|SplitToSequence|ConcatFromSequence"),
    Reason("words run on the references alone, and have tests of their own",
           "String\\w+|RegexFullMatch|TfIdfVectorizer|ImageDecoder"),
    Reason("is for training", "Adagrad|Adam|Momentum|Gradient|\\w*Loss"),
    Reason("its function body in ONNX takes its place on import",
           "AffineGrid|\\w+Window|MelWeightMatrix|CastLike|SwiGLU|CausalConvWithState|LinearAttention|FlexAttention"),
    Reason("spectra run on the references alone", "DFT|STFT"),
    Reason("reads between pixels on the references alone", "DeformConv|MaxRoiPool|MaxUnpool|NonMaxSuppression"),
    Reason("is an input of no node", "Constant"),
    Reason("changes no number", "BitCast"),
)  # fmt: skip


def counted(results: Sequence[dict[str, Any]]) -> Cells:
    """Operands of nodes that some output needs, by operator, input position and kind."""
    cells: Cells = Counter()
    for result in results:
        for key, count in result.get("kinds", {}).items():
            op, index, kind = key.split(":")
            cells[op, _position(op, int(index)), kind] += count
    return cells


def _position(op: str, index: int) -> int:
    """All but the first of an operator that takes any number of inputs count as one."""
    return min(index, 1) if _inputs(op) is None else index


def _inputs(op: str) -> int | None:
    """How many inputs the newest form has at most; None for any number."""
    if not onnx.defs.has(op):
        return None
    schema = onnx.defs.get_schema(op)
    return None if schema.max_input > 100 else int(schema.max_input)


def rows(cells: Cells) -> list[tuple[str, int]]:
    """Every input of the operators that rules draw, and what was reached besides."""
    found = {(op, index) for op, index, _ in cells}
    for op in {each.op for each in RULES}:
        most = _inputs(op)
        found.update((op, index) for index in range(2 if most is None else most))
    return sorted(found)


def reason(op: str, index: int, kind: str) -> str:
    """Why a cell may be empty; "" where it should not be."""
    most = _inputs(op)
    if most == 1 and kind in ("alias", "part"):
        return "it has one input"
    return next((each.text for each in REASONS if each.explains(op, index, kind)), "")


def undrawn() -> dict[str, str]:
    """The operators of ONNX that no rule draws, with the reason ("" for none)."""
    drawn = {each.op for each in RULES}
    schemas = [schema for schema in onnx.defs.get_all_schemas() if not schema.deprecated and not schema.domain]
    names = sorted({schema.name for schema in schemas})
    return {
        op: next((each.text for each in UNDRAWN if each.explains(op, 0, "")), "") for op in names if op not in drawn
    }


def unexplained(cells: Cells) -> list[tuple[str, int, str]]:
    """Cells that are empty for no reason."""
    empty = [(op, index, kind) for op, index in rows(cells) for kind in KINDS if not cells[op, index, kind]]
    return [cell for cell in empty if not reason(*cell)]


def page(results: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown, with the reasons below."""
    cells = counted(results)
    missing = unexplained(cells)
    reasons: dict[str, int] = {}
    lines = [
        "# Random graphs: what was reached",
        "",
        f"{len(results)} graphs. Operands of nodes that some output needs, by operator, input and kind. A number in",
        f"brackets is a reason below; {len(missing)} cells are empty without one (`?`).",
        "",
        "| operator | input | " + " | ".join(KINDS) + " |",
        "|---|---|" + "---|" * len(KINDS),
    ]
    for op, index in rows(cells):
        shown = []
        for kind in KINDS:
            count, why = cells[op, index, kind], reason(op, index, kind)
            mark = f"[{reasons.setdefault(why, len(reasons) + 1)}]" if why and not count else "?"
            shown.append(str(count) if count else mark)
        lines.append(f"| {op} | {index} | " + " | ".join(shown) + " |")
    lines += ["", *(f"{number}. {why}" for why, number in reasons.items()), "", "Operators that are not drawn:", ""]
    lines += [f"- {op}: {why or '?'}" for op, why in undrawn().items()]
    return "\n".join(lines) + "\n"
