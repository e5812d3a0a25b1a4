"""Writes core/ops/COVERAGE.md from the operator table, the catalog of kernels and ONNX's schemas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import onnx

import lathe  # noqa: F401  (registers operators and kernels)
from lathe.core.frontends import contrib, opsets
from lathe.core.frontends.contrib import find_lowering
from lathe.core.frontends.onnx import STANDARD_DOMAINS
from lathe.core.ir.types import DType
from lathe.core.kernels.call import VIEWS
from lathe.core.kernels.choose import families
from lathe.core.ops.opdef import registry
from tests.core.frontends.refused import OPERATORS

COVERAGE = Path("core/ops/COVERAGE.md")

HEAD = """\
# Operators

<!-- Written by `make docs` from the code (tools/make_coverage.py); a test fails when the two differ. -->

ONNX {version}: {own} operators have a reference of their own, {defined} run through the definition that ONNX gives
them, {older} rewritten on import as others, {missing} missing.

- **Opsets**: the versions at which the operator changed. All of them import as the newest form; what an old version
  allowed and the newest cannot express is refused.
- **Element types**: those that the standard allows for the first input (for the output of an operator without inputs).
- **Reference**: *own*: NumPy code in `core/ops`; *definition*: its ONNX function body, imported in its place;
  *rewritten*: other operators take its place.
- **Compiled**: the family of kernels in `core/kernels/kernel_table.py` that takes it, for the shapes and element types
  (float32 first) that its selector names; *view*: it costs nothing; -: it has no kernel of its own. Then it runs on the
  reference, unless its value is known when the model is compiled, or import or a pass replaces it by operators that
  have kernels (its definition, quantized operators, most of ai.onnx.ml). `explain()` says which of them happens, node
  by node.
- **Gradient**: *yes*; *definition*: that of its ONNX function body; *zero*: small changes of the inputs do not change
  the outputs; *none*, with the reason.
"""

CONTRIBUTED = """
## com.microsoft

What exporters and ONNX Runtime's optimizer and quantizer write; rewritten on import as operators above, but for
{own}, which have references of their own:
{operators}.

Of what ONNX Runtime's CPU provider runs, these are refused:

| Operator | Domain | Why |
|---|---|---|
{refused}"""

TABLE = """
## {domain}

| Operator | Opsets | Element types | Reference | Compiled | Gradient |
|---|---|---|---|---|---|
"""

# Operators without kernels of their own, and the operators that the passes turn them into, which have kernels.
FUSED = {
    "Gemm": "FusedMatMul", "MatMul": "FusedMatMul", "Conv": "FusedConv", "ConvTranspose": "FusedConv",
    "RNN": "RecurrentSteps", "GRU": "RecurrentSteps", "LSTM": "RecurrentSteps",
    "Einsum": "FusedMatMul", "DFT": "FusedMatMul", "STFT": "FusedMatMul",
    "EyeLike": "Equal", "Hardmax": "ArgMax", "ReverseSequence": "Gather", "Trilu": "Where",
    "MatMulInteger": "FusedMatMul", "MaxUnpool": "ScatterElements",
}  # fmt: skip


class Row(NamedTuple):
    """One operator of one domain."""

    domain: str
    name: str
    opsets: tuple[int, ...]
    types: str
    reference: str
    compiled: str
    gradient: str


def coverage() -> str:
    """The text of core/ops/COVERAGE.md."""
    rows = list(_rows())
    count = [row.reference for row in rows].count
    head = HEAD.format(
        version=onnx.__version__,
        own=count("own"),
        defined=count("definition"),
        older=count("rewritten"),
        missing=count("missing"),
    )
    tables = [_table(domain, group) for domain, group in groupby(rows, key=lambda row: row.domain)]
    return "".join([head, *tables, _contributed()])


def _contributed() -> str:
    own = [name for name in registry.names() if registry.get(name).domain == contrib.DOMAIN]
    taken = sorted([*contrib.lowered_operators(), *contrib.adopted_operators(), *own])
    refused = "".join(
        f"| {op} | {domain or 'ai.onnx'} | {reason} |\n" for (domain, op), reason in sorted(OPERATORS.items())
    )
    return CONTRIBUTED.format(own=", ".join(own), operators=fill(", ".join(taken), 120), refused=refused)


def _table(domain: str, rows: Iterable[Row]) -> str:
    return TABLE.format(domain=domain or "ai.onnx") + "".join(map(_line, rows))


def _line(row: Row) -> str:
    opsets = ", ".join(map(str, row.opsets))
    return f"| {row.name} | {opsets} | {row.types} | {row.reference} | {row.compiled} | {row.gradient} |\n"


def _rows() -> Iterator[Row]:
    history: dict[tuple[str, str], list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        history.setdefault((schema.domain, schema.name), []).append(schema)
    for (domain, name), schemas in sorted(history.items()):
        newest = max(schemas, key=lambda schema: schema.since_version)
        versions = tuple(sorted({schema.since_version for schema in schemas}))
        facts = _types(newest), _reference(newest), _compiled(newest), _gradient(newest)
        yield Row(domain, name, versions, *facts)


def _types(schema: Any) -> str:
    """The element types of the first input, or of the first output if there is none, in the order of `DType`."""
    parameters = [*schema.inputs, *schema.outputs]
    texts = {str(text) for text in parameters[0].types} if parameters else set()
    allowed = {text[text.rfind("(") + 1 : text.find(")")] for text in texts}
    found = [dtype.label for dtype in DType if _onnx_label(dtype) in allowed]
    containers = [kind for kind in ("seq", "optional", "map") if any(text.startswith(kind) for text in texts)]
    named = "all" if len(found) == len(DType) else ", ".join(found)
    return named + (f" ({', '.join(containers)})" if containers else "")


def _onnx_label(dtype: DType) -> str:
    return {"float32": "float", "float64": "double"}.get(dtype.label, dtype.label)


def _reference(schema: Any) -> str:
    definition = registry.find(schema.name)
    if definition is not None and definition.domain == schema.domain:
        return "own"
    adapted = schema.domain == "" and opsets.has_adapter(schema.name)
    if schema.name == "Constant" or adapted or find_lowering(schema.domain, schema.name) is not None:
        return "rewritten"
    if schema.domain in STANDARD_DOMAINS and (schema.has_function or schema.has_context_dependent_function):
        return "definition"
    return "missing"


def _compiled(schema: Any) -> str:
    if _reference(schema) != "own":
        return "-"
    if schema.name in VIEWS:
        return "view"
    return ", ".join(families(FUSED.get(schema.name, schema.name))) or "-"


def _gradient(schema: Any) -> str:
    reference = _reference(schema)
    if reference != "own":
        return {"definition": "definition", "rewritten": "yes"}.get(reference, "-")
    op = registry.get(schema.name)
    if op.differentiation == "none":
        return f"none: {op.no_gradient or 'models of this domain are not trained by gradients'}"
    return "zero" if op.differentiation == "zero" else "yes"


def main() -> None:
    COVERAGE.write_text(coverage())


if __name__ == "__main__":
    main()
