"""Object code has no instruction that its target lacks, also for targets that this machine is not.

The decoder (iced-x86) has its own table of CPU features, so the check is independent of LLVM.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import llvmlite.binding as llvm
import pytest
from iced_x86 import CpuidFeature, Decoder, Instruction

from lathe.core.codegen.jit import compile_text
from lathe.core.codegen.target import avx512, target_by_name, x86_64_v3
from lathe.core.frontends.onnx import load
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.cpu import object_for
from lathe.core.kernels.target import Target
from lathe.core.passes.pipeline import optimize
from lathe.core.plan.planner import make_plan
from lathe.core.runtime.host import machine, native_driver
from tests.core.conformance.models import suite_models
from tests.core.kernels import family_cases
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import normal, tensor
from tests.core.targets import x86_only

pytestmark = x86_only

# AVX2 alone, AVX-512 without products of bytes, matrix tiles.
TARGETS = ["x86-64-v3", "skylake-avx512", "sapphirerapids"]
SLOW = [*TARGETS[1:], "x86-64", "alderlake", "cascadelake", "cooperlake", "icelake-server", "graniterapids", "znver4"]

# The decoder's names of LLVM's features; a name that is missing here is allowed on no target.
NAMES = {
    "64bit": ("INTEL8086", "INTEL186", "INTEL286", "INTEL386", "INTEL486", "X64", "MULTIBYTENOP", "PAUSE"),
    "cmov": ("CMOV",), "sse": ("SSE",), "sse2": ("SSE2",), "sse3": ("SSE3",), "ssse3": ("SSSE3",),
    "sse4.1": ("SSE4_1",), "sse4.2": ("SSE4_2",), "popcnt": ("POPCNT",), "cx16": ("CMPXCHG16B",), "avx": ("AVX",),
    "avx2": ("AVX2",), "bmi": ("BMI1",), "bmi2": ("BMI2",), "f16c": ("F16C",), "fma": ("FMA",), "lzcnt": ("LZCNT",),
    "movbe": ("MOVBE",), "prfchw": ("PREFETCHW",), "gfni": ("GFNI",), "vaes": ("VAES",), "avxvnni": ("AVX_VNNI",),
    "vpclmulqdq": ("VPCLMULQDQ",), "amx-tile": ("AMX_TILE",), "amx-int8": ("AMX_INT8",), "amx-bf16": ("AMX_BF16",),
    "amx-fp16": ("AMX_FP16",), "avx512f": ("AVX512F",), "avx512bw": ("AVX512BW",), "avx512cd": ("AVX512CD",),
    "avx512dq": ("AVX512DQ",), "avx512vl": ("AVX512VL",), "avx512ifma": ("AVX512_IFMA",),
    "avx512vbmi": ("AVX512_VBMI",), "avx512vbmi2": ("AVX512_VBMI2",), "avx512vnni": ("AVX512_VNNI",),
    "avx512bitalg": ("AVX512_BITALG",), "avx512vpopcntdq": ("AVX512_VPOPCNTDQ",), "avx512bf16": ("AVX512_BF16",),
    "avx512fp16": ("AVX512_FP16",),
}  # fmt: skip
_FEATURES = {value: name for name, value in vars(CpuidFeature).items() if isinstance(value, int)}


def decoded(data: bytes) -> Iterator[Instruction]:
    """The instructions of an object file."""
    for section in llvm.ObjectFileRef.from_data(data).sections():
        if section.is_text():
            yield from Decoder(64, section.data())


def foreign(data: bytes, target: Target) -> set[str]:
    """Instructions of an object file that the target lacks, each with the features it needs."""
    allowed = {name for feature in target.needs for name in NAMES.get(feature, ())}
    found = set()
    for instruction in decoded(data):
        needs = {_FEATURES[each] for each in instruction.cpuid_features()}
        if instruction.is_invalid or needs - allowed:
            found.add(f"{instruction}: {', '.join(sorted(needs)) or 'cannot be decoded'}")
    return found


@cache
def code(name: str) -> dict[str, bytes]:
    """Object files for a target by name: the driver, the measurement of peaks, and kernels of each family."""
    target = target_by_name(name)
    texts = {"driver": native_driver.source(), "peaks": machine._source(target)}
    kernels = {key: object_for(spec, target) for key, spec in family_cases.specs(target).items()}
    return {what: compile_text(text, target) for what, text in texts.items()} | kernels


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [TARGETS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.slow
def test_no_instruction_that_the_target_lacks(name: str) -> None:
    for what, data in code(name).items():
        assert not foreign(data, target_by_name(name)), what


def mnemonics(name: str) -> set[str]:
    return {str(instruction).split()[0] for data in code(name).values() for instruction in decoded(data)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_target_uses_its_characteristic_instructions() -> None:
    """The decoded code uses the instructions that the target is meant for."""
    found = {name: mnemonics(name) for name in TARGETS}
    assert all("vfmadd231ps" in each for each in found.values())
    for mnemonic in ("vpdpbusd", "vdpbf16ps", "tdpbf16ps", "tdpbusd"):
        assert [name for name in TARGETS if mnemonic in found[name]] == ["sapphirerapids"], mnemonic


def test_the_cases_are_of_all_families() -> None:
    found = {spec.family for name in TARGETS for spec in family_cases.specs(target_by_name(name)).values()}
    assert found == family_cases.families() - set(family_cases.OWN)


def test_the_decoder_distinguishes_targets() -> None:
    """Code for AVX-512 is foreign to AVX2, with registers of any width; the other way round it is not."""
    for lanes, feature in ((8, "AVX512DQ"), (4, "AVX512VL")):
        data = compile_text(_converted(lanes), avx512())
        assert feature in " ".join(foreign(data, x86_64_v3())) and not foreign(data, avx512())
    assert not foreign(compile_text(_converted(8), x86_64_v3()), avx512())
    assert "VNNI" in " ".join(foreign(_bytes_product("cascadelake"), target_by_name("skylake-avx512")))
    assert "AMX" in " ".join(foreign(_bytes_product("sapphirerapids"), target_by_name("icelake-server")))


def _converted(lanes: int) -> str:
    """LLVM IR of a conversion for which AVX2 has no instruction."""
    given, result = f"<{lanes} x i64>", f"<{lanes} x double>"
    return f"define {result} @f({given} %x) {{ %y = sitofp {given} %x to {result} ret {result} %y }}"


def _bytes_product(name: str) -> bytes:
    """The object code of the preferred kernel for a product of bytes."""
    graph, target = (
        single_node("FusedMatMul", tensor("uint8[n,64]"), normal(DType.INT8, (64, 48))),
        target_by_name(name),
    )
    call = select(Request(graph.nodes[0], graph.constants, target))
    assert call is not None
    return object_for(call.spec, target)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_of_the_whole_backend_suite(name: str) -> None:
    """Every kernel that ONNX's backend test suite needs."""
    target, seen = target_by_name(name), set()
    for model in (model for model in suite_models().values() if model.has_data):
        for spec in make_plan(optimize(load(model.read()))[0], target).specs.values():
            if spec.key not in seen:
                seen.add(spec.key)
                assert not foreign(object_for(spec, target), target), spec.key
    assert len(seen) > 1000
