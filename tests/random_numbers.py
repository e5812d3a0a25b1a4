"""The random numbers of tests: data from `RNG`, parameters of modules from the generator of `lathe.nn`.

`tests/conftest.py` restarts both before every test: no test depends on which tests ran before it in the same process.
It refuses modules that draw at import, where the numbers would depend on the order of imports.
`tests/project/test_random_numbers.py` keeps other generators out of the modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from lathe.core.nn.init import generator, manual_seed

Result = TypeVar("Result")

RNG = np.random.default_rng(0)
_START = RNG.bit_generator.state


def restart() -> None:
    RNG.bit_generator.state = _START
    manual_seed(0)


def drawn_at_import() -> list[str]:
    """The generators from which something was drawn since the last restart."""
    mine, parameters = RNG.bit_generator.state, str(generator().bit_generator.state)
    restart()
    names = ["RNG"] if mine != _START else []
    return names + (["lathe.nn"] if parameters != str(generator().bit_generator.state) else [])


def made_at_import(make: Callable[[], Result]) -> Result:
    """The result of a function that draws numbers when a module is imported: the same in every order of imports."""
    restart()
    try:
        return make()
    finally:
        restart()
