"""Plans as JSON, for artifacts. Types and dimensions are in textual form; the fallback graph is stored elsewhere."""

from __future__ import annotations

from typing import Any

from lathe.core.errors import ArtifactError
from lathe.core.ir.dim import parse_dim
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType, parse_type
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import (
    Address,
    CutPoint,
    Fallback,
    Memory,
    Plan,
    Port,
    Region,
    Segment,
    Step,
    StepRange,
    Transfer,
)

SCHEMA = 10


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, without the fallback graph."""
    return {
        "schema": SCHEMA,
        "inputs": [_port(port) for port in plan.inputs],
        "states": [_port(port) for port in plan.states],
        "outputs": [_port(port) for port in plan.outputs],
        "steps": [_step(step) for step in plan.steps],
        "schedule": [_entry(entry) for entry in plan.schedule],
        "arena": _affine(plan.arena),
        "weights": plan.weights,
        "memory": [plan.memory.peak, plan.memory.lower_bound, plan.memory.unshared, plan.memory.weights],
        "value_addresses": {
            name: [_address(address), str(type_)] for name, (address, type_) in plan.value_addresses.items()
        },
        "copies": [list(copy) for copy in plan.copies],
        "log": list(plan.log),
        "threads": plan.threads,
        "regions": [_region(region) for region in plan.regions],
        "max_rows": plan.max_rows,
        "cut_points": [_cut_point(cut) for cut in plan.cut_points],
        "supposed": list(map(str, plan.supposed)),
        "sizes": list(plan.sizes),
        "transfers": [_transfer(transfer) for transfer in plan.transfers],
        "swap": _affine(plan.swap),
        "streamed": plan.streamed,
        "least_rows": plan.least_rows,
    }


def plan_from_json(data: dict[str, Any], fallbacks: Graph) -> Plan:
    """The plan that `plan_to_json` wrote, with `fallbacks` as its fallback graph.

    ArtifactError for another schema, or malformed data.
    """
    try:
        if data["schema"] != SCHEMA:
            raise ArtifactError(f"plan has schema {data['schema']!r}, expected {SCHEMA}")
        return _plan(data, fallbacks)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ArtifactError(f"plan is malformed: {type(error).__name__} {error}") from error


def _plan(data: dict[str, Any], fallbacks: Graph) -> Plan:
    return Plan(
        inputs=tuple(_read_port(item) for item in data["inputs"]),
        states=tuple(_read_port(item) for item in data["states"]),
        outputs=tuple(_read_port(item) for item in data["outputs"]),
        steps=tuple(_read_step(item) for item in data["steps"]),
        schedule=tuple(_read_entry(item) for item in data["schedule"]),
        arena=_read_affine(data["arena"]),
        weights=int(data["weights"]),
        memory=Memory(*data["memory"]),
        fallbacks=fallbacks,
        value_addresses={name: (_read_address(a), _tensor(t)) for name, (a, t) in data["value_addresses"].items()},
        copies=tuple((str(name), int(base)) for name, base in data["copies"]),
        log=tuple(map(str, data["log"])),
        threads=int(data["threads"]),
        regions=tuple(_read_region(item) for item in data["regions"]),
        max_rows=data["max_rows"],
        cut_points=tuple(_read_cut_point(item) for item in data["cut_points"]),
        supposed=tuple(map(parse_dim, data["supposed"])),
        sizes=tuple(map(str, data["sizes"])),
        transfers=tuple(map(_read_transfer, data["transfers"])),
        swap=_read_affine(data["swap"]),
        streamed=int(data["streamed"]),
        least_rows=int(data["least_rows"]),
    )


def _affine(value: Affine) -> list[Any]:
    return [value.a, value.b, *([str(unit), count] for unit, count in value.units)]


def _read_affine(item: list[Any]) -> Affine:
    a, b, *units = item
    return Affine(int(a), int(b), tuple((parse_dim(unit), int(count)) for unit, count in units))


def _address(address: Address) -> list[Any]:
    return [address.base, *_affine(address.offset)]


def _read_address(item: list[Any]) -> Address:
    return Address(int(item[0]), _read_affine(item[1:]))


def _port(port: Port) -> list[Any]:
    return [port.name, str(port.type), port.base]


def _read_port(item: list[Any]) -> Port:
    return Port(item[0], parse_type(item[1]), item[2])


def _region(region: Region) -> list[Any]:
    return [_affine(region.offset), _affine(region.size), region.first, region.last, list(region.values)]


def _read_region(item: list[Any]) -> Region:
    offset, size, first, last, values = item
    return Region(_read_affine(offset), _read_affine(size), int(first), int(last), tuple(map(str, values)))


def _cut_point(cut: CutPoint) -> list[Any]:
    return [cut.step, _affine(cut.place), cut.row, _affine(cut.arena)]


def _read_cut_point(item: list[Any]) -> CutPoint:
    step, place, row, arena = item
    return CutPoint(int(step), _read_affine(place), int(row), _read_affine(arena))


def _transfer(given: Transfer) -> list[Any]:
    places = [_affine(given.arena), _address(given.host), _affine(given.nbytes)]
    return [given.name, given.into, given.begin, given.end, given.last, *places]


def _read_transfer(item: list[Any]) -> Transfer:
    name, into, begin, end, last, arena, host, nbytes = item
    times = int(begin), int(end), int(last)
    return Transfer(str(name), bool(into), *times, _read_affine(arena), _read_address(host), _read_affine(nbytes))


def _tensor(text: str) -> TensorType:
    type_ = parse_type(text)
    if not isinstance(type_, TensorType):
        raise ValueError(f"{text} is not a tensor type")
    return type_


def _step(step: Step) -> dict[str, Any]:
    return {
        "symbol": step.symbol,
        "operands": [_address(address) for address in step.operands],
        "label": step.label,
        "op": step.op,
        "summary": step.summary,
        "outputs": list(step.outputs),
        "flops": _affine(step.flops),
        "bytes": _affine(step.bytes),
        "grid": list(map(str, step.grid)),
        "flag": step.flag,
        "may_not_end": step.may_not_end,
        "has_barrier": step.has_barrier,
        "ranges": [[r.first, r.symbol, r.summary, list(map(str, r.grid)), list(r.operands)] for r in step.ranges],
    }


def _read_step(item: dict[str, Any]) -> Step:
    return Step(
        symbol=item["symbol"],
        operands=tuple(_read_address(address) for address in item["operands"]),
        label=item["label"],
        op=item["op"],
        summary=item["summary"],
        outputs=tuple(item["outputs"]),
        flops=_read_affine(item["flops"]),
        bytes=_read_affine(item["bytes"]),
        grid=tuple(map(parse_dim, item["grid"])),
        flag=item["flag"],
        may_not_end=bool(item["may_not_end"]),
        has_barrier=bool(item["has_barrier"]),
        ranges=tuple(map(_read_range, item["ranges"])),
    )


def _read_range(item: list[Any]) -> StepRange:
    first, symbol, summary, grid, operands = item
    return StepRange(int(first), str(symbol), str(summary), tuple(map(parse_dim, grid)), tuple(map(int, operands)))


def _entry(entry: Segment | Fallback) -> list[Any]:
    if isinstance(entry, Segment):
        return ["native", entry.first, entry.last]
    return ["reference", entry.index, entry.label, entry.op, entry.reason]


def _read_entry(item: list[Any]) -> Segment | Fallback:
    return Segment(*item[1:]) if item[0] == "native" else Fallback(*item[1:])
