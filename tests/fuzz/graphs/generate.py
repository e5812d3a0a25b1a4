"""Generates the random model of a seed, with its feeds and expected outputs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.fuzz.graphs import control, coverage
from tests.fuzz.graphs.config import Config, drawn
from tests.fuzz.graphs.evaluate import ir_version, live, opset_ids, reads, tensor, tensor_type
from tests.fuzz.graphs.grower import Grower
from tests.fuzz.graphs.operand_forms import Aim, Operands
from tests.fuzz.graphs.rules import RULES, Rule
from tests.fuzz.graphs.shared_state import SharedState
from tests.fuzz.graphs.values import (
    ALL,
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    FLOATS,
    I8,
    I32,
    I64,
    STRING,
    U8,
    Array,
    Item,
    UnfitNode,
    random_array,
)

OPSETS = range(7, onnx.defs.onnx_opset_version() + 1)
ROWS, LENGTH, AS_MANY = "N", "M", "P"  # symbols; the last one has the value of the first
_TRIES = 12  # attempts for each node
_MOST_OUTPUTS = 8


@dataclass
class Case:
    """The feeds of one run, the expected outputs, and their shadows (see `tests.fuzz.graphs.shadows`)."""

    rows: int
    feeds: dict[str, Array]
    expected: dict[str, Array]
    shadows: dict[str, Array]


@dataclass
class Made:
    """The model of a seed, with its cases and configuration."""

    seed: int
    model: onnx.ModelProto
    cases: list[Case]
    config: Config
    kinds: Counter[tuple[str, int, str]]  # operator, input position, kind of operand
    engines: dict[str, int] = field(default_factory=dict)
    nodes: int = 0
    types: list[str] = field(default_factory=list)
    values: dict[str, Item] = field(default_factory=dict)
    alive: list[int] = field(default_factory=list)  # the indices of `cases` in the arrays of `values`
    rows: list[int] = field(default_factory=list)  # number of rows of every case


def make(seed: int) -> Made:
    """The model of a seed: always the same one."""
    rng = random.Random(f"graph {seed}")
    aim = _aims()[seed % len(_aims())]
    forms = [rule for rule in RULES if rule.op == aim[0]]
    fit = [opset for opset in (*OPSETS, *OPSETS[6:]) if any(each.since <= opset <= each.until for each in forms)]
    opset = rng.choice(fit or OPSETS)  # few opsets have old forms
    lengths = rng.random() < 0.12
    cases = [{ROWS: rows, AS_MANY: rows, LENGTH: 5 if rows == 1 else 3} for rows in (2, 7, 1, 0)]
    world = SharedState(rng, np.random.default_rng(rng.randrange(2**32)), opset, cases)
    world.rowwise = rng.random() < 0.55
    world.hidden = rng.choice(("extents", "numbers")) if world.rowwise and rng.random() < 0.25 else ""
    world.settled = bool(world.hidden) or (world.rowwise and rng.random() < 0.8)
    grower = Grower(world)
    inputs = _inputs(grower, lengths)
    world.disguise = Operands(aim, rng.random() < 0.6)
    _grow(grower, 6 + rng.randrange(50), aim[0])
    outputs = _outputs(grower, inputs, aim[0])
    config = drawn(rng, lengths)
    return _finished(seed, grower, inputs, outputs, config)


@cache
def _aims() -> list[Aim]:
    return coverage.aims()


def _grow(f: Grower, nodes: int, aim: str) -> None:
    """Add nodes up to this number; some repeat a node with the same inputs, some are the operator `aim`."""
    allowed = [each for each in RULES if each.since <= f.opset <= each.until]
    aimed = [each for each in allowed if each.op == aim]
    rules = _some(allowed, f)
    operators = Counter(each.op for each in rules)
    weights = [each.weight * _rarity(each) * _breadth(each) / operators[each.op] ** 0.5 for each in rules]
    for _ in range(3 * nodes):
        if len(f.nodes) >= nodes:
            break
        for _ in range(_TRIES):
            try:
                with f.attempt():
                    if f.nodes and f.on_frequent(0.04):
                        _again(f)
                    elif aimed and f.on_frequent(0.15):
                        f.of(aimed).build(f)
                    elif f.world.hidden == "numbers" and f.on_frequent(0.12):
                        control.add_of_all(f)
                    else:
                        f.world.rng.choices(rules, weights)[0].build(f)
                break
            except UnfitNode as reason:
                f.world.refused[str(reason)[:60]] += 1


def _some(rules: list[Rule], f: Grower) -> list[Rule]:
    """All rules, or few in half of the graphs, so that these combine often (swarm testing, Groce et al., 2012)."""
    if f.on_frequent(0.5):
        return rules
    share = f.of((0.1, 0.2, 0.4))
    return [rule for rule in rules if f.on_frequent(share)] or rules


def _rarity(rule: Rule) -> float:
    """A weight that is larger for rules of few opsets."""
    found = sum(rule.since <= opset <= rule.until for opset in OPSETS)
    return (len(OPSETS) / max(found, 1)) ** 0.8


def _breadth(rule: Rule) -> float:
    """A weight that is larger for operators of many inputs."""
    if not onnx.defs.has(rule.op):
        return 1.0
    most = int(onnx.defs.get_schema(rule.op).max_input)
    return (most if most < 10 else 2) ** 0.5


def _again(f: Grower) -> None:
    node = f.of(f.nodes)
    if node.op_type in ("Constant", "If", "Loop", "Scan"):
        raise UnfitNode("not again")
    attrs = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    inputs = [f.find(name) if name else None for name in node.input]
    f.emit(node.op_type, inputs, outputs=len(node.output), domain=node.domain, **attrs)


# -- inputs ------------------------------------------------------------------------------------------------------------

_SHAPES: tuple[tuple[Any, ...], ...] = (
    (ROWS, 3, 6, 5), (ROWS, 4, 4, 4), (ROWS, 5, 8), (ROWS, 4, 16), (ROWS, 6), (ROWS, 33), (ROWS, 1), (ROWS,),
    (ROWS, 8, 1), (ROWS, 4, 4, 6), (ROWS, 2, 3, 4),
)  # fmt: skip
_OTHERS: tuple[tuple[Any, ...], ...] = ((), (4,), (2, 3), (3, 1, 5), (2, ROWS), (ROWS, 0, 3), (3, ROWS, 4))


def _inputs(f: Grower, lengths: bool) -> dict[str, tuple[Any, ...]]:
    """The shapes of the inputs. In most models every input has the number of rows as its first extent."""
    together = f.world.rowwise or f.on_frequent(0.5)
    shapes: dict[str, tuple[Any, ...]] = {}
    for index in range(2 + f.choose(3)):
        shape = f.of(_SHAPES) if together or f.on_frequent(0.5) else f.of(_OTHERS)
        if lengths and index < 2:
            shape = f.of(((ROWS, LENGTH), (ROWS, LENGTH, 8)))
        if index and not f.world.rowwise and f.on_frequent(0.06):
            shape = tuple(AS_MANY if extent == ROWS else extent for extent in shape)
        kinds = [F32] * 12 + [F64, F16, I32, I64, I64, BOOL, U8, I8, *ALL]
        dtype = (
            F32 if index == 0 else f.of([kind for kind in kinds if kind not in (STRING, BF16) or f.on_frequent(0.3)])
        )
        name = f"x{index}"
        whole = dtype in FLOATS and f.on_frequent(0.15)
        arrays = {}
        for case, sizes in enumerate(f.world.cases):
            extents = [sizes.get(extent, extent) for extent in shape]
            array = random_array(f.world.numbers, dtype, extents, -2.0, 2.0)
            arrays[case] = f.world.numbers.integers(-90, 120, extents).astype(dtype) if whole else array
        item = Item(name, arrays, arrays)
        f.known[name] = item
        f.items.append(item)
        shapes[name] = shape
    return shapes


# -- outputs -----------------------------------------------------------------------------------------------------------


def _outputs(f: Grower, inputs: dict[str, tuple[Any, ...]], aim: str) -> list[Item]:
    """The outputs: values that no node reads, or any values, and results of the operator `aim`.

    Some models also have an input or a constant as output."""
    found = [item for item in f.items if item.name not in inputs and all(case in item.arrays for case in f.alive)]
    read = {name for node in f.nodes for name in node.input}
    ends = [item for item in found if item.name not in read]
    if f.world.rowwise:  # outputs without a row per row would make the model unbatchable
        rows = [f.world.cases[case][ROWS] for case in f.alive]
        by_row = [item for item in found if [shape[:1] for shape in item.shapes(f.alive)] == [(n,) for n in rows]]
        found = [item for item in by_row if not item.rankless or f.on_frequent(0.1)] or by_row or found
        ends = [item for item in ends if item in found]
    if not found:
        return [f.one("Identity", f.items[0])]
    if f.on_frequent(0.6) and ends:
        chosen = ends[-_MOST_OUTPUTS:]
    else:
        chosen = [found[-1], *(f.of(found) for _ in range(f.choose(3)))]
    results = [node.output[0] for node in f.nodes if node.op_type == aim]
    chosen += [item for item in found if item.name in results][-2:]
    if f.on_frequent(0.08):
        chosen.append(f.known[f.of(list(inputs))])
    if f.on_frequent(0.08) and f.constants and not f.world.rowwise:
        chosen.append(f.known[f.of(f.constants).name])
    return list({item.name: item for item in chosen}.values())


def _declared(f: Grower, item: Item, shaped: bool) -> onnx.ValueInfoProto:
    """The declared type of an output; if `shaped`, with its rank, if that is known, and its rows."""
    rank = item.rank(f.alive)
    kind = tensor_type(item.at(f.alive[0]))
    if rank is None or item.rankless or not shaped:
        return helper.make_tensor_value_info(item.name, kind, None)
    shape = []
    for axis in range(rank):
        rows = item.extents(axis, f.alive) == [f.world.cases[case][ROWS] for case in f.alive]
        shape.append(ROWS if rows and axis == 0 else None)
    if shape and f.on_frequent(0.05):  # a wrong extent: ONNX Runtime warns, and the nodes determine the real shape
        shape[f.choose(rank)] = 77
    return helper.make_tensor_value_info(item.name, kind, shape)


def _finished(seed: int, f: Grower, inputs: dict[str, tuple[Any, ...]], outputs: list[Item], config: Config) -> Made:
    names = [item.name for item in outputs]
    nodes = live(f.nodes, names)
    dead = [node for node in f.nodes if f.on_frequent(0.1)]  # some nodes that no output needs stay
    kept = [node for node in f.nodes if node in nodes or (node in dead)]
    kept = live(f.nodes, [*names, *(name for node in kept for name in node.output if name)])
    used = {name for node in kept for name in reads(node)} | set(names)
    infos = [
        helper.make_tensor_value_info(name, tensor_type(f.known[name].at(0)), shape) for name, shape in inputs.items()
    ]
    constants = [constant for constant in f.constants if constant.name in used]
    fed = [] if config.packing else _fed(f, constants)
    infos += [
        helper.make_tensor_value_info(name, tensor_type(f.known[name].at(0)), f.known[name].at(0).shape) for name in fed
    ]
    shaped = f.on_frequent(0.4)
    ports = [_declared(f, item, shaped) for item in outputs]
    graph = helper.make_graph(kept, "random", infos, ports, constants)
    model = helper.make_model(graph, opset_imports=opset_ids(f.opset), ir_version=ir_version(f.opset))
    model.functions.extend(f.world.functions)
    cases = [
        Case(
            f.world.cases[case][ROWS],
            {name: f.known[name].at(case) for name in (*inputs, *fed)},
            {item.name: item.at(case) for item in outputs},
            {item.name: item.shadows[case] for item in outputs},
        )
        for case in f.alive
    ]
    kinds: Counter[tuple[str, int, str]] = Counter()
    alive = {name for node in nodes for name in _all_made(node)}
    for first, found in f.kinds.items():
        if first in alive:
            kinds.update((op, index, kind) for op, index, names_ in found for kind in names_)
    types = sorted({str(f.find(name).dtype) for node in nodes for name in node.output if name})
    engines, rows = dict(f.world.evaluator.engines), [sizes[ROWS] for sizes in f.world.cases]
    return Made(seed, model, cases, config, kinds, engines, len(nodes), types, dict(f.known), list(f.alive), rows)


def _fed(f: Grower, constants: list[onnx.TensorProto]) -> list[str]:
    """The names of initializers that are also inputs; every run feeds them, and the model gets other numbers.

    None if the graph has factors of extents (Resize), since other factors would make the model invalid."""
    found: list[str] = []
    if not f.on_frequent(0.1) or any(node.op_type in ("Resize", "Upsample") for node in f.nodes):
        return found
    for index, constant in enumerate(constants):
        array = f.known[constant.name].at(0)
        if array.dtype in FLOATS and array.size > 1 and np.isfinite(array.astype(np.float64)).all() and len(found) < 3:
            constants[index] = tensor(random_array(f.world.numbers, array.dtype, array.shape, 0.2, 1.0), constant.name)
            found.append(constant.name)
    return found


def _all_made(node: onnx.NodeProto) -> list[str]:
    """The names of the results of a node, and of nodes in its nested graphs."""
    names = list(node.output)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            names += [name for each in attribute.g.node for name in _all_made(each)]
    return names
