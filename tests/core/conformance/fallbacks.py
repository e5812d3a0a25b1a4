"""Lists cases of ONNX's backend test suite with nodes that have no kernel and so run on reference operators.

Every model is planned, not compiled, in several forms: see `FORMS`. `fallbacks.txt` records the result by operator, and
a test compares. After a change of kernels `python -m tests.core.conformance.fallbacks` writes it again.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from lathe.core.codegen.target import host
from lathe.core.compiler.description import describe_model
from lathe.core.compiler.dynamic_shapes import reasons_without_kernel
from lathe.core.compiler.options import make_options
from lathe.core.compiler.run_passes import run_passes
from lathe.core.compiler.symbol_binding import bind
from lathe.core.errors import LatheError
from lathe.core.frontends.onnx import load
from lathe.core.ir.types import DType
from lathe.core.ops.opdef import registry
from lathe.core.plan.plan import Fallback
from lathe.core.plan.planner import make_plan
from tests.core.conformance.models import SuiteModel, suite_models

RECORD = Path(__file__).with_name("fallbacks.txt")
REFUSED = "refused"  # recorded as an operator: the model is invalid in this form, or with dynamic sizes

_OPTIONS = make_options(threads=1, tune="off")
_WIDTH = 120


def with_known_sizes(model: onnx.ModelProto) -> frozenset[str]:
    """The operators without a kernel when all sizes are known."""
    graph, description, _ = describe_model(load(model.SerializeToString()), _OPTIONS)
    compiled, _ = run_passes(bind(graph, description.batching, ()), _OPTIONS)
    schedule = make_plan(compiled, host()).plan.schedule
    return frozenset(step.op for step in schedule if isinstance(step, Fallback))


def with_any_sizes(model: onnx.ModelProto) -> frozenset[str]:
    """The operators without a kernel when extents of the inputs are dynamic. Equal extents share one symbol."""
    for info in model.graph.input:
        for dim in info.type.tensor_type.shape.dim if info.type.HasField("tensor_type") else ():
            if dim.dim_value > 1:
                dim.dim_param = f"extent{dim.dim_value}"
    for info in model.graph.output:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    graph, _, _ = describe_model(load(model.SerializeToString()), _OPTIONS)
    return frozenset(node.op for node in reasons_without_kernel(graph, _OPTIONS))


FORMS: dict[str, Callable[[onnx.ModelProto], frozenset[str]]] = {
    "known sizes": with_known_sizes,
    "any sizes": with_any_sizes,
}


def found(name: str, form: str) -> frozenset[str]:
    """The operators without a kernel in one form of a case."""
    return _operators(lambda: FORMS[form](with_parameters(suite_models()[name])))


def _operators(planned: Callable[[], frozenset[str]]) -> frozenset[str]:
    try:
        return planned()
    except LatheError:
        return frozenset({REFUSED})


def with_parameters(case: SuiteModel) -> onnx.ModelProto:
    """A case whose parameters, such as axes and shapes, are constants, as in files that exporters write."""
    model, (arrays, _) = onnx.ModelProto.FromString(case.read()), case.data()
    given = dict(zip([info.name for info in model.graph.input], arrays, strict=False))
    for node in model.graph.node:
        op = registry.find(node.op_type)
        for index in sorted(set(op.params.values())) if op is not None else ():
            name = node.input[index] if index < len(node.input) else ""
            if isinstance(given.get(name), np.ndarray):
                model.graph.initializer.append(numpy_helper.from_array(given.pop(name), name))
    kept = [info for info in model.graph.input if info.name in given]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


# Other element types


def other_types(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """By operator, the element types without a kernel although float32 has one.

    Each operator is tested by one case, with another type in place of float32.
    """
    chosen: dict[tuple[str, str], str] = {}
    for name in names:
        model = with_parameters(suite_models()[name])
        operators = {(node.op_type, node.domain) for node in model.graph.node}
        if len(operators) == 1 and _is_of_float32(model) and not found(name, "known sizes"):
            chosen.setdefault(operators.pop(), name)
    missing = {}
    for (operator, domain), name in sorted(chosen.items()):
        retyped = {str(dtype): _operators(partial(_retyped, name, dtype)) for dtype in _types_of(operator, domain)}
        types = frozenset(dtype for dtype, operators in retyped.items() if operators - {REFUSED})
        if types:
            missing[operator] = types
    return missing


def _is_of_float32(model: onnx.ModelProto) -> bool:
    first = list(model.graph.input)[:1]
    return any(info.type.tensor_type.elem_type == DType.FLOAT32.onnx_code for info in first)


def _types_of(operator: str, domain: str) -> Sequence[DType]:
    """The types of at most 8 bytes that the standard allows for an operator's first input, without float32."""
    schema = onnx.defs.get_schema(operator, domain)
    allowed = {text.removeprefix("tensor(").removesuffix(")") for text in schema.inputs[0].types}
    known = {"double": "float64", "float": "float32"}
    found = [dtype for dtype in DType if str(dtype) in {known.get(text, text) for text in allowed}]
    return [dtype for dtype in found if dtype not in (DType.FLOAT32, DType.STRING) and dtype.itemsize <= 8]


def _retyped(name: str, dtype: DType) -> frozenset[str]:
    model = with_parameters(suite_models()[name])
    for info in (*model.graph.input, *model.graph.output):
        if info.type.tensor_type.elem_type == DType.FLOAT32.onnx_code:
            info.type.tensor_type.elem_type = dtype.onnx_code
    return with_known_sizes(model)


# The record


@cache
def names() -> tuple[str, ...]:
    """The cases that have data."""
    return tuple(name for name, case in suite_models().items() if case.has_data)


def recorded() -> dict[str, dict[str, frozenset[str]]]:
    """By section of the record, and then by operator: cases, or element types."""
    sections: dict[str, dict[str, frozenset[str]]] = {}
    entry = ""
    for line in RECORD.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line:
            entry, words = line.split(":") if ":" in line else (entry, line)
            section[entry] = section.get(entry, frozenset()) | frozenset(words.split())
    return sections


def entries(sections: Mapping[str, Mapping[str, frozenset[str]]]) -> set[tuple[str, str, str]]:
    """All triples of section, operator and word."""
    return {
        (title, name, word) for title, section in sections.items() for name, words in section.items() for word in words
    }


def _by_operator(form: str) -> dict[str, frozenset[str]]:
    cases: dict[str, set[str]] = defaultdict(set)
    for name in names():
        for operator in found(name, form):
            cases[operator].add(name.removeprefix("test_"))
    return {operator: frozenset(mine) for operator, mine in sorted(cases.items())}


def _section(title: str, entries: Mapping[str, frozenset[str]]) -> str:
    lines = [
        textwrap.fill(f"{name}: {' '.join(sorted(words))}", _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        for name, words in entries.items()
    ]
    return "\n".join([f"[{title}]", *lines, ""])


def all_sections() -> dict[str, Any]:
    """All sections of the record."""
    return {**{form: _by_operator(form) for form in FORMS}, "other types": other_types(names())}


if __name__ == "__main__":
    RECORD.write_text("\n".join(_section(title, entries) for title, entries in all_sections().items()))
