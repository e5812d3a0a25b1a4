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
from lathe.core.language.stored_tensor import StoredTensor, element_count
from lathe.core.nn.module import Module

_NOTHING = np.zeros((), np.dtype([]))  # an element of no bytes: arrays of it have a shape, and cost no memory


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
        first, *others = (tensors[name] for name in wanted.names)
        stored = StoredWeight(first, wanted.convert, tuple(others))
        shape = _shape_of(stored, where)
        if shape != parameter.data.shape:
            message = f"tensor '{wanted.name}' gives parameter '{path}' the shape {list(shape)}"
            raise ModelError(f"{message}, expected {list(parameter.data.shape)}", where=where)
        parameter.defer(stored)
    unused = sorted(name for name in tensors if name not in used and not ignored.fullmatch(name))
    if unused:
        message = f"tensor '{unused[0]}' belongs to no parameter of the model ({len(unused)} such tensors)"
        raise ModelError(message, where=where)


def check_sizes(largest: int, layers: int, tensors: Mapping[str, StoredTensor], where: str) -> None:
    """ModelError if files with these tensors cannot have a weight of `largest` elements, and one in each of the layers.

    Called before a module is made, so that its size is bounded by that of the files.
    """
    most = max((element_count(each.shape, each.name, where) for each in tensors.values()), default=0)
    if largest > most or layers > len(tensors):
        raise ModelError(
            f"needs a weight of {largest} elements, and one in each of {layers} layers; "
            f"the largest of {len(tensors)} tensors has {most} elements",
            where=where,
        )


@dataclass(frozen=True)
class StoredWeight:
    """A parameter in a checkpoint: calling it reads its elements, as float32, contiguous and read-only.

    `convert` makes it of the arrays of `tensor` and of `others`, see `WeightSource`.
    """

    tensor: StoredTensor
    convert: Callable[..., Array] = _unchanged
    others: tuple[StoredTensor, ...] = ()

    def __call__(self) -> Array:
        array = np.ascontiguousarray(self.convert(*(each.array() for each in self.tensors)), np.float32)
        array.setflags(write=False)
        return array

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        return (self.tensor, *self.others)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter. ValueError if the tensors' shapes do not fit the conversion."""
        return self.convert(*(np.broadcast_to(_NOTHING, each.shape) for each in self.tensors)).shape

    @property
    def has_codes(self) -> bool:
        return not self.others and can_split(self.tensor)

    def codes(self) -> BlockCodes | None:
        """The elements as codes of few bits with scales; None if the file does not hold codes.

        The conversions of GGUF files move whole rows, so they apply to codes and scales alike.
        """
        found = None if self.others else block_codes(self.tensor)
        if found is None:
            return None
        offsets = None if found.offsets is None else self.convert(found.offsets)
        return replace(found, codes=self.convert(found.codes), scales=self.convert(found.scales), offsets=offsets)

    def rows(self, numbers: NDArray[np.int64]) -> Array:
        """Rows of the elements, float32: only these are read from the file if the parameter is the tensor itself."""
        if self.convert is not _unchanged:
            return np.asarray(self()[numbers])
        rows = self.tensor.data.reshape(self.tensor.shape[0], -1)[numbers]
        part = replace(self.tensor, shape=(len(numbers), *self.tensor.shape[1:]), data=rows.reshape(-1))
        return part.array().astype(np.float32, copy=False)


def _shape_of(stored: StoredWeight, where: str) -> tuple[int, ...]:
    """The shape of a parameter. ModelError if the tensor's shape does not fit its conversion."""
    tensor = stored.tensor
    for each in stored.tensors:
        each.check()
    try:
        return stored.shape
    except ValueError:
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
