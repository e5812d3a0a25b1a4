"""Fills a decoder with the weights of a checkpoint, whose tensors have other names and layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Array
from lathe.core.language.gguf_codes import BlockCodes, block_codes, can_split
from lathe.core.language.stored_tensor import StoredTensor
from lathe.core.nn.module import Module


def _unchanged(array: Array) -> Array:
    return array


@dataclass(frozen=True)
class WeightSource:
    """Where a parameter is in a checkpoint: the stored tensor's name, and how its elements become the parameter.

    `convert` takes the arrays of the tensor and of `others`, further tensors that hold the rest of the parameter.
    """

    name: str
    convert: Callable[..., Array] = _unchanged
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.others)


def load_weights(
    module: Module,
    tensors: Mapping[str, StoredTensor],
    source: Callable[[str], WeightSource],
    ignored: re.Pattern[str],
    where: str,
) -> None:
    """Give the parameters of `module` the tensors that `source` names for them, as float32.

    They are read when they are needed first. A tensor of float32 whose source does not change it is never copied.
    `ignored` matches the names of tensors that no parameter needs. ModelError for a tensor that is missing, has another
    shape, or belongs to no parameter; UnsupportedError for one of a type that Lathe cannot decode.
    """
    used: set[str] = set()
    for path, parameter in module.named_state():
        wanted = source(path)
        for name in wanted.names:
            if name not in tensors:
                raise ModelError(f"tensor '{name}' is missing, which parameter '{path}' needs", where=where)
        used.update(wanted.names)
        stored = StoredWeight(tuple(tensors[name] for name in wanted.names), wanted.convert)
        shape = _shape_of(stored, where)
        if shape != parameter.data.shape:
            message = f"tensor '{wanted.name}' gives parameter '{path}' the shape {list(shape)}"
            raise ModelError(f"{message}, expected {list(parameter.data.shape)}", where=where)
        parameter.defer(stored)
    unused = sorted(name for name in tensors if name not in used and not ignored.fullmatch(name))
    if unused:
        message = f"tensor '{unused[0]}' belongs to no parameter of the decoder ({len(unused)} such tensors)"
        raise ModelError(message, where=where)


@dataclass(frozen=True)
class StoredWeight:
    """A parameter in a checkpoint: calling it reads its elements, as float32, contiguous and read-only.

    `convert` takes the arrays of all `tensors`.
    """

    tensors: tuple[StoredTensor, ...]
    convert: Callable[..., Array] = _unchanged

    def __call__(self) -> Array:
        array = np.ascontiguousarray(self.convert(*(tensor.array() for tensor in self.tensors)), np.float32)
        array.setflags(write=False)
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter. ValueError if the shapes of the tensors do not fit the conversion."""
        return self.convert(*(np.broadcast_to(np.int8(0), tensor.shape) for tensor in self.tensors)).shape

    @property
    def has_codes(self) -> bool:
        return len(self.tensors) == 1 and can_split(self.tensors[0])

    def codes(self) -> BlockCodes | None:
        """The elements as codes of few bits with scales; None if the file does not hold codes.

        The conversions of GGUF files move whole rows, so they apply to codes and scales alike.
        """
        found = block_codes(self.tensors[0])
        if found is None or not self.has_codes:
            return None
        offsets = None if found.offsets is None else self.convert(found.offsets)
        return replace(found, codes=self.convert(found.codes), scales=self.convert(found.scales), offsets=offsets)

    def rows(self, numbers: NDArray[np.int64]) -> Array:
        """Rows of the elements, float32: only these are read from the file if the parameter is the tensor itself."""
        if self.convert is not _unchanged:
            return np.asarray(self()[numbers])
        (tensor,) = self.tensors
        rows = tensor.data.reshape(tensor.shape[0], -1)[numbers]
        part = replace(tensor, shape=(len(numbers), *tensor.shape[1:]), data=rows.reshape(-1))
        return part.array().astype(np.float32, copy=False)


def _shape_of(stored: StoredWeight, where: str) -> tuple[int, ...]:
    """The shape of a parameter. ModelError if the shapes of its tensors do not fit its conversion."""
    for tensor in stored.tensors:
        tensor.check()
    try:
        return stored.shape
    except ValueError:
        tensor = stored.tensors[0]
        message = f"tensor '{tensor.name}' has shape {list(tensor.shape)}, which does not fit the settings"
        raise ModelError(message, where=where) from None


def part(index: int, parts: int) -> Callable[[Array], Array]:
    """The `index`-th of so many equal parts along the first axis. ValueError if the axis does not split evenly."""
    return lambda array: np.split(array, parts)[index]


def stacked(parts: int) -> Callable[..., Array]:
    """Joins matrices to one [experts, ...] for each expert: those of the first part of all experts, then the next part.

    The parts of an expert follow each other along its rows. ValueError for matrices of different shapes.
    """

    def convert(*arrays: Array) -> Array:
        each = len(arrays) // parts
        return np.concatenate([np.stack(arrays[at : at + each]) for at in range(0, len(arrays), each)], axis=1)

    return convert


def joined_rows(*arrays: Array) -> Array:
    """Stacks of matrices as one stack of higher matrices, whose rows are those of the first stack, then of the next."""
    return np.concatenate(arrays, axis=1) if len(arrays) > 1 else arrays[0]


def joined_halves(heads: int) -> Callable[[Array], Array]:
    """Rows of rotary heads from llama.cpp's order to Hugging Face's.

    llama.cpp rotates adjacent elements of a head. Here the elements of a pair are half a head apart.
    """

    def convert(array: Array) -> Array:
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return convert
