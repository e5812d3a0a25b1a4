"""Choices and loops that depend on data: `cond` and `while_loop`, as PyTorch has them.

Run eagerly they are Python's own `if` and `while`; traced they become If and Loop, which compiled models run natively.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from core.errors import ModelError
from core.ir.graph import Graph, Value
from core.ir.types import DType, TensorType
from core.nn.mode import Tracing, current
from core.nn.tensor import Tensor

Results: TypeAlias = Tensor | tuple[Tensor, ...]

_COUNT, _GOES_ON = TensorType(DType.INT64, ()), TensorType(DType.BOOL, ())


def cond(
    pred: Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Tensor] = ()
) -> Any:
    """`true_fn(*operands)` where `pred`, a boolean of one element, holds, else `false_fn(*operands)`.

    Both return one tensor, or a tuple of as many tensors of the same types. ModelError when they do not.
    """
    mode = current()
    if not isinstance(mode, Tracing):
        return true_fn(*operands) if bool(pred) else false_fn(*operands)
    names = ("then_branch", "else_branch")
    bodies = [_branch(mode, f, operands, name) for f, name in zip((true_fn, false_fn), names, strict=True)]
    counts = [len(body.outputs) for body, _ in bodies]
    if counts[0] != counts[1]:
        raise ModelError(f"the choices return {counts[0]} and {counts[1]} tensors, expected as many", where="cond")
    graphs = {name: body for name, (body, _) in zip(names, bodies, strict=True)}
    return _packed(mode.writer.emit("If", [pred.value], dict(graphs), counts[0]), bodies[0][1])


def while_loop(
    cond_fn: Callable[..., Tensor], body_fn: Callable[..., Any], carried_inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """`body_fn(*carried)` again and again, as long as `cond_fn(*carried)`, a boolean of one element, holds.

    What is carried keeps its types. ModelError when the body returns another number of tensors.
    """
    mode, carried = current(), tuple(carried_inputs)
    if isinstance(mode, Tracing):
        return _loop(mode, cond_fn, body_fn, carried)
    while bool(cond_fn(*carried)):
        carried = _same_number(body_fn(*carried), carried)
    return carried


def _branch(mode: Tracing, function: Callable[..., Any], operands: Sequence[Tensor], name: str) -> tuple[Graph, bool]:
    """The body of a choice, and whether it returns a tuple."""
    body = Graph(name)
    with mode.inside(body):
        results = function(*operands)
        body.outputs = [_own(mode, each) for each in _flat(results)]
    return body, not isinstance(results, Tensor)


def _loop(
    mode: Tracing, goes_on: Callable[..., Tensor], function: Callable[..., Any], carried: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    first, body = goes_on(*carried), Graph("body")
    with mode.inside(body):
        writer = mode.writer
        writer.input("iteration", _COUNT)
        writer.input("goes_on", _GOES_ON)
        inner = tuple(Tensor(writer.input("carried", each.value.tensor).value) for each in carried)
        results = _same_number(function(*inner), carried)
        body.outputs = [_own(mode, each) for each in (goes_on(*results).reshape(()), *results)]
    inputs = [None, first.reshape(()).value, *(each.value for each in carried)]
    return tuple(Tensor(value) for value in mode.writer.emit("Loop", inputs, {"body": body}, len(carried)))


def _own(mode: Tracing, result: Tensor) -> Value:
    """A result as a value that the body itself makes, once."""
    return mode.writer.emit("Identity", [result.value])[0]


def _same_number(results: Any, carried: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found = _flat(results)
    if len(found) != len(carried):
        message = f"the body returns {len(found)} tensors, expected {len(carried)}, as it is given"
        raise ModelError(message, where="while_loop")
    return found


def _flat(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _packed(values: Sequence[Value], several: bool) -> Results:
    tensors = tuple(map(Tensor, values))
    return tensors if several else tensors[0]
