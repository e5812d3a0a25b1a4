"""Kernels for GPUs that several processes compile at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.codegen.cache import ObjectCache
from core.kernels.catalog import KernelSpec, select
from core.kernels.cuda import Binary, binary_for, binary_key
from core.kernels.target import GpuTarget
from core.runtime import cuda_kernels
from core.runtime.cuda_kernels import compile_ahead
from tests.core.cuda.test_sources import request

TARGET = GpuTarget(arch=90)


def kernels(count: int) -> list[KernelSpec]:
    calls = [select(request("Exp", (f"float32[n,{size}]",), {})) for size in range(3, 3 + count)]
    return [call.spec for call in calls if call is not None]


def test_processes_share_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one compiles its share, a child the rest; what is found is used, whoever made it."""
    here: list[KernelSpec] = []

    def noted(spec: KernelSpec, target: GpuTarget, cache: ObjectCache) -> Binary:
        here.append(spec)
        return binary_for(spec, target, cache)

    monkeypatch.setattr(cuda_kernels, "binary_for", noted)
    cache, specs = ObjectCache(tmp_path / "objects"), kernels(9)
    binary_for(specs[0], TARGET, cache)
    compile_ahead(specs, TARGET, cache, workers=2)
    assert here == specs[1::2]
    for spec in specs:
        made = Binary.from_bytes(cache.get(binary_key(spec, TARGET)) or b"")
        assert (made.symbol, made.arch, made.cubin[:4]) == (spec.symbol, 90, b"\x7fELF")
    compile_ahead(specs, TARGET, cache, workers=2)
    assert len(here) == 4


def test_few_are_left_to_who_asks_for_them(tmp_path: Path) -> None:
    cache, specs = ObjectCache(tmp_path / "objects"), kernels(7)
    compile_ahead(specs, TARGET, cache, workers=2)
    compile_ahead(kernels(8), TARGET, cache, workers=1)
    assert not any(cache.get(binary_key(spec, TARGET)) for spec in specs)


def test_what_does_not_compile_stays_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = '["x", "no Python", [], 4, 1]'
    monkeypatch.setattr(cuda_kernels, "_jobs", lambda share, _: [(key, broken) for key in share])
    cache, specs = ObjectCache(tmp_path / "objects"), kernels(8)
    compile_ahead(specs, TARGET, cache, workers=2)
    assert [cache.get(binary_key(spec, TARGET)) is not None for spec in specs] == [True, False] * 4
