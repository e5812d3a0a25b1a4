"""The contents of a compiled model, and how a bundle (see bundle.py) holds them.

    facts: schema, target, compiler, LLVM, description, options, findings of the tuner, plan and device
    code       object files one after the other
    weights    the weight block, large spans of which have digests of their own (see weight_sharing.py)
    fallbacks  graph and constants of nodes that run on the reference
    states     initial values of the model's state
    source     the graph itself, only for models that are compiled per shape, and those of which some runs need other
               code (`Description.has_variants`)

Dynamic-shape code in parts has a plan and sections for each part, and a "script": the graph around them.

If nodes are placed on several devices, every part has a plan and sections of its own ("0.code", "1.code"), and the
facts include the wiring between them. The code of a GPU's part is binaries, up to sm_89 each with its PTX.

An artifact works only on the kind of machine, and with the version of the compiler, that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lathe.core.codegen.jit import compiler_version, llvm_version
from lathe.core.codegen.target import host
from lathe.core.errors import ArtifactError, ModelError
from lathe.core.ir.dim import parse_dim
from lathe.core.ir.graph import Array, Graph, Value
from lathe.core.ir.text import Weights, parse_graph, print_graph
from lathe.core.ir.types import DType, TensorType, parse_type
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.plan.placement import Crossing
from lathe.core.plan.serialize import plan_from_json, plan_to_json
from lathe.core.runtime.artifact.bundle import Bundle, Chunks, FileIdentity, write_bundle
from lathe.core.runtime.artifact.compiled import (
    Compiled,
    Partitioned,
    Split,
    make_partitioned_runner,
    make_placed_runner,
    make_runner,
)
from lathe.core.runtime.device.device import Device
from lathe.core.runtime.device.devices import HOST, open_device
from lathe.core.runtime.host.memory import release_pages
from lathe.core.runtime.host.weight_sharing import DeduplicatedWeights
from lathe.core.runtime.session.partitioned import PartitionedRunner
from lathe.core.runtime.session.placed import Wiring
from lathe.core.runtime.session.runner import Runner
from lathe.core.runtime.session.session import Description, PackInfo

SCHEMA = 11


@dataclass(frozen=True)
class LoadedArtifact:
    """A loaded artifact: code that is ready to run, or the graph of a model that is compiled per shape.

    `options`: those of its compilation. `digest` identifies the contents. `source` reads the graph from the file as it
    was at loading; it works only if `content` is a graph, or the description has variants. The owner closes `content`
    if it is a `Runner`.
    """

    description: Description
    content: Runner | Graph
    options: dict[str, Any]
    digest: str
    source: Callable[[], Graph]


def save(
    path: Path,
    description: Description,
    options: dict[str, Any],
    content: Compiled | Split | Partitioned | Graph,
    durable: bool = True,
    source: Graph | None = None,
) -> FileIdentity:
    """Write an artifact: compiled code, or for a model compiled per shape its graph. Replaces an existing file.

    `options`: as `Options.kept` gives them. `source`: the graph of compiled code, for runs with other inputs.
    `durable`: the file is on disk when this returns, even if the machine stops then. Returns the identity of the
    written file. OSError if the file cannot be written.
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
        facts |= _part_facts(content, sections, "")
    elif isinstance(content, Split):
        facts["findings"] = dict(sorted(item for part in content.parts for item in part.findings.items()))
        facts["parts"] = [_part_facts(part, sections, f"{index}.") for index, part in enumerate(content.parts)]
        facts["wiring"] = _wiring_to_json(content.wiring)
        sections |= _graph_sections("states", _as_constants(content.states))
        sections |= _graph_sections("constants", _as_constants(content.wiring.constants))
    elif isinstance(content, Partitioned):
        facts["parts"] = [_part_facts(part, sections, f"{index}.") for index, part in enumerate(content.parts)]
        supposed = list(map(str, content.supposed))
        facts["script"] = {"supposed": supposed, "notes": content.notes, "sizes": content.sizes}
        sections |= _graph_sections("script", content.script)
    else:
        source = content
    if source is not None:
        sections |= _graph_sections("source", source)
    return write_bundle(path, facts, sections, durable)


def _part_facts(part: Compiled, sections: dict[str, Chunks], prefix: str) -> dict[str, Any]:
    """The header entries of one part: its plan, code spans and device.

    Adds its sections to `sections`, with names that begin with `prefix`.
    """
    sections |= {
        f"{prefix}code": [part.objects[symbol] for symbol in sorted(part.objects)],
        f"{prefix}weights": part.weights(),
        **_graph_sections(f"{prefix}fallbacks", part.plan.fallbacks),
        **_graph_sections(f"{prefix}states", _as_constants(part.states)),
    }
    made_for = {} if part.device == HOST else {"made_for": open_device(part.device).target.key}
    facts = {"plan": plan_to_json(part.plan), "code": _object_spans(part.objects)}
    return {**facts, "device": part.device, **made_for}


