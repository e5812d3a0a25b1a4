"""Custom operators: declared, loaded, fused, differentiated, exported, and compiled with custom kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import lathe
from lathe.core.autodiff import gradients
from lathe.core.compiler.custom_operators import Elementwise, OpDef, register_op
from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.ir.text import Weights, parse_graph, print_graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels import choose
from lathe.core.runtime.session.session import Session
from tests.core.frontends.models import model

ROOT = Path(__file__).resolve().parents[2]
DOMAIN = "com.example"
X = np.linspace(-3, 3, 35, dtype=np.float32).reshape(5, 7)


def square_plus(factor: float = 0.5) -> type[OpDef]:
    """The operator of the documentation, or one that differs in a number."""

    @register_op(DOMAIN, revision=str(factor))
    class SquarePlus(Elementwise):
        attrs = {"b": 4.0}

        def reference(self, c: Any, x: Any) -> Any:
            return ((x + np.sqrt(x * x + c.attr("b"))) * x.dtype.type(factor)).astype(x.dtype)

        def scalar(self, e: Any, c: Any, *x: Any) -> Any:
            return e.mul(e.add(x[0], e.sqrt(e.add(e.mul(x[0], x[0]), c.attr("b")))), factor)

        def slopes(self, g: Any) -> Any:
            x = g.x()
            return [(x / (x * x + g.attr("b")).sqrt() + 1.0) * factor]

    return SquarePlus


def centre_rows(kernel: bool = True) -> type[OpDef]:
    class Centred(OpDef):
        name = "CentreRows"
        inputs = "X"

        def infer(self, c: Any) -> Sequence[Any]:
            if len(c.shape(0) or ()) != 2:
                c.fail(f"X is {c.tensor(0)}, expected rank 2")
            return [c.tensor(0)]

        def reference(self, c: Any, x: Any, *_: Any) -> Any:
            return x - x.mean(axis=1, keepdims=True)

    if kernel:
        Centred.write_kernel = _centre  # type: ignore[method-assign]
    return register_op(DOMAIN)(Centred)


def _centre(self: OpDef, k: Any, spec: Any) -> None:
    x, y = k.operand(0, DType.FLOAT32), k.operand(1, DType.FLOAT32)
    rows, length = map(k.dim, spec.inputs[0].shape)
    with k.parallel(rows) as (row,):
        source, target = x.at(row * length), y.at(row * length)
        zero = k.constant(0, DType.FLOAT32)
        with k.fold(0, length, [zero]) as fold:
            fold.values = [fold.values[0] + source.load(fold.index)]
        mean = fold.values[0] / length.cast(DType.FLOAT32)
        k.strip(length, lambda i, mask: target.store(source.load(i, k.lanes, mask) - mean, i, mask))


def using(*nodes: onnx.NodeProto, dtype: int = onnx.TensorProto.FLOAT) -> bytes:
    proto = model(nodes, {"x": ["n", 7]}, domains={DOMAIN: 1}, dtype=dtype)
    return bytes(proto.SerializeToString())


def chain() -> bytes:
    return using(
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("SquarePlus", ["a"], ["b"], domain=DOMAIN, b=1.0),
        helper.make_node("Mul", ["b", "x"], ["y"]),
    )


def agrees(session: Session, data: bytes) -> None:
    for rows in (5, 1, 0):
        got, want = session.run({"x": X[:rows]})["y"], lathe.interpret(lathe.load(data), {"x": X[:rows]})["y"]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_elementwise_operator_fuses_with_its_neighbours() -> None:
    square_plus()
    with lathe.compile(lathe.load(chain()), threads=2) as session:
        assert "elementwise(Neg+SquarePlus+Mul, " in session.explain()
        assert "steps: 1 compiled, 0 on the reference" in session.explain()
        agrees(session, chain())


def test_a_kernel_in_the_vector_language() -> None:
    centre_rows()
    data = using(helper.make_node("CentreRows", ["x"], ["y"], domain=DOMAIN))
    for threads in (1, 3):
        with lathe.compile(lathe.load(data), threads=threads) as session:
            assert "custom(CentreRows)" in session.explain()
            agrees(session, data)


def test_without_a_kernel_the_reference_runs_and_explain_shows_it() -> None:
    centre_rows(kernel=False)
    data = using(helper.make_node("CentreRows", ["x"], ["y"], domain=DOMAIN))
    with lathe.compile(lathe.load(data), threads=1) as session:
        assert "no compiled kernel for CentreRows" in session.explain()
        agrees(session, data)


def test_a_kernel_is_not_used_for_types_it_does_not_support() -> None:
    centre_rows()
    data = using(helper.make_node("CentreRows", ["x"], ["y"], domain=DOMAIN), dtype=onnx.TensorProto.DOUBLE)
    with lathe.compile(lathe.load(data), threads=1) as session:
        assert "no compiled kernel for CentreRows" in session.explain()
        got = session.run({"x": X.astype(np.float64)})["y"]
    np.testing.assert_allclose(got, X - X.mean(axis=1, keepdims=True), atol=1e-6)


def test_a_new_definition_replaces_the_first_completely() -> None:
    data = using(helper.make_node("CentreRows", ["x"], ["y"], domain=DOMAIN))
    for kernel, shown in ((True, "custom(CentreRows)"), (False, "no compiled kernel for CentreRows")):
        centre_rows(kernel)
        with lathe.compile(lathe.load(data), threads=1) as session:
            assert shown in session.explain()
            agrees(session, data)
    assert not choose.row_of("CentreRows").selectors


def test_a_new_definition_is_compiled_again(tmp_path: Path) -> None:
    """Both kinds of cache know the operators that a model was compiled with."""
    results = []
    for factor in (0.5, 0.25):
        square_plus(factor)
        for given in (chain(), lathe.load(chain())):
            with lathe.compile(given, threads=1, cache_dir=tmp_path) as session:
                agrees(session, chain())
                results.append(session.run({"x": X})["y"])
    np.testing.assert_allclose(results[0], 2 * results[2], rtol=1e-6)


def test_gradients_flow_through_it() -> None:
    """Against central differences, in float64."""
    square_plus()
    data = using(*onnx.ModelProto.FromString(chain()).graph.node, dtype=onnx.TensorProto.DOUBLE)
    graph = lathe.load(data)
    backward = gradients(graph, of="y", with_respect_to=["x"])
    x, h = X.astype(np.float64), 1e-6
    feeds = {value.name: x if value.name == "x" else np.ones_like(x) for value in backward.inputs}
    found = [array for name, array in lathe.interpret(backward, feeds).items() if name != "y"][-1]
    above, below = (lathe.interpret(graph, {"x": x + step})["y"] for step in (h, -h))
    np.testing.assert_allclose(found, (above - below) / (2 * h), rtol=1e-6, atol=1e-8)


def test_custom_operators_round_trip_as_text_and_onnx() -> None:
    square_plus()
    graph = lathe.load(chain())
    weights = Weights()
    assert print_graph(parse_graph(print_graph(graph, weights), weights.tobytes()), Weights()) == print_graph(
        graph, Weights()
    )
    exported = lathe.export(graph)
    node = next(node for node in onnx.ModelProto.FromString(exported).graph.node if node.op_type == "SquarePlus")
    assert node.domain == DOMAIN
    np.testing.assert_array_equal(
        lathe.interpret(lathe.load(exported), {"x": X})["y"], lathe.interpret(graph, {"x": X})["y"]
    )


def test_custom_operators_in_files_are_checked() -> None:
    square_plus()
    centre_rows()
    with pytest.raises(UnsupportedError, match=r"attribute 'c' = 1\.0 is not supported"):
        lathe.load(using(helper.make_node("SquarePlus", ["x"], ["y"], domain=DOMAIN, c=1.0)))
    with pytest.raises(ModelError, match=r"\(CentreRows, opset 1\): has 2 inputs, expected 1"):
        lathe.load(using(helper.make_node("CentreRows", ["x", "x"], ["y"], domain=DOMAIN)))
    elsewhere = helper.make_node("SquarePlus", ["x"], ["y"], domain="elsewhere")
    proto = model([elsewhere], {"x": [2]}, domains={"elsewhere": 1})
    with pytest.raises(UnsupportedError, match="operator SquarePlus of domain 'elsewhere'"):
        lathe.load(proto.SerializeToString())


def test_invalid_operators_cannot_be_registered() -> None:
    class Silent(OpDef):
        def infer(self, c: Any) -> Sequence[Any]:
            return [TensorType(DType.FLOAT32, ())]

    with pytest.raises(TypeError, match="operator Silent has no method 'reference'"):
        register_op(DOMAIN)(Silent)
    with pytest.raises(ValueError, match=r"domain 'ai\.onnx\.ml' is not for custom operators"):
        register_op("ai.onnx.ml")
    with pytest.raises(TypeError, match="is no operator"):
        register_op(DOMAIN)(int)  # type: ignore[type-var]

    class Relu(Elementwise):
        def reference(self, c: Any, x: Any) -> Any:
            return x

    with pytest.raises(ValueError, match="operator Relu is registered twice"):
        register_op(DOMAIN)(Relu)


def test_the_documentation_runs(tmp_path: Path) -> None:
    """Every example of the page, one after the other in one process."""
    page = (ROOT / "docs" / "custom-operators.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 5
    script = tmp_path / "examples.py"
    script.write_text("\n".join(examples))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LATHE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "= Sqrt(" in done.stdout  # the gradient that one of them prints
