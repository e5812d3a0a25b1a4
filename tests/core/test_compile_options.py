"""Options of a compilation: every value of a wrong type or range is refused by an error that names the option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lathe.core.compiler.options import Options, make_options, seconds_of, with_placement
from lathe.core.compiler.pipeline import require_host
from lathe.core.errors import UnsupportedError

COUNTS = (0, -1, 2.5, "4", None, [1], float("nan"))
WRONG: dict[str, tuple[object, ...]] = {
    "threads": COUNTS,
    "max_batch": COUNTS,
    "packing": COUNTS,
    "tune": ("most", -1, float("nan"), None, [1], {}, 10**400, ""),
    "precision": ("float31", None, 32, ["float32"]),
    "device": ("gpu", 1, None, [1], ["cpu", None], "cuda:x", ""),
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]
MAY_BE_NONE = ("threads", "packing")


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name} {str(value)[:20]!r}" for name, value in CASES])
def test_a_wrong_option_is_refused_by_its_name(name: str, value: Any) -> None:
    if value is None and name in MAY_BE_NONE:
        assert isinstance(make_options(**{name: value}), Options)
        return
    with pytest.raises((ValueError, UnsupportedError), match=f"{name}.*expected"):
        make_options(**{name: value})


def test_seconds_of_levels_and_numbers() -> None:
    assert [seconds_of(tune) for tune in ("off", "default", "0.5", 3)] == [0.0, 1.0, 0.5, 3.0]


def test_options_can_be_integers_of_numpy() -> None:
    import numpy as np

    assert make_options(threads=np.int64(3), max_batch=np.uint8(7)) == make_options(threads=3, max_batch=7)  # type: ignore[arg-type]


def test_placements_name_known_devices() -> None:
    options = make_options()
    with pytest.raises(ValueError, match="placement is 'best', expected 'first', 'cost', or devices by names of nodes"):
        with_placement(options, "best", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'cuda:0' is named for placement, the devices are cpu"):
        with_placement(options, {"node": "cuda"}, None)


@pytest.mark.parametrize(
    ("devices", "got"),
    [
        (["cpu", "cuda:0", "cpu", "cuda:1", "cuda:0"], "code for cuda:0, cuda:1"),
        (["cpu", "cpu"], "dynamic-shape code in parts"),
    ],
)
def test_code_that_is_not_of_the_host_alone_is_closed_and_named(devices: list[str], got: str) -> None:
    closed: list[bool] = []
    made: Any = SimpleNamespace(
        shares=[SimpleNamespace(device=device) for device in devices], close=lambda: closed.append(True)
    )
    with pytest.raises(UnsupportedError, match=f"expected one piece of code for the CPU, got {got}$"):
        require_host(made)
    assert closed == [True]
