"""Contexts that annotate the operators written in them: with a device, and with control edges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lathe.core.nn.mode import current_mode
from lathe.core.nn.tensor import Tensor


@contextmanager
def device(name: str) -> Iterator[None]:
    """Within the context, operators of a trace are annotated with a device, such as "cuda:1".

    A module with a device of its own (`Module.to`) keeps it. Eager runs ignore annotations.
    """
    writer = current_mode().writer
    outside, writer.device = writer.device, name
    try:
        yield
    finally:
        writer.device = outside


@contextmanager
def after(*tensors: Tensor) -> Iterator[None]:
    """Within the context, operators of a trace run after those that computed the tensors, without reading these.

    Operators that read no computed tensor, such as those for random numbers, do not wait. Eager runs are in the order
    of the code anyway.
    """
    writer = current_mode().writer
    outside, writer.after = writer.after, (*writer.after, *(tensor.value for tensor in tensors))
    try:
        yield
    finally:
        writer.after = outside
