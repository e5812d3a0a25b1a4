"""A training in the foreground: its bar, and Ctrl-C, after which it ends with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from core.train import events, work
from core.train.assembly import Means
from core.train.events import Event
from core.train.fitting import Outcome, never
from core.train.view import TrainingView
from core.train.work import Opened, Sources


def work_watched(
    folder: Path, sources: Sources | Opened, means: Means, console: Console | None, curves: bool
) -> Outcome:
    """Train what the folder says, and show how it goes on a console, if there is one. Errors are those of `work`."""
    with interruptible() as interrupted:
        if console is None:
            return work.work(folder, sources, means, interrupted)
        with TrainingView(console, curves) as view:
            for event in events.read(folder):
                view.standing.see(event.kind, event.values)

            def watch(event: Event) -> None:
                if event.kind != "failed":  # which is raised as well, and told then
                    view.see(event.kind, event.values)

            return work.work(folder, sources, means, interrupted, watch)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed. Pressed again, it interrupts at once. Only the main thread hears of it."""
    if threading.current_thread() is not threading.main_thread():
        yield never
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
