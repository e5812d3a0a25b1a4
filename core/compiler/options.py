"""Options of a compilation: checked values of the caller's arguments, and their form in an artifact."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from operator import index
from typing import Any, Literal, SupportsIndex

from lathe.core.errors import UnsupportedError
from lathe.core.precisions import PRECISION_CHOICES, PRECISIONS
from lathe.core.runtime.device.devices import HOST, canonical
from lathe.core.runtime.host.cpus import available_cpus

TUNING = {"off": 0.0, "default": 1.0, "full": inf}  # seconds


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a compilation. Equal graphs and options give equal code, unless `tune` is above 0: it measures."""

    precision: str = "float32"
    threads: int = 1
    max_batch: int = 32
    optimize: bool = True
    cache_dir: str | None = None
    tune: float = 0.0  # seconds for measuring kernels; infinity measures all candidates
    winograd: bool = True  # whether Winograd's and Strassen's algorithms are allowed, which need fewer multiplications
    # findings of an earlier tuning, with priority over all others: see core/compiler/tuner.py
    findings: tuple[tuple[str, str], ...] = ()
    tune_later: float = 0.0  # `tune` for the background, while code that was compiled without measuring runs
    packing: int = 0  # the most tokens of a run of packed sequences; 0: sequences are not packed
    memory: int | None = None  # the most bytes of the arena for known shapes; values are recomputed to keep to it
    devices: tuple[str, ...] = ()  # besides the host, most preferred first: see core/runtime/device/devices.py
    pins: tuple[tuple[str, str], ...] = ()  # names of nodes, with the devices that must run them
    limits: tuple[tuple[str, int], ...] = ()  # devices, with the most bytes that the model may take there
    by_cost: bool = False  # whether a device only gets nodes whose gain outweighs the copies

    def __post_init__(self) -> None:
        """Convert lists, which JSON makes of tuples, back to tuples."""
        for name in ("findings", "devices", "pins", "limits"):
            object.__setattr__(self, name, _to_tuples(getattr(self, name)))

    @property
    def key(self) -> str:
        """A text of all options that affect the compiled code: all but the cache folder and `tune_later`."""
        return repr({**asdict(self), "cache_dir": None, "tune_later": 0.0})

    def kept(self) -> dict[str, Any]:
        """The options as JSON values for an artifact, with cache folder, tuning and findings reset to their defaults.

        Findings are stored separately.
        """
        return {**asdict(self), "cache_dir": None, "tune": 0.0, "tune_later": 0.0, "findings": ()}


def make_options(
    device: str | Sequence[str] = "cpu",
    precision: str = "float32",
    threads: int | None = None,
    max_batch: int = 32,
    optimize: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    tune: str | float = "off",
    findings: Mapping[str, str] | None = None,
    winograd: bool = True,
    packing: int | None = None,
) -> Options:
    """Options from the arguments of `compile`; the host is left out of `devices`.

    UnsupportedError for an unknown precision or device; ValueError for a number out of range, for an unknown `tune`,
    and for a value of another type.
    `tune="background"` sets `tune` to 0 and `tune_later` to infinity.
    """
    given = [device] if isinstance(device, str) else device
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"device: expected a name or a list of names, got {device!r}")
    devices = [canonical(name) for name in given]
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise UnsupportedError(f"precision '{precision}' is not supported, expected {PRECISION_CHOICES}")
    return Options(
        precision,
        available_cpus() if threads is None else _checked_count("threads", threads),
        _checked_count("max_batch", max_batch),
        optimize,
        os.fspath(cache_dir) if cache_dir is not None else None,
        0.0 if tune == "background" else seconds_of(tune),
        winograd,
        tuple(sorted((findings or {}).items())),
        tune_later=inf if tune == "background" else 0.0,
        devices=tuple(name for name in dict.fromkeys(devices) if name != HOST),
        packing=0 if packing is None else _checked_count("packing", packing),
    )


def _checked_count(name: str, count: int) -> int:
    if not isinstance(count, SupportsIndex) or index(count) < 1:
        raise ValueError(f"{name}: expected an integer of 1 or more, got {count!r}")
    return index(count)


def with_placement(
    options: Options, placement: Literal["first", "cost"] | Mapping[str, str], device_memory: Mapping[str, int] | None
) -> Options:
    """The options with rules for placing nodes on devices; `placement` and `device_memory` as for `compile`.

    ValueError for a device that is not among those of the options, an unknown placement, or a memory that is no integer
    of 1 or more; UnsupportedError for a name
    that is no device, and for packing with devices.
    """
    pins = {} if isinstance(placement, str) else {node: canonical(name) for node, name in placement.items()}
    limits = {
        canonical(name): _checked_count(f"device_memory of '{name}', in bytes", nbytes)
        for name, nbytes in (device_memory or {}).items()
    }
    if options.packing and options.devices:
        raise UnsupportedError(f"packed sequences run on the CPU alone, not on {', '.join(options.devices)}")
    for names, known in ((pins.values(), (*options.devices, HOST)), (limits, options.devices)):
        for name in names:
            if name not in known:
                what = "placement" if HOST in known else "device_memory"
                raise ValueError(f"'{name}' is named for {what}, the devices are {', '.join(known) or 'none'}")
    if placement not in ("first", "cost") and isinstance(placement, str):
        raise ValueError(f"placement is '{placement}', expected 'first', 'cost', or devices by names of nodes")
    return replace(
        options, pins=tuple(sorted(pins.items())), limits=tuple(sorted(limits.items())), by_cost=placement == "cost"
    )


def _to_tuples(value: Any) -> Any:
    return tuple(map(_to_tuples, value)) if isinstance(value, list | tuple) else value


def seconds_of(tune: str | float) -> float:
    """The seconds of a tuning level ("off": 0, "default": 1, "full": infinity); other numbers or texts as seconds.

    ValueError for a text that is no number, for a negative number, NaN and all other objects.
    """
    try:
        seconds = TUNING[tune] if isinstance(tune, str) and tune in TUNING else float(tune)
    except (ValueError, TypeError, OverflowError):
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"tune is {tune!r}, expected {', '.join(map(repr, TUNING))} or seconds")
    return seconds
