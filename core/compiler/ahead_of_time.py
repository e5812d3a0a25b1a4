"""Compiles the kernels of a model for a GPU that is not in this machine: `lathe kernels`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lathe.core.compiler.description import describe
from lathe.core.compiler.options import make_options
from lathe.core.compiler.pipeline import build
from lathe.core.compiler.symbol_binding import other_symbols
from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph


def compile_kernels(
    graph: Graph,
    target: str,
    cache_dir: str | os.PathLike[str],
    precision: str = "float32",
    max_batch: int = 32,
    tune: str | float = "off",
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Put all kernels that `lathe.compile(graph, device="cuda", ...)` needs on the GPU `target` into the cache.

    `target`: a description of the GPU, see core/runtime/device/absent_gpu.py. `cache_dir`: the cache folder, which is
    created if it is missing. `tune` other than "off" also compiles the candidates that the tuner would measure there
    ("full": all of them). `sizes`: numbers for the symbolic dimensions other than the batch size.

    UnsupportedError for an unknown target or precision, and if Triton is not installed; ModelError for a size that is
    missing or names no dimension; ValueError for `max_batch` or `tune` out of range; for the folder, the errors of
    `Store`.
    """
    options = make_options(target, precision, max_batch=max_batch, cache_dir=cache_dir, tune=tune)
    wanted, given = dimensions(graph), dict(sizes or {})
    for name in sorted({*wanted} ^ {*given}):
        problem = "has no size" if name in wanted else f"is none of the model's ({', '.join(wanted) or 'none'})"
        raise ModelError(f"dimension '{name}' {problem}", where="sizes")
    build(graph, options, describe(graph, options).batching, tuple(sorted(given.items())))


def dimensions(graph: Graph) -> list[str]:
    """The symbolic dimensions other than the batch size, whose sizes `compile_kernels` needs."""
    return other_symbols(graph, describe(graph, make_options()).batching)
