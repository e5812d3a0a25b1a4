"""What a compiled model consists of, and how a bundle (see bundle.py) holds it.

    facts: schema, target, compiler, LLVM, description, options, findings of the tuner, plan
    code       object files one after the other
    weights    the weight block
    fallbacks  graph and constants of nodes that run on the reference
    states     initial values of the model's state
    source     the graph itself, only for models compiled per shape

An artifact is used only on the kind of machine, and by the version of the compiler, that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from core.codegen.jit import Library, compiler_version, llvm_version
from core.codegen.target import host
from core.errors import ArtifactError
from core.ir.graph import Array, Graph, Value
from core.ir.text import Weights, parse_graph, print_graph
from core.ir.types import DType, TensorType, parse_type
from core.plan.plan import Plan
from core.plan.serialize import plan_from_json, plan_to_json
from core.runtime.bundle import Bundle, Chunks, write_bundle
from core.runtime.executable import Executable
from core.runtime.session import BatchInfo, Description, PackInfo

SCHEMA = 3


@dataclass(frozen=True)
class Compiled:
    """What compiling produced for one set of shapes."""

    plan: Plan
    objects: dict[str, bytes]  # symbol -> object file
    weights: Callable[[], Chunks]  # the weight block, piece by piece
    states: Mapping[str, Array] = field(default_factory=dict)  # initial values
    findings: Mapping[str, str] = field(default_factory=dict)  # what the tuner chose: problem -> kernel


@dataclass(frozen=True)
class Stored:
    """What an artifact holds: code that is ready to run, or the graph of a model that is compiled per shape, with the
    options to use. `digest` identifies the contents."""

    description: Description
    content: Executable | Graph
    options: dict[str, Any]
    digest: str


def save(
    path: Path, description: Description, options: dict[str, Any], content: Compiled | Graph, durable: bool = True
) -> None:
    """Write an artifact: compiled code, or for a model compiled per shape its graph. Replaces what was there.

    `durable`: see `write_bundle`.
    """
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "target": host().key,
        "compiler": compiler_version(),
        "llvm": llvm_version(),
        "description": _description_to_json(description),
        "options": options,
    }
    sections: dict[str, Chunks] = {}
    if isinstance(content, Compiled):
        facts["findings"] = dict(sorted(content.findings.items()))
        facts["plan"] = plan_to_json(content.plan)
        facts["code"] = _places(content.objects)
        sections["code"] = [content.objects[symbol] for symbol in sorted(content.objects)]
        sections["weights"] = content.weights()
        sections |= _graph_sections("fallbacks", content.plan.fallbacks)
        sections |= _graph_sections("states", _as_constants(content.states))
    else:
        sections |= _graph_sections("source", content)
    write_bundle(path, facts, sections, durable)


def load(path: Path, threads: int) -> Stored:
    """What is in an artifact; code runs with up to `threads` threads, but no more than it was compiled for.

    ArtifactError when the file is missing, damaged, not this user's, or made for another target or version.
    """
    with Bundle(path) as bundle:
        _check_origin(bundle)
        description = _description_from_json(bundle.facts["description"])
        content = (
            _executable(bundle, threads, description.batching.batchable)
            if "plan" in bundle.facts
            else _read_graph(bundle, "source")
        )
        return Stored(description, content, dict(bundle.facts["options"]), bundle.digest)


def load_executable(path: Path, threads: int) -> Executable:
    """The code of an artifact without a session around it. ArtifactError as in `load`, and where it holds a graph."""
    with Bundle(path) as bundle:
        _check_origin(bundle)
        if "plan" not in bundle.facts:
            raise ArtifactError(f"{bundle.name} holds a model that is compiled per shape, expected compiled code")
        description = _description_from_json(bundle.facts["description"])
        return _executable(bundle, threads, description.batching.batchable)


def _check_origin(bundle: Bundle) -> None:
    for name, expected in (("schema", SCHEMA), ("target", host().key), ("compiler", compiler_version())):
        found = bundle.facts.get(name)
        if found != expected:
            raise ArtifactError(f"{bundle.name} was made for {name} {found!r}, this is {expected!r}; compile it again")


def _executable(bundle: Bundle, threads: int, independent: bool) -> Executable:
    plan = plan_from_json(bundle.facts["plan"], _read_graph(bundle, "fallbacks"))
    code = bundle.section("code")
    objects = {symbol: bytes(code[start : start + size]) for symbol, (start, size) in bundle.facts["code"].items()}
    loaded = Executable(plan, Library(objects), bundle.section("weights"), threads, independent)
    for value, initial in _read_graph(bundle, "states").constants.items():
        loaded.set_state(value.name, initial)
    return loaded


def _places(objects: dict[str, bytes]) -> dict[str, tuple[int, int]]:
    """Where each object file starts in the code section, and its size."""
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for symbol in sorted(objects):
        places[symbol] = (at, len(objects[symbol]))
        at += len(objects[symbol])
    return places


def _as_constants(arrays: Mapping[str, Array]) -> Graph:
    """A graph that only holds arrays."""
    constants = {
        Value(name, TensorType(DType.from_numpy(array.dtype), array.shape)): array for name, array in arrays.items()
    }
    return Graph("states", constants=constants)


def _graph_sections(name: str, graph: Graph) -> dict[str, Chunks]:
    weights = Weights()
    text = print_graph(graph, weights)
    return {f"{name}.lir": [text.encode()], f"{name}.bin": weights.chunks}


def _read_graph(bundle: Bundle, name: str) -> Graph:
    return parse_graph(bytes(bundle.section(f"{name}.lir")).decode(), bundle.section(f"{name}.bin"))


def _description_to_json(description: Description) -> dict[str, Any]:
    batching = description.batching
    return {
        "name": description.name,
        "inputs": {name: str(type_) for name, type_ in description.inputs.items()},
        "outputs": {name: str(type_) for name, type_ in description.outputs.items()},
        "batching": [batching.batchable, batching.reason, batching.symbol],
        "max_batch": description.max_batch,
        "packing": astuple(description.packing) if description.packing is not None else None,
    }


def _description_from_json(data: dict[str, Any]) -> Description:
    try:
        return Description(
            name=str(data["name"]),
            inputs={name: parse_type(text) for name, text in data["inputs"].items()},
            outputs={name: parse_type(text) for name, text in data["outputs"].items()},
            batching=BatchInfo(*data["batching"]),
            max_batch=int(data["max_batch"]),
            packing=PackInfo(*data["packing"]) if data["packing"] is not None else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"description is malformed: {type(error).__name__} {error}") from error
