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
    """This machine, with every vector extension it has. `LATHE_TARGET` names another one of this module."""
    named = {"avx512": avx512, "x86-64-v3": x86_64_v3, "plain": plain}
    choice = os.environ.get("LATHE_TARGET", "")
    if choice:
        if choice not in named:
            raise ValueError(f"LATHE_TARGET is {choice!r}, expected one of {', '.join(named)}")
        return named[choice]()
    return _detect()


def avx512() -> Target:
    """Any x86-64 server core with AVX-512 (x86-64-v4)."""
    return Target("avx512", _triple(), "x86-64-v4", "-prefer-256-bit", vector_bytes=64, registers=32, **_cache_sizes())


def x86_64_v3() -> Target:
    """Any x86-64 core with AVX2 and FMA."""
    return Target("avx2", _triple(), "x86-64-v3", "", vector_bytes=32, registers=16, **_cache_sizes())


def plain() -> Target:
    """The least this kind of machine has: SSE2 on x86-64, NEON on aarch64, without fused multiply-add on x86-64."""
    if _machine() == "aarch64":
        return Target("neon", _triple(), "generic", "+neon", vector_bytes=16, registers=32, **_cache_sizes())
    cpu = "x86-64" if _machine() in _X86 else "generic"
    return Target("plain", _triple(), cpu, "", vector_bytes=16, registers=16, **_cache_sizes())


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


def _detect() -> Target:
    initialize()
    found = dict(llvm.get_host_cpu_features())
    detected = llvm.get_host_cpu_name()
    cpu = cpu_name(detected, [name for name, present in found.items() if present])
    if not _may_use_tiles():
        found = {name: present and not name.startswith("amx-") for name, present in found.items()}
    available = {name for name, present in found.items() if present}
    stated = sorted(available if cpu == detected else found)
    features = ",".join(f"{'+' if name in available else '-'}{name}" for name in stated)
    if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= available:
        # LLVM prefers half-wide vectors on some cores for the sake of mixed code; kernels are not mixed code.
        features += ",-prefer-256-bit"
        return Target("avx512", _triple(), cpu, features, vector_bytes=64, registers=32, **_cache_sizes())
    if {"avx2", "fma"} <= available:
        return Target("avx2", _triple(), cpu, features, vector_bytes=32, registers=16, **_cache_sizes())
    if "neon" in available:
        return Target("neon", _triple(), cpu, features, vector_bytes=16, registers=32, **_cache_sizes())
    return plain()


@functools.cache
def _may_use_tiles() -> bool:
    """Whether this process, with all its threads, may use matrix tiles: their state is large, so Linux wants to be
    asked first. Asked by whoever wants to know the host, and so before any code for it is loaded."""
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
