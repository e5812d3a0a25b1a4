"""Dynamic-shape code: which models get it, that it is right for all sizes, and which models do not get it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.check.dynamic_shapes import check_dynamic_shape_plan
from lathe.core.codegen.target import host
from lathe.core.compiler import compile as compile_module
from lathe.core.compiler import pipeline
from lathe.core.compiler.options import make_options
from lathe.core.errors import FeedError, PlanError
from lathe.core.ir.dim import evaluate, parse_dim, symbol
from lathe.core.ir.dims import compile_dims, size
from lathe.core.plan import planner
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import Address
from lathe.core.plan.serialize import plan_from_json, plan_to_json
from lathe.core.runtime.session.dynamic_shapes import DynamicShapeCode
from lathe.core.runtime.session.run_inputs import CodeBinding, is_dynamic
from tests.core.decoders import Decoder, Feeds
from tests.core.encoders import Encoder
from tests.core.onnx_writer import OnnxWriter
from tests.core.runtime import graphs
from tests.core.sessions import agree, opened
from tests.onnx_runtime import plain_session

DECODERS = {
    "added": Decoder(),
    "rotary": Decoder(rotary=True),
    "shared": Decoder(rotary=True, shared=2),
    "one for all": Decoder(shared=4),
    "turned": Decoder(turned=True),
    "pasts of own names": Decoder(names="own", shared=2),
    "without names": Decoder(names="none"),
    "turned without names": Decoder(names="none", turned=True, rotary=True),
}
WIDTH, HEADS = 32, 4
FLOAT = TensorProto.FLOAT

each_decoder = pytest.mark.parametrize("decoder", DECODERS.values(), ids=list(DECODERS))


def cross(dims: tuple[str, str, str, str] = ("batch", "length", "batch", "encoded")) -> onnx.ModelProto:
    """Cross-attention of x [batch, length, 32] to the output of an encoder, [batch, encoded, 32]."""
    w = OnnxWriter(3)

    def heads(x: str, turned: bool = False) -> str:
        projected = w.op("MatMul", x, w.weight(WIDTH, WIDTH))
        split = w.op("Reshape", projected, w.ints(0, 0, HEADS, WIDTH // HEADS))
        return w.op("Transpose", split, perm=[0, 2, 3, 1] if turned else [0, 2, 1, 3])

    scores = w.op("Mul", w.op("MatMul", heads("x"), heads("seen", True)), w.const(0.35))
    mixed = w.op("MatMul", w.op("Softmax", scores, axis=-1), heads("seen"))
    joined = w.op("Reshape", w.op("Transpose", mixed, perm=[0, 2, 1, 3]), w.ints(0, 0, WIDTH))
    w.op("Add", "x", joined, name="y")
    info = helper.make_tensor_value_info
    inputs = [info("x", FLOAT, [*dims[:2], WIDTH]), info("seen", FLOAT, [*dims[2:], WIDTH])]
    graph = helper.make_graph(w.nodes, "cross", inputs, [info("y", FLOAT, None)], w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def cross_feeds(rows: int, length: int, encoded: int) -> Feeds:
    rng = np.random.default_rng((rows, length, encoded))
    shapes = {"x": (rows, length, WIDTH), "seen": (rows, encoded, WIDTH)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


# -- dynamic-shape code -----------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@each_decoder
@pytest.mark.parametrize("threads", [1, 2])
def test_one_code_for_all_pasts_prompts_and_batches(decoder: Decoder, threads: int, builds: list[CodeBinding]) -> None:
    model = decoder.model()
    with opened(model, threads=threads, new_shapes="wait") as session:
        for rows, length, past in [(1, 1, 5), (2, 1, 6), (1, 7, 0), (3, 40, 0), (2, 3, 33), (1, 1, 1000), (1, 65, 2)]:
            agree(model, session, decoder.feeds(rows, length, past))
        assert "dynamic-shape code serves" in session.explain() and "FALLBACK" not in session.explain()
    assert len(builds) == 1 and is_dynamic(builds[0])


@pytest.mark.sample(2)
@each_decoder
def test_token_by_token(decoder: Decoder, builds: list[CodeBinding]) -> None:
    model = decoder.model()
    with opened(model) as session:
        feeds = decoder.feeds(2, 12, 0)
        for _ in range(50):
            feeds = decoder.after(feeds, agree(model, session, feeds))
        assert session.settle(60)
    assert len(builds) == 1


@pytest.mark.parametrize("encoder", [Encoder(pools=("mean", "first")), Encoder(seed=3)], ids=["pooled", "tokens"])
@pytest.mark.sample(2)
def test_encoders_of_any_length(encoder: Encoder, builds: list[CodeBinding]) -> None:
    model = encoder.model()
    with opened(model) as session:
        for rows, length in [(1, 1), (2, 5), (3, 17), (1, 64), (8, 33)]:
            agree(model, session, encoder.feeds(rows, length))
    assert len(builds) == 1


def test_new_lengths_in_many_threads() -> None:
    model = cross()
    oracle = plain_session(model.SerializeToString())

    def one(seed: int) -> None:
        feeds = cross_feeds(1 + seed % 3, 1 + seed % 7, 2 + seed % 11)
        [want] = oracle.run(None, feeds)
        np.testing.assert_allclose(session.run(feeds)["y"], want, rtol=3e-5, atol=3e-5)

    with opened(model) as session, ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))


def test_if_it_cannot_be_made_each_shape_gets_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cross()
    with opened(model) as session:
        general = session._shapes._maker.general
        assert isinstance(general, DynamicShapeCode)
        monkeypatch.setattr(general, "_make", lambda: 1 / 0)
        with pytest.warns(RuntimeWarning, match="each shape is compiled separately: ZeroDivisionError"):
            assert _agree_at_lengths(model, session, (3, 4, 3)).settle(60)
        assert "length=3: compiled" in session.explain()


def _agree_at_lengths(model: onnx.ModelProto, session: lathe.Session, lengths: tuple[int, ...]) -> lathe.Session:
    for length in lengths:
        agree(model, session, cross_feeds(2, length, 6))
    return session


def test_queries_and_keys_of_two_lengths(builds: list[CodeBinding]) -> None:
    model = cross()
    with opened(model) as session:
        for rows, length, encoded in [(1, 1, 1), (2, 3, 50), (1, 70, 5), (5, 33, 64), (1, 8, 300), (2, 2, 2)]:
            agree(model, session, cross_feeds(rows, length, encoded))
    assert len(builds) == 1


def test_sizes_that_break_an_assumption_get_code_of_their_own(builds: list[CodeBinding]) -> None:
    """Code assumes a decoder's mask as long as past and new tokens together; a mask that broadcasts is shorter."""
    decoder = Decoder()
    model = decoder.model()
    with opened(model, new_shapes="wait") as session:
        feeds = decoder.feeds(1, 1, 7)
        agree(model, session, feeds)
        agree(model, session, feeds | {"mask": np.ones((1, 1), np.int64)})
        with pytest.raises(FeedError):
            session.run(feeds | {"mask": feeds["mask"][:, 1:]})
        agree(model, session, feeds)
    assert [is_dynamic(binding) for binding in builds][:2] == [True, False]


