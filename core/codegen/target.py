"""Targets: the machine we run on, and the fixed ones that tests and portable bundles use."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Collection
from pathlib import Path
from typing import TypedDict

import llvmlite.binding as llvm

from core.codegen import cpus
from core.errors import TargetError
from core.kernels.target import Target

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_X86 = ("x86_64", "amd64")
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64, arch/x86/include/uapi/asm/prctl.h
_WITH_TILES = ("sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids")


class _Sizes(TypedDict, total=False):
    l1_bytes: int
    l2_bytes: int


@functools.cache
def initialize() -> None:
    """Make LLVM's code generator for this machine available."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@functools.cache
def host() -> Target:
    """This machine with every vector extension it has, or the one below it that `LATHE_TARGET` names.

    TargetError when that name is unknown, or when this machine cannot execute code for it.
    """
    machine, name = detected(), os.environ.get("LATHE_TARGET", "")
    if not name:
        return machine
    chosen = named(name)
    if lacking := chosen.needs - machine.needs:
        message = f"LATHE_TARGET is {name!r}, whose code this machine cannot run: it lacks {listed(lacking)}"
        raise TargetError(f"{message}; expected one of {', '.join(runnable(machine))}")
    return chosen


def named(name: str) -> Target:
    """The CPU that LLVM or the psABI calls `name`; "plain" is the least of this kind of machine.

    TargetError when there is none of that name.
    """
    if name == "plain":
        return plain()
    if name not in _names():
        raise TargetError(f"LATHE_TARGET is {name!r}, expected one of {', '.join(_names())}")
    return _x86(name, cpus.FEATURES[name])


def runnable(machine: Target) -> list[str]:
    """The names that `LATHE_TARGET` may have on a machine."""
    return [name for name in _names() if named(name).needs <= machine.needs]


def listed(features: Collection[str]) -> str:
    """Features as a message names them."""
    return ", ".join(sorted(features))


def avx512() -> Target:
    """Any x86-64 server core with AVX-512 (x86-64-v4)."""
    return _x86("x86-64-v4", cpus.LEVEL_4)


def x86_64_v3() -> Target:
    """Any x86-64 core with AVX2 and FMA."""
    return _x86("x86-64-v3", cpus.LEVEL_3)


def plain() -> Target:
    """The least this kind of machine has: SSE2 on x86-64, NEON on aarch64, without fused multiply-add on x86-64."""
    if _machine() == "aarch64":
        return Target("neon", _triple(), "generic", "+neon", vector_bytes=16, registers=32, **_cache_sizes())
    if _machine() in _X86:
        return _x86("x86-64", cpus.BASE)
    return Target("plain", _triple(), "generic", "", vector_bytes=16, registers=16, **_cache_sizes())


def has_fma(target: Target) -> bool:
    """Whether a fused multiply-add is one instruction; elsewhere it would be a library call per element."""
    return target.name != "plain"


def has_bfloat16(target: Target) -> bool:
    """Whether instructions multiply pairs of bfloat16, and round to it."""
    return "+avx512bf16" in target.features.split(",")


def has_float16(target: Target) -> bool:
    """Whether instructions convert float16; elsewhere that would be a library call per element."""
    return target.name != "plain"


def has_bytes(target: Target) -> bool:
    """Whether one instruction multiplies fours of bytes."""
    features = target.features.split(",")
    return "+avx512vnni" in features or (target.lanes == 8 and "+avxvnni" in features)


def cpu_name(detected: str, available: Collection[str]) -> str:
    """LLVM's name of the CPU whose timings code is scheduled for.

    A hypervisor may show the model number of an older one: what it can do says more. Scheduled for a core of another
    kind, loads move so far ahead that register tiles no longer fit the registers.
    """
    return "sapphirerapids" if "amx-bf16" in available and detected not in _WITH_TILES else detected


def target_machine(target: Target) -> llvm.TargetMachine:
    """LLVM's code generator for `target`."""
    initialize()
    factory = llvm.Target.from_triple(target.triple)
    return factory.create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="small"
    )


@functools.cache
def detected() -> Target:
    """This machine as it describes itself."""
    initialize()
    available = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    if not _may_use_tiles():
        available = frozenset(name for name in available if not name.startswith("amx-"))
    cpu = cpu_name(llvm.get_host_cpu_name(), available)
    if _machine() in _X86 and available >= cpus.AVX2:
        return _x86(cpu, cpus.usable(available))
    if "neon" in available:
        features = ",".join(f"+{name}" for name in sorted(available))
        return Target("neon", _triple(), cpu, features, vector_bytes=16, registers=32, **_cache_sizes())
    return plain()


def _x86(cpu: str, available: frozenset[str]) -> Target:
    """A CPU that has exactly these features; LLVM takes no more than its timings from the name."""
    initialize()
    features = _stated(available)
    if available >= cpus.AVX512:
        # LLVM prefers half-wide vectors on some cores for the sake of mixed code; kernels are not mixed code.
        features += ",-prefer-256-bit"
        return Target("avx512", _triple(), cpu, features, vector_bytes=64, registers=32, **_cache_sizes())
    if available >= cpus.AVX2:
        return Target("avx2", _triple(), cpu, features, vector_bytes=32, registers=16, **_cache_sizes())
    return Target("plain", _triple(), cpu, features, vector_bytes=16, registers=16, **_cache_sizes())


def _stated(available: frozenset[str]) -> str:
    """Every feature that LLVM knows, as present or absent: what is not stated would follow from the CPU's name, which
    a hypervisor shows even where it hides instructions. Absent ones come last, for a present one brings with it those
    that it builds upon."""
    known = {*llvm.get_host_cpu_features(), *available} if _machine() in _X86 else available
    return ",".join([f"+{name}" for name in sorted(available)] + [f"-{name}" for name in sorted(known - available)])


def _names() -> list[str]:
    return ["plain", *(cpus.FEATURES if _machine() in _X86 else ())]


@functools.cache
def _may_use_tiles() -> bool:
    """Whether this process, with all its threads, may use matrix tiles: their state is large, so Linux wants to be
    asked first. It is asked when the host is detected, and so before any code is loaded."""
    if platform.system() != "Linux" or _machine() not in _X86:
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0


def _triple() -> str:
    return str(llvm.get_process_triple())


def _machine() -> str:
    machine = platform.machine().lower()
    return "aarch64" if machine == "arm64" else machine


@functools.cache
def _cache_sizes() -> _Sizes:
    """Those of one core, as far as the system tells."""
    sizes: _Sizes = {}
    for index in sorted(_CACHES.glob("index*")):
        size = _kibibytes(_read(index / "size"))
        match _read(index / "level"), _read(index / "type"):
            case "1", "Data" | "Unified" if size:
                sizes["l1_bytes"] = size
            case "2", "Data" | "Unified" if size:
                sizes["l2_bytes"] = size
    return sizes


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _kibibytes(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("K") and text[:-1].isdigit() else 0
