"""Makes a model that disagrees smaller while the symptom stays, and writes a script that shows it.

    python -m tests.fuzz.graphs.minimise SEED FOLDER

Each trial runs in a process of its own, so a crash is a symptom as any other.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from tests.fuzz.graphs.check import check, confirmed
from tests.fuzz.graphs.config import Config, target_of
from tests.fuzz.graphs.evaluate import REFUSALS, opset_ids, ort_session, reads, tensor_type
from tests.fuzz.graphs.generate import Case, Made, make
from tests.fuzz.graphs.grower import live
from tests.fuzz.graphs.script import script
from tests.fuzz.graphs.values import Array, Item

_SECONDS = 240.0  # for all trials
_MOST_SECONDS = 60  # of processor time for one


@dataclass(frozen=True)
class Trial:
    """A model with its cases and configuration."""

    model: onnx.ModelProto
    cases: tuple[Case, ...]
    config: Config


def symptom(trial: Trial) -> tuple[str, str]:
    """What checking it shows, in a process of its own."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        signal.setitimer(signal.ITIMER_PROF, _MOST_SECONDS)
        try:
            cases, doubt = confirmed(trial.model, trial.cases)
            outcome = check(trial.model, cases, trial.config, doubt)
            text = f"{outcome.kind}\n{outcome.text}" if outcome.wrong else "none\n"
        except BaseException as error:
            text = f"trial fails: {type(error).__name__}\n{error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        kind, _, text = pipe.read().decode(errors="replace").partition("\n")
    _, status = os.waitpid(process, 0)
    return (f"ends: {signal.Signals(os.WTERMSIG(status)).name}", "") if os.WIFSIGNALED(status) else (kind, text)


def smallest(made: Made) -> tuple[Trial, str, str]:
    """The smallest trial found with the symptom of a seed, the symptom, and what it says."""
    trial = Trial(made.model, tuple(made.cases), made.config)
    kind, text = symptom(trial)
    if kind == "none":
        return trial, kind, text
    end = time.monotonic() + _SECONDS
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for smaller in _smaller(trial, made):
            if time.monotonic() > end:
                break
            found, words = symptom(smaller)
            if _same(found, kind):
                trial, text, changed = smaller, words, True
                break
    return trial, kind, text


def _same(found: str, wanted: str) -> bool:
    return found.split(":")[:2] == wanted.split(":")[:2] if wanted.startswith(("differs", "rows")) else found == wanted


def _smaller(trial: Trial, made: Made) -> Iterator[Trial]:
    """Trials that are a step smaller, the largest steps first."""
    yield from _one_output(trial, made)
    yield from _without_nodes(trial, made)
    yield from _bypassed(trial)
    for field in fields(Config):
        if getattr(trial.config, field.name) != field.default:
            yield replace(trial, config=replace(trial.config, **{field.name: field.default}))
    if len(trial.cases) > 1:
        for case in trial.cases:
            yield replace(trial, cases=(case,))


def _one_output(trial: Trial, made: Made) -> Iterator[Trial]:
    """With one output: a value that comes before the present ones, or one of them."""
    graph = trial.model.graph
    produced = [name for node in graph.node for name in node.output if name in made.values]
    present = [output.name for output in graph.output]
    if len(present) == 1:
        produced = produced[: produced.index(present[0])] if present[0] in produced else []
    yield from (_rebuilt(trial, made, graph.node, [name]) for name in produced)
    if len(present) > 1:
        yield from (_rebuilt(trial, made, graph.node, [name]) for name in present)


def _without_nodes(trial: Trial, made: Made) -> Iterator[Trial]:
    """Without a node whose results are fed instead, or are constants."""
    nodes = list(trial.model.graph.node)
    outputs = [output.name for output in trial.model.graph.output]
    for node in nodes:
        if node.op_type != "Constant" and not set(node.output) & set(outputs):
            yield _rebuilt(trial, made, [each for each in nodes if each is not node], outputs)


