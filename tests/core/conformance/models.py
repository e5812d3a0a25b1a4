"""The models of ONNX's backend test suite themselves, with the data they are run on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package computes the expected values of its cases when it is imported
    from onnx.backend.test.loader import load_model_tests

KINDS = ("node", "real", "simple", "pytorch-converted", "pytorch-operator")


@dataclass(frozen=True)
class SuiteModel:
    """One model and its first set of data: inputs and expected outputs in the model's order.

    The models of whole networks have no data of their own: both are empty.
    """

    read: Callable[[], bytes]
    data: Callable[[], tuple[list[Any], list[Any]]]
    tolerances: tuple[float, float]  # relative, absolute
    has_data: bool = True


@cache
def suite_models() -> dict[str, SuiteModel]:
    """Every model of the suite by the name of its case."""
    return dict(sorted((name, model) for kind in KINDS for name, model in models_of_kind(kind).items()))


@cache
def models_of_kind(kind: str) -> dict[str, SuiteModel]:
    """The models of one of the `KINDS` by the name of the case. Only "node" takes time: its data are computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: _suite_model(case) for case in load_model_tests(kind=kind)}


def _suite_model(case: Any) -> SuiteModel:
    tolerances = (case.rtol, case.atol)
    if case.model is not None:
        inputs, outputs = (list(map(_array, side)) for side in case.data_sets[0])
        return SuiteModel(case.model.SerializeToString, lambda: (inputs, outputs), tolerances)
    if case.model_dir is None:
        path = Path(onnx.__file__).parent / case.url.removeprefix("onnx/")
        return SuiteModel(path.read_bytes, lambda: ([], []), tolerances, has_data=False)
    folder = Path(case.model_dir)
    return SuiteModel((folder / "model.onnx").read_bytes, lambda: _stored(folder), tolerances)


def _stored(folder: Path) -> tuple[list[Any], list[Any]]:
    graph = onnx.load(folder / "model.onnx").graph
    return _arrays(folder, "input", graph.input), _arrays(folder, "output", graph.output)


def _arrays(folder: Path, kind: str, infos: Any) -> list[Any]:
    count = len(list((folder / "test_data_set_0").glob(f"{kind}_*.pb")))
    return [_read(folder / "test_data_set_0" / f"{kind}_{i}.pb", infos[i].type) for i in range(count)]


def _read(path: Path, type_: onnx.TypeProto) -> Any:
    if type_.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    if type_.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(path.read_bytes()))
    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def _array(item: Any) -> Any:
    return numpy_helper.to_array(item) if isinstance(item, onnx.TensorProto) else item
