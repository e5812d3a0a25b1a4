"""What a caller gives `fit` to learn: an architecture's name, an ONNX file, a graph, or a module of `core.nn`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from core import nn
from core.ir.graph import Graph
from core.ir.types import TensorType, symbol
from core.train.assembly import rows_to_learn
from core.train.data import Dataset
from core.train.recipe import Recipe, RecipeError
from core.train.zoo import ARCHITECTURES

Given: TypeAlias = (
    "str | os.PathLike[str] | Mapping[str, Any] | Graph | nn.Module | type[nn.Module] | None"  # what `fit` takes
)
First: TypeAlias = Callable[[Recipe, Dataset], bytes | Graph]  # a model with its first weights; bytes: an ONNX file

_NAME = "given"  # the file that a recipe has to name, in whose place the argument is
_EXPECTED = f"an architecture ({', '.join(ARCHITECTURES)}), an ONNX file, a core.Graph or a core.nn.Module"


@dataclass(frozen=True)
class Learner:
    """What learns. ``table`` is what a recipe says of it. ``first`` makes it, where no recipe could."""

    name: str
    table: dict[str, Any]
    first: First | None = None
    module: nn.Module | None = None


def learner_of(model: Given, table: Mapping[str, Any] | None, inputs: Mapping[str, str] | None) -> Learner:
    """Read the argument `model`. ``table`` is the recipe's own model, which an argument replaces, but for the settings
    that go with it; ``inputs`` are the types that a module is traced with. RecipeError for what is no model."""
    own = dict(table) if isinstance(table, Mapping) else {}
    if inputs is not None and not _is_module(model):
        raise RecipeError(f"inputs: says how a core.nn.Module is traced, and the model is {_kind(model)}")
    if model is None:
        if not own:
            raise RecipeError(f"model: expected {_EXPECTED}, as an argument or in the recipe")
        return Learner(str(own.get("architecture", "training")), own)
    if isinstance(model, Mapping):
        return Learner(str(model.get("architecture", "training")), dict(model))
    if isinstance(model, str) and model in ARCHITECTURES:
        return Learner(model, own if own.get("architecture") == model else {"architecture": model})
    return _made(model, own if own.keys() & {"onnx", "parent"} else {"onnx": _NAME}, inputs)


def _made(model: Given, table: dict[str, Any], inputs: Mapping[str, str] | None) -> Learner:
    """A model that exists, or that Python code makes."""
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        if not path.is_file():
            raise RecipeError(f"model: '{model}' is no file and no architecture ({', '.join(ARCHITECTURES)})")
        return Learner(path.stem, table, lambda what, dataset: path.read_bytes())
    if isinstance(model, Graph):
        return Learner(model.name or "graph", table, lambda what, dataset: model)
    if isinstance(model, nn.Module):
        name, module = type(model).__name__.lower(), model
        return Learner(name, table, lambda what, dataset: _traced(module, what, dataset, inputs), module)
    if isinstance(model, type) and issubclass(model, nn.Module):
        kind = model
        return Learner(
            kind.__name__.lower(), table, lambda what, dataset: _traced(_new(kind, what), what, dataset, inputs)
        )
    raise RecipeError(f"model: expected {_EXPECTED}, got {_kind(model)}")


def _is_module(model: object) -> bool:
    return isinstance(model, nn.Module) or (isinstance(model, type) and issubclass(model, nn.Module))


def _kind(model: object) -> str:
    return f"the class {model.__qualname__}" if isinstance(model, type) else type(model).__qualname__


def _new(kind: type[nn.Module], what: Recipe) -> nn.Module:
    """An object of a class, with first weights that the recipe's seed decides."""
    try:
        with nn.seeded(what.seed):
            return kind()
    except TypeError as error:
        raise RecipeError(f"model: the class {kind.__qualname__} makes no object ({error}); give an object") from error


def _traced(module: nn.Module, what: Recipe, dataset: Dataset, inputs: Mapping[str, str] | None) -> Graph:
    """A module as a graph. Without ``inputs`` it takes what an architecture would: rows of the data, made float32,
    channels first, while tokens stay whole numbers; and that becomes part of the model."""
    ready, output = rows_to_learn(what, dataset)
    if inputs is not None:
        return nn.trace(module, inputs, [output])
    batch = symbol("batch")
    types = {name: TensorType(row.dtype, (batch, *row.shape)) for name, row in ready.rows.items()}
    graph = nn.trace(module, types, [output])
    return graph if what.preprocess else ready.write(graph)  # which a recipe's preprocessing does later
