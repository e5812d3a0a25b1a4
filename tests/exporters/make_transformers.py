"""Exports models of Transformers and torchvision with both exporters of PyTorch, in an interpreter that has them.

    python make_transformers.py FOLDER [NAME ...]

writes FOLDER/<name>.<exporter>/{model.onnx, feeds-<i>.npz, outputs-<i>.npz, lengths-<i>.npz}. The last ones have other
lengths.

Weights are random (see lively.py), sizes are small. Outputs are PyTorch's own. `dynamo` leaves each free dimension
without a name (`Dim.DYNAMIC`), `torchscript` names them: so people export them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import other_cases
import picture_cases  # first: it declares what Transformers may import
import text_cases
import torch
from random_weights import is_nearly_constant, make_lively
from torch import Tensor, nn
from transformers_case import CASES, Case


class Exported(nn.Module):
    """A model whose outputs are plain tensors."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__()
        self.model, self.names, self.call = model, list(case.axes), case.forward

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, tensors, strict=True))
        return tuple(_tensors(self.call(self.model, **given) if self.call else self.model(**given)))


def _tensors(result: Any) -> list[Tensor]:
    """The tensors of a result, without those that only repeat hidden layers."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = [value for name, value in result.items() if name not in ("past_key_values", "hidden_states")]
    return [tensor for item in result or () if item is not None for tensor in _tensors(item)]


def write(folder: Path, name: str, exporter: str) -> None:
    """Write one model. ValueError if its outputs are nearly constant."""
    case = CASES[name]
    torch.manual_seed(7)
    model = Exported(case, case.build()).eval()
    example = tuple(case.inputs(*case.example).values())
    make_lively(model, example)
    with torch.no_grad(), TemporaryDirectory(dir=folder) as unfinished:
        place = Path(unfinished)
        _export(model, example, case, exporter, place / "model.onnx")
        for index, sizes in enumerate(case.sizes):
            given = case.inputs(*sizes)
            _save(place / f"feeds-{index}.npz", given)
            outputs = model(*given.values())
            if is_nearly_constant(outputs):
                raise ValueError(f"an output for {sizes} is next to nothing, or nearly the same everywhere")
            np.savez(place / f"outputs-{index}.npz", *[tensor.numpy() for tensor in outputs])
        for index, sizes in enumerate(case.lengths):
            _save(place / f"lengths-{index}.npz", case.inputs(*sizes))
        target = folder / f"{name}.{exporter}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(place, target)


def _export(model: Exported, example: tuple[Tensor, ...], case: Case, exporter: str, path: Path) -> None:
    if exporter == "dynamo":
        free = torch.export.Dim.DYNAMIC
        shapes = tuple(dict.fromkeys(axes, free) for axes in case.axes.values())
        program = torch.onnx.export(
            model, example, dynamo=True, dynamic_shapes=(shapes,), input_names=list(case.axes), verbose=False
        )
        program.save(path, external_data=False)
        return
    torch.onnx.export(
        model,
        example,
        path,
        dynamo=False,
        input_names=list(case.axes),
        output_names=[f"output_{index}" for index in range(len(model(*example)))],
        dynamic_axes={each: dict(free) for each, free in case.axes.items()},
        opset_version=17,
    )


def _save(path: Path, given: Mapping[str, Tensor]) -> None:
    np.savez(path, **{key: tensor.numpy() for key, tensor in given.items()})


def main(folder: Path, names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    text_cases.add_all()
    picture_cases.add_all()
    other_cases.add_all()
    for name in names or sorted(CASES.keys() - text_cases.LARGE - picture_cases.LARGE):
        for exporter in CASES[name].exporters:
            try:
                with redirect_stdout(None):  # the exporters talk
                    write(folder, name, exporter)
            except Exception as error:
                shutil.rmtree(folder / f"{name}.{exporter}", ignore_errors=True)  # of a run before
                print(
                    f"{name}.{exporter}: {type(error).__name__}: {' '.join(str(error).split())[-200:]}", file=sys.stderr
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the models go")
    parser.add_argument("names", nargs="*", help="of models; all but the large ones without any")
    chosen = parser.parse_args()
    main(chosen.folder, chosen.names)
