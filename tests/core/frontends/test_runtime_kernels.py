"""Lathe imports each operator of ONNX Runtime's CPU provider or gives a reason; lowerings read every attribute."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

import lathe  # noqa: F401  (registers operators)
from lathe.core.frontends import contrib, opsets
from lathe.core.frontends.contrib import find_lowering
from lathe.core.frontends.functions import has_definition
from lathe.core.ops.opdef import registry
from tests.core.frontends.refused import ATTRIBUTES, OPERATORS

KERNELS = {
    (kernel.domain, kernel.op_name)
    for kernel in runtime.get_all_opkernel_def()
    if kernel.provider == "CPUExecutionProvider"
}
SCHEMAS = {(schema.domain, schema.name): schema for schema in runtime.get_all_operator_schema()}
LOWERED = sorted(key for key in SCHEMAS if find_lowering(*key) is not None)


def imports(domain: str, op: str) -> bool:
    """True if the importer accepts some form of an operator."""
    own = registry.find(op)
    if (own is not None and own.domain == domain) or find_lowering(domain, op) is not None:
        return True
    if domain == contrib.DOMAIN:
        return op in contrib.adopted_operators()
    if domain != "":
        return False
    return op == "Constant" or opsets.has_adapter(op) or has_definition(op, domain, onnx.defs.onnx_opset_version())


def test_operators_of_onnx_runtime_are_imported_or_have_a_reason() -> None:
    missing = {key for key in KERNELS if not imports(*key)}
    assert len(KERNELS) > 200
    assert missing == set(OPERATORS)
    assert all(len(reason) > 10 for reason in OPERATORS.values())


def words(x: Any, seen: set[Any]) -> Iterator[str]:
    """The strings in a lowering function, in the lowering functions that it calls, and in the tables that they read."""
    if isinstance(x, str):
        yield x
    elif isinstance(x, tuple | list | frozenset | dict):
        for item in (*x, *x.values()) if isinstance(x, dict) else x:
            yield from words(item, seen)
    elif isinstance(x, FunctionType) and x not in seen and x.__module__.startswith(contrib.__name__):
        seen.add(x)
        yield from _words_of(x.__code__, x.__globals__, seen)


def _words_of(code: CodeType, names: dict[str, Any], seen: set[Any]) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words_of(constant, names, seen)
        else:
            yield from words(constant, seen)
    for name in code.co_names:
        yield from words(names.get(name), seen)


@pytest.mark.parametrize(("domain", "op"), LOWERED)
def test_every_attribute_is_read(domain: str, op: str) -> None:
    """An attribute that a lowering never reads has no effect; if it should have one, results are wrong."""
    read = set(words(find_lowering(domain, op), set()))
    unread = set(SCHEMAS[domain, op].attributes) - read
    assert unread == {attribute for name, attribute in ATTRIBUTES if name == op}


def test_reasons_belong_to_operators_that_are_lowered() -> None:
    assert {op for op, _ in ATTRIBUTES} <= {op for _, op in LOWERED}
    assert all(len(reason) > 10 for reason in ATTRIBUTES.values())
