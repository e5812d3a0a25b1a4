"""How to compile: options as the caller gives them, checked, and as an artifact keeps them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Literal

from core.errors import UnsupportedError
from core.precisions import CHOICES, PRECISIONS
from core.runtime.cpus import available_cpus
from core.runtime.devices import HOST, canonical

TUNING = {"off": 0.0, "default": 1.0, "full": inf}  # seconds


@dataclass(frozen=True, slots=True)
class Options:
    """The same graph, options and findings give the same code; with `tune` at 0 nothing is measured."""

    precision: str = "float32"
    threads: int = 1
    max_batch: int = 32
    optimize: bool = True
    cache_dir: str | None = None
    tune: float = 0.0  # seconds for measuring alternatives; infinity for all there are
    winograd: bool = True  # whether products may be computed from fewer multiplications than their definition has
    findings: tuple[tuple[str, str], ...] = ()  # of an earlier tuning, to be used before any other: see core/tune.py
    tune_later: float = 0.0  # the same in the background, while what was compiled without it runs
    packing: int = 0  # the most tokens of a run of packed sequences; 0: sequences are not packed
    memory: int | None = None  # bytes that the arena of known shapes may take, at the price of computing values again
    devices: tuple[str, ...] = ()  # besides the host, in the order of preference: see core/runtime/devices.py
    pins: tuple[tuple[str, str], ...] = ()  # nodes that have to run on one device, with its name
    limits: tuple[tuple[str, int], ...] = ()  # devices with the bytes that they may take
    by_cost: bool = False  # whether a device only gets what is worth the copies

    def __post_init__(self) -> None:
        """Lists, which is what JSON makes of tuples, become tuples again."""
        for name in ("findings", "devices", "pins", "limits"):
            object.__setattr__(self, name, _tuples(getattr(self, name)))

    @property
    def key(self) -> str:
        """Text of everything that has a say in the result."""
        return repr({**asdict(self), "cache_dir": None, "tune_later": 0.0})

    def kept(self) -> dict[str, Any]:
        """What an artifact keeps: where the cache was is of no interest, and the findings that were used are kept by
        themselves."""
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
    """Checked options. UnsupportedError or ValueError says what is wrong."""
    devices = [canonical(name) for name in ([device] if isinstance(device, str) else device)]
    if precision not in PRECISIONS:
        raise UnsupportedError(f"precision '{precision}' is not supported, expected {CHOICES}")
    if max_batch < 1 or (threads is not None and threads < 1):
        raise ValueError(f"max_batch and threads must be 1 or more, got {max_batch} and {threads}")
    return Options(
        precision,
        threads or available_cpus(),
        max_batch,
        optimize,
        os.fspath(cache_dir) if cache_dir is not None else None,
        0.0 if tune == "background" else seconds_of(tune),
        winograd,
        tuple(sorted((findings or {}).items())),
        tune_later=inf if tune == "background" else 0.0,
        devices=tuple(name for name in dict.fromkeys(devices) if name != HOST),
        packing=_tokens(packing),
    )


def _tokens(packing: int | None) -> int:
    if packing is not None and packing < 1:
        raise ValueError(f"packing must be 1 token or more, got {packing}")
    return packing or 0


def with_placement(
    options: Options, placement: Literal["first", "cost"] | Mapping[str, str], device_memory: Mapping[str, int] | None
) -> Options:
    """The options with wishes for where nodes run. ValueError for a device that is not among theirs."""
    pins = {} if isinstance(placement, str) else {node: canonical(name) for node, name in placement.items()}
    limits = {canonical(name): nbytes for name, nbytes in (device_memory or {}).items()}
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


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def seconds_of(tune: str | float) -> float:
    """The seconds that a level of tuning, or a number, stands for. ValueError for anything else."""
    try:
        seconds = TUNING[tune] if isinstance(tune, str) and tune in TUNING else float(tune)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"tune is {tune!r}, expected {', '.join(map(repr, TUNING))} or seconds")
    return seconds
