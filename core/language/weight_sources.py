"""Fills a decoder with the weights of a checkpoint, whose tensors have other names and layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Array
from lathe.core.language.stored_tensor import StoredTensor
from lathe.core.nn.module import Module


def _unchanged(array: Array) -> Array:
    return array


@dataclass(frozen=True)
class WeightSource:
    """Where a parameter is in a checkpoint: the stored tensor's name, and how its elements become the parameter."""

    name: str
    convert: Callable[[Array], Array] = _unchanged


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
        if wanted.name not in tensors:
            raise ModelError(f"tensor '{wanted.name}' is missing, which parameter '{path}' needs", where=where)
        used.add(wanted.name)
        array = _converted(wanted, tensors[wanted.name], where)
        if array.shape != parameter.data.shape:
            message = f"tensor '{wanted.name}' gives parameter '{path}' the shape {list(array.shape)}"
            raise ModelError(f"{message}, expected {list(parameter.data.shape)}", where=where)
        parameter.data = array
    unused = sorted(name for name in tensors if name not in used and not ignored.fullmatch(name))
    if unused:
        message = f"tensor '{unused[0]}' belongs to no parameter of the decoder ({len(unused)} such tensors)"
        raise ModelError(message, where=where)


def _converted(source: WeightSource, tensor: StoredTensor, where: str) -> Array:
    """The elements of a parameter: float32, contiguous and read-only."""
    try:
        array = np.ascontiguousarray(source.convert(tensor.array()), np.float32)
    except ValueError:
        shape = list(tensor.shape)
        raise ModelError(
            f"tensor '{tensor.name}' has shape {shape}, which does not fit the settings", where=where
        ) from None
    array.setflags(write=False)
    return array


def part(index: int, parts: int) -> Callable[[Array], Array]:
    """The `index`-th of so many equal parts along the first axis. ValueError if the axis does not split evenly."""
    return lambda array: np.split(array, parts)[index]


def joined_halves(heads: int) -> Callable[[Array], Array]:
    """Rows of rotary heads from llama.cpp's order to Hugging Face's.

    llama.cpp rotates adjacent elements of a head. Here the elements of a pair are half a head apart.
    """

    def convert(array: Array) -> Array:
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return convert
