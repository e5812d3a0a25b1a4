"""Kernels compiled ahead of time without a GPU, and copied to a machine with a GPU of the same facts."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import lathe
from lathe.core.compiler.ahead_of_time import compile_kernels
from lathe.core.compiler.description import describe
from lathe.core.compiler.options import make_options
from lathe.core.compiler.pipeline import build
from lathe.core.errors import ArtifactError, ModelError, UnsupportedError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels import cuda
from lathe.core.kernels.cuda import Binary, Source, compiler
from lathe.core.kernels.target import GpuTarget
from lathe.core.runtime.artifact.store import Store
from lathe.core.runtime.device import devices, portable_cache
from lathe.core.runtime.device.cuda import CudaDevice
from lathe.core.runtime.device.cuda_driver import Driver
from lathe.server.cli.app import app
from tests.core.cuda.fake_driver import FakeDriver
from tests.core.cuda.test_compile import perceptron

FAKE = "sm_86/46/101376/4096"  # the facts of the GPU that FakeDriver shows


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The symbols of the kernels that Triton would compile; a fake replaces it."""
    symbols: list[str] = []

    def compile_source(source: Source, target: GpuTarget) -> Binary:
        symbols.append(source.symbol)
        return Binary(source.symbol, target.arch, 4, 0, b"\x7fELF", "", "triton 3.9.0")

    monkeypatch.setattr(compiler, "compile_source", compile_source)
    monkeypatch.setattr(cuda, "triton_version", lambda: "3.9.0")
    return symbols


def test_a_gpu_with_the_same_facts_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    """Whatever version of Triton is installed there, or none."""
    graph, tar = perceptron(), tmp_path / "cache.tar.gz"
    compile_kernels(graph, FAKE, tmp_path / "here", precision="bfloat16", max_batch=4)
    assert len(compiled) == len(set(compiled)) > 1
    assert portable_cache.write_tar(tar, Store(tmp_path / "here")) == len(compiled)
    for index, version in enumerate(("3.9.0", "3.6.0", "")):
        compiled.clear()
        monkeypatch.setattr(cuda, "triton_version", lambda version=version: version)
        monkeypatch.setitem(devices._devices, "cuda:0", CudaDevice(Driver(FakeDriver()), 0))
        there = tmp_path / f"there-{index}"
        there.mkdir()
        portable_cache.read_tar(tar, Store(there))
        options = make_options("cuda", "bfloat16", max_batch=4, cache_dir=there)
        build(graph, options, describe(graph, options).batching, ())
        assert compiled == []


def test_the_tuners_candidates_are_compiled_too(tmp_path: Path, compiled: list[str]) -> None:
    b, graph = _begin("wide", ("batch", 512))
    graph.outputs = [b("MatMul", graph.inputs[0], b.constant(np.ones((512, 512), np.float32)))]
    counts = []
    for tune in ("off", "default", "full"):
        compiled.clear()
        compile_kernels(graph, FAKE, tmp_path / tune, max_batch=32, tune=tune)
        counts.append(len(set(compiled)))
    assert 1 <= counts[0] < counts[1] < counts[2]


def test_a_description_stands_for_all_gpus_that_the_model_names(tmp_path: Path, compiled: list[str]) -> None:
    graph = perceptron()
    for index, node in enumerate(graph.nodes):
        node.device = ("cpu", "cuda:0", "cuda:1")[index % 3]
    compile_kernels(graph, FAKE, tmp_path, max_batch=4)
    assert compiled


def test_missing_sizes_are_requested_by_name(tmp_path: Path, compiled: list[str]) -> None:
    b, graph = _begin("free", ("batch", "length"))
    graph.outputs = [b("Softmax", graph.inputs[0], axis=-1)]
    compile_kernels(graph, "sm_90", tmp_path, sizes={"length": 7})
    assert len(compiled) == 1
    with pytest.raises(ModelError, match="sizes: dimension 'length' has no size"):
        compile_kernels(graph, "sm_90", tmp_path)
    with pytest.raises(ModelError, match=r"dimension 'width' is none of the model's \(length\)"):
        compile_kernels(graph, "sm_90", tmp_path, sizes={"length": 7, "width": 1})


