"""The table of operators (core/ops/COVERAGE.md) agrees with the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from lathe.core.ops.opdef import registry
from tools.make_coverage import COVERAGE, coverage

PAGE = coverage()


def test_the_page_is_up_to_date() -> None:
    assert (Path(__file__).parents[3] / COVERAGE).read_text() == PAGE, "run `make docs`"


def test_every_operator_of_the_standard_is_in_it_as_it_is() -> None:
    for name in registry.names():
        if registry.get(name).domain not in ("lathe", "com.microsoft"):
            assert f"\n| {name} | " in PAGE
    assert "| Add | 1, 6, 7, 13, 14 |" in PAGE
    assert "| Reshape | " in PAGE and PAGE.split("\n| Reshape | ")[1].split("\n")[0].endswith("| own | view | yes |")
    gemm = PAGE.split("\n| Gemm | ")[1].split("\n")[0]
    assert gemm.endswith("| own | sparse, amx, strassen, gemm, gemm.dynamic | yes |")


@pytest.mark.parametrize("name", [name for name in registry.names() if onnx.defs.has(name, registry.get(name).domain)])
def test_defaults_of_attributes_are_those_of_the_schema(name: str) -> None:
    """To the last digit of float32: a kernel of float64 sees the difference."""
    ours = {key: default for key, default in registry.get(name).attrs.items() if default is not None}
    declared = onnx.defs.get_schema(name, domain=registry.get(name).domain).attributes
    theirs = {key: _plain(attribute.default_value) for key, attribute in declared.items()}
    assert {key: _plain(ours[key]) for key in ours if theirs.get(key) is not None} == {
        key: theirs[key] for key in ours if theirs.get(key) is not None
    }


def _plain(value: Any) -> Any:
    """A default of the schema or of Lathe as a plain value; None if there is none."""
    if isinstance(value, onnx.AttributeProto):
        if value.type == onnx.AttributeProto.UNDEFINED:
            return None
        value = onnx.helper.get_attribute_value(value)
    if isinstance(value, bytes):
        return value.decode()
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
