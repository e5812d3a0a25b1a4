"""Targets: the values of `LATHE_TARGET`, the features passed to LLVM, and code for one machine on another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lathe
from lathe.core.codegen import cpus, jit
from lathe.core.codegen import target as targets
from lathe.core.codegen.jit import Library, compile_text, required_features_of
from lathe.core.compiler import compile as compile_module
from lathe.core.compiler import pipeline
from lathe.core.errors import ArtifactError, TargetError
from lathe.core.frontends.export import export
from lathe.core.kernels.target import Target
from lathe.core.runtime.artifact import artifact
from lathe.core.runtime.artifact.bundle import Bundle
from tests.core.runtime import graphs
from tests.core.targets import X86, x86_only

ROOT = Path(__file__).parents[3]
FUNCTION = "define void @f() { ret void }"


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment of a test that sets `LATHE_TARGET`; the host is the real one before and afterwards."""
    targets.host.cache_clear()
    monkeypatch.delenv("LATHE_TARGET", raising=False)
    yield monkeypatch
    monkeypatch.undo()
    targets.host.cache_clear()


def test_a_cpu_with_a_wrong_model_number_is_known_by_its_features() -> None:
    assert targets.cpu_name("rocketlake", {"avx512f", "amx-bf16"}) == "sapphirerapids"
    assert targets.cpu_name("graniterapids", {"avx512f", "amx-bf16"}) == "graniterapids"
    assert targets.cpu_name("znver5", {"avx512f"}) == "znver5"


def test_a_named_target_replaces_the_detected_one(chosen: pytest.MonkeyPatch) -> None:
    chosen.setenv("LATHE_TARGET", "plain")
    assert targets.host() == targets.plain() != targets.detect_host()


def test_an_unknown_name_is_refused_with_the_known_ones(chosen: pytest.MonkeyPatch) -> None:
    chosen.setenv("LATHE_TARGET", "pdp11")
    with pytest.raises(TargetError, match="LATHE_TARGET is 'pdp11', expected one of plain"):
        targets.host()


@x86_only
def test_a_target_beyond_the_machine_is_refused(chosen: pytest.MonkeyPatch) -> None:
    chosen.setattr(targets, "detect_host", targets.x86_64_v3)
    chosen.setenv("LATHE_TARGET", "cascadelake")
    with pytest.raises(TargetError, match=r"'cascadelake', .* lacks avx512bw, .*avx512vnni.*expected one of plain.*v3"):
        targets.host()
    targets.host.cache_clear()
    chosen.setenv("LATHE_TARGET", "haswell")
    assert (targets.host().cpu, targets.host().name, targets.host().lanes) == ("haswell", "avx2", 8)


@x86_only
@pytest.mark.parametrize("name", cpus.FEATURES)
def test_every_named_cpu_has_the_vectors_of_its_features(name: str) -> None:
    target = targets.target_by_name(name)
    wide = "avx512f" in target.needs
    known = {"avx512": (wide, 64, 32), "avx2": (not wide, 32, 16), "plain": (name == "x86-64", 16, 16)}
    assert known[target.name] == (True, target.vector_bytes, target.registers)
    assert (target.cpu, target.needs) == (name, cpus.FEATURES[name])


@x86_only
def test_missing_features_are_stated_last() -> None:
    """LLVM reads features in order, each with those it implies, and takes unstated ones from the CPU's name."""
    known = set(targets.llvm.get_host_cpu_features())
    for target in (targets.host(), targets.target_by_name("sapphirerapids"), targets.x86_64_v3(), targets.plain()):
        signs = [feature[0] for feature in target.features.split(",")]
        assert signs == sorted(signs) and {feature[1:] for feature in target.features.split(",")} >= known


