"""Sessions with packing against ONNX Runtime on each sequence alone, for any lengths, threads and bins."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lathe
from lathe import nn
from lathe.core.compiler import compile as compile_module
from lathe.core.compiler import pipeline
from lathe.core.compiler.compile import compile
from lathe.core.compiler.packing import takes_tokens
from lathe.core.errors import FeedError, SessionClosed, UnsupportedError
from lathe.core.ir.text import parse_graph
from lathe.core.runtime.session.packed import Feed, pack_bins, split_feeds
from lathe.core.runtime.session.session import Session
from tests.core.encoders import Encoder, Feeds
from tests.server.batching.test_padding import attention

LENGTHS = (1, 3, 7, 17, 33, 128)
WHOLE = Encoder(pools=("mean", "first"))


def packing(model: onnx.ModelProto, tokens: int = 200, **options: Any) -> Session:
    return compile(model.SerializeToString(), packing=tokens, tune="off", **options)


def theirs(model: onnx.ModelProto, feeds: Sequence[Feeds]) -> list[dict[str, Any]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, feed), strict=True)) for feed in feeds]


def assert_agree(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        for name, array in other.items():
            assert (mine[name].shape, mine[name].dtype) == (array.shape, array.dtype)
            np.testing.assert_allclose(mine[name], array, rtol=1e-4, atol=1e-5)


ENCODERS = {
    "a table of positions, the mean over a mask": Encoder(),
    "positions counted from the mask": Encoder(positions="mask", pools=("first",)),
    "rotary positions": Encoder(positions="rotary", pools=("max", "min")),
    "causal by a triangle": Encoder(causal="trilu", pools=("last",)),
    "causal by a range, no mask": Encoder(positions="range", causal="range", masked=False, pools=("all", "last")),
    "tokens only": Encoder(pools=()),
    "masked by truth values": Encoder(guarded=True),
}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.sample(3)
def test_agrees_with_onnx_runtime(name: str) -> None:
    encoder = ENCODERS[name]
    model = encoder.model()
    feeds = [encoder.feeds(rows, length) for length in LENGTHS for rows in (1, 2)]
    with packing(model) as session:
        assert session.packing is not None and session.packing.packable, session.packing
        assert_agree(session.run_packed(feeds), theirs(model, feeds))
        assert_agree([session.run(feeds[5])], theirs(model, feeds[5:6]))
        text = session.explain(100)
    assert text.count("SegmentAttention") == encoder.layers and "SegmentAttention     FALLBACK" not in text
    fallbacks = {line.split()[0] for line in text.splitlines() if "FALLBACK" in line}
    assert fallbacks <= {"CumSum"}


class Classifier(nn.Module):
    """An encoder with a padding mask: its tokens, and a linear layer of their mean."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, x: nn.Tensor, padding: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        y = self.encoder(x, src_key_padding_mask=padding)
        return y, self.head(y.mean(1))


