"""Scan as opset 8 had it: a loop over a batch, with today's Scan for each of its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.frontends.scope import Emitter
from core.ir.graph import Attr, Graph, Value
from core.ir.types import DType, TensorType


def scan_over_batch(
    e: Emitter,
    lengths: Value | None,
    inputs: Sequence[Value],
    scanned: int,
    attrs: Mapping[str, Attr],
    outputs: Sequence[str],
) -> list[Value]:
    """The values of the outputs, which get the names `outputs`; the last `scanned` inputs are scanned.

    Axis 0 of everything is the batch, axis 1 of what is scanned the steps, of which an item may have fewer: `lengths`,
    int64[batch], says how many. What an item's scan outputs lack in steps is zero.
    """
    states = len(inputs) - scanned
    body = Graph("item")
    inner = Emitter(body, e.session, e.label)
    trip, going = _input(inner, "item", DType.INT64), _input(inner, "going", DType.BOOL)
    item = [inner("Gather", value, trip, axis=0) for value in inputs]
    count = None if lengths is None else inner("Reshape", inner("Gather", lengths, trip, axis=0), _vector(inner, -1))
    if count is not None:
        item[states:] = [_first_steps(inner, value, count) for value in item[states:]]
    results = list(_scan(inner, item, attrs, len(outputs)))
    if count is not None:
        missing = inner("Sub", inner("Shape", inputs[states], start=1, end=2), count)
        results[states:] = [_padded(inner, value, missing) for value in results[states:]]
    body.outputs = [inner("Identity", going), *results]
    batch = e("Squeeze", e("Shape", inputs[0], start=0, end=1))
    return e.emit("Loop", [batch], {"body": body}, outputs)


def _input(e: Emitter, name: str, dtype: DType) -> Value:
    value = Value(e.session.fresh(f"{e.label}.{name}"), TensorType(dtype, ()))
    e.graph.inputs.append(value)
    return value


def _vector(e: Emitter, *items: int) -> Value:
    return e.constant(items, dtype=DType.INT64)


def _first_steps(e: Emitter, value: Value, count: Value) -> Value:
    return e("Slice", value, _vector(e, 0), count, _vector(e, 0))


def _padded(e: Emitter, value: Value, missing: Value) -> Value:
    """`value` with so many more steps of zeros."""
    return e("Pad", value, e("Concat", _vector(e, 0), missing, axis=0), None, _vector(e, 0))


def _scan(e: Emitter, item: Sequence[Value], attrs: Mapping[str, Attr], outputs: int) -> list[Value]:
    kept = {"scan_input_directions" if name == "directions" else name: value for name, value in attrs.items()}
    names = [e.session.fresh(f"{e.label}.scan") for _ in range(outputs)]
    return e.emit("Scan", item, kept, names)
