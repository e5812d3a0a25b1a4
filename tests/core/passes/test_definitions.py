"""Einsum and Fourier transforms as products: like ONNX Runtime and the ONNX reference, and no node on the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx.reference
import pytest

import lathe
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.lowering.definitions import ExpandDefinitions
from lathe.core.passes.pipeline import optimize
from lathe.core.passes.simplify.bind_params import BindParams
from tests.core.small_models import assert_like_onnx_runtime, model, normal

# Equations of attention, of windows, of adapters and of mixtures, with the shapes of their operands.
EQUATIONS = [
    ("bhid,bhjd->bhij", "N,2,5,4", "N,2,7,4"),
    ("b g h i j, b g h j d -> b g h i d", "N,3,2,5,5", "N,3,2,5,4"),
    ("bqhd,bkhd->bhqk", "N,5,2,4", "N,7,2,4"),
    ("bhqk,bkhd->bqhd", "N,2,5,7", "N,7,2,4"),
    ("ibnd,jbnd->ijbn", "5,N,2,4", "7,N,2,4"),
    ("bhwc,hkc->bhwk", "N,5,6,4", "5,3,4"),
    ("bhwc,wkc->bhwk", "N,5,6,4", "6,3,4"),
    ("bcl,oc->bol", "N,3,20", "5,3"),
    ("oc,bcl->bol", "5,3", "N,3,20"),
    ("bsm,mhd->bshd", "N,5,8", "8,2,4"),
    ("bshd,hdm->bsm", "N,5,2,4", "2,4,8"),
    ("bshd,dhm->bsm", "N,5,2,4", "4,2,8"),
    ("...d,de->...e", "N,5,8", "8,3"),
    ("...ij,...jk", "N,3,5,4", "1,1,4,6"),
    ("nctkv,kvw->nctw", "N,3,4,2,5", "2,5,5"),
    ("bi,bi->b", "N,7", "N,7"),
    ("bi,bj->bij", "N,7", "N,5"),
    ("bi,i->b", "N,7", "7"),
    ("bij,bj->bi", "N,3,7", "N,7"),
    ("bij,bik->bjk", "N,3,7", "N,1,5"),
    ("bii->bi", "N,3,3"),
    ("bij->bji", "N,3,4"),
    ("bii,bij->bj", "N,3,3", "N,3,4"),
    ("bi,bj,bk->bijk", "N,3", "N,4", "N,5"),
    ("bij,jk,kl->bil", "N,3,4", "4,5", "5,2"),
    ("bi,ij,bj->b", "N,3", "3,4", "N,4"),
    ("bij,bjk,bk,b->bi", "N,3,4", "N,4,5", "N,5", "N"),
    ("bhi,bhij,bhjd,hd->bhd", "N,2,3", "N,2,3,4", "N,2,4,5", "2,5"),
    ("i,j,bk->b", "3", "4", "N,5"),
]


def einsum(equation: str, *shapes: str) -> bytes:
    inputs = [f"float[{shape}] x{i}" for i, shape in enumerate(shapes)]
    names = ", ".join(f"x{i}" for i in range(len(shapes)))
    return model(f"{', '.join(inputs)} => float[] y", f'y = Einsum <equation = "{equation}"> ({names})')


def extents(shape: str, rows: int) -> list[int]:
    return [rows if size == "N" else int(size) for size in shape.split(",")]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("equation", "shapes"), [(first, rest) for first, *rest in EQUATIONS], ids=lambda x: str(x))
def test_equations(equation: str, shapes: Sequence[str]) -> None:
    data = einsum(equation, *shapes)
    runs = [{f"x{i}": normal(*extents(shape, n), seed=i) for i, shape in enumerate(shapes)} for n in (1, 3)]
    assert_like_onnx_runtime(data, *runs)
    with lathe.compile(data, tune="off") as session:
        session.run(runs[0])
        assert "FALLBACK" not in session.explain(), session.explain()


SCORES = 's = Einsum <equation = "bqhd,bkhd->bhqk"> (h, h)'
VALUES = 'v = Einsum <equation = "bhqk,bkhd->bqhd"> (p, h)'
ATTENTION = model(
    "float[N,S,8] x, float[N,S] mask => float[N,S,8] y",
    f"h = Reshape (x, heads)  {SCORES}  m = Unsqueeze (mask, axes)  f = Sub (one, m)  b = Mul (f, low)"
    f"  masked = Add (s, b)  p = Softmax <axis = -1> (masked)  {VALUES}  y = Reshape (v, joined)",
    "int64[4] heads = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, int64[2] axes = {1, 2}, float one = {1},"
    " float low = {-10000}",
)


def test_attention_is_fused() -> None:
    rng = np.random.default_rng(0)
    feeds = {"x": normal(3, 16, 8), "mask": (rng.random((3, 16)) < 0.8).astype(np.float32)}
    assert_like_onnx_runtime(ATTENTION, feeds)
    with lathe.compile(ATTENTION, tune="off", new_shapes="wait") as session:
        session.run(feeds)
        assert session.batching.batchable, session.batching.reason
        assert "FusedAttention" in session.explain()


def test_attention_is_packed() -> None:
    with lathe.compile(ATTENTION, tune="off", packing=64) as session:
        assert session.packing is not None and session.packing.packable, session.packing


def test_extents_that_only_agree_at_run_time() -> None:
    """Such an Einsum runs on the reference operator, which raises an error if the extents do not fit."""
    data = model("float[N,A,4] x, float[N,B,4] z => float[] y", 'y = Einsum <equation = "nak,nak->n"> (x, z)')
    assert_like_onnx_runtime(data, *({"x": normal(2, a, 4), "z": normal(2, b, 4)} for a, b in ((3, 3), (1, 3), (3, 1))))


def transform(
    shape: Sequence[Any], dtype: DType = DType.FLOAT32, axis: int = 1, length: int | None = None, **attrs: int
) -> Graph:
    b = Builder(Graph("transform"))
    x = b.input("x", TensorType(dtype, tuple(shape)))
    count = None if length is None else b.constant(np.array(length))
    b.graph.outputs = [b("DFT", x, count, b.constant(np.array(axis)), **attrs)]
    return b.graph


def by_onnx(graph: Graph, feeds: dict[str, Any]) -> Any:
    """The outputs of ONNX's reference evaluator for the same numbers in double precision."""
    (found,) = onnx.reference.ReferenceEvaluator(lathe.export(graph)).run(None, feeds)
    return found