@pytest.mark.parametrize("names", ["own", "none"])
def test_pasts_that_are_not_of_one_length_have_code_of_their_own(names: str, builds: list[CodeBinding]) -> None:
    model = Decoder(names=names).model()
    feeds = Decoder().feeds(2, 1, 7)
    with opened(model, new_shapes="wait") as session:
        agree(model, session, feeds)
        shorter = {name: past[:, :, 2:] for name, past in feeds.items() if name.startswith("past.1")}
        with pytest.raises(FeedError):
            session.run(feeds | shorter)
        with pytest.raises(FeedError):
            session.run(feeds | {"past.0.key": feeds["past.0.key"][:, :, 1:]})
        with pytest.raises(FeedError):
            session.run(feeds | {"past.0.key": feeds["past.0.key"][:1]})
        agree(model, session, feeds | {"mask": np.ones((2, 1), np.int64)})
        agree(model, session, Decoder().feeds(1, 2, 9))
    assert is_dynamic(builds[0]) and sum(map(is_dynamic, builds)) == 1


def test_operands_of_one_row_broadcast(builds: list[CodeBinding]) -> None:
    model = cross(dims=("batch", "length", "rows", "encoded"))
    with opened(model, new_shapes="wait") as session:
        for x_rows, rows in [(2, 2), (2, 1), (1, 3), (3, 3)]:
            feeds = {"x": cross_feeds(x_rows, 4, 5)["x"], "seen": cross_feeds(rows, 4, 5)["seen"]}
            agree(model, session, feeds)
    assert is_dynamic(builds[0]) and sum(map(is_dynamic, builds)) == 1


