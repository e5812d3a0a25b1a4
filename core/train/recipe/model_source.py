"""Reads the argument `model` of `fit`: an architecture, an ONNX file, a graph, a module, or a recipe's table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lathe import nn
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType, symbol
from lathe.core.train.data import Dataset
from lathe.core.train.recipe.recipe import Recipe, RecipeError
from lathe.core.train.recipe.training_setup import plan_model_rows
from lathe.core.train.zoo import ARCHITECTURES

# The types of the argument `model` of `fit`.
ModelArgument: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Graph | nn.Module | type[nn.Module] | None"
# Makes the model with its initial weights; bytes are an ONNX file.
ModelFactory: TypeAlias = Callable[[Recipe, Dataset], bytes | Graph]

_NAME = "given"  # placeholder for the recipe's key `model.onnx`, which must name a file
_EXPECTED = f"an architecture ({', '.join(ARCHITECTURES)}), an ONNX file, a lathe.Graph or a lathe.core.nn.Module"


@dataclass(frozen=True)
class ModelSource:
    """A model to train, as the argument `model` of `fit` names it.

    `name` is the default name of the training's folder. `table` is the recipe's table `model`. `first` makes the model
    with its initial weights from recipe and dataset; None if the table alone says how. If the caller passed a module
    object, `module` is that object, which gets the trained weights.
    """

    name: str
    table: dict[str, Any]
    first: ModelFactory | None = None
    module: nn.Module | None = None


def model_source_of(
    model: ModelArgument, table: Mapping[str, Any] | None, inputs: Mapping[str, str] | None
) -> ModelSource:
    """Read the argument `model` of `fit`; None stands for the model that `table` describes.

    `table` is the recipe's table `model`, which the argument replaces; settings in it that fit the argument stay.
    `inputs` are the types with which a module is traced. RecipeError for a value that is not a model, for None without
    a table, and for `inputs` with a model that is no module.
    """
    own = dict(table) if isinstance(table, Mapping) else {}
    if inputs is not None and not _is_module(model):
        raise RecipeError(f"inputs: expected a lathe.core.nn.Module as model, got {_kind(model)}")
    if model is None:
        if not own:
            raise RecipeError(f"model: expected {_EXPECTED}, as an argument or in the recipe")
        return ModelSource(str(own.get("architecture", "training")), own)
    if isinstance(model, Mapping):
        return ModelSource(str(model.get("architecture", "training")), dict(model))
    if isinstance(model, str) and model in ARCHITECTURES:
        return ModelSource(model, own if own.get("architecture") == model else {"architecture": model})
    return _source_of_object(model, own if own.keys() & {"onnx", "parent"} else {"onnx": _NAME}, inputs)


def _source_of_object(model: ModelArgument, table: dict[str, Any], inputs: Mapping[str, str] | None) -> ModelSource:
    """The source for a file, a graph, a module or a class of modules. RecipeError for another value.

    `table` is the recipe's table `model` for it.
    """
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        if not path.is_file():
            raise RecipeError(f"model: '{model}' is neither a file nor an architecture ({', '.join(ARCHITECTURES)})")
        return ModelSource(path.stem, table, lambda recipe, dataset: path.read_bytes())
    if isinstance(model, Graph):
        return ModelSource(model.name or "graph", table, lambda recipe, dataset: model)
    if isinstance(model, nn.Module):
        name, module = type(model).__name__.lower(), model
        return ModelSource(name, table, lambda recipe, dataset: _trace(module, recipe, dataset, inputs), module)
    if isinstance(model, type) and issubclass(model, nn.Module):
        kind = model
        return ModelSource(
            kind.__name__.lower(),
            table,
            lambda recipe, dataset: _trace(_make_module(kind, recipe), recipe, dataset, inputs),
        )
    raise RecipeError(f"model: expected {_EXPECTED}, got {_kind(model)}")


def _is_module(model: object) -> bool:
    return isinstance(model, nn.Module) or (isinstance(model, type) and issubclass(model, nn.Module))


def _kind(model: object) -> str:
    return f"the class {model.__qualname__}" if isinstance(model, type) else type(model).__qualname__


def _make_module(kind: type[nn.Module], recipe: Recipe) -> nn.Module:
    """An object of a module class, with initial weights drawn with the recipe's seed.

    RecipeError if the constructor raises a TypeError, as one that needs arguments does.
    """
    try:
        with nn.seeded(recipe.seed):
            return kind()
    except TypeError as error:
        raise RecipeError(f"model: cannot make an object of class {kind.__qualname__}: {error}; pass one") from error


def _trace(module: nn.Module, recipe: Recipe, dataset: Dataset, inputs: Mapping[str, str] | None) -> Graph:
    """A module as a graph with the recipe's output name.

    Without `inputs` the module takes what an architecture would: rows of the data as float32, channels first; tokens
    stay integers. The conversion from the rows of the data becomes part of the graph: here or, if the recipe has
    preprocessing, in `set_up_training`. TraceError or ModelError if the module cannot be traced, DataError for columns
    that do not fit the recipe.
    """
    ready, output = plan_model_rows(recipe, dataset)
    if inputs is not None:
        return nn.trace(module, inputs, [output])
    batch = symbol("batch")
    types = {name: TensorType(row.dtype, (batch, *row.shape)) for name, row in ready.rows.items()}
    graph = nn.trace(module, types, [output])
    return graph if recipe.preprocess else ready.write(graph)  # with preprocessing, `set_up_training` adds it