def load(path: Path, threads: int, written: FileIdentity | None = None) -> LoadedArtifact:
    """The contents of an artifact; code runs with up to `threads` threads, but no more than it was compiled for.

    `written`: what `save` returned in this process. If the file is still the same, its digests are not checked.

    ArtifactError if the file is missing, damaged, a link, owned neither by this user nor by root, writable by its group
    or others, or made for another target or version. UnsupportedError, DeviceLost or DeviceMemoryError if a device of
    the code cannot be used or has too little memory.
    """
    bundle = Bundle(path, written)
    with ExitStack() as stack:
        stack.callback(bundle.close)
        _check_origin(bundle)
        description = _description_from_json(bundle.facts["description"])
        options = dict(bundle.facts["options"])
        runner = _runner(bundle, threads, description)
        if runner is None:
            graph = _read_graph(bundle, "source")
            return LoadedArtifact(description, graph, options, bundle.digest, lambda: graph)
        if description.has_variants:  # the file stays open, because its path may be replaced or deleted
            stack.pop_all()
            bundle.close_at_end()
        return LoadedArtifact(description, runner, options, bundle.digest, partial(_read_graph, bundle, "source"))


def load_graph(path: Path) -> Graph:
    """The graph of an artifact (its section `source`); its large constants are read-only views of the mapped file.

    ArtifactError if it holds no graph, or as for `load`.
    """
    with Bundle(path) as bundle:
        _check_origin(bundle)
        return _read_graph(bundle, "source")


def load_executable(path: Path, threads: int, written: FileIdentity | None = None) -> Runner:
    """The code of an artifact, ready to run in up to `threads` threads. `written` is as for `load`.

    ArtifactError if it holds a graph instead of code; otherwise the errors of `load`. The caller closes the result.
    """
    with Bundle(path, written) as bundle:
        _check_origin(bundle)
        found = _runner(bundle, threads, _description_from_json(bundle.facts["description"]))
        if found is None:
            raise ArtifactError(f"{bundle.name} holds a model that is compiled per shape, expected compiled code")
        return found


def _check_origin(bundle: Bundle) -> None:
    for name, expected in (("schema", SCHEMA), ("target", host().key), ("compiler", compiler_version())):
        found = bundle.facts.get(name)
        if found != expected and name == "target":
            raise ArtifactError(f"{bundle.name} was made for {host().difference_from(str(found))}; compile it again")
        if found != expected:
            raise ArtifactError(f"{bundle.name} was made for {name} {found!r}, this is {expected!r}; compile it again")


def _runner(bundle: Bundle, threads: int, description: Description) -> Runner | None:
    """The code in a bundle, ready to run; None if it holds only a graph, which is compiled per shape."""
    facts, independent, max_batch = bundle.facts, description.batching.is_divisible, description.max_batch
    if "plan" in facts:
        part, weights = _read_part(bundle, facts, "")
        return make_runner(part, threads, max_batch, independent, weights)
    if "parts" not in facts:
        return None
    read = [_read_part(bundle, each, f"{index}.") for index, each in enumerate(facts["parts"])]
    if "script" in facts:
        return _parts_runner(bundle, facts["script"], read, threads, max_batch)
    wiring = _wiring_from_json(facts["wiring"], _read_graph(bundle, "constants"))
    blocks = {id(part): weights for part, weights in read}
    content = Split(tuple(part for part, _ in read), wiring, _read_arrays(bundle, "states"))
    return make_placed_runner(content, lambda part: make_runner(part, threads, max_batch, False, blocks[id(part)]))


def _parts_runner(
    bundle: Bundle,
    facts: Mapping[str, Any],
    read: list[tuple[Compiled, DeduplicatedWeights]],
    threads: int,
    max_batch: int,
) -> PartitionedRunner:
    parts, supposed = tuple(part for part, _ in read), tuple(map(parse_dim, facts["supposed"]))
    script = _read_graph(bundle, "script")
    content = Partitioned(script, parts, supposed, tuple(facts["notes"]), tuple(facts["sizes"]))
    return make_partitioned_runner(content, threads, max_batch, [weights for _, weights in read])


def _read_part(bundle: Bundle, facts: Mapping[str, Any], prefix: str) -> tuple[Compiled, DeduplicatedWeights]:
    """The code of one device, and its weights, mapped from the file. `prefix`: the start of the names of its sections.

    ArtifactError if a section is damaged, or if the code cannot run on the device (see `_check_device`).
    """
    if facts["device"] != HOST:
        _check_device(bundle, facts["made_for"], open_device(facts["device"]))
    plan = plan_from_json(facts["plan"], _read_graph(bundle, f"{prefix}fallbacks"))
    code, block = bundle.section(f"{prefix}code"), bundle.section(f"{prefix}weights")
    objects = {symbol: bytes(code[start : start + size]) for symbol, (start, size) in facts["code"].items()}
    states = _read_arrays(bundle, f"{prefix}states")
    weights = DeduplicatedWeights(block, bundle.spans(f"{prefix}weights") if facts["device"] == HOST else ())
    return Compiled(plan, objects, lambda: [block.data], states, {}, facts["device"]), weights


