"""Post-training static quantization: files that ONNX Runtime runs alike, and as accurate as its own quantizer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import QuantFormat, QuantType
from onnxruntime.quantization import quantize_static as theirs
from sklearn.datasets import load_digits

import lathe
from lathe.core.compress.ranges import METHODS
from lathe.core.compress.static import StaticQuantization, quantize_static
from lathe.core.errors import DataError, FeedError, UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType
from loadtest.onnx_runtime_quantizer import calibration_reader
from tests.core.small_models import model
from tests.random_numbers import RNG

F = np.float32


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    return data.images.astype(F)[:, None], data.target


def batches(name: str, rows: np.ndarray, size: int = 64) -> list[dict[str, np.ndarray]]:
    return [{name: rows[start : start + size]} for start in range(0, len(rows), size)]


def ort_run(data: bytes, feeds: dict[str, Any]) -> Any:
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def run(graph: Graph | bytes, feeds: dict[str, Any]) -> Any:
    with lathe.compile(graph, threads=1, tune="off") as session:
        return next(iter(session.run(feeds).values()))


RESIDUAL = model(
    "float[n,3,8,8] x => float[n,5] y",
    "a = Conv<pads = [1,1,1,1]>(x, w, b) s = BatchNormalization(a, g, o, m, v) r = Relu(s)"
    " c = Conv<pads = [1,1,1,1]>(r, u) t = Add(c, r) z = Relu(t) p = GlobalAveragePool(z) f = Flatten(p)"
    " h = MatMul(f, k) i = Add(h, d) j = Relu(i) y = Gemm<transB = 1>(j, l, d)",
    ", ".join(
        f"float[{shape}] {name} = {{{', '.join(f'{number:.5f}' for number in numbers)}}}"
        for name, shape, numbers in (
            (name, shape, np.random.default_rng(place).uniform(low, 1, np.prod(eval(f"[{shape}]"))))
            for place, (name, shape, low) in enumerate(
                [
                    ("w", "6,3,3,3", -1), ("b", "6", -1), ("g", "6", 0.5), ("o", "6", -1), ("m", "6", -1),
                    ("v", "6", 0.5), ("u", "6,6,3,3", -1), ("k", "6,5", -1), ("d", "5", -1), ("l", "5,5", -1),
                ]
            )
        )
    ),
)  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("activations", [DType.UINT8, DType.INT8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_onnx_runtime_runs_it_alike(method: Any, activations: DType, symmetric: bool, per_channel: bool) -> None:
    """Convolutions with a folded normalization and a residual, a product of matrices, a Gemm."""
    rows = RNG.standard_normal((96, 3, 8, 8)).astype(F)
    options = StaticQuantization(method, 99.9, activations, symmetric, per_channel)
    quantized = quantize_static(lathe.load(RESIDUAL), batches("x", rows), options, threads=1)
    data = lathe.export(quantized)
    onnx.checker.check_model(onnx.load_model_from_string(data), full_check=True)
    exact, mine, other = ort_run(RESIDUAL, {"x": rows}), run(data, {"x": rows}), ort_run(data, {"x": rows})
    largest = np.abs(exact).max()
    assert np.abs(mine - other).max() < 0.02 * largest
    assert np.sqrt(((mine - exact) ** 2).mean()) < 0.03 * largest
    ops = [node.op for node in quantized.nodes]
    assert "BatchNormalization" not in ops
    assert ops.count("QuantizeLinear") == 4, "one for each activation: x, r, f, j; c is added where it is computed"


def test_the_compiler_runs_it_with_integers() -> None:
    rows = RNG.standard_normal((16, 3, 8, 8)).astype(F)
    with lathe.compile(quantize_static(lathe.load(RESIDUAL), batches("x", rows)), tune="off", threads=1) as session:
        assert "products of bytes" in session.explain()


def test_the_digits_lose_no_more_than_with_onnx_runtimes_quantizer(project: Path, tmp_path: Path) -> None:
    """The bundled model, calibrated on 256 rows, on all others; the allowed loss is 0.3 points."""
    path = project / "model_repo" / "digits" / "2" / "model.onnx"
    rows, labels = digits()
    given, rest = batches("image", rows[:256]), {"image": rows[256:]}
    theirs(str(path), str(tmp_path / "theirs.onnx"), calibration_reader(given), QuantFormat.QDQ, per_channel=True,
           activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)  # fmt: skip

    def points(scores: Any) -> float:
        return float((scores.argmax(axis=1) == labels[256:]).mean() * 100)

    mine = points(run(quantize_static(lathe.load(path), given, threads=1), rest))
    assert mine >= points(ort_run(path.read_bytes(), rest)) - 0.3
    assert mine >= points(ort_run((tmp_path / "theirs.onnx").read_bytes(), rest)) - 0.1


NORMALIZED = model(
    "float[n,6,16] x => float[n,6,16] y",
    "a = MatMul(x, w) s = Add(a, x) z = LayerNormalization<axis = -1>(s, g) b = MatMul(z, w) t = Add(b, z)"
    " c = MatMul(t, w) y = Add(c, t)",
    f"float[16,16] w = {{{', '.join(f'{v:.4f}' for v in np.random.default_rng(1).standard_normal(256) / 4)}}},"
    f" float[16] g = {{{', '.join(['1.0'] * 16)}}}",
)


def test_only_sums_whose_readers_are_integer_products_are_quantized() -> None:
    """`s` is normalized, `y` is an output, and `t` is read by `y` as well, so all of them stay float32."""
    rows = RNG.standard_normal((8, 6, 16)).astype(F)
    quantized = quantize_static(lathe.load(NORMALIZED), batches("x", rows), threads=1)
    s, _, y = (node for node in quantized.nodes if node.op == "Add")
    assert all(
        value.producer is None or value.producer.op != "DequantizeLinear" for value in s.inputs + y.inputs if value
    )
    assert sum(node.op == "QuantizeLinear" for node in quantized.nodes) == 3, "one for each product: x, z, t"


def test_skipped_nodes_stay_as_they_are() -> None:
    graph = lathe.load(RESIDUAL)
    for place, node in enumerate(graph.nodes):
        node.name = f"node{place}"
    convs = frozenset(node.name for node in graph.nodes if node.op == "Conv")
    rows = RNG.standard_normal((4, 3, 8, 8)).astype(F)
    quantized = quantize_static(graph, batches("x", rows), StaticQuantization(skip=convs))
    assert all(node.inputs[0].producer is None or node.inputs[0].producer.op != "DequantizeLinear"
               for node in quantized.nodes if node.op == "Conv")  # fmt: skip


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"calibration": "kl"},
            "calibration: expected one of min-max, moving-average, .*, got 'kl'",
        ),
        ({"percentile": 101.0}, "percentile: expected more than 50, at most 100, got 101.0"),
        ({"activations": DType.INT4}, "activations: expected uint8 or int8, got int4"),
        ({"skip": frozenset({"none"})}, "skip: expected names of nodes, got none"),
    ],
)
def test_unknown_choices_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        quantize_static(lathe.load(RESIDUAL), [], StaticQuantization(**change))


def test_without_data_or_products_nothing_is_made() -> None:
    with pytest.raises(DataError, match="calibration: expected at least one batch of data, got none"):
        quantize_static(lathe.load(RESIDUAL), [])
    with pytest.raises(FeedError):
        quantize_static(lathe.load(RESIDUAL), [{"z": np.zeros((1, 3, 8, 8), F)}])
    with pytest.raises(DataError, match=r"batch 1: %x: expected finite numbers, got nan"):
        quantize_static(lathe.load(RESIDUAL), [{"x": np.full((1, 3, 8, 8), one, F)} for one in (0.0, np.nan)])
    none = model("float[n,4] x => float[n,4] y", "y = Relu(x)")
    with pytest.raises(UnsupportedError, match=r"expected a Conv, MatMul or Gemm of float32 .*, got none"):
        quantize_static(lathe.load(none), [{"x": np.zeros((1, 4), F)}])


def outliers() -> bytes:
    """A normalization with a few large channels, and products that share its result."""
    proto = onnx.load_model_from_string(
        model(
            "float[n,32] x => float[n,24] y",
            "l = LayerNormalization(x, g, z) a = MatMul(l, v) b = Gemm<transB = 1>(l, w, c) y = Add(a, b)",
            f"float[24] c = {{{', '.join(['0.25'] * 24)}}}",
        )
    )
    channels = np.ones(32, F)
    channels[[3, 17]] = 60
    named = {"g": channels, "z": np.zeros(32, F), "v": RNG.standard_normal((32, 24)).astype(F),
             "w": RNG.standard_normal((24, 32)).astype(F)}  # fmt: skip
    named["v"][[3, 17]] /= 60
    named["w"][:, [3, 17]] /= 60
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in named.items())
    return bytes(proto.SerializeToString())


@pytest.mark.parametrize("per_channel", [False, True])
def test_smoothing_spares_the_small_channels(per_channel: bool) -> None:
    """The factors go into the normalization: no node more than without."""
    data, rows = outliers(), RNG.standard_normal((200, 32)).astype(F)
    exact, errors, counts = ort_run(data, {"x": rows}), {}, {}
    for smoothing in (0.0, 0.5):
        options = StaticQuantization("min-max", per_channel=per_channel, smoothing=smoothing)
        small = quantize_static(lathe.load(data), batches("x", rows), options, threads=1)
        got = ort_run(lathe.export(small), {"x": rows})
        assert np.abs(run(small, {"x": rows}) - got).max() < 0.02 * np.abs(exact).max()
        errors[smoothing], counts[smoothing] = np.sqrt(((got - exact) ** 2).mean()), len(small.nodes)
    assert errors[0.5] < 0.5 * errors[0.0]
    assert counts[0.5] == counts[0.0]


@pytest.mark.parametrize("nodes", ["y = Conv<pads = [1,1,1,1]>(x, w, b)", "y = Conv<group = 2>(x, u)",
                                   "h = MatMul(x, k) y = Add(h, d)", "y = Gemm<transB = 1>(x, l)",
                                   "y = Gemm(x, k, d)"])  # fmt: skip
def test_correcting_the_bias_removes_the_mean_error_of_the_weights(nodes: str) -> None:
    is_image = "Conv" in nodes
    shape = "n,4,9,9" if is_image else "n,16"
    proto = onnx.load_model_from_string(
        model(f"float[{shape}] x => float[n,{'6,h,v' if is_image else '12'}] y", nodes, "float[1] unused = {1}")
    )
    named = {"w": (6, 4, 3, 3), "u": (6, 2, 3, 3), "b": (6,), "k": (16, 12), "l": (12, 16), "d": (12,)}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(RNG.standard_normal(dims).astype(F), name)
        for name, dims in named.items()
        if any(name in node.input for node in proto.graph.node)
    )
    data = proto.SerializeToString()
    rows = (RNG.standard_normal((300, *((4, 9, 9) if is_image else (16,)))) + 3).astype(F)  # a mean that is not 0
    exact, shifts = ort_run(data, {"x": rows}), {}
    for corrects in (False, True):
        options = StaticQuantization("min-max", per_channel=False, corrects_bias=corrects)
        small = quantize_static(lathe.load(data), batches("x", rows), options, threads=1)
        difference = ort_run(lathe.export(small), {"x": rows}) - exact
        inner = difference[:, :, 1:-1, 1:-1] if is_image else difference  # without what the padding touches
        axes = (0, 2, 3) if is_image else (0,)
        shifts[corrects] = float(np.abs(inner.mean(axis=axes)).max())
    assert shifts[True] < 0.35 * shifts[False]
