"""`lathe.compile(model, device=...)` from end to end on simulated devices, against the references."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import lathe
from lathe.core.compiler import pipeline
from lathe.core.errors import ArtifactError, DeviceMemoryError, FeedError, UnsupportedError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.cuda.toolchain import is_interpreter_supported
from lathe.core.runtime.device import devices
from lathe.core.runtime.session.session import Session
from tests.core.passes.test_quantized import network, pair, weight
from tests.core.random_nets import Net, feeds
from tests.core.runtime import graphs

KINDS = ["simulated", *(["interpreted"] if is_interpreter_supported() else [])]  # the second one with `make test-cuda`
PAIR = ("simulated:0", "simulated:1")
N = symbol("n")


@pytest.fixture(autouse=True)
def _fresh_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test new devices, since a device that failed stays unusable."""
    monkeypatch.setattr(devices, "_devices", {})


def assert_agrees(session: Session, graph: Graph, sizes: tuple[int, ...] = (1, 3, 0, 3, 3)) -> None:
    """Compare at every batch size; repeated sizes are captured as graphs in between."""
    for n in sizes:
        given = feeds(graph, n, 0)
        got, want = session.run(given), lathe.interpret(graph, given)
        assert list(got) == list(want)
        for name, array in want.items():
            assert got[name].dtype == array.dtype
            np.testing.assert_allclose(got[name], array, 2e-4, 2e-4)
        assert session.settle(120)


def perceptron() -> Graph:
    b, graph = _begin("mlp", ("batch", 16))
    x = graph.inputs[0]
    for width in (24, 8):
        weight = np.random.default_rng(width).standard_normal((int(x.shape[-1]), width)) / 4  # type: ignore[arg-type]
        x = b("Relu", b("Gemm", x, b.constant(weight.astype(np.float32)), b.constant(np.ones(width, np.float32))))
    graph.outputs = [b("Softmax", x, axis=-1)]
    return graph


def residual_block() -> Graph:
    """Two convolutions around a shortcut, pooled over all places."""
    b, graph = _begin("block", ("batch", 4, 6, 6))
    rng, x = np.random.default_rng(0), graph.inputs[0]

    def convolved(value: Value) -> Value:
        weight = b.constant((rng.standard_normal((4, 4, 3, 3)) / 6).astype(np.float32))
        return b("Conv", value, weight, b.constant(np.ones(4, np.float32)), pads=(1, 1, 1, 1))

    y = b("Relu", b("Add", convolved(b("Relu", convolved(x))), x))
    graph.outputs = [b("Flatten", b("GlobalAveragePool", y))]
    return graph


def encoder_layer() -> Graph:
    """Attention and a normalized dense layer over tokens."""
    b, graph = _begin("encoder", ("batch", 5, 8))
    rng, x = np.random.default_rng(0), graph.inputs[0]

    def dense(value: Value) -> Value:
        return b("MatMul", value, b.constant((rng.standard_normal((8, 8)) / 3).astype(np.float32)))

    scores = b("MatMul", dense(x), b("Transpose", dense(x), perm=(0, 2, 1)))
    mixed = b("MatMul", b("Softmax", b("Mul", scores, b.constant(np.float32(0.35))), axis=-1), dense(x))
    scale, bias = (b.constant(np.full(8, number, np.float32)) for number in (1.5, 0.5))
    graph.outputs = [b("LayerNormalization", b("Add", x, mixed), scale, bias, axis=-1)]
    return graph


