"""States of runners: unknown names, and arrays of another dtype or shape, are refused and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.compiler import pipeline
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.runtime.artifact.compiled import (
    Compiled,
    Partitioned,
    Split,
    make_partitioned_runner,
    make_placed_runner,
    make_runner,
)
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.session import runner as runner_module
from lathe.core.runtime.session.placed import PlacedRunner, Wiring
from lathe.core.runtime.session.runner import Runner, settle_all
from tests.core.runtime import graphs

ZEROS = np.zeros(4, np.float32)


def _compiled(device: str) -> Compiled:
    made = pipeline.build(graphs.counter(), pipeline.make_options(device, threads=1), BatchInfo(False, "a state"), ())
    (part,) = made.parts if isinstance(made, Split) else (made,)
    assert isinstance(part, Compiled) and part.device == device
    return part


def _made(part: Compiled) -> Runner:
    return make_runner(part, 1, 1, False)


def _host() -> Runner:
    return _made(_compiled("cpu"))


def _device() -> Runner:
    return _made(_compiled("simulated:0"))


def _placed_part() -> Runner:
    return make_placed_runner(Split((_compiled("cpu"),), Wiring(("x",), ("add",))), _made)


def _placed_shared() -> Runner:
    return make_placed_runner(Split((), Wiring((), (), {"total": "total"}), {"total": ZEROS}), _made)


@pytest.fixture(params=[_host, _device, _placed_part, _placed_shared], ids=lambda make: make.__name__[1:])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    made = request.param()
    yield made
    made.close()


def test_an_unknown_state_is_named(runner: Runner) -> None:
    for use in (lambda: runner.state("sum"), lambda: runner.set_state("sum", ZEROS)):
        with pytest.raises(KeyError, match="state 'sum' is unknown, the states are: total"):
            use()


@pytest.mark.parametrize(
    "wrong", [np.zeros(3, np.float32), np.zeros((1, 4), np.float32), np.zeros(4), np.zeros(4, int)]
)
def test_an_array_of_another_type_is_refused(runner: Runner, wrong: Any) -> None:
    runner.set_state("total", ZEROS + 2)
    with pytest.raises(ValueError, match=r"state 'total': expected float32\[4\], got "):
        runner.set_state("total", wrong)
    assert runner.state("total").tolist() == [2, 2, 2, 2]


def test_memory_that_cannot_be_a_state_is_not_adopted() -> None:
    runner, fixed = _host(), np.zeros(4, np.float32)
    fixed.flags.writeable = False
    assert isinstance(runner, Executable)
    for wrong in (np.zeros(8, np.float32)[::2], fixed):
        with pytest.raises(ValueError, match="expected a C-contiguous array that may be written"):
            runner.adopt_state("total", wrong)
    with pytest.raises(ValueError, match=r"expected float32\[4\], got float64\[4\]"):
        runner.adopt_state("total", np.zeros(4))
    with pytest.raises(KeyError, match="state 'sum' is unknown"):
        runner.adopt_state("sum", ZEROS)
    runner.close()


@pytest.mark.parametrize("at", [0, 1])
def test_parts_that_were_made_are_closed_if_a_part_is_for_a_device(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No runner is made for the wrong part, and the state of a wrong shape closes its own runner."""
    closed: list[Runner] = []
    monkeypatch.setattr(Executable, "close", lambda self: closed.append(self))
    parts = [_compiled("cpu"), _compiled("cpu")]
    parts[at] = _compiled("simulated:0")
    with pytest.raises(ValueError, match="a part of a script is for simulated:0, expected cpu"):
        make_partitioned_runner(Partitioned(graphs.counter(), tuple(parts), ()), 1, 1)
    assert len(closed) == at
    with pytest.raises(ValueError, match="state 'total': expected"):
        _made(replace(_compiled("cpu"), states={"total": np.zeros(3)}))
    assert len(closed) == at + 1


class _Busy:
    """Background work of some seconds, on a clock that the test moves."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        self.left, self.clock = seconds, clock

    def settle(self, timeout: float | None = None) -> bool:
        waited = self.left if timeout is None else min(self.left, timeout)
        self.clock[0] += waited
        self.left -= waited
        return self.left == 0


@pytest.mark.parametrize(
    ("timeout", "waited", "settled"), [(None, 9, True), (9, 9, True), (7, 7, False), (0, 0, False)]
)
def test_all_waits_together_take_at_most_the_timeout(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None, waited: float, settled: bool
) -> None:
    clock = [100.0]
    monkeypatch.setattr(runner_module.time, "monotonic", lambda: clock[0])
    busy: list[Any] = [_Busy(3, clock) for _ in range(3)]
    assert settle_all(busy, timeout) is settled and clock[0] == 100 + waited
    clock[0], busy = 100.0, [_Busy(3, clock) for _ in range(3)]
    placed = PlacedRunner([], Wiring((), ()), {})
    placed._parts = tuple(busy)
    assert placed.settle(timeout) is settled and clock[0] == 100 + waited
    clock[0], busy = 100.0, [_Busy(3, clock) for _ in range(3)]
    with lathe.compile(graphs.mlp(), threads=1) as session:
        monkeypatch.setattr(session, "_settling", lambda: iter(busy))
        assert session.settle(timeout) is settled and clock[0] == 100 + waited
