"""Runs a training in the foreground: shows its progress, and on Ctrl-C ends it with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import events, work_folder
from lathe.core.train.run.events import Event
from lathe.core.train.run.terminal_view import TrainingView
from lathe.core.train.run.training_loop import Outcome, never_stop
from lathe.core.train.run.work_folder import OpenSources, Sources


def run_in_foreground(
    folder: Path, sources: Sources | OpenSources, resources: Resources, console: Console | None, curves: bool
) -> Outcome:
    """Run the training in the folder, and show its progress on the console, if given; `curves`: with charts.

    Ctrl-C, in the main thread, stops the training with a checkpoint. Result and errors are those of `run_training`.
    """
    with catch_interrupt() as interrupted:
        if console is None:
            return work_folder.run_training(folder, sources, resources, interrupted)
        with TrainingView(console, curves) as view:
            for event in events.read(folder):
                view.standing.see(event.kind, event.values)

            def watch(event: Event) -> None:
                if event.kind != "failed":  # the caller reports the exception
                    view.see(event.kind, event.values)

            return work_folder.run_training(folder, sources, resources, interrupted, watch)


@contextmanager
def catch_interrupt() -> Iterator[Callable[[], bool]]:
    """Context manager: gives a function that says whether Ctrl-C was pressed.

    A second Ctrl-C raises KeyboardInterrupt at once. The handler before is restored at the end. Outside the main thread
    signals cannot be handled, and the function always returns False.
    """
    if threading.current_thread() is not threading.main_thread():
        yield never_stop
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
