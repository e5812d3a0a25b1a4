"""The Scan of opset 8, as a Loop over the batch with a Scan of the newest form for each item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Attr, Graph, Value
from lathe.core.ir.types import DType, TensorType


def scan_over_batch(
    e: Emitter,
    lengths: Value | None,
    inputs: Sequence[Value],
    scanned: int,
    attrs: Mapping[str, Attr],
    outputs: Sequence[str],
) -> list[Value]:
    """Emit the loop and return its outputs, named `outputs`. The last `scanned` inputs are scanned, the others states.

    Axis 0 of all inputs and outputs is the batch; axis 1 of scan inputs and scan outputs is the steps. `lengths`,
    int64[batch], has the number of steps of each item; None means all steps. Shorter items have zeros in the remaining
    steps of scan outputs.
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
        results[states:] = [_pad_steps(inner, value, missing) for value in results[states:]]
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


def _pad_steps(e: Emitter, value: Value, missing: Value) -> Value:
    """`value` with zeros appended along axis 0 (steps); `missing`, int64[1], is their number."""
    return e("Pad", value, e("Concat", _vector(e, 0), missing, axis=0), None, _vector(e, 0))


def _scan(e: Emitter, item: Sequence[Value], attrs: Mapping[str, Attr], outputs: int) -> list[Value]:
    renamed = {"scan_input_directions" if name == "directions" else name: value for name, value in attrs.items()}
    names = [e.session.fresh(f"{e.label}.scan") for _ in range(outputs)]
    return e.emit("Scan", item, renamed, names)