def test_models_written_in_python() -> None:
    module = Classifier()
    module.eval()
    graph = nn.trace(module, {"x": "float32[batch,sequence,16]", "padding": "bool[batch,sequence]"})
    rng = np.random.default_rng(0)
    feeds = [
        {
            "x": rng.standard_normal((rows, length, 16)).astype(np.float32),
            "padding": np.repeat(np.arange(length)[None] > length // 2, rows, 0),
        }
        for rows, length in ((1, 1), (2, 5), (1, 40), (3, 17))
    ]
    with compile(graph, packing=100, tune="off") as session:
        assert_agree(session.run_packed(feeds), [lathe.interpret(graph, feed) for feed in feeds])
        assert "FALLBACK" not in session.explain(50)


def test_convolutions_and_neighbours_are_compiled() -> None:
    weights = ", ".join(f"{value:.2f}" for value in np.random.default_rng(1).uniform(-1, 1, 40))
    graph = parse_graph(f"""graph @g {{
        input %x : float32[batch,sequence,8]
        const %w : float32[8,1,5] = [{weights}]
        %t : float32[*] = Transpose(%x) {{perm = [0, 2, 1]}}
        %c : float32[*] = Conv(%t, %w) {{group = 8, pads = [2, 2]}}
        %u : float32[*] = Transpose(%c) {{perm = [0, 2, 1]}}
        %s : float32[*] = MatMul(%u, %t)
        %p : float32[*] = Softmax(%s) {{axis = -1}}
        %a : float32[*] = MatMul(%p, %x)
        %b : float32[*] = Add(%a, %u)
        %cut : float32[*] = Slice(%b) {{axes = [1], starts = [0], ends = [-1], steps = [1]}}
        %y : float32[*] = Pad(%cut) {{pads = [0, 1, 0, 0, 0, 0]}}
        output %y
    }}""")
    rng = np.random.default_rng(0)
    shapes = ((1, 1), (2, 5), (1, 40), (3, 17))
    feeds: list[Feeds] = [{"x": rng.standard_normal((*shape, 8)).astype(np.float32)} for shape in shapes]
    with compile(graph, packing=50, tune="off") as session:
        assert_agree(session.run_packed(feeds), [lathe.interpret(graph, feed) for feed in feeds])
        text = session.explain(50)
        assert "SegmentAttention" in text and "FALLBACK" not in text


def test_the_token_of_the_greatest_id() -> None:
    """The way CLIP finds the end of a text; the first one if there are several."""
    graph = parse_graph("""graph @g {
        input %ids : int64[batch,sequence]
        const %table : float32[5,3] = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        %x : float32[*] = Gather(%table, %ids)
        %short : int32[*] = Cast(%ids) {to = 6}
        %numbers : float32[*] = Cast(%ids) {to = 1}
        %divisors : float32[*] = Unsqueeze(%numbers) {axes = [2]}
        %both : float32[*] = Div(%x, %divisors)
        %at : int64[*] = ArgMax(%short) {axis = -1, keepdims = 1}
        %end : float32[*] = GatherND(%both, %at) {batch_dims = 1}
        output %end, %at
    }""")
    rng = np.random.default_rng(0)
    shapes = ((1, 1), (2, 5), (1, 40), (3, 17))
    feeds: list[Feeds] = [{"ids": rng.integers(0, 5, shape)} for shape in shapes]  # ids of 0 give infinities
    with compile(graph, packing=50, tune="off") as session:
        assert_agree(session.run_packed(feeds), [lathe.interpret(graph, feed) for feed in feeds])
        assert "FALLBACK" not in session.explain(50)


def test_a_session_reports_that_it_packs() -> None:
    with packing(WHOLE.model(), 64) as session:
        text = session.explain(50)
        assert "packing: yes - no token depends on another sequence than its own, along 'sequence'" in text
        assert "tokens, at most 64 in a run:" in text and "code for whole sequences:" in text
        assert session.memory is not None
        profiled = session.profile(WHOLE.feeds(2, 9), runs=2)
        assert any(node.op == "SegmentAttention" for node in profiled.nodes)


def test_nothing_compiles_for_a_new_length(monkeypatch: pytest.MonkeyPatch) -> None:
    with packing(WHOLE.model()) as session:
        session.run(WHOLE.feeds(1, 5))

        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError("compiled again")

        monkeypatch.setattr(pipeline, "build", refuse)
        for length in (1, 2, 50, 160):
            session.run(WHOLE.feeds(1, length))


def test_models_that_cannot_be_packed_run_unpacked() -> None:
    model = WHOLE.model()
    model.graph.node.append(onnx.helper.make_node("ReduceMean", ["tokens"], ["centre"], axes=[1], keepdims=1))
    model.graph.node.append(onnx.helper.make_node("Sub", ["tokens", "centre"], ["centred"]))
    model.graph.output.append(onnx.ValueInfoProto(name="centred"))
    feeds = [WHOLE.feeds(1, 4)]
    with packing(model) as session:
        assert session.packing is not None and not session.packing.packable
        assert "combines a value of whole sequences with a value of tokens" in session.packing.reason
        assert f"packing: no - {session.packing.reason}" in session.explain()
        with pytest.raises(UnsupportedError, match="a value of whole sequences with a value of tokens"):
            session.run_packed(feeds)
        assert_agree([session.run(feeds[0])], theirs(model, feeds))
        with compile(model.SerializeToString(), tune="off") as plain:  # with code for all lengths
            assert session.description.any_size == plain.description.any_size != ()


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ("int64[n,length] int32[n,length]", True),
        ("int64[n,8]", False),
        ("int64[n,length] int64[n]", False),
        ("int64[n,length,2]", False),
        ("int64[n,length] float32[n,length]", False),
    ],
)
def test_only_models_of_integers_take_tokens(types: str, expected: bool) -> None:
    lines = [f"input %x{index} : {each}" for index, each in enumerate(types.split())]
    assert takes_tokens(parse_graph("graph @g {\n" + "\n".join(lines) + "\noutput %x0\n}")) is expected