@x86_only
def test_features_that_a_hypervisor_hides_are_not_taken_from_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of the newest kind that shows AVX2 alone gets no instruction of AVX-512."""
    shown = {name: name in cpus.LEVEL_3 for name in {*targets.llvm.get_host_cpu_features(), *cpus.LEVEL_3}}
    monkeypatch.setattr(targets.llvm, "get_host_cpu_features", lambda: shown)
    monkeypatch.setattr(targets.llvm, "get_host_cpu_name", lambda: "sapphirerapids")
    found = targets.detect_host.__wrapped__()
    assert (found.cpu, found.name, found.needs) == ("sapphirerapids", "avx2", cpus.LEVEL_3)
    add = "define <16 x float> @f(<16 x float> %x) { %y = fadd <16 x float> %x, %x ret <16 x float> %y }"
    machine = targets.target_machine(found)
    text = str(machine.emit_assembly(jit._optimize(add, machine)))
    assert "ymm" in text and "zmm" not in text


def test_incomplete_avx512_counts_as_none() -> None:
    assert cpus.usable_features(cpus.LEVEL_4 - {"avx512bw"} | {"avx512vnni", "amx-tile"}) == cpus.LEVEL_3
    assert cpus.usable_features(cpus.LEVEL_4 | {"amx-bf16"}) == cpus.LEVEL_4
    assert cpus.usable_features(cpus.FEATURES["sapphirerapids"]) == cpus.FEATURES["sapphirerapids"]
    assert cpus.usable_features(cpus.LEVEL_3 - {"fma"}) == cpus.BASE


def test_without_tiles_llvm_gets_the_tile_features_disabled() -> None:
    with_tiles = Target("avx512", "x86_64", "sapphirerapids", "+amx-tile,+avx512f,-amx-fp16", 64, 32)
    assert with_tiles.without_tiles.features == "-amx-tile,+avx512f,-amx-fp16"


def test_objects_list_the_features_they_need() -> None:
    for target in (targets.host(), targets.plain()):
        assert required_features_of(compile_text(FUNCTION, target)) == target.needs
    assert required_features_of(b"\x7fELF") is None and required_features_of(b"lathe needs: avx") is None


@x86_only
def test_code_for_more_than_the_host_is_not_loaded(chosen: pytest.MonkeyPatch) -> None:
    chosen.setenv("LATHE_TARGET", "x86-64-v3")
    wide = compile_text(FUNCTION, targets.target_by_name("sapphirerapids"))
    with pytest.raises(ArtifactError, match=r"f needs amx-bf16, .*avx512f.*, which LATHE_TARGET=x86-64-v3 lacks"):
        Library({"f": wide})
    for target in (targets.x86_64_v3(), targets.plain()):
        Library({"f": compile_text(FUNCTION, target)}).close()


@x86_only
def test_an_artifact_for_another_target_is_refused_with_what_it_needs(
    chosen: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen.setenv("LATHE_TARGET", "plain")
    compile_module.compile_to(tmp_path / "plain.lathe", graphs.mlp(), pipeline.make_options(threads=1))
    targets.host.cache_clear()
    chosen.setenv("LATHE_TARGET", "haswell")
    with pytest.raises(ArtifactError, match=r"made for target 'x86-64' without avx, .*, this is 'haswell'; compile"):
        artifact.load(tmp_path / "plain.lathe", 1)


def test_another_target_compiles_its_own_models_and_objects(chosen: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One cache for two targets: neither uses the other's code, and each finds its own again."""

    def objects() -> list[frozenset[str] | None]:
        lathe.compile(graphs.mlp(), threads=1, cache_dir=tmp_path).close()
        return [required_features_of(path.read_bytes()) for path in (tmp_path / "objects").iterdir()]

    own = objects()
    chosen.setenv("LATHE_TARGET", "plain")
    targets.host.cache_clear()
    both = objects()
    assert set(own) == {targets.detect_host().needs} and set(both) == {
        targets.detect_host().needs,
        targets.plain().needs,
    }
    assert objects() == both


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["plain", *(["x86-64-v3"] if X86 else [])])
def test_children_compile_for_the_same_target(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(export(graphs.mlp()))
    program = (
        "import sys, lathe; from pathlib import Path; model = Path(sys.argv[1]);"
        "lathe.compile(model, threads=1, tune='background', cache_dir=model.parent / 'cache').settle()"
    )
    variables = {**os.environ, "LATHE_TARGET": name, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, str(model)], env=variables, cwd=ROOT, check=True, timeout=100)
    made = [required_features_of(path.read_bytes()) for path in (tmp_path / "cache" / "objects").glob("*.o")]
    assert made and set(made) == {targets.target_by_name(name).needs}
    models = list((tmp_path / "cache" / "models").iterdir())
    assert len(models) > 1  # the code that runs at first, and the code that the child makes
    for path in models:
        with Bundle(path) as bundle:
            assert bundle.facts["target"] == targets.target_by_name(name).key
