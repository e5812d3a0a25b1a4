"""Which models may be batched across requests, and which must not."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.text import parse_graph
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.passes.proofs.rows import rows
from lathe.core.reference import interpret

INDEPENDENT = {
    "a perceptron": """
        input %x : float32[n,4]
        const %w : float32[4,2] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
        %h : float32[*] = MatMul(%x, %w)
        %y : float32[*] = Softmax(%h) {axis = -1}
        output %y""",
    "a table tiled for every row": """
        input %x : float32[n,4]
        const %first : int64[1] = [0]
        const %twice : int64[1] = [2]
        const %once : int64[1] = [1]
        const %table : float32[3,2] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        const %one : float32[1,4] = [1.0, 2.0, 3.0, 4.0]
        %s : int64[*] = Shape(%x)
        %n : int64[*] = Slice(%s, %first, %once)
        %r : int64[*] = Concat(%n, %twice) {axis = 0}
        %q : int64[*] = Concat(%n, %once) {axis = 0}
        %t : float32[*] = Tile(%table, %r)
        %y : float32[*] = Reshape(%t) {shape = [n, 12]}
        %o : float32[*] = Tile(%one, %q)
        %z : float32[*] = Add(%x, %o)
        output %y, %z""",
    "all rows, and columns to the end as tf2onnx writes it": """
        input %x : float32[n,4]
        %a : float32[*] = Slice(%x) {starts = [0, 1], ends = [1000000000, 1000000000], axes = [0, 1]}
        %y : float32[*] = Neg(%a)
        output %y""",
    "rows folded with positions and unfolded again": """
        input %x : float32[n,3,4]
        const %w : float32[4,2] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
        %f : float32[*] = Reshape(%x) {shape = [-1, 4]}
        %h : float32[*] = MatMul(%f, %w)
        %y : float32[*] = Reshape(%h) {shape = [n, 3, 2]}
        output %y""",
    "rows moved away and back": """
        input %x : float32[n,3,4]
        %t : float32[*] = Transpose(%x) {perm = [1, 0, 2]}
        %r : float32[*] = ReduceMax(%t) {axes = [0], keepdims = 1}
        %y : float32[*] = Transpose(%r) {perm = [1, 0, 2]}
        output %y""",
    "a shape read from the input": """
        input %x : float32[n,3,4]
        const %zero : int64[] = [0]
        const %axis : int64[1] = [0]
        const %rest : int64[1] = [12]
        %s : int64[*] = Shape(%x)
        %g : int64[*] = Gather(%s, %zero) {axis = 0}
        %u : int64[*] = Unsqueeze(%g, %axis)
        %c : int64[*] = Concat(%u, %rest) {axis = 0}
        %y : float32[*] = Reshape(%x, %c)
        output %y""",
    "zeros for every row": """
        input %x : float32[n,4]
        %z : float32[*] = ConstantOfShape() {shape = [n, 2]}
        %y : float32[*] = Concat(%x, %z) {axis = 1}
        output %y""",
    "rows interleaved with positions, as in PyTorch's attention": """
        input %x : float32[n,3,4]
        const %w : float32[2,4] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
        %t : float32[*] = Transpose(%x) {perm = [1, 0, 2]}
        %f : float32[*] = Reshape(%t) {shape = [-1, 4]}
        %g : float32[*] = Gemm(%f, %w) {transB = 1}
        %u : float32[*] = Reshape(%g) {shape = [3, n, 2]}
        %y : float32[*] = Transpose(%u) {perm = [1, 0, 2]}
        output %y""",
    "the same places of every row, which lies behind them": """
        input %x : float32[n,3,4,2]
        const %last : int64[2,1,1] = [2, 0]
        const %pairs : int64[2,5,1] = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0]
        %t : float32[*] = Transpose(%x) {perm = [1, 0, 2, 3]}
        %g : float32[*] = GatherND(%t, %last)
        %u : float32[*] = Transpose(%g) {perm = [0, 3, 1, 2, 4]}
        %v : float32[*] = Reshape(%u) {shape = [2, 4, n, 2]}
        %w : float32[*] = Transpose(%v) {perm = [0, 3, 1, 2]}
        %b : float32[*] = GatherND(%w, %pairs) {batch_dims = 1}
        %y : float32[*] = Transpose(%b) {perm = [3, 0, 1, 2]}
        output %y""",
    "a view there and back": """
        input %x : float32[n,6]
        %a : float32[*] = Reshape(%x) {shape = [2, 3*n]}
        %y : float32[*] = Reshape(%a) {shape = [n, 6]}
        output %y""",
    "two inputs": """
        input %x : float32[n,4]
        input %k : int64[n]
        const %table : float32[3,4] = [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]
        %e : float32[*] = Gather(%table, %k) {axis = 0}
        %y : float32[*] = Add(%x, %e)
        output %y""",
    "a loop that carries rows": """
        input %x : float32[n,4]
        const %m : int64[] = [3]
        %h : float32[*], %s : float32[*] = Loop(%m, _, %x) {body = graph @b {
          input %i : int64[]
          input %c : bool[]
          input %u : float32[n,4]
          %v : float32[*] = Mul(%u, %x)
          %w : float32[*] = Softmax(%v) {axis = 1}
          %r : float32[*] = ReduceMax(%v) {axes = [1], keepdims = 1}
          %d : bool[*] = Identity(%c)
          output %d, %w, %r
        }}
        %t : float32[*] = Transpose(%s) {perm = [1, 0, 2]}
        %y : float32[*] = Reshape(%t) {shape = [n, 3]}
        output %h, %y""",
    "a scan over positions": """
        input %x : float32[n,3,4]
        input %z : float32[n,4]
        %h : float32[*], %y : float32[*] = Scan(%z, %x) {num_scan_inputs = 1, scan_input_axes = [1],
            scan_output_axes = [1], body = graph @b {
          input %a : float32[n,4]
          input %b : float32[n,4]
          %u : float32[*] = Add(%a, %b)
          %v : float32[*] = Mul(%u, %b)
          output %u, %v
        }}
        output %h, %y""",
    "a branch for all rows": """
        input %x : float32[n,4]
        const %f : bool[] = [1]
        %g : bool[*] = Not(%f)
        %y : float32[*] = If(%g) {else_branch = graph @e {
          %u : float32[*] = Neg(%x)
          output %u
        }, then_branch = graph @t {
          %v : float32[*] = Softmax(%x) {axis = 1}
          output %v
        }}
        output %y""",
}

MIXING = {
    "softmax over the batch": (
        """
        input %x : float32[n,4]
        %y : float32[*] = Softmax(%x) {axis = 0} "over"
        output %y""",
        "node 'over' (Softmax)",
    ),
    "a sequence-first net": (
        """
        input %x : float32[n,4,4]
        %a : float32[*] = Slice(%x) {starts = [0], ends = [1], axes = [0]} "first step"
        %y : float32[*] = Add(%x, %a)
        output %y""",
        "node 'first step' (Slice)",
    ),
    "a reduction after a transpose": (
        """
        input %x : float32[n,3,4]
        %t : float32[*] = Transpose(%x) {perm = [1, 0, 2]}
        %r : float32[*] = ReduceSum(%t) {axes = [1], keepdims = 1} "sum"
        %y : float32[*] = Add(%x, %r)
        output %y""",
        "node 'sum' (ReduceSum)",
    ),
    "statistics of the batch": (
        """
        input %x : float32[n,2,3]
        const %c : float32[2] = [1.0, 1.0]
        %y : float32[*], %m : float32[*], %v : float32[*] =
            BatchNormalization(%x, %c, %c, %c, %c) {training_mode = 1} "bn"
        output %y""",
        "node 'bn' (BatchNormalization)",
    ),
    "a mean over the batch": (
        """
        input %x : float32[n,4]
        %m : float32[*] = ReduceMean(%x) {axes = [0], keepdims = 1} "mean"
        %y : float32[*] = Sub(%x, %m)
        output %y""",
        "node 'mean' (ReduceMean)",
    ),
    "rows compared with each other": (
        """
        input %x : float32[n,4]
        %t : float32[*] = Transpose(%x) {perm = [1, 0]}
        %y : float32[*] = MatMul(%x, %t) "gram"
        output %y""",
        "node 'gram' (MatMul)",
    ),
    "a product over the rows": (
        """
        input %x : float32[n,4]
        %t : float32[*] = Transpose(%x) {perm = [1, 0]}
        %p : float32[*] = MatMul(%t, %x) "normal equations"
        %y : float32[*] = MatMul(%x, %p)
        output %y""",
        "node 'normal equations' (MatMul)",
    ),
    "rows merged and split differently": (
        """
        input %x : float32[n,6]
        %a : float32[*] = Reshape(%x) {shape = [2, 3*n]} "split"
        %t : float32[*] = Transpose(%a) {perm = [1, 0]}
        %y : float32[*] = Reshape(%t) {shape = [n, 6]}
        output %y""",
        "node 'split' (Reshape)",
    ),
    "divided by the number of rows": (
        """
        input %x : float32[n,4]
        const %zero : int64[] = [0]
        %s : int64[*] = Shape(%x)
        %g : int64[*] = Gather(%s, %zero) {axis = 0}
        %f : float32[*] = Cast(%g) {to = 1}
        %y : float32[*] = Div(%x, %f) "count"
        output %y""",
        "node 'count' (Div): computes with the number of rows",
    ),
    "numbered rows": (
        """
        input %x : float32[n]
        const %zero : int64[] = [0]
        const %one : int64[] = [1]
        %s : int64[*] = Shape(%x)
        %g : int64[*] = Gather(%s, %zero) {axis = 0}
        %r : int64[*] = Range(%zero, %g, %one) "numbers"
        %y : float32[*] = Cast(%r) {to = 1}
        output %y""",
        "node 'numbers' (Range): computes with the number of rows",
    ),
    "places among the rows": (
        """
        input %x : float32[n,4]
        const %p : int64[2,1,2] = [0, 1, 0, 2]
        %t : float32[*] = Transpose(%x) {perm = [1, 0]}
        %y : float32[*] = GatherND(%t, %p) "pick"
        output %y""",
        "node 'pick' (GatherND): GatherND may pick from any row",
    ),
    "a scan over the rows": (
        """
        input %x : float32[n,4]
        const %z : float32[4] = [0.0, 0.0, 0.0, 0.0]
        %h : float32[*], %y : float32[*] = Scan(%z, %x) {num_scan_inputs = 1, body = graph @b {
          input %a : float32[4]
          input %b : float32[4]
          %u : float32[*] = Add(%a, %b)
          %v : float32[*] = Neg(%u)
          output %u, %v
        }} "sums"
        output %y""",
        "node 'sums' (Scan): it iterates over the rows",
    ),
    "a loop that ends when all rows are large": (
        """
        input %x : float32[n,4]
        const %m : int64[] = [3]
        const %ten : float32[] = [10.0]
        %y : float32[*] = Loop(%m, _, %x) {body = graph @b {
          input %i : int64[]
          input %c : bool[]
          input %u : float32[n,4]
          %v : float32[*] = Add(%u, %u)
          %l : float32[*] = ReduceMin(%v) {keepdims = 0} "least"
          %d : bool[*] = Less(%l, %ten)
          output %d, %v
        }} "growth"
        output %y""",
        "node 'least' (ReduceMin)",
    ),
    "a branch that the rows choose": (
        """
        input %x : float32[n]
        const %zero : float32[] = [0.0]
        %f : bool[*] = Greater(%x, %zero)
        %y : float32[*] = If(%f) {else_branch = graph @e {
          %u : float32[*] = Neg(%x)
          output %u
        }, then_branch = graph @t {
          %v : float32[*] = Relu(%x)
          output %v
        }} "choice"
        output %y""",
        "node 'choice' (If): its condition differs from row to row",
    ),
    "an output without rows": (
        """
        input %x : float32[n,4]
        %t : float32[*] = Transpose(%x) {perm = [1, 0]}
        output %t""",
        "output 't' (float32[4,n]) does not hold one row per row of the inputs",
    ),
    "a constant output": (
        """
        input %x : float32[n,4]
        const %c : float32[2] = [1.0, 2.0]
        output %c""",
        "output 'c' (float32[2]) does not hold",
    ),
    "inputs of different length": (
        """
        input %x : float32[n,4]
        input %z : float32[m,4]
        %y : float32[*] = Relu(%x)
        output %y""",
        "the inputs have different leading dimensions: m, n",
    ),
    "a fixed batch": (
        """
        input %x : float32[8,4]
        %y : float32[*] = Relu(%x)
        output %y""",
        "input 'x' (float32[8,4]) has no symbolic leading dimension",
    ),
    "as wide as there are rows": (
        """
        input %x : float32[n,n]
        %y : float32[*] = Relu(%x)
        output %y""",
        "input 'x' has dimension 'n' more than once",
    ),
    "state": (
        """
        input %x : float32[n,4]
        state %s : float32[4] = [0.0, 0.0, 0.0, 0.0] -> %next
        %y : float32[*] = Add(%x, %s)
        %next : float32[*] = Relu(%s)
        output %y""",
        "the model keeps state (%s)",
    ),
}


def analysed(text: str) -> BatchInfo:
    return rows(parse_graph("graph @g {" + text + "\n}"))


@pytest.mark.parametrize("text", INDEPENDENT.values(), ids=INDEPENDENT)
def test_independent_rows_are_proven(text: str) -> None:
    info = analysed(text)
    assert info.batchable, info.reason
    assert info.symbol == "n"


@pytest.mark.parametrize("text", INDEPENDENT.values(), ids=INDEPENDENT)
def test_rows_proven_independent_are_independent(text: str) -> None:
    graph = parse_graph("graph @g {" + text + "\n}")
    infer_graph(graph)
    rng = np.random.default_rng(0)
    first, second = (_rows_of(graph, rng, count) for count in (2, 3))
    together = interpret(graph, {name: np.concatenate([first[name], second[name]]) for name in first})
    for name, array in together.items():
        apart = [interpret(graph, feeds)[name] for feeds in (first, second)]
        np.testing.assert_allclose(array, np.concatenate(apart), rtol=1e-6)


def _rows_of(graph: Graph, rng: np.random.Generator, count: int) -> dict[str, Array]:
    shapes = {value.name: (count, *value.shape[1:]) for value in graph.inputs}
    dtypes = {value.name: value.dtype.numpy for value in graph.inputs}
    return {name: rng.integers(0, 3, shape).astype(dtypes[name]) for name, shape in shapes.items()}


@pytest.mark.parametrize(("text", "reason"), MIXING.values(), ids=MIXING)
def test_models_that_mix_rows_are_refused_with_the_node(text: str, reason: str) -> None:
    info = analysed(text)
    assert not info.batchable
    assert info.symbol is None
    assert reason in info.reason
