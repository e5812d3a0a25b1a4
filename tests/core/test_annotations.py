"""Device annotations and control edges: through text, passes, plans, placement, ONNX files and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

import lathe
from lathe import nn
from lathe.core.check.plans import check_plan
from lathe.core.codegen.target import host
from lathe.core.compiler.custom_operators import Elementwise, register_op
from lathe.core.errors import ModelError, PlanError, UnsupportedError, VerifyError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, Node, topological
from lathe.core.ir.text import parse_graph, print_graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ir.verify import verify
from lathe.core.kernels.target import GpuTarget
from lathe.core.passes.pipeline import optimize
from lathe.core.plan.kernel_choice import is_view
from lathe.core.plan.order import node_order
from lathe.core.plan.placement import device_groups
from lathe.core.plan.planner import make_plan
from lathe.core.runtime.device import devices
from tests.core.check.cases import optimized
from tests.core.random_nets import Net, feeds

W = "[" + ", ".join(str(float(i % 5)) for i in range(16)) + "]"
PAIR = ("simulated:0", "simulated:1")


@pytest.fixture(autouse=True)
def _fresh_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_devices", {})


def graph_of(*nodes: str, outputs: str = "%y") -> Graph:
    """A graph with an input %x and a constant %w of 4 x 4."""
    lines = ["input %x : float32[n,4]", f"const %w : float32[4,4] = {W}", *nodes, f"output {outputs}"]
    graph = parse_graph("graph @g {\n  " + "\n  ".join(lines) + "\n}\n")
    verify(graph)
    return graph


def node(name: str, op: str, operands: str, more: str = "") -> str:
    return f'%{name} : float32[n,4] = {op}({operands}) "{name}" {more}'


def chain(device: str = "simulated:1") -> Graph:
    """Two layers, of which the second is on a device of its own."""
    return graph_of(
        node("a", "MatMul", "%x, %w"),
        node("b", "Relu", "%a"),
        node("c", "MatMul", "%b, %w", f'on "{device}"'),
        node("y", "Relu", "%c", f'on "{device}"'),
    )


def order(graph: Graph) -> list[str]:
    return [each.outputs[0].name for each in graph.nodes]


# -- the graph --------------------------------------------------------------------------------------------------------


def test_text_has_annotations_and_edges() -> None:
    graph = graph_of(node("a", "Exp", "%x"), node("b", "Neg", "%x"), node("y", "Abs", "%x", 'on "cuda:1" after %a, %b'))
    y = graph.nodes[-1]
    assert (y.device, [value.name for value in y.after]) == ("cuda:1", ["a", "b"])
    assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)
    copy = graph.clone()
    assert print_graph(copy) == print_graph(graph) and copy.nodes[-1].after[0] is copy.nodes[0].output


def test_nodes_before_an_edge_live_as_long_as_the_node_after_it() -> None:
    graph = graph_of(node("a", "Exp", "%x"), node("b", "Neg", "%x"), node("y", "Abs", "%x", "after %a"))
    assert graph.remove_dead() == 1
    assert order(graph) == ["a", "y"]


def test_a_cycle_of_edges_is_refused() -> None:
    graph = graph_of(node("a", "Exp", "%x"), node("y", "Abs", "%a"))
    graph.nodes[0].after = (graph.nodes[1].output,)
    with pytest.raises(VerifyError, match=r"node 'a' \(Exp\): runs after %y, which is not defined before it"):
        verify(graph)
    with pytest.raises(ValueError, match="cycle through node"):
        graph.sort()


def test_sorting_honours_edges() -> None:
    graph = graph_of(node("a", "Exp", "%x"), node("b", "Neg", "%x", "after %a"), node("y", "Abs", "%b"))
    assert [each.name for each in topological(graph.nodes[::-1])] == ["a", "b", "y"]


# -- passes -----------------------------------------------------------------------------------------------------------


def test_passes_fuse_within_a_device_only() -> None:
    found, _ = optimize(chain())
    assert [(each.op, each.device) for each in found.nodes] == [("FusedMatMul", ""), ("FusedMatMul", "simulated:1")]


def test_equal_nodes_for_different_devices_are_not_merged() -> None:
    graph = graph_of(
        node("a", "Exp", "%x", 'on "cuda:0"'), node("b", "Exp", "%x", 'on "cuda:1"'), node("y", "Add", "%a, %b")
    )
    found, _ = optimize(graph)
    assert sorted(each.device for each in found.nodes if "Exp" in print_graph(found)) == ["", "cuda:0", "cuda:1"]


def test_passes_keep_edges() -> None:
    """The node before the edge has no reader, and the one after it would be fused with its producer."""
    graph = graph_of(
        node("a", "Exp", "%x"),
        node("b", "Sin", "%x"),
        node("c", "Identity", "%b"),
        node("y", "Neg", "%c", "after %a"),
    )
    found, _ = optimize(graph)
    assert [(each.op, [value.name for value in each.after]) for each in found.nodes] == [
        ("Exp", []), ("Sin", []), ("Neg", ["a"]),
    ]  # fmt: skip


def test_an_edge_from_a_node_that_becomes_a_constant_goes() -> None:
    graph = graph_of('%a : float32[4,4] = Exp(%w) "a"', node("y", "Neg", "%x", "after %a"))
    found, _ = optimize(graph)
    assert [(each.op, each.after) for each in found.nodes] == [("Neg", ())]


def test_an_output_keeps_its_name_if_its_annotated_node_goes() -> None:
    graph = graph_of(node("a", "Exp", "%x"), node("y", "Identity", "%a", 'on "cuda:1"'))
    found, _ = optimize(graph)
    assert [value.name for value in found.outputs] == ["y"]


def test_edges_that_cannot_be_kept_are_refused() -> None:
    graph = graph_of(node("a", "Exp", "%x"), '%r : float32[4,4] = Exp(%w) "r" after %a', node("y", "Neg", "%x"))
    with pytest.raises(UnsupportedError, match=r"'r'.*: runs after other nodes, but reads no computed value"):
        optimize(graph)
    body = 'graph @body {\n %v : float32[n,4] = Neg(%x) "v" on "cuda:0"\n output %v\n}'
    looped = graph_of(
        "const %t : bool[] = [1]", f'%y : float32[n,4] = If(%t) {{else_branch = {body}, then_branch = {body}}} "if"'
    )
    with pytest.raises(UnsupportedError, match=r"'v'.*: is annotated with a device inside .*'if'"):
        optimize(looped)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_compute_the_same_with_annotations_and_edges(seed: int) -> None:
    """Plans are checked, also that every node runs after those of its edges."""
    rng = np.random.default_rng(seed)
    graph = Net(lambda below: int(rng.integers(below))).grow(steps=4 + seed % 12)
    for index, each in enumerate(graph.nodes):
        reads_computed = any(value is not None and value not in graph.constants for value in each.inputs)
        if rng.random() < 0.4:
            each.device = str(rng.choice(["cpu", *PAIR]))
        if index and reads_computed and rng.random() < 0.3:
            each.after = (graph.nodes[int(rng.integers(index))].output,)
    verify(graph)
    given = feeds(graph, 3, 0)
    want = lathe.interpret(graph, given)
    annotated = {each.device for each in optimized(graph).nodes if not is_view(each)} - {""}
    refused = []
    for options in ({}, {"threads": 1}, {"device": PAIR}):
        try:
            with lathe.compile(graph, max_batch=4, tune="off", **options) as session:  # type: ignore[arg-type]
                for name, got in session.run(given).items():
                    np.testing.assert_allclose(got, want[name], 2e-4, 2e-4)
                if options.get("device"):
                    assert annotated <= {share.device for share in session._shapes.cached_runners()[()].shares}
        except UnsupportedError as error:
            refused.append(str(error))
    assert all("has no kernel for" in reason for reason in refused)  # of a node that is annotated with a GPU


# -- plans ------------------------------------------------------------------------------------------------------------


def edges_against_the_order() -> Graph:
    """Each node is ready at once; edges ask for the reverse of the graph's order."""
    graph = graph_of(node("a", "Exp", "%x"), node("b", "Sin", "%x"), node("y", "Neg", "%x"), outputs="%a, %b, %y")
    a, b, y = graph.nodes
    a.after, b.after = (b.output,), (y.output,)
    graph.sort()
    return graph


