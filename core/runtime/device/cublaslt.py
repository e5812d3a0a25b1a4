"""NVIDIA's library of matrix products (cuBLASLt), if it is installed: some functions of its C interface by ctypes.

The library is optional: its products are tuning candidates in addition to Lathe's own kernels. Functions, structures
and numbers are those of `cublasLt.h` since version 12.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lathe.core.errors import DeviceError, DeviceMemoryError
from lathe.core.ir.dim import evaluate
from lathe.core.ir.types import DType
from lathe.core.kernels.gemm.cublaslt_spec import WORKSPACE_ALIGNMENT, LibrarySpec, Matrix, TunedAlgorithm
from lathe.core.kernels.target import GPU_ALIGNMENT

LEAST_VERSION = 12_00_00
_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_WHEELS = ("cu13/lib", "cublas/lib")  # inside the namespace package `nvidia`, where pip puts the library

_OK, _ALLOC_FAILED = 0, 3
_TYPES = {DType.FLOAT32: 0, DType.FLOAT16: 2, DType.BFLOAT16: 14}  # cudaDataType
_F32 = _TYPES[DType.FLOAT32]
_COMPUTE_32F, _COMPUTE_TF32 = 68, 77  # cublasComputeType_t
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8  # cublasLtMatmulDescAttributes_t
_BIAS_TYPE = 26
_EPILOGUES = {"": 1, "Relu": 2, "Gelu": 32}  # cublasLtEpilogue_t; with a bias, 4 more (and no 1)
_WITH_BIAS = 4
_BATCHES, _BATCH_STEP = 5, 6  # cublasLtMatrixLayoutAttribute_t
_MOST_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t; followed by the least alignments of A, B, C and D
_ALIGNMENTS = (5, 6, 7, 8)
_CANDIDATES = 4  # algorithms that are tried
_MAX_DESCRIPTORS = 64  # cached descriptions of a product, one per batch size; at the limit, all of them are dropped


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque bytes, which stay valid on any machine with the same version of the library."""

    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


_DESCRIBED = (c_void_p,) * 6  # handle, operation, and the layouts of A, B, C and D
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtDestroy": (c_void_p,),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatrixLayoutSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*_DESCRIBED, c_void_p, c_int, POINTER(_Heuristic), POINTER(c_int)),
    "cublasLtMatmulAlgoCheck": (*_DESCRIBED, POINTER(_Algorithm), POINTER(_Heuristic)),
    "cublasLtMatmul": (
        c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
        c_void_p, POINTER(_Algorithm), c_void_p, c_size_t, c_void_p,
    ),
}  # fmt: skip


class Library:
    """The library with a handle for the CUDA context that is current when it is made."""

    def __init__(self, functions: Any) -> None:
        """`functions`: the loaded library, as of `load_library`.

        DeviceError if it is older than `LEAST_VERSION`, or cannot be initialised; AttributeError if it lacks a
        function.
        """
        self.version = _version(functions)
        if self.version < LEAST_VERSION:
            raise DeviceError(
                f"cuBLASLt: expected version {_dotted(LEAST_VERSION)} or newer, got {_dotted(self.version)}"
            )
        self._functions = {name: _declare(functions, name, types) for name, types in _FUNCTIONS.items()}
        self.handle = self.create("cublasLtCreate")

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function of the library by name, for its effect.

        DeviceMemoryError if it cannot allocate memory, DeviceError for any other status but success.
        """
        status = self._functions[name](*arguments)
        if status != _OK:
            raise (DeviceMemoryError if status == _ALLOC_FAILED else DeviceError)(f"{name}: status {status}")

    def answer(self, name: str, *arguments: Any) -> int:
        """Call a function of the library by name and return its status, which is no error here."""
        return int(self._functions[name](*arguments))

    def create(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function that creates an object, and return the handle that it writes to its first argument."""
        handle = c_void_p()
        self(name, byref(handle), *arguments)
        return handle


def _version(functions: Any) -> int:
    version = functions.cublasLtGetVersion
    version.argtypes, version.restype = (), c_size_t
    return int(version())


def _dotted(version: int) -> str:
    """A version of the library as NVIDIA writes it: 12.9.3 for 120903."""
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def _declare(functions: Any, name: str, types: tuple[Any, ...]) -> Any:
    function = getattr(functions, name)
    function.argtypes, function.restype = types, c_int
    return function


