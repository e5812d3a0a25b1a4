"""A coverage table: operators' inputs by kind of operand, with reasons for empty cells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from tests.fuzz.graphs import control, elementwise, layers, movement  # noqa: F401  (they fill the table of rules)
from tests.fuzz.graphs.grower import KINDS
from tests.fuzz.graphs.operand_forms import is_fixed
from tests.fuzz.graphs.rules import RULES

Cells = Counter[tuple[str, int, str]]


@dataclass(frozen=True)
class Reason:
    """Why cells are empty: regular expressions for operators, input numbers and kinds, each for the whole text."""

    text: str
    operators: str
    inputs: str = r"\d+"
    kinds: str = ".*"

    def explains(self, op: str, index: int, kind: str) -> bool:
        parts = ((self.operators, op), (self.inputs, str(index)), (self.kinds, kind))
        return all(re.fullmatch(pattern, text) for pattern, text in parts)


_ONE_OF_ITS_TYPE = "no other input has its element type"
_MOVED = "no extent may move it"
REASONS = (
    Reason(f"{_ONE_OF_ITS_TYPE}: lengths are int32", "RNN|GRU|LSTM", "4", "alias|part"),
    Reason(f"{_ONE_OF_ITS_TYPE}: scales are floats, the rest is quantized", "DequantizeLinear", "1", "alias|part"),
    Reason(f"{_ONE_OF_ITS_TYPE}: the zero point alone is quantized", "QuantizeLinear", "2", "alias|part"),
    Reason(f"{_ONE_OF_ITS_TYPE}: biases are int32", "QLinearConv", "8", "alias|part"),
    Reason(f"{_ONE_OF_ITS_TYPE}: places, lengths and which image are int64, all else is floats",
           "Attention|RotaryEmbedding|RoiAlign|TensorScatter", "2|3|6", "alias|part"),
    Reason(f"{_ONE_OF_ITS_TYPE}: whether it trains is a truth value", "Dropout", "2", "alias|part"),
    Reason(f"{_ONE_OF_ITS_TYPE}: ONNX Runtime resizes no int64, the type of sizes", "Resize", "3", "alias|part"),
    Reason(f"{_ONE_OF_ITS_TYPE}: images are floats, the sizes int64", "Col2Im", "0", "alias|part"),
    Reason("its numbers are floats, since of whole ones some round and others leave their type; its axes are int64",
           "ReduceL2|ReduceLogSum|ReduceLogSumExp|ReduceMean|ReduceProd|CumProd", "0|1", "alias|part"),
    Reason(f"{_MOVED}: two updates of one place have no order", "Scatter", "1", "count"),
    Reason(f"{_MOVED}: the columns of the input are as many as the blocks", "Col2Im", "1|2", "count"),
    Reason(f"{_MOVED}: it says whether the model trains", "Dropout", "2", "count"),
    Reason("inside of an If, because a sequence is no array that one node could show", "SequenceConstruct"),
)  # fmt: skip

# Seeds aim at these cells nevertheless: a newer ONNX Runtime may accept them.
REFUSED = (
    Reason("before opset 11 ONNX Runtime takes no branches of two ranks", "Scatter|Upsample", "\\d+", "unknown rank"),
)

# Operators that no rule adds.
UNDRAWN = (
    Reason("draws numbers: nothing to compare with", "Random\\w+|Bernoulli|Multinomial"),
    Reason("sequences and optionals run on the references alone, and have tests of their own",
           "Sequence\\w+|Optional\\w*|SplitToSequence|ConcatFromSequence"),
    Reason("words run on the references alone, and have tests of their own",
           "String\\w+|RegexFullMatch|TfIdfVectorizer|ImageDecoder"),
    Reason("is for training", "Adagrad|Adam|Momentum|Gradient|\\w*Loss"),
    Reason("its function body in ONNX takes its place on import",
           "AffineGrid|\\w+Window|MelWeightMatrix|CastLike|SwiGLU|CausalConvWithState|LinearAttention|FlexAttention"),
    Reason("spectra are products, or run on the references, and have tests of their own", "DFT|STFT"),
    Reason("reads between pixels on the references alone", "DeformConv|MaxRoiPool|MaxUnpool|NonMaxSuppression"),
    Reason("is an input of no node", "Constant"),
    Reason("changes no number", "BitCast"),
)  # fmt: skip


def counted(results: Sequence[dict[str, Any]]) -> Cells:
    """The number of operands by operator, input position and kind; only nodes that an output needs count."""
    cells: Cells = Counter()
    for result in results:
        for key, count in result.get("kinds", {}).items():
            op, index, kind = key.split(":")
            cells[op, _position(op, int(index)), kind] += count
    return cells


def _position(op: str, index: int) -> int:
    """The position in the table: 0 or 1 if the operator takes any number of inputs."""
    return min(index, 1) if _inputs(op) is None else index


def _inputs(op: str) -> int | None:
    """The largest number of inputs of the newest form; None if it is unlimited."""
    if not onnx.defs.has(op):
        return None
    schema = onnx.defs.get_schema(op)
    return None if schema.max_input > 100 else int(schema.max_input)


def rows(cells: Cells) -> list[tuple[str, int]]:
    """The inputs of all operators that rules add, and other inputs that were reached."""
    found = {(op, index) for op, index, _ in cells}
    for op in {each.op for each in RULES}:
        most = _inputs(op)
        found.update((op, index) for index in range(2 if most is None else most))
    return sorted(found)


def aims() -> list[tuple[str, int, str]]:
    """The cells that can be reached. Successive seeds aim at successive cells."""
    return [(*row, kind) for row in rows(Counter()) for kind in KINDS if not _unreachable(*row, kind)]


def reason(op: str, index: int, kind: str) -> str:
    """Why a cell may be empty; "" if it should not be."""
    return _unreachable(op, index, kind) or next((each.text for each in REFUSED if each.explains(op, index, kind)), "")


def _unreachable(op: str, index: int, kind: str) -> str:
    most = _inputs(op)
    if most == 1 and kind in ("alias", "part"):
        return "it has one input"
    if kind in ("count", "constant") and is_fixed(op, index):
        return "other values of it are not valid, or have no answer that is fixed"
    return next((each.text for each in REASONS if each.explains(op, index, kind)), "")


def undrawn() -> dict[str, str]:
    """The operators of ONNX that no rule adds, with the reason ("" for none)."""
    drawn = {each.op for each in RULES}
    schemas = [schema for schema in onnx.defs.get_all_schemas() if not schema.deprecated and not schema.domain]
    names = sorted({schema.name for schema in schemas})
    return {
        op: next((each.text for each in UNDRAWN if each.explains(op, 0, "")), "") for op in names if op not in drawn
    }


def unexplained(cells: Cells) -> list[tuple[str, int, str]]:
    """Empty cells without a reason."""
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
