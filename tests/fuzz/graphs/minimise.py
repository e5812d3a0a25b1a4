"""Minimises a model that disagrees while the symptom stays, and writes a script that shows it.

    python -m tests.fuzz.graphs.minimise SEED FOLDER

Each trial runs in its own process, so a crash is a symptom like any other.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

import lathe
from tests.fuzz.graphs.check import check, confirmed
from tests.fuzz.graphs.config import Config, target_of
from tests.fuzz.graphs.evaluate import REFUSALS, live, opset_ids, ort_session, reads, tensor_type
from tests.fuzz.graphs.generate import Case, Made, make
from tests.fuzz.graphs.script import script
from tests.fuzz.graphs.values import Array, Item

_SECONDS = 240.0  # for all trials
_MOST_SECONDS = 60  # of processor time for one trial


@dataclass(frozen=True)
class Trial:
    """A model with its cases and configuration."""

    model: onnx.ModelProto
    cases: tuple[Case, ...]
    config: Config


def warm_up() -> None:
    """Import and initialize the compiler once, so that forked trials need not; this starts no threads."""
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "warm",
        [helper.make_tensor_value_info("x", 1, ["N", 3])],
        [helper.make_tensor_value_info("y", 1, None)],
    )
    model = helper.make_model(graph, opset_imports=opset_ids(17), ir_version=8)
    with lathe.compile(lathe.load(model.SerializeToString()), threads=1, tune="off") as session:
        session.run({"x": np.zeros((2, 3), np.float32)})


def symptom(trial: Trial) -> tuple[str, str]:
    """The symptom of a trial, checked in a child process."""
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
    """The smallest trial found with the symptom of a seed, the symptom, and its message."""
    trial = Trial(made.model, tuple(made.cases), made.config)
    kind, text = symptom(trial)
    if kind == "none":
        return trial, kind, text
    end = time.monotonic() + _SECONDS
    before = None
    while trial is not before and time.monotonic() < end:
        before = trial
        for ways in (_one_output, _fewer_outputs, _without_nodes, _bypassed, _fewer_inputs, _plainer, _one_case):
            trial, text = _reduced(trial, made, ways, kind, text, end)
    return trial, kind, text


Way = Callable[[], Trial | None]


def _reduced(
    trial: Trial, made: Made, ways: Callable[[Trial, Made], list[Way]], kind: str, text: str, end: float
) -> tuple[Trial, str]:
    """The smallest trial with the symptom, and its message. After each success the search goes on with that trial."""
    at = 0
    while at < len(found := ways(trial, made)) and time.monotonic() < end:
        smaller = found[at]()
        shown, words = symptom(smaller) if smaller is not None else ("none", "")
        if smaller is not None and _same(shown, kind):
            trial, text = smaller, words
        else:
            at += 1
    return trial, text


def _same(found: str, wanted: str) -> bool:
    return found.split(":")[:2] == wanted.split(":")[:2] if wanted.startswith(("differs", "rows")) else found == wanted


def _one_output(trial: Trial, made: Made) -> list[Way]:
    """Ways to one output: one of the outputs, or a value before it."""
    graph = trial.model.graph
    produced = [name for node in graph.node for name in node.output if name in made.values]
    present = [output.name for output in graph.output]
    if len(present) == 1:
        produced = produced[: produced.index(present[0])] if present[0] in produced else []
    else:
        produced = [*present, *produced]
    return [partial(_rebuilt, trial, made, graph.node, [name]) for name in produced]


def _fewer_outputs(trial: Trial, made: Made) -> list[Way]:
    present = [output.name for output in trial.model.graph.output]
    if len(present) == 1:
        return []
    rest = [[name for name in present if name != left] for left in present]
    return [partial(_rebuilt, trial, made, trial.model.graph.node, names) for names in rest]


def _without_nodes(trial: Trial, made: Made) -> list[Way]:
    """Ways without a node, whose results are fed instead; last nodes first, since nodes before them become dead too."""
    nodes = list(trial.model.graph.node)
    outputs = [output.name for output in trial.model.graph.output]
    free = [node for node in nodes if node.op_type != "Constant" and not set(node.output) & set(outputs)]
    return [
        partial(_rebuilt, trial, made, [each for each in nodes if each is not node], outputs) for node in free[::-1]
    ]


def _fewer_inputs(trial: Trial, made: Made) -> list[Way]:
    graph = trial.model.graph
    read = {name for node in graph.node for name in reads(node)} | {output.name for output in graph.output}
    return [partial(_without_input, trial, port.name) for port in graph.input if port.name not in read]


def _without_input(trial: Trial, name: str) -> Trial:
    graph = onnx.GraphProto.FromString(trial.model.graph.SerializeToString())
    graph.input.remove(next(port for port in graph.input if port.name == name))
    cases = []
    for case in trial.cases:
        feeds = {key: array for key, array in case.feeds.items() if key != name}
        cases.append(replace(case, feeds=feeds))
    return Trial(_model(trial.model, graph), tuple(cases), trial.config)


def _plainer(trial: Trial, made: Made) -> list[Way]:
    """Ways to a configuration with one more setting at its default."""
    changed = [field for field in fields(Config) if getattr(trial.config, field.name) != field.default]
    configs = [replace(trial.config, **{field.name: field.default}) for field in changed]
    return [partial(replace, trial, config=config) for config in configs]


def _one_case(trial: Trial, made: Made) -> list[Way]:
    return [partial(replace, trial, cases=(case,)) for case in trial.cases] if len(trial.cases) > 1 else []


def _rebuilt(trial: Trial, made: Made, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> Trial:
    """The trial with these nodes; values that none of them computes become inputs."""
    kept = live(nodes, outputs)
    given = {name for node in kept for name in node.output}
    constants = {each.name for each in trial.model.graph.initializer}
    needed = list(dict.fromkeys([name for node in kept for name in reads(node)] + list(outputs)))
    free = [name for name in needed if name not in given and name not in constants]
    before = {port.name: port for port in trial.model.graph.input}
    free = list(dict.fromkeys([*before, *free]))  # unread inputs stay: they may determine the number of rows
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
    """The type of a value as an input: fixed extents as numbers, the others as symbols."""
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


def _bypassed(trial: Trial, made: Made) -> list[Way]:
    """Ways without a node, whose first input replaces its result; the oracle computes the new results."""
    outputs = {output.name for output in trial.model.graph.output}
    nodes = enumerate(trial.model.graph.node)
    found = [i for i, node in nodes if len(node.output) == 1 and node.input and node.output[0] not in outputs]
    return [partial(_bypass, trial, index) for index in found]


def _bypass(trial: Trial, index: int) -> Trial | None:
    graph = onnx.GraphProto.FromString(trial.model.graph.SerializeToString())
    node = trial.model.graph.node[index]
    outputs = [output.name for output in graph.output]
    for each in graph.node:
        for at, name in enumerate(each.input):
            if name == node.output[0]:
                each.input[at] = node.input[0]
    del graph.node[index]
    kept = live(graph.node, outputs)
    names = {name for each in kept for name in reads(each)} | set(outputs)
    graph.ClearField("node")
    graph.node.extend(kept)
    for constant in [each for each in graph.initializer if each.name not in names]:
        graph.initializer.remove(constant)
    try:
        model = _model(trial.model, graph)
        return Trial(model, tuple(_asked(model, case) for case in trial.cases), trial.config)
    except (*REFUSALS, KeyError):
        return None


def _asked(model: onnx.ModelProto, case: Case) -> Case:
    """The case with the results of ONNX Runtime for this model."""
    feeds = {port.name: case.feeds[port.name] for port in model.graph.input}
    session = ort_session(model)
    names = [port.name for port in session.get_outputs()]
    arrays: dict[str, Array] = dict(zip(names, map(np.asarray, session.run(None, feeds)), strict=True))
    return Case(case.rows, feeds, arrays, arrays)


def main(seed: int, folder: Path) -> None:
    warm_up()
    trial, kind, text = smallest(make(seed))
    name = f"seed-{seed}"
    (folder / f"{name}.py").write_text(
        script(seed, trial.model, trial.cases, trial.config, target_of(seed), kind, text)
    )
    (folder / f"{name}.onnx").write_bytes(trial.model.SerializeToString())
    print(f"seed {seed}: {kind}\n{text[:600]}\n{onnx.printer.to_text(trial.model)}\n{folder / name}.py")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