@pytest.mark.parametrize("target", [host(), GpuTarget(device="simulated")], ids=["cpu", "gpu"])
def test_plans_run_nodes_in_the_order_of_edges(target: object) -> None:
    graph = edges_against_the_order()
    plan = make_plan(graph, target, threads=4).plan  # type: ignore[arg-type]
    assert [step.label for step in plan.steps] == ["y", "b", "a"]
    assert all(step.has_barrier for step in plan.steps)
    assert [each.name for each in node_order(graph)] == ["y", "b", "a"]


def test_the_checker_finds_nodes_that_run_too_early() -> None:
    graph = graph_of(node("a", "Exp", "%x"), node("y", "Neg", "%x"), outputs="%a, %y")
    planned = make_plan(graph, host(), threads=4)
    check_plan(graph, planned, host())
    assert not planned.plan.steps[0].has_barrier  # both run at the same time
    graph.nodes[1].after = (graph.nodes[0].output,)
    with pytest.raises(PlanError, match="Neg 'y' must run after Exp 'a'"):
        check_plan(graph, planned, host())


def test_edges_order_parts_on_different_devices() -> None:
    graph = edges_against_the_order()
    where = dict(zip(graph.nodes, ["gpu", "cpu", "gpu"], strict=True))
    assert [(device, [each.name for each in nodes]) for device, nodes in device_groups(graph, where)] == [
        ("gpu", ["y"]), ("cpu", ["b"]), ("gpu", ["a"]),
    ]  # fmt: skip
    placement = {"b": "cpu"}
    with lathe.compile(graph, device="simulated", placement=placement, optimize=False) as session:
        x = np.ones((2, 4), np.float32)
        assert np.array_equal(session.run({"x": x})["y"], -x)
        assert "3 parts on simulated:0, cpu" in session.explain()


