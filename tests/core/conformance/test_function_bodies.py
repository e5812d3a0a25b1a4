"""Operators that ONNX defines by a function body: the body gives the suite's expected results.

Lathe implements most of them directly. Here each runs through its body instead, so that operators that ONNX adds this
way work at once.
"""

from __future__ import annotations

import onnx
import pytest

import lathe
from lathe.core.frontends import onnx as importer
from lathe.core.frontends.proto import default_domain
from tests.core.conformance.exclusions import REASONS
from tests.core.conformance.models import suite_models
from tests.core.conformance.round_trip import assert_similar, feeds

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

_CASES_EACH = 4
WITHOUT_CASES = {
    "Bernoulli": "its cases expect certain random numbers",
    "Shrink": "its cases are of opset 9 and 10, its body needs 18",
}


def function_operators() -> list[str]:
    schemas = onnx.defs.get_all_schemas()
    return sorted({s.name for s in schemas if s.has_function or s.has_context_dependent_function})


def cases_of(op: str) -> list[str]:
    """Cases whose models apply the operator at an opset that gives it a body.

    bfloat16 is left out: the operator itself rounds once, its body after every step."""
    found = []
    for name, model in suite_models().items():
        if name in REASONS or "bf16" in name or "bfloat16" in name or not model.has_data:
            continue
        proto = onnx.ModelProto.FromString(model.read())
        if any(node.op_type == op and has_body(proto, node) for node in proto.graph.node):
            found.append(name)
    return found[:: max(1, len(found) // _CASES_EACH)][:_CASES_EACH]


def has_body(proto: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    versions = {default_domain(entry.domain): entry.version for entry in proto.opset_import}
    try:
        schema = onnx.defs.get_schema(node.op_type, versions[default_domain(node.domain)], node.domain)
    except (onnx.defs.SchemaError, KeyError):
        return False
    first = [*schema.function_opset_versions, *schema.context_dependent_function_opset_versions]
    return min(first, default=1 << 30) <= versions[default_domain(node.domain)]


@pytest.mark.parametrize("op", function_operators())
@pytest.mark.sample(2)
def test_the_body_gives_the_expected_results(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_supported = importer._is_supported
    monkeypatch.setattr(importer, "_is_supported", lambda name, domain: name != op and is_supported(name, domain))
    names = cases_of(op)
    assert names or op in WITHOUT_CASES
    for name in names:
        model = suite_models()[name]
        inputs, expected = model.data()
        graph = lathe.load(model.read())
        assert all(node.op != op for node in graph.nodes)
        for got, wanted in zip(lathe.interpret(graph, feeds(model, inputs)).values(), expected, strict=True):
            assert_similar(got, wanted, model.tolerances)


def test_all_function_operators_of_onnx_are_covered() -> None:
    assert len(function_operators()) >= 47
