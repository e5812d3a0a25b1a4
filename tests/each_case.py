"""Several quick cases in one test: each failure names its case, and the cases after it still run.

pytest and pytest-xdist take 2 ms of processor time for each test. That is more than a quick case takes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def each_case() -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Gives a function whose context managers name one case each. ExceptionGroup of all failures at the end."""
    failures: list[Exception] = []

    @contextmanager
    def case(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as failure:
            failure.add_note(f"case: {name}")
            failures.append(failure)

    yield case
    if failures:
        raise ExceptionGroup("failed cases", failures)
