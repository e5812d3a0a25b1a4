"""The steps of RNN, GRU and LSTM: the kernel against the reference, and whole operators against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import lathe
from lathe.core.ir.graph import Array
from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import floats, kernel, sweep
from tests.core.one_node import one_node_model, onnx_run
from tests.core.targets import each_target

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STATES = {"RNN": 1, "GRU": 1, "LSTM": 2}
STEPS = 4


def _sweep(cell: str, hidden: int, target: Target, directions: int = 1, batch: str = "n", **attrs: Any) -> None:
    """Everything that is optional is given."""
    rows = GATES[cell] * hidden
    state = f"float32[{directions},{batch},{hidden}]"
    memory = [state, floats(directions, 3 * hidden)] if cell == "LSTM" else []
    sweep(
        "RecurrentSteps",
        f"float32[{STEPS},{batch},{directions * rows}]",
        floats(directions, rows, hidden) / hidden,
        floats(directions, rows),
        np.array([4, 2, 0, 1] * 9, np.int32)[: int(batch)] if batch != "n" else None,
        state,
        *memory,
        outputs=1 + STATES[cell],
        cell=cell,
        direction="bidirectional" if directions == 2 else "forward",
        target=target,
        batches=(0, 1, 3, 17) if batch == "n" else (1, 1, 1),
        **attrs,
    )


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("hidden", [16, 33])
@pytest.mark.parametrize("cell", GATES)
def test_sizes_with_tails(target: Target, cell: str, hidden: int) -> None:
    _sweep(cell, hidden, target)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("cell", GATES)
def test_both_directions_and_sequences_that_end_early(target: Target, cell: str) -> None:
    _sweep(cell, 17, target, directions=2, batch="35")


@each_target
def test_linear_before_reset_and_input_forget(target: Target) -> None:
    _sweep("GRU", 17, target, linear_before_reset=1)
    _sweep("LSTM", 17, target, input_forget=1, clip=0.5)


@each_target
def test_activations_with_parameters(target: Target) -> None:
    names = ("HardSigmoid", "LeakyRelu", "Elu")
    _sweep("LSTM", 9, target, activations=names, activation_alpha=(0.3, 0.1, 0.5), activation_beta=(0.4,))


@pytest.mark.parametrize(
    "activations", [("Affine",), ("Tanh", "Relu"), ("ScaledTanh",)], ids=["affine", "two directions", "scaled"]
)
def test_unsupported_options_run_on_the_reference(activations: tuple[str, ...]) -> None:
    direction = "bidirectional" if len(activations) == 2 else "forward"
    arrays = [floats(STEPS, 2, 3), floats(len(activations), 5, 3), floats(len(activations), 5, 5)]
    attrs = {"activations": list(activations), "hidden_size": 5, "direction": direction}
    session = lathe.compile(one_node_model("RNN", arrays, attrs, 1).SerializeToString(), threads=1)
    assert "FALLBACK" in session.explain()


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_whole_operators_agree_with_onnx_runtime(cell: str, direction: str, layout: int) -> None:
    directions, batch, size, hidden = 1 + (direction == "bidirectional"), 5, 6, 19
    x, lengths = floats(STEPS, batch, size), np.array([4, 3, 0, 1, 4], np.int32)
    weights = [floats(directions, GATES[cell] * hidden, k) / 4 for k in (size, hidden)]
    bias = floats(directions, 2 * GATES[cell] * hidden)
    states = [floats(directions, batch, hidden) * (i + 1) for i in range(STATES[cell])]
    attrs = {"hidden_size": hidden, "direction": direction}
    count = 1 + STATES[cell]
    want = onnx_run(cell, [x, *weights, bias, lengths, *states], attrs, count)
    if layout:  # which ONNX Runtime does not have
        x, states, want = x.swapaxes(0, 1), [s.swapaxes(0, 1) for s in states], _batch_first(want)
    given = [x, *weights, bias, lengths, *states]
    model = one_node_model(cell, given, {**attrs, "layout": layout}, count)
    fixed = {f"x{i}" for i in (1, 2, 3)}
    for initializer in fixed:
        _freeze(model, initializer, given[int(initializer[1:])])
    session = lathe.compile(model.SerializeToString(), threads=2)
    assert "FALLBACK" not in session.explain()
    got = session.run({f"x{i}": array for i, array in enumerate(given) if f"x{i}" not in fixed})
    for i, expected in enumerate(want):
        np.testing.assert_allclose(got[f"y{i}"], expected, rtol=1e-4, atol=1e-5)


def _batch_first(outputs: list[Any]) -> list[Any]:
    y, *states = outputs
    return [y.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in states)]


def _freeze(model: onnx.ModelProto, name: str, array: Array) -> None:
    """Make an input a constant of the model."""
    kept = [value for value in model.graph.input if value.name != name]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.append(numpy_helper.from_array(array, name))


def test_more_rows_than_a_task_takes() -> None:
    hidden = 24
    compiled = kernel(
        "RecurrentSteps", f"float32[{STEPS},n,{3 * hidden}]", floats(1, 3 * hidden, hidden) / hidden,
        cell="GRU", outputs=2,
    )  # fmt: skip
    for rows, threads in ((70, 1), (70, 3), (33, 2)):
        compiled.check(floats(STEPS, rows, 3 * hidden), threads=threads)
