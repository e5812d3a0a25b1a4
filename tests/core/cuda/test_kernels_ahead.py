"""Kernels for GPUs that several processes compile at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.choose import select
from lathe.core.kernels.cuda import Binary, binary_for, binary_key
from lathe.core.kernels.target import GpuTarget
from lathe.core.runtime.device import cuda_kernels
from lathe.core.runtime.device.cuda_kernels import compile_ahead
from tests.core.cuda.test_sources import request

TARGET = GpuTarget(arch=90)


def kernels(count: int) -> list[KernelSpec]:
    calls = [select(request("Exp", (f"float32[n,{size}]",), {})) for size in range(3, 3 + count)]
    return [call.spec for call in calls if call is not None]


def test_processes_share_the_missing_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process compiles its share, a child the rest; cached kernels of any process are used."""
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


def test_few_kernels_are_not_compiled_ahead(tmp_path: Path) -> None:
    cache, specs = ObjectCache(tmp_path / "objects"), kernels(7)
    compile_ahead(specs, TARGET, cache, workers=2)
    compile_ahead(kernels(8), TARGET, cache, workers=1)
    assert not any(cache.get(binary_key(spec, TARGET)) for spec in specs)


def test_kernels_that_do_not_compile_stay_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = '["x", "no Python", [], 4, 1]'
    monkeypatch.setattr(cuda_kernels, "_jobs", lambda share, _: [(key, broken) for key in share])
    cache, specs = ObjectCache(tmp_path / "objects"), kernels(8)
    compile_ahead(specs, TARGET, cache, workers=2)
    assert [cache.get(binary_key(spec, TARGET)) is not None for spec in specs] == [True, False] * 4
