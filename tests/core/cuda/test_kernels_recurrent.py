"""GPU kernels of recurrent steps: every cell, direction and option, sizes with tails, sequences that end early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from tests.core.cuda.gpu_kernel import GpuKernel, compiles, sweep
from tests.core.kernels.sweep import floats

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STATES = {"RNN": 1, "GRU": 1, "LSTM": 2}
LENGTHS = np.array([4, 2, 0, 1, 3] * 4, np.int32)


def layer(cell: str, hidden: int, directions: int = 1, steps: int = 4, batch: str = "n") -> list[str | Array | None]:
    """The inputs of a layer, all optional ones included; sequence lengths only if the batch is a number."""
    rows, state = GATES[cell] * hidden, f"float32[{directions},{batch},{hidden}]"
    return [
        f"float32[{steps},{batch},{directions * rows}]",
        floats(directions, rows, hidden) / np.float32(hidden),
        floats(directions, rows),
        LENGTHS[: int(batch)] if batch != "n" else None,
        state,
        *([state, floats(directions, 3 * hidden)] if cell == "LSTM" else []),
    ]


def check(cell: str, *inputs: Any, directions: int = 1, **attrs: Any) -> GpuKernel:
    attrs.setdefault("direction", "bidirectional" if directions == 2 else "forward")
    attrs.setdefault("batches", (0, 1, 17))
    return sweep("RecurrentSteps", *inputs, outputs=1 + STATES[cell], cell=cell, **attrs)


@pytest.mark.parametrize("hidden", [16, 33])
@pytest.mark.parametrize("cell", GATES)
def test_sizes_with_tails(cell: str, hidden: int) -> None:
    check(cell, *layer(cell, hidden))


@pytest.mark.parametrize("cell", GATES)
def test_both_directions_and_sequences_that_end_early(cell: str) -> None:
    check(cell, *layer(cell, 9, directions=2, batch="20"), directions=2, batches=(1,))


@pytest.mark.parametrize("cell", GATES)
def test_backwards_without_optional_inputs(cell: str) -> None:
    first = layer(cell, 7, steps=3)[:2]
    check(cell, *first, direction="reverse")


def test_steps_that_are_counted_by_the_batch_symbol() -> None:
    for cell in GATES:
        rows = 5 * GATES[cell]
        check(cell, f"float32[n,3,{rows}]", floats(1, rows, 5), batches=(0, 1, 6))


def test_more_units_than_a_block_and_every_offer() -> None:
    for cell, attrs in (("GRU", {}), ("GRU", {"linear_before_reset": 1}), ("LSTM", {})):
        inputs = layer(cell, 70, steps=2)
        for rank in range(GpuKernel("RecurrentSteps", *inputs, outputs=1 + STATES[cell], cell=cell).offers):
            check(cell, *inputs, rank=rank, batches=(2,), **attrs)


def test_linear_before_reset_and_input_forget() -> None:
    check("GRU", *layer("GRU", 17, batch="6"), linear_before_reset=1, batches=(1,))
    check("LSTM", *layer("LSTM", 17, batch="6"), input_forget=1, clip=0.5, batches=(1,))


def test_activations_with_parameters() -> None:
    names = ("HardSigmoid", "LeakyRelu", "Elu")
    attrs = {"activations": names, "activation_alpha": (0.3, 0.1, 0.5), "activation_beta": (0.4,)}
    check("LSTM", *layer("LSTM", 9), **attrs)


@pytest.mark.parametrize("cell", GATES)
def test_compiles(cell: str) -> None:
    for hidden, tf32 in ((256, True), (100, False)):
        compiles(
            "RecurrentSteps", *layer(cell, hidden, directions=2), outputs=1 + STATES[cell], cell=cell,
            direction="bidirectional", tf32=tf32,
        )  # fmt: skip
