"""Object files: reproducible, cached safely, linked and unloaded."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.codegen import target as targets
from lathe.core.codegen.jit import Library, assembly_of, compile_kernel, object_key
from lathe.core.codegen.lang import Kernel
from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.errors import ArtifactError
from lathe.core.ir.types import DType
from tests.core.codegen.demo import DemoSpec

_NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def store(value: int, name: str = "demo") -> Kernel:
    """A kernel that writes `value` to its only operand."""
    k = Kernel(DemoSpec(name), targets.host())
    k.operand(0, DType.INT64).store(k.index(value))
    return k


def call(library: Library, symbol: str) -> int:
    out, counter = np.zeros(1, np.int64), np.zeros(8, np.int64)
    table = np.array([out.ctypes.data], np.uint64)
    _NATIVE(library.address(symbol))(table.ctypes.data, 1, 0, 1, counter.ctypes.data)
    return int(out[0])


def executable_bytes() -> int:
    """Memory of this process that holds anonymous executable code."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if "x" in fields[1] and len(fields) == 5:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            total += end - start
    return total


def test_same_kernel_same_bytes_in_another_process(tmp_path: Path) -> None:
    program = (
        "import sys; from tests.core.codegen.test_jit import store, compile_kernel;"
        f"open({str(tmp_path / 'object')!r}, 'wb').write(compile_kernel(store(5)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
    assert (tmp_path / "object").read_bytes() == compile_kernel(store(5))


def test_libraries_with_the_same_symbol_live_side_by_side() -> None:
    first, second = store(1), store(2)
    with Library({first.symbol: compile_kernel(first)}) as a, Library({second.symbol: compile_kernel(second)}) as b:
        assert (call(a, first.symbol), call(b, second.symbol)) == (1, 2)


def test_close_frees_the_code() -> None:
    kernel = store(7)
    data = compile_kernel(kernel)
    Library({kernel.symbol: data}).close()
    before = executable_bytes()
    libraries = [Library({kernel.symbol: data}) for _ in range(50)]
    grown = executable_bytes()
    for library in libraries:
        library.close()
        library.close()
    assert grown > before
    assert executable_bytes() - before < (grown - before) / 10
    with pytest.raises(ArtifactError, match="closed"):
        libraries[0].address(kernel.symbol)


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                 "keepcost")]  # fmt: skip


def allocated() -> int:
    """Bytes that this process has from malloc."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    return int(mallinfo2().uordblks)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_closing_a_library_frees_all_its_memory() -> None:
    """A server loads and unloads models for months."""
    kernel = store(7)
    data = compile_kernel(kernel)
    for _ in range(5):
        Library({kernel.symbol: data}).close()
    before = allocated()
    for _ in range(50):
        Library({kernel.symbol: data}).close()
    assert (allocated() - before) / 50 < 500


@pytest.mark.parametrize("data", [b"", b"not an object file", b"\x7fELF" + b"\0" * 100])
def test_damaged_objects_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="could not be linked"):
        Library({"lathe_demo": data})


def test_the_key_covers_spec_and_target() -> None:
    specs, machines = (DemoSpec("a"), DemoSpec("b")), (targets.avx512(), targets.x86_64_v3(), targets.plain())
    assert len({object_key(spec, machine) for spec in specs for machine in machines}) == 6


def test_wide_registers_are_used_if_the_target_has_them() -> None:
    def text(target: Any) -> str:
        k = Kernel(DemoSpec(), target)
        x = k.operand(0, DType.FLOAT32)
        x.store(x.load(0, k.lanes) * x.load(k.lanes, k.lanes))
        return assembly_of(k)

    widths = [("zmm", targets.avx512()), ("ymm", targets.x86_64_v3()), ("xmm", targets.plain())]
    for register, target in widths if "x86" in targets.host().triple else []:
        assert register in text(target)


class TestObjectCache:
    def test_round_trip(self, tmp_path: Path) -> None:
        cache = ObjectCache(tmp_path / "cache")
        assert cache.get("k") is None
        cache.put("k", b"code")
        assert ObjectCache(tmp_path / "cache").get("k") == b"code"
        assert [path.name for path in cache.folder.iterdir()] == ["k.o"]

    @pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"", lambda d: b"\0" * len(d)])
    def test_a_damaged_object_counts_as_absent(self, tmp_path: Path, damage: Any) -> None:
        cache = ObjectCache(tmp_path / "cache")
        cache.put("k", b"code")
        file = cache.folder / "k.o"
        file.write_bytes(damage(file.read_bytes()))
        assert cache.get("k") is None

    def test_an_object_writable_by_others_is_not_used(self, tmp_path: Path) -> None:
        cache = ObjectCache(tmp_path / "cache")
        cache.put("k", b"code")
        (cache.folder / "k.o").chmod(0o666)
        assert cache.get("k") is None

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        cache = ObjectCache(tmp_path / "cache")
        cache.put("k", b"code")
        (cache.folder / "other.o").symlink_to(cache.folder / "k.o")
        assert cache.get("other") is None

    def test_a_folder_writable_by_others_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "cache"
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(ArtifactError, match="written by other users"):
            ObjectCache(folder)

    def test_an_object_of_another_user_is_not_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = ObjectCache(tmp_path / "cache")
        cache.put("k", b"code")
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert cache.get("k") is None

    def test_the_least_recently_used_objects_are_evicted_first(self, tmp_path: Path) -> None:
        cache = ObjectCache(tmp_path / "cache", max_bytes=300)
        for age, key in enumerate("abc"):
            cache.put(key, bytes(100 - 32))
            os.utime(cache.folder / f"{key}.o", (age, age))
        cache.get("a")
        cache.put("d", bytes(100 - 32))
        assert [key for key in "abcd" if cache.get(key) is not None] == ["a", "c", "d"]
