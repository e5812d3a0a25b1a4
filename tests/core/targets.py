"""The targets that tests use, and which of them this machine can run."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import pytest

from lathe.core.codegen import cpus
from lathe.core.codegen.target import avx512, comma_separated, host, plain, x86_64_v3
from lathe.core.kernels.target import Target

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
    """The host without matrix tiles (AMX), which have separate tests."""
    return host().without_tiles


def runs_here(target: Target) -> bool:
    """True if the host has every instruction that code for `target` may use."""
    return target.needs <= host().needs


def parametrize_targets(targets: Mapping[str, Target]) -> pytest.MarkDecorator:
    """Parametrize a test that runs code with `target`.

    Targets that this machine cannot run are skipped, and `skipped_targets` reports them at the end of a run;
    test_instructions.py compiles and decodes code for them. Of equal targets (such as the host with and without tiles,
    if it has none) only the first is tested. Targets that neither the host nor a CPU with AVX2 would choose are marked
    slow: they would be a third of the code that the quick tests compile."""
    names = {target: name for name, target in reversed(targets.items())}
    return pytest.mark.parametrize(
        "target", [_given(name, target) for name, target in targets.items() if names[target] == name]
    )


def skipped_targets() -> list[str]:
    """One line for each instruction set whose code the tests do not run on this machine."""
    missing = {what: needed - host().needs for what, needed in _SETS.items() if X86}
    return [
        f"running {what}: this machine lacks {comma_separated(lacking)}" for what, lacking in missing.items() if lacking
    ]


def _given(name: str, target: Target) -> object:
    lacking = target.needs - host().needs
    marks = [pytest.mark.skip(reason=f"this machine lacks {comma_separated(lacking)}")] if lacking else []
    slow = [pytest.mark.slow] if target in _RARE and target != host() else []
    return pytest.param(target, id=name, marks=marks + slow)


# A target for each kind of vectors; most kernels are tested on these.
VECTORS = {"host": vectors(), "x86-64-v3": x86_64_v3(), "plain": plain()}
each_target = parametrize_targets(VECTORS)
each_wide = parametrize_targets({name: VECTORS[name] for name in ("host", "x86-64-v3")})
