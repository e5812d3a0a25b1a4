"""Compares the outputs of Lathe (interpreted and compiled) and ONNX Runtime with those of the model's framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import lathe


def agrees(data: bytes, feeds: Mapping[str, Any], expected: Sequence[Any], rtol: float = 1e-4) -> None:
    """AssertionError if an output differs in type, shape, or by more than `rtol` of its largest element."""
    with lathe.compile(data, threads=1, tune="off") as session:
        answers = {"interpreted": lathe.interpret(lathe.load(data), feeds), "compiled": session.run(feeds)}
    theirs = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    answers["onnxruntime"] = dict(
        zip([output.name for output in theirs.get_outputs()], theirs.run(None, dict(feeds)), strict=True)
    )
    for who, outputs in answers.items():
        assert len(outputs) == len(expected), who
        for (name, got), wanted in zip(outputs.items(), expected, strict=True):
            same(got, wanted, rtol, f"{who}: {name}")


def same(got: Any, wanted: Any, rtol: float, label: str) -> None:
    """AssertionError if two results differ; maps are compared by key, sequences element by element."""
    if isinstance(wanted, list):
        assert len(got) == len(wanted), label
        for mine, other in zip(got, wanted, strict=True):
            same(mine, other, rtol, label)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), label
        same(np.array([got[key] for key in wanted]), np.array(list(wanted.values())), rtol, label)
    else:
        assert (got.dtype.kind, got.shape) == (wanted.dtype.kind, wanted.shape), label
        if wanted.dtype.kind != "f":
            np.testing.assert_array_equal(got, wanted, label)
        else:
            largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-3)
            np.testing.assert_allclose(got, wanted, rtol, rtol * largest, err_msg=label)


def folder_agrees(folder: Path) -> None:
    """The same for a folder that a maker script wrote: model.onnx, inputs.npz and outputs.npz, in order."""
    data = (folder / "model.onnx").read_bytes()
    inputs, outputs = _arrays(folder / "inputs.npz"), _arrays(folder / "outputs.npz")
    graph = lathe.load(data)
    agrees(data, dict(zip([value.name for value in graph.inputs], inputs, strict=True)), outputs)


def _arrays(path: Path) -> list[Any]:
    with np.load(path) as file:
        return [file[f"arr_{index}"] for index in range(len(file.files))]