def _rebuilt(trial: Trial, made: Made, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> Trial:
    """The model of these nodes; what none of them makes becomes an input."""
    kept = live(nodes, outputs)
    given = {name for node in kept for name in node.output}
    constants = {each.name for each in trial.model.graph.initializer}
    needed = list(dict.fromkeys([name for node in kept for name in reads(node)] + list(outputs)))
    free = [name for name in needed if name not in given and name not in constants]
    before = {port.name: port for port in trial.model.graph.input}
    ports = [before[name] if name in before else _port(made.values[name], made) for name in free]
    graph = helper.make_graph(
        kept,
        "small",
        ports,
        [helper.make_tensor_value_info(name, _type(made.values[name]), None) for name in outputs],
        [each for each in trial.model.graph.initializer if each.name in needed],
    )
    rows = {made.rows[case]: case for case in made.alive}
    cases = []
    for case in trial.cases:
        at = rows[case.rows]
        cases.append(
            Case(
                case.rows,
                {name: case.feeds[name] if name in case.feeds else made.values[name].at(at) for name in free},
                {name: made.values[name].at(at) for name in outputs},
                {name: made.values[name].shadows[at] for name in outputs},
            )
        )
    return Trial(_model(trial.model, graph), tuple(cases), trial.config)


def _model(like: onnx.ModelProto, graph: onnx.GraphProto) -> onnx.ModelProto:
    opset = like.opset_import[0].version
    model = helper.make_model(graph, opset_imports=opset_ids(opset), ir_version=like.ir_version)
    called = {node.op_type for node in graph.node}
    model.functions.extend(each for each in like.functions if each.name in called)
    return model


def _type(item: Item) -> int:
    return tensor_type(next(iter(item.arrays.values())))


def _port(item: Item, made: Made) -> onnx.ValueInfoProto:
    """The type of a value as an input: its extents where they are fixed, and the number of rows."""
    rank = item.rank(made.alive)
    if rank is None:
        return helper.make_tensor_value_info(item.name, _type(item), None)
    rows = [made.rows[case] for case in made.alive]
    shape: list[int | str] = []
    for axis in range(rank):
        fixed = item.fixed(axis, made.alive)
        moving = "N" if item.extents(axis, made.alive) == rows else f"{item.name}_{axis}"
        shape.append(fixed if fixed is not None else moving)
    return helper.make_tensor_value_info(item.name, _type(item), shape)


def _bypassed(trial: Trial) -> Iterator[Trial]:
    """Without a node, whose first input takes the place of its result; the oracle is asked again."""
    graph = trial.model.graph
    for index, node in enumerate(graph.node):
        if len(node.output) != 1 or not node.input or not node.input[0]:
            continue
        copy = onnx.GraphProto.FromString(graph.SerializeToString())
        outputs = [output.name for output in graph.output]
        if node.output[0] in outputs:
            continue
        for each in copy.node:
            for at, name in enumerate(each.input):
                if name == node.output[0]:
                    each.input[at] = node.input[0]
        del copy.node[index]
        kept = live(copy.node, outputs)
        names = {name for each in kept for name in reads(each)}
        copy.ClearField("node")
        copy.node.extend(kept)
        for ports in (copy.input, copy.initializer):
            for port in [port for port in ports if port.name not in names]:
                ports.remove(port)
        try:
            model = _model(trial.model, copy)
            cases = tuple(_asked(model, case) for case in trial.cases)
        except (*REFUSALS, KeyError):
            continue
        yield Trial(model, cases, trial.config)


def _asked(model: onnx.ModelProto, case: Case) -> Case:
    """The case with what ONNX Runtime gives now."""
    feeds = {port.name: case.feeds[port.name] for port in model.graph.input}
    session = ort_session(model)
    names = [port.name for port in session.get_outputs()]
    arrays: dict[str, Array] = dict(zip(names, map(np.asarray, session.run(None, feeds)), strict=True))
    return Case(case.rows, feeds, arrays, arrays)


def main(seed: int, folder: Path) -> None:
    trial, kind, text = smallest(make(seed))
    name = f"seed-{seed}"
    (folder / f"{name}.py").write_text(
        script(seed, trial.model, trial.cases, trial.config, target_of(seed), kind, text)
    )
    (folder / f"{name}.onnx").write_bytes(trial.model.SerializeToString())
    print(f"seed {seed}: {kind}\n{text[:600]}\n{onnx.printer.to_text(trial.model)}\n{folder / name}.py")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
