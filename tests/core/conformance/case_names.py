"""The names of the cases of ONNX's backend test suite, as `case_names.txt` records them.

The package `onnx` computes the data of its cases before it names them, which takes five seconds of processor time. A
test run has several processes, all of which need the names of all tests. So they read this list, and only a process
that runs cases computes their data. `test_sample.py` compares the list with the package. With another release of
`onnx`, `python -m tests.core.conformance.case_names` writes the list again.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.core.conformance.models import models_of_kind, suite_models

RECORD = Path(__file__).with_name("case_names.txt")


@cache
def case_names() -> list[str]:
    """All cases, sorted by name."""
    return RECORD.read_text().split()


def names_with_data() -> list[str]:
    """The cases that have inputs and expected outputs: all but the whole networks."""
    return [name for name in case_names() if name not in models_of_kind("real")]


if __name__ == "__main__":
    RECORD.write_text("\n".join(suite_models()) + "\n")
