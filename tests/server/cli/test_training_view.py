"""The terminal output of a training."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from lathe.core.train.run.terminal_view import StepRate, TrainingProgress, TrainingView, curve, eta

STARTED = {"epochs": 4, "steps_per_epoch": 50, "judge": "accuracy"}


def step(number: int, seconds: float, loss: float = 1.0) -> dict[str, Any]:
    epoch = (number - 1) // 50 + 1
    return {"step": number, "epoch": epoch, "loss": loss, "rate": 0.1, "rows_per_second": 640.0, "seconds": seconds}


def view(terminal: bool, curves: bool = False) -> tuple[TrainingView, StringIO]:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, height=40, markup=False, highlight=False)
    return TrainingView(console, curves), out


def test_the_remaining_time_follows_from_the_steps_so_far() -> None:
    pace = StepRate()
    assert pace.remaining(100) is None
    pace.note(10, 5.0)  # the time before it (compilation, another process) says nothing about the rate
    assert pace.remaining(100) is None
    pace.note(30, 9.0)
    assert pace.remaining(100) == pytest.approx(70 * 0.2)


def test_a_resumed_training_measures_again_and_drops_repeated_steps() -> None:
    standing = TrainingProgress()
    standing.see("started", STARTED)
    for number in (10, 20, 30):
        standing.see("step", step(number, seconds=number))
    standing.see("resumed", {"step": 20, "epoch": 1})
    assert [number for number, _ in standing.losses] == [10, 20]
    standing.see("step", step(22, seconds=20.2))
    standing.see("step", step(42, seconds=22.2))
    assert standing.pace.remaining(standing.total) == pytest.approx((200 - 42) * 0.1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.4, "0 s left"),
        (59.4, "59 s left"),
        (59.6, "1:00 left"),
        (125, "2:05 left"),
        (3723, "1:02:03 left"),
    ],
)
def test_durations_are_readable(seconds: float | None, text: str) -> None:
    assert eta(seconds) == text


def test_a_curve_has_its_highest_value_at_the_top() -> None:
    lines = curve([0.0, 1.0, 2.0, 3.0], width=10, height=2)
    assert lines == ["        3   ▃█", "        0 ▁▅██"]


def test_a_flat_curve_and_a_long_one() -> None:
    assert curve([2.0, 2.0], width=10, height=1) == ["        2 ▁▁"]
    (line,) = curve([float(i) for i in range(1000)], width=8, height=1)
    assert len(line) == 10 + 8
    assert line[10:] == "".join(sorted(line[10:])) and line[-1] == "█"


def test_on_a_terminal_one_block_is_updated() -> None:
    shown, out = view(terminal=True, curves=True)
    with shown:
        shown.see("started", STARTED)
        for number in range(10, 101, 10):
            shown.see("step", step(number, seconds=0.1 * number, loss=100 / number))
        shown.see("epoch", {"epoch": 2, "step": 100, "validation": {"loss": 0.5, "accuracy": 0.75}, "seconds": 10.0})
        text = StringIO()
        Console(file=text, width=80).print(shown.render())
    for part in ("epoch 2/4", "10 s left", "loss 1.0000", "640 rows/s", "validation accuracy 0.7500", "█"):
        assert part in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert "epoch 2/4  loss" not in out.getvalue()


def test_without_a_terminal_each_epoch_is_a_line() -> None:
    shown, out = view(terminal=False)
    with shown:
        shown.see("started", STARTED)
        shown.see("step", step(50, seconds=1.0, loss=0.25))
        shown.see("epoch", {"epoch": 1, "step": 50, "seconds": 1.0})
        shown.see("log", {"message": "checkpoint 50 could not be written: no space"})
    assert out.getvalue().splitlines() == [
        "epoch 1/4  loss 0.2500  rate 1.00e-01  640 rows/s",
        "checkpoint 50 could not be written: no space",
    ]


def trial(number: int, state: str, merit: float | None, seconds: float, error: str = "") -> dict[str, Any]:
    values = {"optimizer.rate": 0.0123456, "batch": 16 * (number + 1)}
    return {"trial": number, "state": state, "merit": merit, "values": values, "error": error, "seconds": seconds}


SEARCH = [
    trial(0, "complete", 0.5, 1.0),
    trial(2, "pruned", 0.75, 2.0),
    trial(1, "complete", 0.625, 3.0),
    trial(3, "failed", None, 4.0, "the loss is nan"),
]


def test_a_search_is_shown_as_a_table_of_trials() -> None:
    shown, out = view(terminal=False)
    with shown:
        shown.see("started", {"trials": 10, "ended": 0, "parallel": 2})
        for ended in SEARCH:
            shown.see("trial", ended)
    assert out.getvalue().splitlines() == [
        "trial 0 complete 0.5000  optimizer.rate=0.01235 batch=16",
        "trial 2 pruned 0.7500  optimizer.rate=0.01235 batch=48",
        "trial 1 complete 0.6250  optimizer.rate=0.01235 batch=32",
        "trial 3 failed  optimizer.rate=0.01235 batch=64: the loss is nan",
    ]


def test_on_a_terminal_a_search_is_a_bar_with_the_best_trial() -> None:
    shown, _ = view(terminal=True)
    shown.see("started", {"trials": 10, "ended": 0, "parallel": 2})
    for ended in SEARCH:
        shown.see("trial", ended)
    # killed and started again: its clock starts again too
    shown.see("started", {"trials": 10, "ended": 4, "parallel": 2})
    shown.see("trial", trial(4, "complete", 0.25, 2.0))
    shown.see("trial", trial(5, "complete", 0.25, 5.0))
    text = StringIO()
    Console(file=text, width=100).print(shown.render())
    assert [" ".join(line.split()) for line in text.getvalue().replace("━", "").splitlines()] == [
        "trial 6/10 12 s left",
        "1 pruned 1 failed best 0.6250 by trial 1 (optimizer.rate=0.01235 batch=32)",
    ]
