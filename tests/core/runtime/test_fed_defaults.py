"""Sessions with feeds for initializers that are also inputs: code with real inputs in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lathe
import lathe.core.compiler.options
from lathe.core.compiler.description import describe
from lathe.core.errors import FeedError, SessionClosed
from lathe.core.runtime.session.session import _MAX_VARIANTS
from tests.core.frontends.models import theirs
from tests.core.frontends.test_defaults import X, load, model, scaled

Feeds = dict[str, Any]
F, I = np.float32, np.int64  # noqa: E741


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, ["" if name == "_" else name for name in inputs.split()], outputs.split(), **attrs)


def loop() -> onnx.ModelProto:
    """y = x, `c` added `count` times."""
    body = helper.make_graph(
        [node("Identity", "going", "goes"), node("Add", "v c", "w")],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
        ],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in (("goes", 9), ("w", 1))],
    )
    return model([node("Loop", "count _ x", "y", body=body)], ["n", 6], {"count": I(3), "c": F([[0.5] * 6])})


def branches() -> onnx.ModelProto:
    """y = x * c where `yes`, else x + c."""
    then, other = (
        helper.make_graph(
            [node(op, "x c", name)], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
        )
        for op, name in (("Mul", "multiplied"), ("Add", "added"))
    )
    nodes = [node("If", "yes", "y", then_branch=then, else_branch=other)]
    return model(nodes, ["n", 6], {"yes": np.bool_(True), "c": F([3])})


def integers() -> onnx.ModelProto:
    nodes = [node("Cast", "x", "i", to=TensorProto.INT64), node("Mod", "i k", "m"), node("Cast", "m", "y", to=1)]
    return model(nodes, ["n", 6], {"k": I([5])})


def layers() -> onnx.ModelProto:
    """Two layers, all of whose weights are defaults."""
    rng = np.random.default_rng(3)
    sizes = {"w": (6, 40), "b": (40,), "v": (40, 5), "a": (5,)}
    nodes = [node("Gemm", "x w b", "h"), node("Relu", "h", "r"), node("Gemm", "r v a", "y")]
    return model(nodes, ["n", 6], {name: rng.standard_normal(size, F) for name, size in sizes.items()})


def clipped() -> onnx.ModelProto:
    return model([node("Clip", "x low high", "y")], ["n", 6], {"low": F(1), "high": F(6)})


def sliced() -> onnx.ModelProto:
    nodes = [node("Slice", "x starts ends axes", "p"), node("Relu", "p", "y")]
    return model(nodes, ["n", 6], {"starts": I([0]), "ends": I([4]), "axes": I([1])})


def declared_open() -> onnx.ModelProto:
    """A default of any number of columns."""
    return model([node("Mul", "x c", "y")], ["n", 1], {"c": F([[2, 3]])}, declared={"c": [1, "k"]})


CASES: dict[str, tuple[Callable[[], onnx.ModelProto], list[Feeds]]] = {
    "float": (scaled, [{"c": F([5])}, {"c": F([1, 2, 3])}, {"c": F([2])}]),
    "shape": (scaled, [{"s": I([4, 3])}, {"s": I([6, -1])}, {"s": I([-1, 3])}, {"s": I([12, 1]), "c": F([7, 8])}]),
    "integer": (integers, [{"k": I([3])}, {"k": I([-4])}, {"k": I([5])}]),
    "bounds of Slice": (sliced, [{"starts": I([2])}, {"ends": I([6]), "starts": I([1])}, {"axes": I([0])}]),
    "bounds of Clip": (clipped, [{"high": F(4)}, {"low": F(3), "high": F(20)}, {"low": F(1)}]),
    "loop": (loop, [{"count": I(5)}, {"count": I(0)}, {"c": F([[2] * 6])}, {"count": I(2), "c": F([[-1] * 6])}]),
    "branches": (branches, [{"yes": np.bool_(False)}, {"c": F([4])}, {"yes": np.bool_(False), "c": F([4])}]),
    "weights": (
        layers,
        [
            {"w": np.random.default_rng(4).standard_normal((6, 40), F)},
            {
                "v": np.random.default_rng(5).standard_normal((40, 5), F),
                "a": np.random.default_rng(6).standard_normal(5, F),
            },
        ],
    ),
    "declared open": (declared_open, [{"c": F([[1, 2, 3]])}, {"c": F([[4]])}, {"c": F([[2, 3]])}]),
}


def x_of(proto: onnx.ModelProto) -> np.ndarray[Any, Any]:
    columns = proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    return X if columns == 6 else X.reshape(-1, columns)


def check(session: lathe.Session, proto: onnx.ModelProto, fed: Feeds) -> None:
    feeds = {name: np.asarray(array) for name, array in {"x": x_of(proto), **fed}.items()}
    got, want = session.run(feeds)["y"], theirs(proto, feeds)["y"]
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", ["graph", "bytes", "path", "artifact"])
def test_a_fed_default_affects_only_its_run(name: str, form: str, tmp_path: Path, cache: Path) -> None:
    make, feeds = CASES[name]
    proto = make()
    with opened(proto, form, tmp_path, cache) as session:
        assert list(session.inputs) == ["x"]
        assert list(session.defaults) == [info.name for info in proto.graph.initializer]
        for fed in feeds:
            check(session, proto, fed)
            check(session, proto, {})


def opened(proto: onnx.ModelProto, form: str, tmp_path: Path, cache: Path) -> lathe.Session:
    file, artifact = tmp_path / "model.onnx", tmp_path / "model.lathe"
    file.write_bytes(proto.SerializeToString())
    match form:
        case "graph":
            return lathe.compile(load(proto), tune="off", cache_dir=cache)
        case "bytes":
            return lathe.compile(proto.SerializeToString(), tune="off", cache_dir=cache)
        case "path":
            lathe.compile(file, tune="off", cache_dir=cache).close()
            return lathe.compile(file, tune="off", cache_dir=cache)  # the first session left its code in the cache
    options = lathe.core.compiler.options.make_options(tune="off", cache_dir=cache)
    lathe.core.compiler.compile.compile_to(artifact, load(proto), options)
    session = lathe.load_compiled(artifact, cache_dir=cache, tune="off")
    artifact.unlink()  # the session has it open
    return session


@pytest.mark.parametrize("new_shapes", ["wait", "background"])
def test_a_child_process_compiles_for_fed_defaults(new_shapes: Any, tmp_path: Path, cache: Path) -> None:
    artifact = tmp_path / "model.lathe"
    lathe.core.compiler.compile.compile_to(
        artifact, load(scaled()), lathe.core.compiler.options.make_options(tune="off", cache_dir=cache)
    )
    with lathe.load_compiled(artifact, cache_dir=cache, new_shapes=new_shapes, tune="off") as session:
        check(session, scaled(), {"c": F([5])})
        assert session.settle(60)
        check(session, scaled(), {"c": F([5])})
        assert "with c fed:" in session.explain()
    stored = set(cache.rglob("*.lathe"))
    with lathe.load_compiled(artifact, cache_dir=cache, new_shapes=new_shapes, tune="off") as session:
        check(session, scaled(), {"c": F([6])})
        assert session.settle(60)
    assert set(cache.rglob("*.lathe")) == stored  # the code was found there


def test_defaults_that_are_never_fed_cost_nothing(tmp_path: Path, cache: Path) -> None:
    """The code is that of the same model without optional inputs."""
    with_defaults, without = layers(), layers()
    del without.graph.input[1:]
    options = lathe.core.compiler.options.make_options(tune="off", cache_dir=cache)
    plans = []
    for proto in (with_defaults, without):
        graph = load(proto)
        plans.append(lathe.core.compiler.pipeline.build(graph, options, describe(graph, options).batching, ()).plan)
    assert plans[0].steps == plans[1].steps
    assert plans[0].memory == plans[1].memory
    with lathe.compile(load(with_defaults), tune="off", cache_dir=cache) as session:
        assert session.batching.batchable
        session.run({"x": X})
        assert session._calls.run({"x": X}) is not None


@pytest.mark.parametrize(
    ("fed", "message"),
    [
        ({"c": np.float64([1])}, r"input 'c' has dtype float64, expected float32"),
        ({"c": F([[1]])}, r"input 'c' has shape \[1, 1\], expected float32\[k\]"),
        ({"s": I([1, 2, 3])}, r"input 's' has shape \[3\], expected int64\[2\]"),
        ({"s": np.int32([4, 3])}, r"input 's' has dtype int32, expected int64"),
        ({"q": F([1])}, r"unknown input 'q'; the model has x, and may take 2 more"),
        ({"q": F([1]), "c": F([1])}, r"unknown input 'q'"),
    ],
)
def test_feeds_that_do_not_fit_are_refused(fed: Feeds, message: str, cache: Path) -> None:
    with lathe.compile(load(scaled()), tune="off", cache_dir=cache) as session:
        with pytest.raises(FeedError, match=message):
            session.run({"x": X, **fed})
        with pytest.raises(FeedError, match="input 'x' is missing"):
            session.run(fed if "q" not in fed else {})
        check(session, scaled(), {})


def test_many_choices_at_once_and_closing(cache: Path) -> None:
    """More choices than the session keeps, from several threads."""
    proto, rng = layers(), np.random.default_rng(5)
    names = ("w", "b", "v", "a")
    arrays = {t.name: rng.standard_normal(numpy_helper.to_array(t).shape, F) for t in proto.graph.initializer}
    choices = [
        {n: arrays[n] for i, n in enumerate(names) if bits >> i & 1} for bits in range(1, 3 * _MAX_VARIANTS // 2 + 1)
    ]
    started = threading.active_count()
    with lathe.compile(load(proto), tune="off", cache_dir=cache, threads=1) as session:
        with ThreadPoolExecutor(4) as pool:
            for result in [pool.submit(check, session, proto, fed) for fed in [*choices, *choices]]:
                result.result()
        assert len(session._variants.cached_sessions()) == _MAX_VARIANTS
    with pytest.raises(SessionClosed):
        session.run({"x": X, **choices[0]})
    assert threading.active_count() <= started + 1


def test_models_with_state_refuse_fed_defaults() -> None:
    """Fed defaults run in other sessions, and each would have its own state."""
    graph = load(scaled())
    value = graph.add_constant(np.zeros(1, F), "count")
    graph.states.append(lathe.core.ir.graph.State(value, value, graph.constants.pop(value)))
    with lathe.compile(graph, tune="off") as session:
        assert not session.defaults
        with pytest.raises(FeedError, match="unknown input 'c'"):
            session.run({"x": X, "c": F([1])})


def test_profiles_accept_fed_defaults(cache: Path) -> None:
    with lathe.compile(load(clipped()), tune="off", cache_dir=cache) as session:
        table = session.profile({"x": X, "high": np.float32(3)}, runs=1).table()
        assert "Clip" in table