# -- placement --------------------------------------------------------------------------------------------------------


def parts(session: object) -> list[str]:
    return [share.device for share in session._shapes.cached_runners()[()].shares]  # type: ignore[attr-defined]


def test_annotated_nodes_run_on_their_devices() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    graph = chain()
    with lathe.compile(graph, device=PAIR) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], lathe.interpret(graph, {"x": x})["y"], 1e-5)
        assert parts(session) == list(PAIR)
        assert "receive %b from simulated:0, directly" in session.explain()


@pytest.mark.parametrize(("device", "expected"), [("simulated", "simulated:0"), ("cpu", "cpu")])
def test_devices_have_short_names(device: str, expected: str) -> None:
    with lathe.compile(chain(device), device=PAIR, placement={"a": "simulated:1"}) as session:
        session.run({"x": np.ones((1, 4), np.float32)})
        assert parts(session) == ["simulated:1", expected]


def test_placement_by_name_has_priority() -> None:
    with lathe.compile(chain(), device=PAIR, placement={"c": "cpu"}) as session:
        session.run({"x": np.ones((1, 4), np.float32)})
        assert parts(session) == ["simulated:0", "cpu"]


def test_annotations_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="node 'c': is annotated with the device 'simulated:7', expected one of"):
        lathe.compile(chain("simulated:7"), device=PAIR)
    with pytest.raises(UnsupportedError, match="node 'c': device 'tpu' is not supported, expected 'cpu', 'cuda'"):
        lathe.compile(chain("tpu"), device=PAIR)
    graph = graph_of("const %k : int64[] = [1]", node("y", "CumProd", "%x, %k", 'on "simulated:1"'))
    with pytest.raises(UnsupportedError, match="node 'y': simulated:1 has no kernel for CumProd"):
        lathe.compile(graph, device=PAIR)