def test_attention_for_all_pairs_is_not_packed() -> None:
    """Each head scales its attention weights, which no fused kernel does; also without optimization."""
    model = Encoder(pools=()).model()
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    product = next(node for node in model.graph.node if node.op_type == "MatMul" and softmax.output[0] in node.input)
    scaled = onnx.helper.make_node("Mul", [softmax.output[0], "factors"], ["scaled"])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[[2]], [[3]]], np.float32), "factors"))
    model.graph.node.insert(list(model.graph.node).index(product), scaled)
    product.input[0] = "scaled"
    for options in ({}, {"optimize": False}):
        with packing(model, **options) as session:
            assert session.packing is not None
            assert "no kernel computes this attention within sequences" in session.packing.reason


def test_packing_is_off_by_default() -> None:
    with compile(WHOLE.model().SerializeToString(), tune="off") as session:
        assert session.packing is None
        with pytest.raises(UnsupportedError, match="compiled without `packing`"):
            session.run_packed([])
    with pytest.raises(ValueError, match="packing: expected an integer of 1 or more, got 0"):
        packing(WHOLE.model(), 0)


def test_refuses_feeds_that_do_not_fit() -> None:
    short, (long, mask) = WHOLE.feeds(1, 5), WHOLE.feeds(1, 6).values()
    with packing(WHOLE.model()) as session:
        with pytest.raises(FeedError, match="dimension sequence: expected 6 as in 'ids', got 5 in 'mask'"):
            session.run_packed([short, {"ids": long, "mask": mask[:, :5]}])
        with pytest.raises(FeedError, match="index out of range"):
            session.run_packed([short, {"ids": long * 0 + 1000, "mask": mask}])
        with pytest.raises(FeedError, match="index out of range"):
            session.run_packed([WHOLE.feeds(1, 300)])  # there are positions for 160
        assert session.run_packed([]) == []
    with pytest.raises(SessionClosed):
        session.run_packed([short])


def test_empty_feeds_run_the_ordinary_way() -> None:
    encoder = Encoder(pools=())
    feeds = [encoder.feeds(2, 3), {name: np.zeros((0, 4), np.int64) for name in ("ids", "mask")}]
    with packing(encoder.model()) as session:
        assert [outputs["tokens"].shape for outputs in session.run_packed(feeds)] == [(2, 3, 16), (0, 4, 16)]


def test_artifacts_store_packing(tmp_path: Path) -> None:
    model, feeds = WHOLE.model(), [WHOLE.feeds(1, length) for length in LENGTHS]
    options = pipeline.make_options(cache_dir=tmp_path / "cache", packing=150)
    compile_module.compile_to(tmp_path / "encoder.lathe", lathe.load(model.SerializeToString()), options)
    for _ in range(2):  # the second time, compiled code comes from the cache
        with lathe.load_compiled(tmp_path / "encoder.lathe", cache_dir=tmp_path / "cache", tune="off") as session:
            assert session.packing is not None and session.packing.tokens == 150
            assert_agree(session.run_packed(feeds), theirs(model, feeds))


def test_many_threads_share_a_session() -> None:
    model = WHOLE.model()
    feeds = [[WHOLE.feeds(1 + i % 2, length, seed=i) for length in LENGTHS] for i in range(4)]
    expected = [theirs(model, each) for each in feeds]
    found: dict[int, list[dict[str, Any]]] = {}
    with packing(model, threads=2) as session:

        def work(index: int) -> None:
            for _ in range(5):
                found[index] = session.run_packed(feeds[index])

        workers = [threading.Thread(target=work, args=(index,)) for index in range(len(feeds))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for index, each in enumerate(expected):
        assert_agree(found[index], each)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=20),
    st.integers(1, 100),
)
def test_bins(shapes: list[tuple[int, int]], capacity: int) -> None:
    feeds = [Feed({}, rows, length) for rows, length in shapes]
    bins = pack_bins(split_feeds(feeds, capacity), capacity)
    rows = sorted((item.feed, row) for items in bins for item in items for row in range(item.first, item.last))
    assert rows == [(index, row) for index, feed in enumerate(feeds) for row in range(feed.rows)]
    sizes = [sum(item.tokens for item in items) for items in bins]
    assert all(size <= capacity or len(items) == items[0].rows == 1 for size, items in zip(sizes, bins, strict=True))
    small = [size for size in sizes if 2 * size <= capacity]
    assert len(small) <= 1  # two such bins would have been one


def test_nan_does_not_reach_other_sequences_on_references() -> None:
    """Products of six columns have no kernels."""
    hidden = np.zeros((3, 2, 6), np.float32)
    hidden[1] = np.nan
    with compile(attention(), packing=64, tune="off") as session:
        found = session.run({"hidden": hidden, "mask": np.ones((3, 2), np.int64)})
    for array in found.values():
        assert np.isnan(array[1]).all() and not array[[0, 2]].any()
