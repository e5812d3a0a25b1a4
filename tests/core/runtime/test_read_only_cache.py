"""A cache folder in which nothing can be written: models compile and run without it, and what it holds is used."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.codegen.target import host
from lathe.core.compiler import pipeline
from lathe.core.compiler.compile import compile_to
from lathe.core.frontends.export import export
from lathe.core.ir.build import Builder
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.runtime.artifact import store
from lathe.core.runtime.artifact.store import open_store
from lathe.core.runtime.host import json_lists, machine
from tests.core.runtime import graphs


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the default cache, which does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LATHE_CACHE_DIR", str(folder))
    monkeypatch.setattr(store, "_stores", {})
    return folder


def freeze(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse everything that a read-only file system refuses below `folder`; the superuser may write elsewhere."""

    def refused(call: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def wrapper(path: Any, *arguments: Any, **options: Any) -> Any:
            name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            if Path(name).is_relative_to(folder) and writes(path, *arguments, **options):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
            return call(path, *arguments, **options)

        return wrapper

    def opens_to_write(path: Any, flags: int, *_: Any, **__: Any) -> bool:
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    def is_new(path: Any, *_: Any, **__: Any) -> bool:
        return not os.path.lexists(path)

    monkeypatch.setattr(os, "open", refused(os.open, opens_to_write))
    monkeypatch.setattr(os, "mkdir", refused(os.mkdir, is_new))
    for name in ("utime", "replace", "rename", "unlink"):
        monkeypatch.setattr(os, name, refused(getattr(os, name), lambda *_, **__: True))


def _products() -> lathe.Graph:
    graph = lathe.Graph("products")
    build = Builder(graph)
    x = build.input("x", TensorType(DType.FLOAT32, (symbol("n"), symbol("length"), 8)))
    graph.outputs = [build("MatMul", x, build.constant(np.eye(8, dtype=np.float32)))]
    return graph


GRAPHS: dict[str, tuple[Callable[[], lathe.Graph], tuple[int, ...]]] = {
    "one code": (graphs.mlp, (4, 20)),
    "code for each shape": (graphs.sequence, (2, 5, 8)),
    "code for any shape": (_products, (2, 5, 8)),
    "state": (graphs.counter, (4,)),
}


def check(name: str, make: Callable[[lathe.Graph], lathe.Session]) -> None:
    graph, shape = GRAPHS[name][0](), GRAPHS[name][1]
    x = {"x": np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)}
    with make(graph) as session:
        for output, want in lathe.interpret(graph, x).items():
            np.testing.assert_allclose(session.run(x)[output], want, rtol=2e-5, atol=2e-5)


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("made", ["before", "never"])
def test_models_compile_and_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, explicit: bool, made: str
) -> None:
    options: dict[str, Any] = {"threads": 1, "tune": 0.01, **({"cache_dir": cache} if explicit else {})}
    if made == "before":
        check(name, lambda graph: lathe.compile(export(graph), **options))
    else:
        open_store(None)
    before = sorted(cache.rglob("*"))
    freeze(cache, monkeypatch)
    check(name, lambda graph: lathe.compile(export(graph), **options))
    check(name, lambda graph: lathe.compile(graph, **options))
    assert sorted(cache.rglob("*")) == before


@pytest.mark.parametrize("name", GRAPHS)
def test_an_artifact_is_compiled_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, name: str
) -> None:
    open_store(None)
    freeze(cache, monkeypatch)
    path = tmp_path / "model.lathe"
    compile_to(path, GRAPHS[name][0](), pipeline.make_options(threads=1))
    check(name, lambda _: lathe.load_compiled(path, threads=1))


def test_readers_of_json_and_peaks_need_no_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(None)
    freeze(cache, monkeypatch)
    assert json_lists._objects(None, host()).keys() == set(json_lists.READERS)
    assert machine.peaks.__wrapped__().flops > 0
    assert list(cache.rglob("*.o")) == list(cache.rglob("*.json")) == []


def test_objects_of_a_read_only_cache_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = ObjectCache(tmp_path / "objects")
    objects.put("a", b"code")
    freeze(tmp_path, monkeypatch)
    assert ObjectCache(tmp_path / "objects").get("a") == b"code"
    with pytest.raises(OSError, match="Read-only file system"):
        objects.put("a", b"other")
    objects.put_if_possible("b", b"more")
    assert objects.get("a") == b"code" and objects.get("b") is None


def test_a_folder_that_cannot_be_made_is_an_error_only_where_it_was_asked_for(cache: Path) -> None:
    """In any order: the store that the environment names is the same folder."""
    cache.mkdir(mode=0o700)
    (cache / "objects").write_bytes(b"a file in place of a folder")
    for _ in range(2):
        assert open_store(None) is None
        with pytest.raises(OSError, match="objects"):
            open_store(str(cache))
    (cache / "objects").unlink()
    assert open_store(None) is open_store(str(cache)) is not None