def test_a_view_follows_its_source_even_if_annotated() -> None:
    graph = graph_of(
        node("a", "Exp", "%x"),
        '%r : float32[n,2,2] = Reshape(%a) {shape = [-1, 2, 2]} "r" on "simulated:1"',
        '%y : float32[n,2,2] = Neg(%r) "y" on "simulated:1"',
    )
    with lathe.compile(graph, device=PAIR, optimize=False) as session:
        session.run({"x": np.ones((1, 4), np.float32)})
        assert parts(session) == list(PAIR)


def test_the_cpu_alone_ignores_annotations_and_says_so() -> None:
    with lathe.compile(chain(), device="cpu") as session:
        session.run({"x": np.ones((1, 4), np.float32)})
        text = session.explain()
    assert "device annotations: 2 rewrites, 4 -> 4 nodes (without effect, as the model is compiled for the CPU" in text
    assert "fused" not in text or text.count("FusedMatMul") == 2


# -- ONNX -------------------------------------------------------------------------------------------------------------


def test_export_and_import_keep_annotations_and_edges() -> None:
    graph = graph_of(
        node("a", "Exp", "%x"),
        node("b", "MatMul", "%x, %w", 'on "cuda:1"'),
        node("c", "Relu", "%b", 'on "cuda:1" after %a'),
        node("y", "Neg", "%x", "after %a, %c"),
    )
    data = lathe.export(graph)
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    again = lathe.load(data)
    found = {each.outputs[0].name: (each.device, [value.name for value in each.after]) for each in again.nodes}
    assert found == {"a": ("", []), "b": ("cuda:1", []), "c": ("cuda:1", ["a"]), "y": ("", ["a", "c"])}
    fused = lathe.load(lathe.export(optimize(graph)[0]))  # fused operators are written as several
    assert {each.device for each in fused.nodes if each.op in ("MatMul", "Relu")} == {"cuda:1"}
    assert any("a" in [value.name for value in each.after] for each in fused.nodes)


def onnx_model(**metadata: str) -> onnx.ModelProto:
    nodes = [onnx.helper.make_node("Neg", ["x"], ["y"], "neg"), onnx.helper.make_node("Exp", ["x"], ["z"], "exp")]
    for key, value in metadata.items():
        nodes[0].metadata_props.add(key=f"lathe.{key}", value=value)
    info = [onnx.helper.make_tensor_value_info(name, 1, ["n", 4]) for name in "xyz"]
    return onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=[onnx.helper.make_opsetid("", 21)]
    )


def test_metadata_of_nodes_is_read() -> None:
    graph = lathe.load(onnx_model(device="cuda", after='["z"]').SerializeToString())
    assert order(graph) == ["z", "y"]  # the node after the edge comes later than in the file
    assert (graph.nodes[1].device, graph.nodes[1].after) == ("cuda", (graph.nodes[0].output,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("z", r"node 'neg' \(Neg\): metadata 'lathe.after': expected a JSON list of names of values, got 'z'"),
        ("[1]", "expected a JSON list"),
        ("[" * 100_000, "expected a JSON list"),
        ('["nobody"]', "reads 'nobody', which nothing defines"),
        ('["y"]', "is part of a cycle"),
    ],
)
def test_wrong_metadata_is_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lathe.load(onnx_model(after=text).SerializeToString())


