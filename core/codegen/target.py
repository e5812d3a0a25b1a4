"""CPU targets: the host, and the fixed targets that tests and portable bundles use."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Collection
from pathlib import Path
from typing import TypedDict

import llvmlite.binding as llvm

from lathe.core.codegen import cpus
from lathe.core.errors import TargetError
from lathe.core.kernels.target import Target

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_X86 = ("x86_64", "amd64")
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64, arch/x86/include/uapi/asm/prctl.h
_WITH_TILES = ("sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids")


class _Sizes(TypedDict, total=False):
    l1_bytes: int
    l2_bytes: int


@functools.cache
def initialize() -> None:
    """Initialise LLVM's code generator for this machine, once per process."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@functools.cache
def host() -> Target:
    """This machine with all its vector extensions, or the target that `LATHE_TARGET` names at the first call.

    TargetError if that name is unknown, or if this machine cannot run code for it.
    """
    machine, name = detect_host(), os.environ.get("LATHE_TARGET", "")
    if not name:
        return machine
    chosen = target_by_name(name)
    if missing := chosen.needs - machine.needs:
        message = f"LATHE_TARGET is {name!r}, whose code this machine cannot run: it lacks {comma_separated(missing)}"
        raise TargetError(f"{message}; expected one of {', '.join(runnable_names(machine))}")
    return chosen


def target_by_name(name: str) -> Target:
    """The CPU that LLVM or the psABI calls `name`; "plain" is the baseline of this architecture.

    TargetError if the name is unknown.
    """
    if name == "plain":
        return plain()
    if name not in _names():
        raise TargetError(f"LATHE_TARGET is {name!r}, expected one of {', '.join(_names())}")
    return _x86(name, cpus.FEATURES[name])


def runnable_names(machine: Target) -> list[str]:
    """The values of `LATHE_TARGET` whose code `machine` can run."""
    return [name for name in _names() if target_by_name(name).needs <= machine.needs]


def comma_separated(features: Collection[str]) -> str:
    """Feature names, sorted and separated by commas, for messages."""
    return ", ".join(sorted(features))


def avx512() -> Target:
    """Any x86-64 server core with AVX-512 (x86-64-v4)."""
    return _x86("x86-64-v4", cpus.LEVEL_4)


def x86_64_v3() -> Target:
    """Any x86-64 core with AVX2 and FMA."""
    return _x86("x86-64-v3", cpus.LEVEL_3)


def plain() -> Target:
    """The baseline of this architecture: SSE2 without FMA on x86-64, NEON on aarch64, LLVM's generic CPU elsewhere."""
    if _machine() == "aarch64":
        return Target("neon", _triple(), "generic", "+neon", vector_bytes=16, registers=32, **_cache_sizes())
    if _machine() in _X86:
        return _x86("x86-64", cpus.BASE)
    return Target("plain", _triple(), "generic", "", vector_bytes=16, registers=16, **_cache_sizes())


def has_fma(target: Target) -> bool:
    """Whether a fused multiply-add is one instruction; otherwise it would be a library call per element."""
    return target.name != "plain"


def has_bfloat16_dot(target: Target) -> bool:
    """Whether the CPU multiplies pairs of bfloat16 and rounds to bfloat16 (AVX512-BF16)."""
    return "+avx512bf16" in target.features.split(",")


def has_float16_conversion(target: Target) -> bool:
    """Whether the CPU converts float16 by an instruction; otherwise it would be a library call per element."""
    return target.name != "plain"


def has_int8_dot(target: Target) -> bool:
    """Whether the CPU adds up four products of bytes by one instruction (AVX512-VNNI, or AVX-VNNI with AVX2)."""
    return target.has_byte_dot


def cpu_name(detected: str, available: Collection[str]) -> str:
    """LLVM's name of the CPU for whose timings code is scheduled: mostly `detected`, the name that LLVM detects.

    It is "sapphirerapids" if `amx-bf16` is available but the detected CPU has no matrix tiles: a hypervisor may report
    an older model number. Code scheduled for another kind of core moves loads so far ahead that register tiles no
    longer fit the registers.
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
def detect_host() -> Target:
    """This machine as a target, with the vector extensions that it reports; `LATHE_TARGET` is ignored.

    Without AVX2 or NEON it is `plain()`.
    """
    initialize()
    available = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    if not _may_use_tiles():
        available = frozenset(name for name in available if not name.startswith("amx-"))
    cpu = cpu_name(llvm.get_host_cpu_name(), available)
    if _machine() in _X86 and available >= cpus.AVX2:
        return _x86(cpu, cpus.usable_features(available))
    if "neon" in available:
        features = ",".join(f"+{name}" for name in sorted(available))
        return Target("neon", _triple(), cpu, features, vector_bytes=16, registers=32, **_cache_sizes())
    return plain()


def _x86(cpu: str, available: frozenset[str]) -> Target:
    """An x86-64 target with exactly the features `available`; LLVM takes nothing but timings from the name `cpu`."""
    initialize()
    features = _feature_string(available)
    if available >= cpus.AVX512:
        # LLVM prefers 256-bit vectors on some cores, for code that mixes vector and scalar work; kernels do not mix it.
        features += ",-prefer-256-bit"
        return Target("avx512", _triple(), cpu, features, vector_bytes=64, registers=32, **_cache_sizes())
    if available >= cpus.AVX2:
        return Target("avx2", _triple(), cpu, features, vector_bytes=32, registers=16, **_cache_sizes())
    return Target("plain", _triple(), cpu, features, vector_bytes=16, registers=16, **_cache_sizes())


def _feature_string(available: frozenset[str]) -> str:
    """LLVM's feature string: every known feature with "+" or "-".

    LLVM derives features that are not stated from the CPU's name, which a hypervisor shows even if it hides
    instructions. Absent features come last, because "+" implies the features on which a feature builds.
    """
    known = {*llvm.get_host_cpu_features(), *available} if _machine() in _X86 else available
    return ",".join([f"+{name}" for name in sorted(available)] + [f"-{name}" for name in sorted(known - available)])


def _names() -> list[str]:
    return ["plain", *(cpus.FEATURES if _machine() in _X86 else ())]


@functools.cache
def _may_use_tiles() -> bool:
    """Whether Linux lets this process, with all its threads, use matrix tiles.

    Tile state is large, so a process must request it (arch_prctl). This runs when the host is detected, before any code
    is loaded.
    """
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
    """The bytes of a core's first- and second-level data caches, as `l1_bytes` and `l2_bytes` of a `Target`.

    A size that sysfs does not report is missing.
    """
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