def _read_arrays(bundle: Bundle, name: str) -> dict[str, Array]:
    return {value.name: array for value, array in _read_graph(bundle, name).constants.items()}


def _check_device(bundle: Bundle, made_for: str, device: Device) -> None:
    """Raise ArtifactError unless `device` has the architecture `made_for`, or a newer one and both are NVIDIA's.

    Binaries run on their own generation, and PTX on every later one; whether a binary has PTX is checked when it is
    loaded.
    """
    mine = device.target.key
    later = made_for.startswith("sm_") and mine.startswith("sm_") and int(made_for[3:]) <= int(mine[3:])
    if made_for != mine and not later:
        raise ArtifactError(f"{bundle.name} was made for {made_for}, {device.name} is {mine}; compile it again")


def _object_spans(objects: dict[str, bytes]) -> dict[str, tuple[int, int]]:
    """The start and size of each symbol's object file in the code section, which holds them sorted by symbol."""
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for symbol in sorted(objects):
        places[symbol] = (at, len(objects[symbol]))
        at += len(objects[symbol])
    return places


def _as_constants(arrays: Mapping[str, Array]) -> Graph:
    """A graph without nodes whose constants are `arrays`, by name."""
    constants = {
        Value(name, TensorType(DType.from_numpy(array.dtype), array.shape)): array for name, array in arrays.items()
    }
    return Graph("states", constants=constants)


def _wiring_to_json(wiring: Wiring) -> dict[str, Any]:
    crossings = [[c.name, c.source, c.target, str(c.nbytes), c.sender, c.receiver] for c in wiring.crossings]
    states = dict(wiring.states)
    return {"inputs": wiring.inputs, "outputs": wiring.outputs, "states": states, "crossings": crossings}


def _wiring_from_json(data: dict[str, Any], constants: Graph) -> Wiring:
    return Wiring(
        inputs=tuple(data["inputs"]),
        outputs=tuple(data["outputs"]),
        states=dict(data["states"]),
        constants={value.name: array for value, array in constants.constants.items()},
        crossings=tuple(
            Crossing(name, source, target, parse_dim(nbytes), sender, receiver)
            for name, source, target, nbytes, sender, receiver in data["crossings"]
        ),
    )


def _graph_sections(name: str, graph: Graph) -> dict[str, Chunks]:
    weights = Weights()
    text = print_graph(graph, weights)
    return {f"{name}.lir": [text.encode()], f"{name}.bin": weights.chunks}


def _read_graph(bundle: Bundle, name: str) -> Graph:
    """The graph in the sections `name`.lir (text) and `name`.bin (large constants, which stay views of the file).

    The pages of the constants, which checking the digests has read, are released, because child processes do most of
    the compiling. ArtifactError if a section is missing or damaged.
    """
    text, constants = bundle.section(f"{name}.lir"), bundle.section(f"{name}.bin")
    try:
        graph = parse_graph(bytes(text).decode(), constants)
    except (ModelError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{name} is malformed: {error}") from error
    release_pages(constants)
    return graph


def _description_to_json(description: Description) -> dict[str, Any]:
    batching = description.batching
    return {
        "name": description.name,
        "inputs": {name: str(type_) for name, type_ in description.inputs.items()},
        "outputs": {name: str(type_) for name, type_ in description.outputs.items()},
        "batching": [batching.batchable, batching.reason, batching.symbol, list(map(str, batching.supposed))],
        "max_batch": description.max_batch,
        "may_not_end": description.may_not_end,
        "defaults": {name: str(type_) for name, type_ in description.defaults.items()},
        "declared": {name: str(type_) for name, type_ in description.declared.items()},
        "packing": astuple(description.packing) if description.packing is not None else None,
        "any_size": [[name, str(dim)] for name, dim in description.any_size],
        "in_parts": description.in_parts,
        "size_inputs": list(description.size_inputs),
    }


def _description_from_json(data: dict[str, Any]) -> Description:
    try:
        batchable, reason, symbol, supposed = data["batching"]
        return Description(
            name=str(data["name"]),
            inputs={name: parse_type(text) for name, text in data["inputs"].items()},
            outputs={name: parse_type(text) for name, text in data["outputs"].items()},
            batching=BatchInfo(batchable, reason, symbol, tuple(map(parse_dim, supposed))),
            max_batch=int(data["max_batch"]),
            may_not_end=bool(data["may_not_end"]),
            defaults={name: parse_type(text) for name, text in data["defaults"].items()},
            declared={name: parse_type(text) for name, text in data["declared"].items()},
            packing=PackInfo(*data["packing"]) if data["packing"] is not None else None,
            any_size=tuple((str(name), parse_dim(dim)) for name, dim in data["any_size"]),
            in_parts=bool(data["in_parts"]),
            size_inputs=tuple(map(str, data["size_inputs"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"description is malformed: {type(error).__name__} {error}") from error
