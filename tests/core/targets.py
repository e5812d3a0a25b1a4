"""The targets that tests name, and which of them this machine runs."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import pytest

from core.codegen import cpus
from core.codegen.target import avx512, host, listed, plain, x86_64_v3
from core.kernels.target import Target

X86 = platform.machine().lower() in ("x86_64", "amd64")
x86_only = pytest.mark.skipif(not X86, reason="these are x86-64 targets")

_SETS = {
    "code for AVX2": cpus.AVX2,
    "code for AVX-512": cpus.AVX512,
    "products of bytes by AVX512-VNNI": frozenset({"avx512vnni"}),
    "products of bfloat16 by AVX512-BF16": frozenset({"avx512bf16"}),
    "products of bytes and bfloat16 on matrix tiles (AMX)": frozenset({"amx-tile", "amx-int8", "amx-bf16"}),
    "products of float16 on matrix tiles (AMX)": frozenset({"amx-tile", "amx-fp16"}),
}
_RARE = (plain(), avx512())  # server CPUs since 2016 have AVX2, and those with AVX-512 have VNNI since 2019


def vectors() -> Target:
    """The host as if it had no matrix tiles, which have tests of their own."""
    return host().without_tiles


def runs_here(target: Target) -> bool:
    """Whether the host has every instruction that code for `target` may use."""
    return target.needs <= host().needs


def each(targets: Mapping[str, Target]) -> pytest.MarkDecorator:
    """Parametrize a test that runs code with `target`. Those that this machine cannot run are skipped, which
    `left_out` tells at the end of a run; their code is compiled and decoded in test_instructions.py. Of equal targets
    (the host, and the host without tiles that it does not have) only the first is tested. What neither the host nor a
    CPU with AVX2 would choose is slow: sweeps over all targets are a third of what the quick tests would compile."""
    names = {target: name for name, target in reversed(targets.items())}
    return pytest.mark.parametrize(
        "target", [_given(name, target) for name, target in targets.items() if names[target] == name]
    )


def left_out() -> list[str]:
    """What the tests do not run on this machine, one line for each set of instructions."""
    missing = {what: needed - host().needs for what, needed in _SETS.items() if X86}
    return [f"running {what}: this machine lacks {listed(lacking)}" for what, lacking in missing.items() if lacking]


def _given(name: str, target: Target) -> object:
    lacking = target.needs - host().needs
    marks = [pytest.mark.skip(reason=f"this machine lacks {listed(lacking)}")] if lacking else []
    slow = [pytest.mark.slow] if target in _RARE and target != host() else []
    return pytest.param(target, id=name, marks=marks + slow)


# Every kind of vectors, as most kernels are tested on.
VECTORS = {"host": vectors(), "x86-64-v3": x86_64_v3(), "plain": plain()}
each_target = each(VECTORS)
each_wide = each({name: VECTORS[name] for name in ("host", "x86-64-v3")})