def test_descriptions_of_gpus() -> None:
    assert devices.open_device("sm_90").target == GpuTarget(90, 132, 232448, l2_bytes=62914560)
    assert devices.open_device("sm_90/132/232448/62914560").target == devices.open_device("sm_90").target
    for name in ("sm_", "sm_9x", "sm_90/132", "sm_90/132/a/3"):
        with pytest.raises(UnsupportedError, match="is no description of a GPU, expected sm_ARCH"):
            devices.open_device(name)
    with pytest.raises(UnsupportedError, match="'sm_75' needs its facts"):
        devices.open_device("sm_75")


def test_nothing_runs_on_a_description(compiled: list[str]) -> None:
    with pytest.raises(UnsupportedError, match=r"sm_90 is the description of a GPU: .* nothing runs"):
        lathe.compile(perceptron(), device="sm_90")


def test_a_file_that_is_no_cache_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store, key = Store(tmp_path), "0" * 64
    for name, data in ((f"../objects/{key}.o", b""), ("objects/x.o", b""), (f"objects/{key}.o", b"\x7fELF")):
        with pytest.raises(ArtifactError):
            portable_cache.add(store, name, data)
    (tmp_path / "no.tar").write_bytes(b"no tar")
    with pytest.raises(ArtifactError, match=r"no.tar is no tar of a cache"):
        portable_cache.read_tar(tmp_path / "no.tar", store)
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        link = tarfile.TarInfo(f"objects/{key}.o")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(ArtifactError):
        portable_cache.read_tar(tmp_path / "link.tar", store)
    assert store.objects.names() == [] and list(portable_cache.contents(store)) == []


def test_tuning_records_are_copied_but_replace_none(tmp_path: Path) -> None:
    """The host's object code is not copied."""
    there, here = Store(tmp_path / "there"), Store(tmp_path / "here")
    for store, text in ((there, b"theirs"), (here, b"mine")):
        portable_cache.add(store, f"tuning/{'a' * 24}.json", text)
    portable_cache.add(there, f"tuning/{'b' * 24}.json", b"more")
    there.objects.put("0" * 64, b"\x7fELF of the host")
    portable_cache.write_tar(tmp_path / "all.tar", there)
    assert portable_cache.read_tar(tmp_path / "all.tar", here) == 2
    assert [data for _, data in portable_cache.contents(here)] == [b"mine", b"more"]


def _begin(name: str, shape: tuple[str | int, ...]) -> tuple[Builder, Graph]:
    graph = Graph(name)
    b = Builder(graph)
    b.input("x", TensorType(DType.FLOAT32, tuple(symbol(d) if isinstance(d, str) else d for d in shape)))
    return b, graph


def test_the_command_line_compiles_into_a_file_and_loads_it(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATHE_CACHE_DIR", str(tmp_path / "cache"))
    model, tar = tmp_path / "model.onnx", tmp_path / "cache.tar.xz"
    model.write_bytes(lathe.export(perceptron()))
    command = ["kernels", "--target", FAKE, "--model", str(model), "-o", str(tar)]
    seen: list[str] = []
    for precisions in (("float32",), ("float32", "bfloat16")):
        compiled.clear()
        chosen = [word for precision in precisions for word in ("--precision", precision)]
        done = CliRunner().invoke(app, [*command, *chosen])
        assert done.exit_code == 0, done.output
        assert compiled and not set(compiled) & set(seen)  # kernels in the file are not compiled again
        seen += compiled
    with tarfile.open(tar) as file:
        assert len(file.getnames()) == len(seen)
    done = CliRunner().invoke(app, ["load-kernels", str(tar)])
    assert done.exit_code == 0 and "files copied into" in done.output
    assert len(list(portable_cache.contents(Store(tmp_path / "cache")))) == len(seen)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "sm_9x"], "target 'sm_9x' is no description of a GPU"),
        (["--target", "sm_90", "--size", "length"], "expected NAME=SIZE"),
        (["--target", "sm_90", "--size", "length=7"], "dimension 'length' is none of the model's (none)"),
        (["--target", "sm_90", "--precision", "int4"], "precision 'int4' is not supported"),
    ],
)
def test_the_command_line_reports_errors(tmp_path: Path, compiled: list[str], arguments: list[str], says: str) -> None:
    model, tar = tmp_path / "model.onnx", tmp_path / "cache.tar"
    model.write_bytes(lathe.export(perceptron()))
    done = CliRunner().invoke(app, ["kernels", "--model", str(model), "-o", str(tar), *arguments])
    assert done.exit_code == 1 and says in done.output.replace("\n", " ") and not tar.exists()