def _begin(name: str, shape: tuple[object, ...]) -> tuple[Builder, Graph]:
    graph = Graph(name)
    b = Builder(graph)
    b.input("x", TensorType(DType.FLOAT32, tuple(symbol(d) if isinstance(d, str) else d for d in shape)))  # type: ignore[misc]
    return b, graph


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", [perceptron(), residual_block(), encoder_layer()], ids=lambda graph: graph.name)
def test_models_run_as_a_whole_on_one_device(graph: Graph, kind: str) -> None:
    with lathe.compile(graph, device=kind, max_batch=2) as session:
        assert_agrees(session, graph)
        explained = session.explain(3)
    assert f"part 0 on {kind}:0" in explained and "1 parts on" in explained
    assert f"  receive %x from cpu: {evaluate(graph.inputs[0].tensor.nbytes, {'batch': 3})} B" in explained


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_model_of_the_repository_agrees(project: Path, kind: str) -> None:
    graph = lathe.load(project / "model_repo" / "digits" / "2" / "model.onnx")
    with lathe.compile(graph, device=kind) as session:
        image = np.random.default_rng(0).uniform(0, 16, (3, 1, 8, 8)).astype(np.float32)
        got, want = session.run({"image": image}), lathe.interpret(graph, {"image": image})
        np.testing.assert_allclose(got["probabilities"], want["probabilities"], 1e-4, 1e-5)
        assert [share.device for share in session._shapes.cached_runners()[()].shares] == [f"{kind}:0"]
        assert session.memory is not None and session.memory.weights > 0
        assert len(session.profile({"image": image}, runs=2).nodes) > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_graphs_agree(kind: str) -> None:
    """The interpreter runs six of them, which include windows over a single pixel."""
    for seed in range(30) if kind == "simulated" else range(14, 20):
        choices = random.Random(seed)
        graph = Net(choices.randrange).grow(steps=2 + seed % 12)
        pair = (f"{kind}:0", f"{kind}:1")
        limits = {name: 2000 * choices.randrange(2, 30) for name in pair}
        options = [{"device": kind}, {"device": pair, "device_memory": limits}, {"device": kind, "placement": "cost"}]
        try:
            with lathe.compile(graph, max_batch=2, tune="off", **options[seed % 3]) as session:  # type: ignore[arg-type]
                assert_agrees(session, graph, (2, 0, 2, 2))
        except Exception as error:
            raise AssertionError(f"the graph of seed {seed}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_models_multiply_bytes(kind: str) -> None:
    """First layers, ordinary and grouped convolutions and dense layers; depthwise convolutions stay float32."""

    def write(b: Builder, x: Value) -> Value:
        x = pair(b, x, zero=17)
        for shape, group in (((8, 3, 3, 3), 1), ((8, 1, 3, 3), 8), ((12, 4, 3, 2), 2)):
            x = b("Conv", x, weight(b, *shape, axis=0), pads=(1, 1, 1, 1), group=group)
            x = pair(b, b("Relu", x), 0.05, 0)
        pooled = pair(b, b("Flatten", b("MaxPool", x, kernel_shape=(2, 2), strides=(2, 2))), 0.05, 0)
        return b("Gemm", pooled, weight(b, 5, 192, axis=0), b.constant(np.ones(5, np.float32)), transB=1)

    graph = network(write, 3, 8, 7)
    x = np.random.default_rng(0).standard_normal((3, 3, 8, 7)).astype(np.float32)
    with lathe.compile(graph, device=kind, max_batch=4) as session:
        (got,), (want,) = session.run({"x": x}).values(), lathe.interpret(graph, {"x": x}).values()
        np.testing.assert_allclose(got, want, atol=0.01 * np.abs(want).max())  # some elements differ by a quantum
        explained = session.explain(3)
    assert "1 parts on" in explained and (explained.count("conv int8"), explained.count("gemm int8")) == (2, 1)


def test_two_devices_and_the_cpu_share_a_model() -> None:
    graph = perceptron()
    with lathe.compile(graph, device=PAIR, placement={"gemm_2": PAIR[1], "softmax": "cpu"}) as session:
        assert_agrees(session, graph)
        lines = session.explain(3).splitlines()
    assert "3 parts on simulated:0, simulated:1, cpu" in lines
    assert "  receive %relu from simulated:0, directly: 288 B" in lines
    assert "  send %relu to simulated:1, part 1" in lines


def test_memory_limits_hold() -> None:
    """The simulated devices count the memory that they really allocate."""
    graph = perceptron()
    limits = {"simulated:0": 3500, "simulated:1": 3600}
    with lathe.compile(graph, device=PAIR, device_memory=limits, max_batch=4) as session:
        assert_agrees(session, graph, (1, 4, 4))
        shares = [share.device for share in session._shapes.cached_runners()[()].shares]
        for name, limit in limits.items():
            assert 0 < devices.open_device(name).memory().total - devices.open_device(name).memory().free <= limit
    assert shares == ["simulated:0", "simulated:1"]


def test_states_are_right_wherever_they_are_updated() -> None:
    b, graph = _begin("running", (4,))
    total = Value("total", TensorType(DType.FLOAT32, (4,)))
    grown = b("Add", total, graph.inputs[0])
    graph.states = [State(total, grown, np.zeros(4, np.float32))]
    graph.outputs = [b("CumSum", grown, b.constant(np.array(0)))]
    for placement in ("first", {"cumsum": "cpu"}, {"cumsum": "cpu", "add": "cpu"}):
        with lathe.compile(graph, device="simulated", placement=placement, optimize=False) as session:  # type: ignore[arg-type]
            runs = [session.run({"x": np.full(4, k, np.float32)})["cumsum"].tolist() for k in (1, 2, 3)]
            assert runs == [[1, 2, 3, 4], [3, 6, 9, 12], [6, 12, 18, 24]]


def test_a_profile_changes_states_as_often_as_it_runs() -> None:
    """The timing repeats only steps that change no state."""
    b, graph = _begin("running", (4,))
    total = Value("total", TensorType(DType.FLOAT32, (4,)))
    grown = b("Add", total, graph.inputs[0])
    graph.states = [State(total, grown, np.zeros(4, np.float32))]
    graph.outputs = [b("Neg", grown), b("Softmax", graph.inputs[0], axis=-1)]
    with lathe.compile(graph, device="simulated", optimize=False) as session:
        ones = {"x": np.ones(4, np.float32)}
        session.profile(ones, runs=3)  # and one run to warm up
        assert session.run(ones)["neg"].tolist() == [-5] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_cumulative_sums_and_topk_run_on_the_device(kind: str) -> None:
    """As in sampling: the likeliest elements and their cumulative probability."""
    b, graph = _begin("likeliest", ("batch", 40))
    values, places = b.emit("TopK", graph.inputs[0], b.constant(np.array([7])), outputs=2, axis=-1)
    graph.outputs = [b("CumSum", b("Softmax", values, axis=-1), b.constant(np.array(1))), places]
    with lathe.compile(graph, device=kind) as session:
        assert_agrees(session, graph)
        assert "1 parts on" in session.explain(3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_recurrent_layers_stay_on_the_device(cell: str, kind: str) -> None:
    b, graph = _begin("recurrent", (5, "batch", 6))
    rng, rows = np.random.default_rng(0), 8 * {"RNN": 1, "GRU": 3, "LSTM": 4}[cell]
    weights = [b.constant((rng.standard_normal((2, rows, size)) / 3).astype(np.float32)) for size in (6, 8)]
    bias = b.constant(rng.standard_normal((2, 2 * rows)).astype(np.float32))
    graph.outputs = list(
        b.emit(cell, graph.inputs[0], *weights, bias, outputs=2, hidden_size=8, direction="bidirectional")
    )
    with lathe.compile(graph, device=kind) as session:
        assert_agrees(session, graph)
        explained = session.explain(3)
    assert "1 parts on" in explained and f"{cell.lower()} steps" in explained


def test_outputs_without_computation() -> None:
    b, graph = _begin("pass", ("batch", 3))
    x = graph.inputs[0]
    graph.outputs = [x, b.constant(np.arange(3, dtype=np.float32)), b("Neg", x), b("Reshape", x, shape=(-1, 1, 3))]
    with lathe.compile(graph, device="simulated") as session:
        assert_agrees(session, graph)
        given = np.ones((2, 3), np.float32)
        results = session.run({"x": given})
        assert not any(np.may_share_memory(result, given) for result in results.values())


def test_other_dynamic_sizes_are_compiled_on_demand() -> None:
    b, graph = _begin("free", ("batch", "length"))
    graph.outputs = [b("Softmax", graph.inputs[0], axis=-1)]
    with lathe.compile(graph, device="simulated") as session:
        for shape in ((2, 3), (1, 7), (2, 3)):
            x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            got, want = session.run({"x": x}), lathe.interpret(graph, {"x": x})
            np.testing.assert_allclose(got["softmax"], want["softmax"], 1e-5)


def test_a_kernel_that_refuses_its_data_names_the_node() -> None:
    graph = graphs.lookup()
    name = graph.inputs[0].name
    with lathe.compile(graph, device="simulated") as session:
        bad = np.full(graph.inputs[0].tensor.evaluate(dict.fromkeys(graph.inputs[0].tensor.symbols, 2)), 10**6)
        with pytest.raises(FeedError, match=r"\(Gather\): index out of range"):
            session.run({name: bad.astype(graph.inputs[0].dtype.numpy)})
        good = np.zeros_like(bad).astype(graph.inputs[0].dtype.numpy)
        assert session.run({name: good}).keys() == lathe.interpret(graph, {name: good}).keys()


def test_cached_models_load_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = perceptron()
    file = lathe.export(graph)
    options = {"device": PAIR, "placement": {"softmax": PAIR[1]}, "cache_dir": tmp_path, "max_batch": 4}
    with lathe.compile(file, **options) as session:  # type: ignore[arg-type]
        assert_agrees(session, graph)
    monkeypatch.setattr(pipeline, "build", None)  # nothing compiles from here on
    with lathe.compile(file, **options) as session:  # type: ignore[arg-type]
        assert_agrees(session, graph)
        assert len(session._shapes.cached_runners()[()].shares) == 2
    kept = next((tmp_path / "models").glob("*.lathe"))
    with lathe.load_compiled(kept) as session:
        assert_agrees(session, graph)
    fact = b'"made_for": "sm_80"'
    damaged = tmp_path / "other.lathe"
    damaged.write_bytes(kept.read_bytes().replace(fact, b'"made_for": "sm_99"'))
    with pytest.raises(ArtifactError):
        lathe.load_compiled(damaged)


def test_background_tuning_replaces_the_running_code(tmp_path: Path) -> None:
    """A child process compiles for the same devices; the session frees the device memory of the replaced code."""
    graph, pair = perceptron(), ("simulated:6", "simulated:7")
    file = tmp_path / "model.onnx"
    file.write_bytes(lathe.export(graph))
    placement = {"softmax": pair[1]}
    options = {"device": pair, "cache_dir": tmp_path / "cache", "tune": "background", "placement": placement}
    with lathe.compile(file, **options) as session:  # type: ignore[arg-type]
        assert "compiled without measuring" in session.explain(3)
        taken = [devices.open_device(name).memory().free for name in pair]
        assert_agrees(session, graph)
        assert session.settle(300)
        explained = session.explain(3)
        assert "tuned" in explained and "2 parts on simulated:6, simulated:7" in explained
        assert_agrees(session, graph)
        assert [devices.open_device(name).memory().free for name in pair] == taken
    assert all(devices.open_device(name).memory().free == devices.open_device(name).memory().total for name in pair)


def test_errors_name_what_is_not_supported() -> None:
    graph = perceptron()
    with pytest.raises(UnsupportedError, match="device 'tpu' is not supported, expected 'cpu', 'cuda'"):
        lathe.compile(graph, device="tpu")
    with pytest.raises(ValueError, match="'simulated:1' is named for placement, the devices are simulated:0, cpu"):
        lathe.compile(graph, device="simulated", placement={"gemm": "simulated:1"})
    with pytest.raises(ValueError, match="'cpu' is named for device_memory, the devices are simulated:0"):
        lathe.compile(graph, device="simulated", device_memory={"cpu": 1})
    for wrong in (0, -5, 1.5):
        with pytest.raises(
            ValueError, match="device_memory of 'simulated', in bytes: expected an integer of 1 or more"
        ):
            lathe.compile(graph, device="simulated", device_memory={"simulated": wrong})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="placement is 'luck', expected 'first', 'cost'"):
        lathe.compile(graph, device="simulated", placement="luck")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match='tune="background" needs the path of a file'):
        lathe.compile(graph, device="simulated", tune="background")
    with pytest.raises(UnsupportedError, match="packed sequences run on the CPU alone, not on simulated:0"):
        lathe.compile(graph, device="simulated", packing=8)
    with pytest.raises(DeviceMemoryError, match=r"needs .* simulated:0 has 1073741824 free"):
        lathe.compile(graph, device="simulated", max_batch=1 << 24)