N = symbol("n")
TRANSFORMS: list[dict[str, Any]] = [
    {"shape": (N, 16, 1)},
    {"shape": (N, 15, 1), "onesided": 1},
    {"shape": (N, 7, 2)},
    {"shape": (N, 12, 2), "inverse": 1},
    {"shape": (N, 8, 1), "length": 13},
    {"shape": (N, 8, 2), "length": 5},
    {"shape": (N, 8, 1), "length": 12, "onesided": 1},
    {"shape": (N, 6, 5, 1)},
    {"shape": (N, 6, 5, 2), "inverse": 1},
    {"shape": (N, 6, 5, 4, 2), "axis": 2},
    {"shape": (N, 6, 5, 4, 2), "axis": -2, "length": 9},
    {"shape": (N, 251, 1)},
    {"shape": (N, 512, 1), "onesided": 1},
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", TRANSFORMS, ids=lambda way: "-".join(map(str, way.values())))
def test_fourier_transforms(way: dict[str, Any]) -> None:
    graph = transform(**way)
    with lathe.compile(graph, tune="off") as session:
        for rows in (1, 3):
            feeds = {"x": normal(*(size if isinstance(size, int) else rows for size in way["shape"]))}
            (got,), want = session.run(feeds).values(), by_onnx(graph, feeds)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert np.abs(got - want).max() < 1e-6 * np.abs(want).max() * max(1, np.log2(got.shape[1]))
        assert "FALLBACK" not in session.explain() and session.batching.batchable


@pytest.mark.parametrize("length", [6, 7])
def test_inverse_transforms(length: int) -> None:
    """Half of a spectrum gives back the real numbers; the reference of ONNX has no such inverse in every version."""
    b = Builder(Graph("there and back"))
    x = b.input("x", TensorType(DType.FLOAT32, (N, length, 1)))
    half = b("DFT", x, None, b.constant(np.array(1)), onesided=1)
    b.graph.outputs = [b("DFT", half, b.constant(np.array(length)), b.constant(np.array(1)), onesided=1, inverse=1)]
    feeds = {"x": normal(3, length, 1)}
    with lathe.compile(b.graph, tune="off") as session:
        (got,) = session.run(feeds).values()
        assert "FALLBACK" not in session.explain()
    np.testing.assert_allclose(got, feeds["x"], atol=1e-6)


@pytest.mark.parametrize("length", [7, 10])
def test_half_of_a_longer_spectrum(length: int) -> None:
    graph = transform((N, 7, 2), length=length, onesided=1, inverse=1)
    feeds = {"x": normal(3, 7, 2)}
    with lathe.compile(graph, tune="off") as session:
        (got,) = session.run(feeds).values()
        assert "FALLBACK" not in session.explain()
    np.testing.assert_allclose(got[..., 0], np.fft.irfft(feeds["x"] @ [1, 1j], length), atol=1e-6)


def test_spectra_of_symmetric_signals_are_real() -> None:
    """The spectrum of a symmetric signal is real, however large its numbers are."""
    half = 1000 * np.random.default_rng(0).random((3, 50)).astype(np.float32)
    signal = np.concatenate([half, half[:, :1], half[:, :0:-1]], axis=1)
    with lathe.compile(transform((N, 100, 1)), tune="off") as session:
        (got,) = session.run({"x": signal[..., None]}).values()
    assert np.all(got[..., 1] == 0) and np.abs(got[..., 0]).max() > 1000


def test_unused_parts_are_not_computed() -> None:
    """The real part of a transform along two axes of real numbers, as in FNet: four products."""
    b = Builder(Graph("fnet"))
    x = b("Unsqueeze", b.input("x", TensorType(DType.FLOAT32, (N, 16, 24))), axes=(3,))
    zeros = b("Expand", b.constant(np.float32(0)), b("Shape", x))
    y = b("DFT", b("Concat", x, zeros, axis=-1), axis=(2,))
    b.graph.outputs = [b("Gather", b("DFT", y, axis=(1,)), b.constant(np.array(0)), axis=3)]
    optimized, _ = optimize(b.graph)
    assert [node.op for node in optimized.nodes].count("FusedMatMul") == 4
    feeds = {"x": normal(3, 16, 24)}
    with lathe.compile(b.graph, tune="off") as session:
        (got,) = session.run(feeds).values()
        assert "FALLBACK" not in session.explain()
    np.testing.assert_allclose(got, np.fft.fft2(feeds["x"]).real, atol=1e-4)


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("windowed", [False, True])
def test_frames_of_a_signal(onesided: int, windowed: bool) -> None:
    body = f"y = STFT <onesided = {onesided}> (x, step, {'window' if windowed else ''}, length)"
    window = ", float[16] window = {" + ", ".join(str(i / 16) for i in range(16)) + "}"
    constants = "int64 step = {5}, int64 length = {16}" + (window if windowed else "")
    data = model("float[N,100,1] x => float[] y", body, constants)
    feeds = {"x": normal(3, 100, 1)}
    assert_like_onnx_runtime(data, feeds)
    with lathe.compile(data, tune="off") as session:
        session.run(feeds)
        assert "FALLBACK" not in session.explain()


BETTER_FAST: dict[str, dict[str, Any]] = {
    "long": {"shape": (N, 2000, 1)},
    "long for complex numbers": {"shape": (N, 600, 2)},
    "padded": {"shape": (N, 8, 1), "length": 9999},
    "double": {"shape": (N, 8, 1), "dtype": DType.FLOAT64},
}


@pytest.mark.parametrize("name", BETTER_FAST)
def test_long_transforms_stay_with_the_fft(name: str) -> None:
    graph = transform(**BETTER_FAST[name])
    BindParams().run(graph)
    assert ExpandDefinitions().run(graph).changed == 0
    assert [node.op for node in graph.nodes] == ["DFT"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("image", "block", "windows", "attrs"),
    [
        ((6, 9), (2, 3), 9, {"strides": [2, 3]}),
        ((12,), (4,), 3, {"strides": [4]}),
        ((7, 9), (2, 3), 9, {"strides": [2, 3]}),
        ((6, 7), (3, 3), 20, {}),
        ((6, 7), (3, 3), 42, {"pads": [1, 1, 1, 1]}),
        ((9, 9), (2, 3), 16, {"strides": [2, 2], "dilations": [2, 1], "pads": [0, 0, 1, 0]}),
        ((8, 8), (2, 2), 4, {"strides": [3, 3], "dilations": [2, 2]}),
    ],
    ids=str,
)
def test_columns_of_an_image(
    image: tuple[int, ...], block: tuple[int, ...], windows: int, attrs: dict[str, list[int]]
) -> None:
    given = ", ".join(f"{name} = {numbers}" for name, numbers in attrs.items())
    body = f"y = Col2Im {f'<{given}>' if given else ''} (x, image, block)"
    constants = f"int64[{len(image)}] image = {{{', '.join(map(str, image))}}}, "
    constants += f"int64[{len(block)}] block = {{{', '.join(map(str, block))}}}"
    columns = 2 * int(np.prod(block))
    data = model(f"float[N,{columns},{windows}] x => float[] y", body, constants, opset=18)
    assert_like_onnx_runtime(data, *({"x": normal(n, columns, windows)} for n in (1, 3)))
    with lathe.compile(data, tune="off") as session:
        assert ("FALLBACK" in session.explain()) == ("dilations" in attrs)


NORMS = [
    "LpNormalization <axis = -1, p = 2> (x)",
    "LpNormalization <axis = 1, p = 1> (x)",
    "MeanVarianceNormalization (x)",
    "MeanVarianceNormalization <axes = [1, 3]> (x)",
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("body", NORMS)
@pytest.mark.parametrize("sizes", ["N,3,5,7", "N,3,H,W"])
def test_norms_are_reductions(body: str, sizes: str) -> None:
    data = model(f"float[{sizes}] x => float[] y", f"y = {body}")
    feeds = [{"x": normal(rows, 3, 5, 7)} for rows in (1, 4)]
    feeds[0]["x"][0, 0, 0] = 0
    assert_like_onnx_runtime(data, *feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        session.run(feeds[0])
        assert "FALLBACK" not in session.explain()


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8"])
def test_one_hot_gives_integers(kind: str) -> None:
    """Models compute the masks of experts in this way."""
    data = model("int64[N,L] x => int64[] y", "h = OneHot (x, depth, values) y = Cast <to = 7> (h)",
                 f"int64[1] depth = {{5}}, {kind}[2] values = {{3, 7}}")  # fmt: skip
    feeds = {"x": np.random.default_rng(0).integers(-6, 7, (3, 9))}
    with lathe.compile(data, threads=1, tune="off") as session:
        np.testing.assert_array_equal(session.run(feeds)["y"], lathe.interpret(lathe.load(data), feeds)["y"])
        assert "FALLBACK" not in session.explain()


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("kind", ["int64", "int32", "float"])
def test_one_hot_is_a_comparison(axis: int, kind: str) -> None:
    """Negative indices count from the end, and indices out of range give only the "off" value.

    ONNX Runtime supports only int64 here; for the other types the reference is the oracle."""
    data = model(f"{kind}[N,L] x => float[] y", f"y = OneHot <axis = {axis}> (x, depth, values)",
                 "int64[1] depth = {5}, float[2] values = {-1.5, 2.5}")  # fmt: skip
    random = np.random.default_rng(0)
    dtype = {"float": "float32"}.get(kind, kind)
    feeds = [{"x": random.integers(-6, 7, shape).astype(dtype)} for shape in ((1, 4), (3, 9))]
    if kind == "int64":
        assert_like_onnx_runtime(data, *feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        for each in feeds:
            np.testing.assert_array_equal(session.run(each)["y"], lathe.interpret(lathe.load(data), each)["y"])
        assert "FALLBACK" not in session.explain()