def test_a_compiled_file_keeps_its_places(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(lathe.export(chain()))
    for _ in range(2):  # compiled, then from the cache
        with lathe.compile(file, device=PAIR, cache_dir=tmp_path / "cache", tune="off") as session:
            session.run({"x": np.ones((1, 4), np.float32)})
            assert parts(session) == list(PAIR)


# -- layers -----------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("simulated:1")

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = self.first(x)
        with nn.device("cpu"):
            y = y.exp()
        with nn.after(y):
            z = x.tanh()
        return self.second(y) + z


def test_modules_and_contexts_annotate_operators() -> None:
    graph = nn.trace(Two(), {"x": "float32[n,4]"})
    devices_of = {each.name: each.device for each in graph.nodes}
    assert {devices_of[name] for name in devices_of if name.startswith("second.")} == {"simulated:1"}
    assert [each.device for each in graph.nodes if each.op == "Exp"] == ["cpu"]
    (tanh,) = (each for each in graph.nodes if each.op == "Tanh")
    assert isinstance(tanh, Node) and [value.producer.op for value in tanh.after if value.producer] == ["Exp"]
    assert [each.device for each in graph.nodes if each.op == "Add"][-1] == ""
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    with lathe.compile(graph, device=PAIR) as session:
        got = session.run({"x": x})["output"]
        np.testing.assert_allclose(got, lathe.interpret(graph, {"x": x})["output"], 1e-4, 1e-5)
        assert set(parts(session)) == {"simulated:0", "cpu", "simulated:1"}


def test_eager_runs_ignore_annotations() -> None:
    model, x = Two(), np.ones((2, 4), np.float32)
    assert model(x).numpy().shape == (2, 4)


# -- effects ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def notes() -> list[str]:
    """What nodes of the custom operator `Note` leave behind, in the order in which they run."""
    left: list[str] = []

    @register_op("com.notes")
    class Note(Elementwise):
        attrs: ClassVar[dict[str, object]] = {"text": ""}

        def reference(self, c: Any, x: Any) -> Any:
            left.append(c.attr("text"))
            return x.copy()

    return left


@pytest.mark.parametrize("options", [{}, {"device": "simulated"}, {"optimize": False}], ids=str)
def test_effects_happen_in_the_order_of_edges(notes: list[str], options: dict[str, object]) -> None:
    """Nothing reads what the first two nodes compute, and native code lies between them."""
    text = [f'{{text = "{name}"}} "{name}"' for name in "pqr"]
    graph = graph_of(
        node("e", "Exp", "%x"),
        f"%p : float32[n,4] = Note(%e) {text[0]}",
        node("s", "Sin", "%x", "after %p"),
        f"%q : float32[n,4] = Note(%s) {text[1]} after %p",
        f"%r : float32[n,4] = Note(%x) {text[2]} after %q, %s",
        node("y", "Neg", "%x", "after %r"),
    )
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    with lathe.compile(graph, tune="off", **options) as session:  # type: ignore[arg-type]
        session.run({"x": x})
        notes.clear()
        for _ in range(2):
            assert np.array_equal(session.run({"x": x})["y"], -x)
    assert notes == [*"pqr", *"pqr"]


def test_edges_order_native_parts_and_references_of_dynamic_shape_code(notes: list[str]) -> None:
    graph = Graph("dynamic")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), symbol("t"))))
    values = [b("Exp", x, name="e")]
    for name in "pqr":
        for op in ("Note", "Tanh"):
            value = b(op, x, name=f"{name}.{op}", **({"text": name} if op == "Note" else {}))  # type: ignore[arg-type]
            assert value.producer is not None
            value.producer.after = (values[-1],)
            values.append(value)
    graph.outputs = [values[-1], b("Unique", x, name="u")]
    verify(graph)
    with lathe.compile(graph, tune="off") as session:
        for shape in ((2, 3), (3, 5)):
            given = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
            session.run(given)
            notes.clear()
            want = lathe.interpret(graph, given)
            assert notes == [*"pqr"]
            notes.clear()
            for name, got in session.run(given).items():
                np.testing.assert_allclose(got, want[name], 1e-5)
            assert notes == [*"pqr"]
        assert "parts, and references between them" in session.explain()
