"""A fake cuBLASLt on host memory: C functions with its header's interface that check arguments and multiply.

Every function has the C calling convention and the types of `cublasLt.h`. Attribute numbers, their sizes, and the
memory order (columns) are the header's, too. Its algorithms are numbered, and all compute the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from tests.core.cuda.fake_driver import FakeDriver, _inside

SUCCESS, NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 7, 15
TYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}  # cudaDataType
DESC_SIZES = {3: 4, 4: 4, 7: 4, 8: 8, 26: 4}  # transposes of A and B, epilogue, address and type of the bias
LAYOUT_SIZES = {5: 4, 6: 8}  # batch count, and stride
PREFERENCE_SIZES = {1: 8, 5: 4, 6: 4, 7: 4, 8: 4}  # workspace, and alignments
RELU, BIAS, GELU = 2, 4, 32


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: 96 bytes, of which the first 64 are the algorithm."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


@dataclass
class Thing:
    """An operation, a layout, a preference or a handle."""

    kind: str
    facts: dict[Any, int] = field(default_factory=dict)


@dataclass
class FakeCublasLt:
    """A fake library.

    `workspaces`: the bytes of each algorithm, in the heuristic's order; `refused`: algorithms that a check refuses.
    """

    driver: FakeDriver
    version: int = 120903
    workspaces: tuple[int, ...] = (0, 4096)
    refused: frozenset[int] = frozenset()
    has_driver: bool = True
    alive: dict[int, Thing] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)  # the algorithms that ran, by index
    made: int = 0

    def functions(self) -> SimpleNamespace:
        """The functions as attributes, as `ctypes.CDLL` gives them."""
        pointer, size = c_void_p, c_size_t
        prototypes: dict[str, tuple[Callable[..., int], Any]] = {
            "cublasLtGetVersion": (lambda: self.version, CFUNCTYPE(size)),
            "cublasLtCreate": (self._create, CFUNCTYPE(c_int, POINTER(pointer))),
            "cublasLtMatmulDescCreate": (self._describe, CFUNCTYPE(c_int, POINTER(pointer), c_int, c_int)),
            "cublasLtMatrixLayoutCreate": (
                self._lay_out, CFUNCTYPE(c_int, POINTER(pointer), c_int, c_uint64, c_uint64, c_int64),
            ),
            "cublasLtMatmulPreferenceCreate": (self._prefer, CFUNCTYPE(c_int, POINTER(pointer))),
            "cublasLtMatmulAlgoGetHeuristic": (
                self._heuristics, CFUNCTYPE(c_int, *[pointer] * 7, c_int, POINTER(Heuristic), POINTER(c_int)),
            ),
            "cublasLtMatmulAlgoCheck": (self._check, CFUNCTYPE(c_int, *[pointer] * 7, POINTER(Heuristic))),
            "cublasLtMatmul": (self._multiply, CFUNCTYPE(c_int, *[pointer] * 14, size, pointer)),
        }  # fmt: skip
        for name, sizes in (
            ("MatmulDesc", DESC_SIZES), ("MatrixLayout", LAYOUT_SIZES), ("MatmulPreference", PREFERENCE_SIZES)
        ):  # fmt: skip
            prototypes[f"cublasLt{name}SetAttribute"] = (
                self._setter(name, sizes), CFUNCTYPE(c_int, pointer, c_int, pointer, size),
            )  # fmt: skip
            prototypes[f"cublasLt{name}Destroy"] = (self._destroyer(name), CFUNCTYPE(c_int, pointer))
        prototypes["cublasLtDestroy"] = (self._destroyer("handle"), CFUNCTYPE(c_int, pointer))
        return SimpleNamespace(**{name: type_(self._noted(name, do)) for name, (do, type_) in prototypes.items()})

    def _noted(self, name: str, do: Callable[..., int]) -> Callable[..., int]:
        """A callback that records its calls, and returns an error status if `do` raises: ctypes swallows exceptions."""

        def called(*arguments: Any) -> int:
            self.asked.append(name)
            try:
                return do(*arguments)
            except Exception as error:
                self.asked.append(f"{name}: {type(error).__name__} {error}")
                return INVALID_VALUE

        return called

    # -- things

    def _made(self, place: Any, kind: str, **facts: int) -> int:
        self.made += 1
        self.alive[self.made] = Thing(kind, dict(facts))
        place[0] = self.made
        return SUCCESS

    def _create(self, place: Any) -> int:
        return self._made(place, "handle") if self.has_driver else NOT_INITIALIZED

    def _describe(self, place: Any, compute: int, scale: int) -> int:
        assert compute in (68, 77) and scale == 0
        return self._made(place, "MatmulDesc", compute=compute)

    def _lay_out(self, place: Any, dtype: int, rows: int, columns: int, pitch: int) -> int:
        assert dtype in TYPES and pitch >= rows > 0 < columns
        return self._made(place, "MatrixLayout", dtype=dtype, rows=rows, columns=columns, pitch=pitch)

    def _prefer(self, place: Any) -> int:
        return self._made(place, "MatmulPreference")

    def _setter(self, kind: str, sizes: dict[int, int]) -> Callable[..., int]:
        def put(thing: int, name: int, value: int, size: int) -> int:
            assert sizes[name] == size
            self._thing(thing, kind).facts[name] = int.from_bytes(ctypes.string_at(value, size), "little")
            return SUCCESS

        return put

    def _destroyer(self, kind: str) -> Callable[..., int]:
        def destroy(thing: int) -> int:
            self._thing(thing, kind)
            del self.alive[thing]
            return SUCCESS

        return destroy

    def _thing(self, place: int, kind: str) -> Thing:
        thing = self.alive[place]
        assert thing.kind == kind, f"{thing} is no {kind}"
        return thing

    # -- algorithms and products

    def _heuristics(
        self, handle: int, operation: int, a: int, b: int, c: int, d: int, preference: int, most: int, results: Any,
        count: Any,
    ) -> int:  # fmt: skip
        facts = self._thing(preference, "MatmulPreference").facts
        assert [facts[name] for name in (5, 6, 7, 8)] == [16] * 4
        self._checked(operation, a, b, c, d)
        fitting = [i for i, size in enumerate(self.workspaces) if size <= facts[1]][:most]
        for place, index in enumerate(fitting):
            results[place].algorithm[0], results[place].workspace = index + 1, self.workspaces[index]
            results[place].state = SUCCESS
        count[0] = len(fitting)
        return SUCCESS if fitting else NOT_SUPPORTED

    def _check(self, handle: int, operation: int, a: int, b: int, c: int, d: int, algorithm: int, result: Any) -> int:
        self._checked(operation, a, b, c, d)
        index = self._index(algorithm)
        result[0].workspace = self.workspaces[index]
        return NOT_SUPPORTED if index in self.refused else SUCCESS

    def _index(self, algorithm: int) -> int:
        data = ctypes.string_at(algorithm, 64)
        assert not any(data[8:])
        return int.from_bytes(data[:8], "little") - 1

    def _checked(self, operation: int, *layouts: int) -> tuple[int, int, int]:
        """The sizes m, n and k, after a check that shapes, batches and types agree."""
        facts = self._thing(operation, "MatmulDesc").facts
        a, b, c, d = (self._thing(layout, "MatrixLayout").facts for layout in layouts)
        assert len({each.get(5, 1) for each in (a, b, c, d)}) == 1, "batches differ"
        (m, k), (deep, n) = _sides(a, facts[3]), _sides(b, facts[4])
        assert k == deep and _sides(c, 0) == _sides(d, 0) == (m, n), (m, n, k, deep, c, d)
        assert a["dtype"] == b["dtype"] and c["dtype"] == d["dtype"]
        assert facts["compute"] == 68 or a["dtype"] == 0
        return m, n, k

    def _multiply(
        self, handle: int, operation: int, alpha: int, a: int, a_layout: int, b: int, b_layout: int, beta: int, c: int,
        c_layout: int, d: int, d_layout: int, algorithm: int, workspace: int, size: int, stream: int,
    ) -> int:  # fmt: skip
        self._thing(handle, "handle")
        index = self._index(algorithm)
        self._checked(operation, a_layout, b_layout, c_layout, d_layout)
        assert workspace % 256 == 0 and size >= self.workspaces[index]
        _inside(self.driver.memory, workspace, size)
        assert c_float.from_address(alpha).value == 1.0
        scale = c_float.from_address(beta).value
        facts = dict(self._thing(operation, "MatmulDesc").facts)
        layouts = [dict(self._thing(each, "MatrixLayout").facts) for each in (a_layout, b_layout, c_layout, d_layout)]

        def work() -> None:
            x, y, z, to = (self._array(at, facts) for at, facts in zip((a, b, c, d), layouts, strict=True))
            left = x.swapaxes(1, 2) if facts[3] else x
            right = y.swapaxes(1, 2) if facts[4] else y
            sums = left.astype(np.float32) @ right.astype(np.float32) + (scale * z.astype(np.float32) if scale else 0)
            np.copyto(to, self._finished(sums, facts, layouts[3]).astype(to.dtype))
            self.ran.append(index)

        handles = {int(each): each for each in self.driver.handles}
        self.driver.calls.append(("cublasLtMatmul", (stream,)))
        self.driver._give(handles[stream], work)
        return SUCCESS

    def _finished(self, sums: Any, facts: dict[Any, int], d: dict[Any, int]) -> Any:
        epilogue = facts[7]
        if epilogue & BIAS:
            dtype = TYPES[facts[26]]
            assert facts[26] == d["dtype"], "a bias has the type of the result"
            rows = d["rows"]
            bias = _inside(self.driver.memory, facts[8], rows * dtype.itemsize).view(dtype)
            sums = sums + bias.astype(np.float32)[:, None]
        if epilogue & RELU:
            return np.maximum(sums, 0)
        if epilogue & GELU:
            return 0.5 * sums * (1 + np.tanh(0.7978845608028654 * (sums + 0.044715 * sums**3)))
        return sums

    def _array(self, address: int, facts: dict[Any, int]) -> Any:
        """A view [batch, rows, columns] of memory in column-major order."""
        dtype, count, step = TYPES[facts["dtype"]], facts.get(5, 1), facts.get(6, 0)
        shape = (count, facts["rows"], facts["columns"])
        reach = (count - 1) * step + (shape[2] - 1) * facts["pitch"] + shape[1]
        flat = _inside(self.driver.memory, address, reach * dtype.itemsize).view(dtype)
        strides = [each * dtype.itemsize for each in (step, 1, facts["pitch"])]
        return as_strided(flat, shape, strides, writeable=True)


def _sides(facts: dict[Any, int], turned: int) -> tuple[int, int]:
    return (facts["columns"], facts["rows"]) if turned else (facts["rows"], facts["columns"])
