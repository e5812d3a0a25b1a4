"""x86-64 CPUs by LLVM's names, and the instruction sets that generated code may use on each.

The first three names are levels of the x86-64 psABI (https://gitlab.com/x86-psABIs/x86-64-ABI), the others follow
LLVM's X86.td. Only instruction sets that a code generator chooses are listed: those for cryptography, virtual machines
or transactions never appear in generated code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

BASE = frozenset({"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"})
LEVEL_2 = BASE | {"crc32", "cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"}
LEVEL_3 = LEVEL_2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"}
LEVEL_4 = LEVEL_3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

# The instruction sets that kernels with 32-byte and with 64-byte vectors require.
AVX2 = frozenset({"avx2", "f16c", "fma"})
AVX512 = frozenset({"avx512bw", "avx512dq", "avx512f", "avx512vl"})

_BROADWELL = LEVEL_3 | {"prfchw"}
_ALDERLAKE = _BROADWELL | {"avxvnni", "gfni", "vaes", "vpclmulqdq"}
_SKYLAKE = LEVEL_4 | {"prfchw"}  # the server CPU
_CASCADELAKE = _SKYLAKE | {"avx512vnni"}
_ICELAKE = _CASCADELAKE | {
    "avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vpopcntdq", "gfni", "vaes", "vpclmulqdq",
}  # fmt: skip
_SAPPHIRERAPIDS = _ICELAKE | {"amx-bf16", "amx-int8", "amx-tile", "avx512bf16", "avx512fp16", "avxvnni"}
_ZEN = _BROADWELL | {"sse4a"}
_ZEN3 = _ZEN | {"vaes", "vpclmulqdq"}
_ZEN4 = _ZEN3 | _ICELAKE | {"avx512bf16"}

FEATURES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "x86-64": BASE,
        "x86-64-v3": LEVEL_3,
        "x86-64-v4": LEVEL_4,
        "haswell": LEVEL_3,
        "broadwell": _BROADWELL,
        "skylake": _BROADWELL,
        "alderlake": _ALDERLAKE,
        "skylake-avx512": _SKYLAKE,
        "cascadelake": _CASCADELAKE,
        "cooperlake": _CASCADELAKE | {"avx512bf16"},
        "icelake-server": _ICELAKE,
        "sapphirerapids": _SAPPHIRERAPIDS,
        "emeraldrapids": _SAPPHIRERAPIDS,
        "graniterapids": _SAPPHIRERAPIDS | {"amx-fp16"},
        "znver1": _ZEN,
        "znver2": _ZEN,
        "znver3": _ZEN3,
        "znver4": _ZEN4,
        "znver5": _ZEN4 | {"avxvnni"},
    }
)


def usable_features(available: frozenset[str]) -> frozenset[str]:
    """Those of the `available` features that kernels may use; just `BASE` if a feature of `AVX2` is not available.

    A hypervisor may hide the base of an extension and show the extension. Code for 64-byte vectors needs all features
    in `AVX512`, so if one of them is missing, all AVX-512 and AVX10 features are dropped. AMX is dropped unless all of
    `AVX512` and `amx-tile` are available.
    """
    if not available >= AVX2:
        return BASE
    hidden = [] if available >= AVX512 else ["avx512", "avx10"]
    hidden += [] if AVX512 | {"amx-tile"} <= available else ["amx-"]
    return frozenset(name for name in available if not name.startswith(tuple(hidden)))