@cache
def load_library() -> Any:
    """The library, loaded by ctypes: the first one found of the system's and Python's packages, newer names first.

    None if there is none.
    """
    for path in _library_paths():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _library_paths() -> Iterator[str]:
    spec = find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    folders = [Path(place) / wheel for place in places or () for wheel in _WHEELS]
    for name in _NAMES:
        yield name
        yield from (str(folder / name) for folder in folders if (folder / name).exists())


def open_library() -> Library | None:
    """The library for the current CUDA context; None if it is missing, too old, or cannot be initialised."""
    functions = load_library()
    try:
        return Library(functions) if functions is not None else None
    except (DeviceError, AttributeError):
        return None


# -- one product ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Descriptors:
    """The library's descriptors of one matrix product for one batch size.

    The library is column-major, so its A is our B, and all other matrices are transposed with it.
    """

    operation: c_void_p
    layouts: tuple[c_void_p, ...]
    algorithm: _Algorithm = field(default_factory=_Algorithm)


class Product:
    """A matrix product on a device, done by the library. Any number of threads may launch it."""

    def __init__(self, library: Library, spec: LibrarySpec, enter: Callable[[], None]) -> None:
        """`enter` makes the library's context current in this thread."""
        self._library, self._spec, self._enter = library, spec, enter
        self._descriptors: dict[int, _Descriptors] = {}
        self._variants: list[Product] = []  # closed together with this one
        self._lock = threading.Lock()
        self._one, self._none = c_float(1.0), c_float(0.0)

    def ways(self, n: int) -> Sequence[str]:
        """The algorithms, at most 4, that the library's heuristic ranks first for a batch of `n`.

        Each is given by its bytes in hexadecimal, a slash, and the number of bytes of workspace that it needs.
        """
        self._enter()
        with self._lock:
            form = self._describe(n)
            found = [f"{bytes(each.algorithm).hex()}/{each.workspace}" for each in self._heuristics(form, _CANDIDATES)]
            self._destroy(form)
        return found

    def by(self, n: int, way: str) -> Product:
        algorithm, _, workspace = way.partition("/")
        spec = replace(self._spec, ways=(TunedAlgorithm(n, algorithm, int(workspace)),))
        self._variants.append(Product(self._library, spec, self._enter))
        return self._variants[-1]

    def launch(self, stream: int, addresses: Sequence[int], n: int) -> None:
        """Submit the product to a stream. The first launch for a batch size may load code, so it must not be captured.

        `addresses`: those of A, B, the bias or the added matrix if the spec has them, the result and the workspace.
        """
        self._enter()
        a, b, *extras, y, workspace = addresses
        with self._lock:
            form = self._descriptors_for(n)
            if self._spec.bias:
                self._set("cublasLtMatmulDesc", form.operation, _BIAS_POINTER, c_void_p(extras[-1]))
            c, beta = (extras[0], self._one) if self._spec.c is not None else (y, self._none)
            first = -(-workspace // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
            layouts = form.layouts
            self._library(
                "cublasLtMatmul", self._library.handle, form.operation, byref(self._one), b, layouts[0], a, layouts[1],
                byref(beta), c, layouts[2], y, layouts[3], byref(form.algorithm), first, self._spec.workspace_bytes(),
                stream,
            )  # fmt: skip

    def close(self) -> None:
        while self._variants:
            self._variants.pop().close()
        with self._lock:
            self._clear()

    # -- descriptions ------------------------------------------------------------------------------------------------

    def _descriptors_for(self, n: int) -> _Descriptors:
        if n not in self._descriptors:
            if len(self._descriptors) >= _MAX_DESCRIPTORS:
                self._clear()
            form = self._describe(n)
            self._descriptors[n] = replace(form, algorithm=self._algorithm(form, n))
        return self._descriptors[n]

    def _describe(self, n: int) -> _Descriptors:
        spec, library = self._spec, self._library
        compute = _COMPUTE_TF32 if spec.tf32 else _COMPUTE_32F
        operation = library.create("cublasLtMatmulDescCreate", compute, _F32)
        epilogue = _EPILOGUES[spec.activation]
        if spec.bias:
            epilogue = epilogue + _WITH_BIAS if spec.activation else _WITH_BIAS
            self._set("cublasLtMatmulDesc", operation, _BIAS_TYPE, c_int32(_TYPES[spec.y.dtype]))
        for name, value in ((_TRANSPOSE_A, spec.b.turned), (_TRANSPOSE_B, spec.a.turned), (_EPILOGUE, epilogue)):
            self._set("cublasLtMatmulDesc", operation, name, c_uint32(int(value)))
        b, a = self._layout(spec.b, "depth", "columns", n), self._layout(spec.a, "rows", "depth", n)
        d = self._layout(spec.y, "rows", "columns", n)
        c = d if spec.c is None else self._layout(spec.c, "rows", "columns", n)
        return _Descriptors(operation, (b, a, c, d))

    def _layout(self, matrix: Matrix, high: str, wide: str, n: int) -> c_void_p:
        """The library's descriptor of a matrix for a batch of `n`.

        `high` and `wide` are the attributes of the spec with its rows and columns. A row-major matrix is a column-major
        one with rows and columns exchanged.
        """

        def at(dim: Any) -> int:
            return evaluate(dim, {"n": n})

        sides = (at(getattr(self._spec, high)), at(getattr(self._spec, wide)))
        rows, columns = sides if matrix.turned else reversed(sides)
        layout = self._library.create(
            "cublasLtMatrixLayoutCreate", _TYPES[matrix.dtype], rows, columns, at(matrix.pitch)
        )
        batch = at(self._spec.batch)
        if batch > 1:
            self._set("cublasLtMatrixLayout", layout, _BATCHES, c_int32(batch))
            self._set("cublasLtMatrixLayout", layout, _BATCH_STEP, c_int64(at(matrix.step)))
        return layout

    def _algorithm(self, form: _Descriptors, n: int) -> _Algorithm:
        """The tuned algorithm for `n` (see `_nearest`), if the library accepts it here within the spec's workspace.

        Otherwise the first one of the library's heuristic. DeviceError if there is none.
        """
        way = self._nearest(n)
        if way is not None:
            algorithm, result = _Algorithm.from_buffer_copy(bytes.fromhex(way.algorithm)), _Heuristic()
            status = self._library.answer(
                "cublasLtMatmulAlgoCheck", self._library.handle, form.operation, *form.layouts, byref(algorithm),
                byref(result),
            )  # fmt: skip
            if status == _OK and result.workspace <= self._spec.workspace_bytes():
                return algorithm
        for found in self._heuristics(form, 1):
            return found.algorithm
        raise DeviceError(f"cuBLASLt {self._library.version} has no algorithm for {self._spec.summary}, n = {n}")

    def _nearest(self, n: int) -> TunedAlgorithm | None:
        """The tuned algorithm of the largest batch size up to `n`, otherwise of the smallest; None without any."""
        ways = sorted(self._spec.ways, key=lambda way: way.n)
        return next((way for way in reversed(ways) if way.n <= n), ways[0] if ways else None)

    def _heuristics(self, form: _Descriptors, most: int) -> list[_Heuristic]:
        library, found, count = self._library, (_Heuristic * most)(), c_int()
        preference = library.create("cublasLtMatmulPreferenceCreate")
        self._set("cublasLtMatmulPreference", preference, _MOST_WORKSPACE, c_uint64(self._spec.workspace_bytes()))
        for name in _ALIGNMENTS:
            self._set("cublasLtMatmulPreference", preference, name, c_uint32(GPU_ALIGNMENT))
        status = library.answer(
            "cublasLtMatmulAlgoGetHeuristic", library.handle, form.operation, *form.layouts, preference, most, found,
            byref(count),
        )  # fmt: skip
        library("cublasLtMatmulPreferenceDestroy", preference)
        return [each for each in found[: count.value] if each.state == _OK] if status == _OK else []

    def _set(self, what: str, which: c_void_p, name: int, value: Any) -> None:
        self._library(f"{what}SetAttribute", which, name, byref(value), ctypes.sizeof(value))

    def _destroy(self, form: _Descriptors) -> None:
        for layout in {layout.value: layout for layout in form.layouts}.values():
            self._library("cublasLtMatrixLayoutDestroy", layout)
        self._library("cublasLtMatmulDescDestroy", form.operation)

    def _clear(self) -> None:
        while self._descriptors:
            self._destroy(self._descriptors.popitem()[1])
