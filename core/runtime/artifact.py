"""Compiled artifacts on disk: a folder that `load` turns into a running session without compiling.

    artifact.json   description, plan, target, and the SHA-256 of every other file
    code.bin        object files one after the other
    weights.bin     the weight block, memory-mapped when loaded
    fallbacks.*     graph and constants of nodes that run on the reference
    states.*        initial values of the model's state
    source.*        the graph itself, only for models compiled per shape

The code in an artifact is native code. It is used only when this user owns the files, nobody else can write to them,
their digests hold, and they were made for this machine's target by this version of the generators.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.codegen.jit import Library, compiler_version, llvm_version
from core.codegen.target import host
from core.errors import ArtifactError
from core.ir.graph import Array, Graph, Value
from core.ir.text import Weights, parse_graph, print_graph
from core.ir.types import DType, TensorType, parse_type
from core.plan.plan import Plan
from core.plan.serialize import plan_from_json, plan_to_json
from core.runtime.executable import Executable
from core.runtime.session import BatchInfo, Description, Session
from core.runtime.shapes import Binding

SCHEMA = 2
_INDEX = "artifact.json"
_LARGEST_INDEX = 64 << 20


# Compiles a stored graph with its stored options for one set of shapes; whether rows may share a run is stored too.
Specialise: TypeAlias = Callable[[Graph, dict[str, Any], BatchInfo, Binding], Executable]


@dataclass(frozen=True)
class Compiled:
    """What compiling produced for one set of shapes."""

    plan: Plan
    objects: dict[str, bytes]  # symbol -> object file
    weights: NDArray[np.uint8]
    states: Mapping[str, Array] = field(default_factory=dict)  # initial values


def save(folder: Path, description: Description, options: dict[str, Any], content: Compiled | Graph) -> None:
    """Write an artifact into a new folder: compiled code, or for a model compiled per shape its graph."""
    folder.mkdir(mode=0o700, parents=True)
    files: dict[str, bytes | memoryview] = {}
    index: dict[str, Any] = {
        "schema": SCHEMA,
        "target": host().key,
        "compiler": compiler_version(),
        "llvm": llvm_version(),
        "description": _description_to_json(description),
        "options": options,
    }
    if isinstance(content, Compiled):
        index["plan"] = plan_to_json(content.plan)
        index["code"], files["code.bin"] = _join(content.objects)
        files["weights.bin"] = content.weights.data
        _add_graph(files, "fallbacks", content.plan.fallbacks)
        _add_graph(files, "states", _as_constants(content.states))
    else:
        _add_graph(files, "source", content)
    index["files"] = {name: {"bytes": len(data), "sha256": _digest(data)} for name, data in files.items()}
    for name, data in files.items():
        _write(folder / name, data)
    _write(folder / _INDEX, json.dumps(index, indent=1).encode())


def load(folder: Path, threads: int, specialise: Specialise) -> Session:
    """A session from an artifact, run by up to `threads` threads, but no more than it was compiled for.

    `specialise` compiles further shapes of a model that needs it.

    ArtifactError when the folder is missing, damaged, not this user's, or made for another target or version.
    """
    index = _read_index(folder)
    for name, expected in (("schema", SCHEMA), ("target", host().key), ("compiler", compiler_version())):
        if index.get(name) != expected:
            made_for = f"{name} {index.get(name)!r}"
            raise ArtifactError(f"artifact was made for {made_for}, this is {expected!r}; compile it again")
    description = _description_from_json(index["description"])
    if "plan" not in index:
        source = parse_graph(_text(folder, index, "source.lir"), _bytes(folder, index, "source.bin"))
        options = dict(index["options"])
        return Session(description, lambda binding: specialise(source, options, description.batching, binding))
    fallbacks = parse_graph(_text(folder, index, "fallbacks.lir"), _bytes(folder, index, "fallbacks.bin"))
    plan = plan_from_json(index["plan"], fallbacks)
    code = _bytes(folder, index, "code.bin")
    objects = {symbol: bytes(code[start : start + size]) for symbol, (start, size) in index["code"].items()}
    weights = _bytes(folder, index, "weights.bin")
    fixed = Executable(plan, Library(objects), weights, threads, description.batching.batchable)
    states = parse_graph(_text(folder, index, "states.lir"), _bytes(folder, index, "states.bin"))
    for value, initial in states.constants.items():
        fixed.set_state(value.name, initial)
    return Session(description, fixed=fixed)


def _join(objects: dict[str, bytes]) -> tuple[dict[str, tuple[int, int]], bytes]:
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for symbol in sorted(objects):
        places[symbol] = (at, len(objects[symbol]))
        at += len(objects[symbol])
    return places, b"".join(objects[symbol] for symbol in sorted(objects))


def _as_constants(arrays: Mapping[str, Array]) -> Graph:
    """A graph that only holds arrays."""
    constants = {
        Value(name, TensorType(DType.from_numpy(array.dtype), array.shape)): array for name, array in arrays.items()
    }
    return Graph("states", constants=constants)


def _add_graph(files: dict[str, bytes | memoryview], name: str, graph: Graph) -> None:
    weights = Weights()
    files[f"{name}.lir"] = print_graph(graph, weights).encode()
    files[f"{name}.bin"] = weights.tobytes()


def _write(path: Path, data: bytes | memoryview) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_index(folder: Path) -> dict[str, Any]:
    _check_owner(folder)
    path = folder / _INDEX
    _check_owner(path)
    if path.stat().st_size > _LARGEST_INDEX:
        raise ArtifactError(f"{_INDEX} is larger than {_LARGEST_INDEX} bytes")
    try:
        index = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{_INDEX} is unreadable: {type(error).__name__}") from error
    if not isinstance(index, dict) or not isinstance(index.get("files"), dict):
        raise ArtifactError(f"{_INDEX} is not an artifact's index")
    return index


def _bytes(folder: Path, index: dict[str, Any], name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A file of the artifact, mapped read-only, after its digest was checked."""
    entry = index["files"].get(name)
    path = folder / name
    _check_owner(path)
    if entry is None or path.stat().st_size != entry["bytes"]:
        raise ArtifactError(f"{name} does not have the size its index names")
    data = np.zeros(0, np.uint8) if entry["bytes"] == 0 else np.memmap(path, np.uint8, "r")
    if _digest(data.data) != entry["sha256"]:
        raise ArtifactError(f"{name} is damaged: its digest differs from the index")
    return data


def _text(folder: Path, index: dict[str, Any], name: str) -> str:
    return bytes(_bytes(folder, index, name)).decode()


def _check_owner(path: Path) -> None:
    try:
        status = os.lstat(path)
    except OSError as error:
        raise ArtifactError(f"{path.name} is missing") from error
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ArtifactError(f"{path.name} is a link, or can be written by other users")


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _description_to_json(description: Description) -> dict[str, Any]:
    batching = description.batching
    return {
        "name": description.name,
        "inputs": {name: str(type_) for name, type_ in description.inputs.items()},
        "outputs": {name: str(type_) for name, type_ in description.outputs.items()},
        "batching": [batching.batchable, batching.reason, batching.symbol],
        "max_batch": description.max_batch,
    }


def _description_from_json(data: dict[str, Any]) -> Description:
    try:
        return Description(
            name=str(data["name"]),
            inputs={name: parse_type(text) for name, text in data["inputs"].items()},
            outputs={name: parse_type(text) for name, text in data["outputs"].items()},
            batching=BatchInfo(*data["batching"]),
            max_batch=int(data["max_batch"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"description is malformed: {type(error).__name__} {error}") from error