def grouped(fed: str = "mask") -> onnx.ModelProto:
    """Grouped-query attention with cached keys and values.

    The total number of positions is the length of a "mask", or fed as a "number" or as a "vector" of one element."""
    w, int32 = OnnxWriter(4), TensorProto.INT32
    q, k, v = (w.op("MatMul", "x", w.weight(WIDTH, size)) for size in (HEADS * 16, 32, 32))
    last, total = "last", "total"
    if fed == "mask":
        total = w.op("Cast", w.op("Gather", w.op("Shape", "mask"), w.const(1, np.int64)), to=int32)
        last = w.op("Sub", w.op("ReduceSum", "mask", w.ints(1), keepdims=0), w.const(1, np.int64))
        last = w.op("Cast", last, to=int32)
    given = [q, k, v, "past_k", "past_v", last, total]
    tables, outputs = [w.weight(64, 8), w.weight(64, 8)], ["y", "k", "v"]
    attrs = {"num_heads": HEADS, "kv_num_heads": HEADS // 2, "do_rotary": 1, "domain": "com.microsoft"}
    w.nodes.append(helper.make_node("GroupQueryAttention", [*given, *tables], outputs, **attrs))
    info = helper.make_tensor_value_info
    numbers = [info("last", int32, ["batch"]), info("total", int32, [1] if fed == "vector" else [])]
    masks = [info("mask", TensorProto.INT64, ["batch", "places"])]
    inputs = [info("x", FLOAT, ["batch", "length", WIDTH]), *(masks if fed == "mask" else numbers)]
    inputs += [info(name, FLOAT, ["batch", HEADS // 2, "past", 16]) for name in ("past_k", "past_v")]
    graph = helper.make_graph(w.nodes, "grouped", inputs, [info(name, FLOAT, None) for name in outputs], w.constants)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


# Rows, new tokens, positions of the past, total positions: for a past that grows, and for one that is a buffer.
STEPS = [(1, 6, 0, 6), (1, 1, 6, 7), (2, 1, 20, 21), (1, 1, 32, 10), (1, 1, 32, 32), (1, 1, 9, 10), (2, 5, 12, 5)]


def grouped_feeds(fed: str, rows: int, length: int, past: int, total: int) -> Feeds:
    rng = np.random.default_rng((rows, length, past, total))
    shapes = {"x": (rows, length, WIDTH), "past_k": (rows, 2, past, 16), "past_v": (rows, 2, past, 16)}
    feeds: Feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if fed == "mask":
        return {**feeds, "mask": np.ones((rows, total), np.int64)}
    number = np.array([total] if fed == "vector" else total, np.int32)
    return {**feeds, "last": np.full(rows, total - 1, np.int32), "total": number}


@pytest.mark.parametrize("fed", ["mask", "number", "vector"])
@pytest.mark.sample(3)
def test_grouped_queries_have_one_code_for_pasts_that_grow_and_for_buffers(
    fed: str, tmp_path: Path, builds: list[CodeBinding]
) -> None:
    model = grouped(fed)
    oracle = plain_session(model.SerializeToString())
    for _ in range(2):  # the second session finds the code
        with lathe.compile(model.SerializeToString(), threads=1, tune="off", cache_dir=tmp_path) as session:
            assert list(session.inputs) == [each.name for each in model.graph.input]
            for rows, length, past, total in STEPS:
                feeds = grouped_feeds(fed, rows, length, past, total)
                for answers in (session.run(feeds), session.run(feeds)):
                    for name, want in zip(("y", "k", "v"), oracle.run(None, feeds), strict=True):
                        assert answers[name].shape == want.shape
                        used = ... if name == "y" else (..., slice(total), slice(None))  # the rest is never read
                        np.testing.assert_allclose(answers[name][used], want[used], rtol=3e-5, atol=3e-5, err_msg=name)
            assert "FALLBACK" not in session.explain()
    assert len(builds) == 1 and is_dynamic(builds[0])


def test_numbers_that_are_no_lengths_are_refused() -> None:
    feeds = grouped_feeds("number", 1, 1, 6, 7)
    with opened(grouped("number")) as session:
        with pytest.raises(FeedError, match="'total' is missing"):
            session.run({name: array for name, array in feeds.items() if name != "total"})
        with pytest.raises(FeedError, match="'total' has dtype float32"):
            session.run(feeds | {"total": np.array(7, np.float32)})
        with pytest.raises(FeedError, match="'total' has shape"):
            session.run(feeds | {"total": np.array([7, 7], np.int32)})
        with pytest.raises(FeedError, match="unknown input 'total#length'"):
            session.run(feeds | {"total#length": np.empty(7, np.uint8)})
        assert session.run(feeds)["y"].shape == (1, 1, HEADS * 16)


def network_of_nodes(names: tuple[str | None, str | None, str | None]) -> onnx.ModelProto:
    """Two layers of a graph network: the features of nodes, and a matrix of edges."""
    w = OnnxWriter(8)
    hidden = w.op("Relu", w.op("MatMul", "edges", w.op("MatMul", "nodes", w.weight(8, 16))))
    w.op("MatMul", "edges", w.op("MatMul", hidden, w.weight(16, 4)), name="y")
    info = helper.make_tensor_value_info
    inputs = [info("nodes", FLOAT, [names[0], 8]), info("edges", FLOAT, list(names[1:]))]
    graph = helper.make_graph(w.nodes, "nodes", inputs, [info("y", FLOAT, None)], w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("names", [("n", "n", "n"), (None, None, None), ("n", "a", "b")])
def test_a_graph_network_has_one_code_for_all_numbers_of_nodes(names: Any, builds: list[CodeBinding]) -> None:
    model, rng = network_of_nodes(names), np.random.default_rng(0)
    with opened(model, new_shapes="wait") as session:
        for count in (3, 1, 20, 7):
            feeds = {"nodes": rng.standard_normal((count, 8)), "edges": rng.standard_normal((count, count))}
            agree(model, session, {name: array.astype(np.float32) for name, array in feeds.items()})
        assert "FALLBACK" not in session.explain()
        with pytest.raises(FeedError):
            session.run({"nodes": np.ones((3, 8), np.float32), "edges": np.ones((3, 4), np.float32)})
    assert is_dynamic(builds[0]) and sum(map(is_dynamic, builds)) == 1


def two_sums() -> onnx.ModelProto:
    """x [a, b, 16] and z [c, d, 16] times weights: concatenated along the tokens, and softmax of all pairs."""
    w = OnnxWriter(5)
    one, other = (w.op("MatMul", x, w.weight(16, 8)) for x in ("x", "z"))
    w.op("Concat", one, other, axis=1, name="joined")
    w.op("Softmax", w.op("MatMul", one, w.op("Transpose", other, perm=[0, 2, 1])), name="pairs")
    info = helper.make_tensor_value_info
    ports = [info(name, FLOAT, [None] * 3) for name in "xz"], [info(name, FLOAT, None) for name in ("joined", "pairs")]
    graph = helper.make_graph(w.nodes, "two_sums", *ports, w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_unnamed_extents_are_inferred_from_weights_and_inputs(builds: list[CodeBinding]) -> None:
    model, rng = two_sums(), np.random.default_rng(0)
    with opened(model, new_shapes="wait") as session:
        for rows, length, other in [(1, 2, 3), (3, 1, 5), (2, 9, 9), (4, 40, 1)]:
            shapes = {"x": (rows, length, 16), "z": (rows, other, 16)}
            feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            agree(model, session, feeds)
        assert len(builds) == 1
        with pytest.raises(FeedError):
            session.run(feeds | {"x": feeds["x"][..., 1:]})
        with pytest.raises(FeedError):
            session.run(feeds | {"x": feeds["x"][1:]})


@pytest.mark.parametrize("feeds", [cross_feeds(0, 3, 4), cross_feeds(2, 0, 4)], ids=["no rows", "no queries"])
def test_empty_inputs_are_answered(feeds: Feeds) -> None:
    model = cross()
    with opened(model, new_shapes="wait") as session:
        agree(model, session, cross_feeds(2, 3, 4))
        agree(model, session, feeds)


def test_a_frequent_shape_gets_specialised_code(builds: list[CodeBinding]) -> None:
    model, feeds = cross(), cross_feeds(2, 5, 9)
    with opened(model) as session:
        for _ in range(40):
            agree(model, session, feeds)
        assert session.settle(60)
        agree(model, session, feeds)
        assert "encoded=9, length=5: compiled" in session.explain()
        [own] = session._shapes.cached_runners().values()
        [known] = session._calls._calls.values()
        assert known.runner is own, "what was compiled is what runs"
    assert [is_dynamic(binding) for binding in builds] == [True, False]


def quarters() -> onnx.ModelProto:
    """Products of x [batch, length, 16] as [4, ?, 16], which is valid for some batch sizes only."""
    w = OnnxWriter(3)
    w.op("Reshape", w.op("MatMul", "x", w.weight(16, 16)), w.ints(4, -1, 16), name="y")
    info = helper.make_tensor_value_info
    ports = [info("x", FLOAT, ["batch", "length", 16])], [info("y", FLOAT, None)]
    graph = helper.make_graph(w.nodes, "quarters", *ports, w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_runs_of_a_batch_size_before_its_shape_had_a_placeholder_count() -> None:
    model, x = quarters(), np.ones((2, 6, 16), np.float32)
    with opened(model) as session:
        for _ in range(16):
            agree(model, session, {"x": x})
        assert session.settle(60)
        assert list(session._shapes.cached_runners()) == [(("length", 6),)]
        agree(model, session, {"x": np.ones((4, 6, 16), np.float32)})  # the first run of four rows
        agree(model, session, {"x": x})
        assert session.settle(60)
        assert list(session._shapes.cached_runners())[1:] == [(("batch", 2), ("length", 6))]


def test_runs_that_do_not_wait_use_reference_operators_first(builds: list[CodeBinding]) -> None:
    model = cross()
    with opened(model, new_shapes="background") as session:
        for length in range(2, 8):
            agree(model, session, cross_feeds(1, length, 9))
        assert session.settle(60)
        agree(model, session, cross_feeds(1, 3, 4))
        general = session._shapes._maker.general
        assert isinstance(general, DynamicShapeCode) and general.quick
    assert len(builds) == 1


def test_later_sessions_load_the_code_from_the_cache(tmp_path: Path, builds: list[CodeBinding]) -> None:
    model, path = cross(), tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for count in (1, 1):
        with lathe.compile(path, threads=1, cache_dir=tmp_path / "cache", tune="off") as session:
            for length in (3, 9):
                agree(model, session, cross_feeds(2, length, 6))
        assert len(builds) == count


@pytest.mark.slow
def test_the_code_is_there_before_any_run(tmp_path: Path, builds: list[CodeBinding]) -> None:
    """A decoder's mask is as long as past and new tokens together, so inputs of independent symbols do not fit."""
    model, path, cache = DECODERS["rotary"].model(), tmp_path / "model.onnx", tmp_path / "cache"
    path.write_bytes(model.SerializeToString())
    with lathe.compile(path, threads=1, cache_dir=cache, tune="off") as session:
        assert _answers_any_size(session)
    other = str(tmp_path / "other")
    compile_module.compile_to(
        tmp_path / "model.lathe", lathe.load(path), make_options(threads=1, cache_dir=other, tune="off")
    )
    with lathe.load_compiled(tmp_path / "model.lathe", 1, other, "background") as session:
        session.prepare()
        assert _answers_any_size(session)
    assert len(builds) == 2 and all(map(is_dynamic, builds))


def _answers_any_size(session: lathe.Session) -> bool:
    general = session._shapes._maker.general
    return isinstance(general, DynamicShapeCode) and general.quick


def test_runs_are_recorded() -> None:
    found: list[Any] = []
    with opened(cross()) as session:
        session.run(cross_feeds(1, 4, 6), record=found.append)
        session.run(cross_feeds(1, 4, 6))
    assert {"FusedAttention"} <= {run.op for run in found}
    assert all(run.began <= run.ended for run in found)


def test_a_closed_session_refuses_runs() -> None:
    session = opened(cross())
    session.run(cross_feeds(1, 4, 6))
    session.close()
    with pytest.raises(lathe.errors.SessionClosed):
        session.run(cross_feeds(1, 4, 6))


# -- models without it -------------------------------------------------------------------------------------------------


def test_models_of_one_size_or_packed_sequences_have_none() -> None:
    with opened(Decoder().model(), packing=64) as session:
        assert not session.description.any_size
    with opened(graphs.mlp()) as session:
        assert not session.description.any_size


def test_a_node_that_needs_known_sizes_gets_code_per_shape() -> None:
    graph = graphs.sequence()
    with opened(graph, new_shapes="wait") as session:
        assert session.description.any_size == ()
        for length in (3, 7):
            x = {"x": np.random.default_rng(0).standard_normal((2, length, 8)).astype(np.float32)}
            (got,), (want,) = session.run(x).values(), lathe.interpret(graph, x).values()
            np.testing.assert_allclose(got, want, rtol=2e-5)


# -- its plans ---------------------------------------------------------------------------------------------------------


def test_dimensions_are_evaluated_together() -> None:
    texts = ["7", "size0*size1", "4*size0*size1 - 3*size2 + 1", "(size1 - 1)//2", "size0*((size2 + 3)//4) + 2"]
    dims = [parse_dim(text) for text in texts]
    for values in [(1, 2, 3), (0, 1, 9), (5, 77, 4)]:
        env = {f"size{place}": value for place, value in enumerate(values)}
        assert compile_dims(dims)(values) == [evaluate(dim, env) for dim in dims]
    with pytest.raises(ValueError, match="expected a size"):
        compile_dims([symbol("n") + size(0)])


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Collects the graphs and plans of dynamic-shape code as they are made."""
    found: list[tuple[Any, Any]] = []
    original = planner._plan

    def plan(graph: lathe.Graph, *arguments: Any) -> Any:
        made = original(graph, *arguments)
        found.append((graph, made))
        return made

    monkeypatch.setattr(planner, "_plan", plan)
    return found


def test_the_checker_finds_buffers_that_overlap_for_some_sizes(planned: list[tuple[Any, Any]]) -> None:
    with opened(cross(), new_shapes="wait") as session:
        session.run(cross_feeds(2, 3, 4))
    graph, made = next((g, p) for g, p in planned if p.plan.arena.units)
    check_dynamic_shape_plan(graph, made, host(), False)
    steps = tuple(replace(step, operands=tuple(map(_together, step.operands))) for step in made.plan.steps)
    with pytest.raises(PlanError):
        check_dynamic_shape_plan(graph, replace(made, plan=replace(made.plan, steps=steps)), host(), False)


def _together(operand: Address) -> Address:
    """The address without its units, so that all buffers begin at the same place."""
    return replace(operand, offset=Affine(operand.offset.a, operand.offset.b))


def test_plans_travel_as_json(planned: list[tuple[Any, Any]]) -> None:
    with opened(cross(), new_shapes="wait") as session:
        session.run(cross_feeds(2, 3, 4))
    plan = next(p.plan for _, p in planned if p.plan.arena.units)
    assert plan_from_json(plan_to_json(plan), plan.fallbacks) == plan


PICTURES = ("convolution", "groups", "depthwise", "max", "average", "padded average", "nearest", "linear")


def picture(kind: str, channels: int = 6) -> onnx.ModelProto:
    """A model of images [batch, channels, height, width]: an operator of this kind, then another window."""
    w = OnnxWriter(5)
    pads = [1, 0, 2, 1]
    match kind:
        case "convolution":
            made = w.op("Conv", "x", w.weight(10, channels, 3, 3), w.const(np.ones(10)), pads=pads, strides=[2, 1])
        case "groups":
            made = w.op("Conv", "x", w.weight(12, channels // 2, 3, 5), group=2, pads=[1, 2, 1, 2], dilations=[2, 1])
        case "depthwise":
            weight, bias = w.weight(channels, 1, 3, 3), w.const(np.arange(channels))
            made = w.op("Relu", w.op("Conv", "x", weight, bias, group=channels, pads=pads, strides=[1, 2]))
        case "max":
            made = w.op("MaxPool", "x", kernel_shape=[3, 2], pads=pads, strides=[2, 2])
        case "average":
            made = w.op("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 1])
        case "nearest" | "linear":
            modes = {"mode": kind, "coordinate_transformation_mode": w.rng.choice(["half_pixel", "asymmetric"])}
            twice = w.op("Resize", "x", "", w.const([1, 1, 2, 1.5]), **modes)
            sizes = w.op("Concat", w.op("Slice", w.op("Shape", "x"), w.ints(0), w.ints(2)), w.ints(9, 17), axis=0)
            fixed = w.op("Resize", "x", "", "", sizes, mode=kind, coordinate_transformation_mode="align_corners")
            made = w.op("Mul", w.op("ReduceMean", twice, axes=[2, 3]), fixed)
        case _:
            made = w.op("AveragePool", "x", kernel_shape=[2, 3], pads=[1, 1, 0, 1], count_include_pad=1)
    w.op("GlobalAveragePool", w.op("Exp", w.op("Mul", made, w.const(0.1))), name="mean")
    w.op("Mul", made, w.const(2.0), name="y")
    info = helper.make_tensor_value_info
    inputs, results = (
        [info("x", FLOAT, ["batch", channels, "height", "width"])],
        [info(n, FLOAT, None) for n in ("y", "mean")],
    )
    graph = helper.make_graph(w.nodes, kind, inputs, results, w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def resized_signals(rank: int, kind: str) -> onnx.ModelProto:
    """x [batch, channels, d0, d1..] at twice its extents, and at known ones."""
    w, extents = OnnxWriter(8), rank - 2
    twice = w.op("Resize", "x", "", w.const([1, 1, *[2] * extents]), mode=kind)
    sizes = w.op("Concat", w.op("Slice", w.op("Shape", "x"), w.ints(0), w.ints(2)), w.ints(*[5] * extents), axis=0)
    fixed = w.op("Resize", "x", "", "", sizes, mode=kind, coordinate_transformation_mode="asymmetric")
    w.op("Mul", w.op("ReduceMean", twice, axes=list(range(2, rank))), fixed, name="y")
    info = helper.make_tensor_value_info
    shape = ["batch", "channels", *(f"d{axis}" for axis in range(extents))]
    ports = [info("x", FLOAT, shape)], [info("y", FLOAT, None)]
    graph = helper.make_graph(w.nodes, "resized_signals", *ports, w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("kind", ["nearest", "linear"])
@pytest.mark.parametrize("rank", [3, 5])
def test_lines_and_volumes_of_any_extents_are_resized(rank: int, kind: str, builds: list[CodeBinding]) -> None:
    model, rng = resized_signals(rank, kind), np.random.default_rng(0)
    with opened(model, new_shapes="wait") as session:
        for rows, channels, *extents in [(1, 2, 3, 4, 5), (2, 3, 9, 1, 4), (3, 1, 2, 7, 2)]:
            x = rng.standard_normal((rows, channels, *extents[: rank - 2])).astype(np.float32)
            agree(model, session, {"x": x})
        assert "FALLBACK" not in session.explain() and "on the reference:" not in session.explain()
    assert len(builds) == 1


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize(
    "kind", ["convolution", "groups", "depthwise", "max", "average", "padded average", "nearest", "linear"]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_images_of_any_extents(kind: str, threads: int, builds: list[CodeBinding]) -> None:
    model = picture(kind)
    with opened(model, threads=threads, new_shapes="wait") as session:
        assert session.description.any_size
        for rows, height, width in [(1, 7, 9), (3, 16, 5), (2, 33, 40), (1, 5, 64)]:
            x = np.random.default_rng((rows, height, width)).standard_normal((rows, 6, height, width))
            agree(model, session, {"x": x.astype(np.float32)})
    assert len(builds) == 1


def test_a_failure_of_dynamic_shape_code_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model still answers; a warning and `explain` say why each shape is compiled separately."""
    build = pipeline.build

    def failing_build(graph: Any, options: Any, batching: Any, binding: CodeBinding, *rest: Any) -> Any:
        if is_dynamic(binding):
            raise ValueError("no plan today")
        return build(graph, options, batching, binding, *rest)

    monkeypatch.setattr(pipeline, "build", failing_build)
    model, feeds = cross(), cross_feeds(2, 3, 4)
    reason = "no dynamic-shape code, so each shape is compiled separately: ValueError: no plan today"
    with opened(model, threads=1, new_shapes="wait") as session:
        with pytest.warns(RuntimeWarning, match=reason):
            got = session.run(feeds)
        assert reason in session.explain()
    expected = plain_session(model.SerializeToString()).run(None, feeds)
    np.testing.assert_allclose(got["y"], expected[0], 1e-4, 1e-5)
