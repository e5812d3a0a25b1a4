"""Fills a decoder with the weights of a checkpoint, whose tensors have other names and layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Array
from lathe.core.language.stored_tensor import StoredTensor, element_count
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
    """Set the parameters of `module` to the tensors that `source` names for them, as float32.

    A tensor of float32 whose source does not change it is not copied. `ignored` matches the names of tensors that no
    parameter needs. ModelError for a tensor that is missing, has another shape, or belongs to no parameter.
    """
    used: set[str] = set()
    for path, parameter in module.named_state():
        wanted = source(path)
        for name in wanted.names:
            if name not in tensors:
                raise ModelError(f"tensor '{name}' is missing, which parameter '{path}' needs", where=where)
        used.update(wanted.names)
        array = _converted(wanted, [tensors[name] for name in wanted.names], where)
        if array.shape != parameter.data.shape:
            message = f"tensor '{wanted.name}' gives parameter '{path}' the shape {list(array.shape)}"
            raise ModelError(f"{message}, expected {list(parameter.data.shape)}", where=where)
        parameter.data = array
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


def _converted(source: WeightSource, tensors: Sequence[StoredTensor], where: str) -> Array:
    """The elements of a parameter: float32, contiguous and read-only."""
    try:
        array = np.ascontiguousarray(source.convert(*(tensor.array() for tensor in tensors)), np.float32)
    except ValueError:
        shape = list(tensors[0].shape)
        raise ModelError(
            f"tensor '{tensors[0].name}' has shape {shape}, which does not fit the settings", where=where
        ) from None
    array.setflags(write=False)
    return array


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
