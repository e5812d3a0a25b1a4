"""Data-dependent control flow: `cond` and `while_loop`, with PyTorch's arguments.

Eagerly they run as `if` and `while` in Python. Traced they become ONNX's If and Loop, which compiled models run as
native code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.nn.mode import Tracing, current_mode
from lathe.core.nn.tensor import Tensor

Results: TypeAlias = Tensor | tuple[Tensor, ...]

_COUNT, _CONDITION = TensorType(DType.INT64, ()), TensorType(DType.BOOL, ())


def cond(
    pred: Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Tensor] = ()
) -> Any:
    """`true_fn(*operands)` if `pred`, a boolean of one element, is true, otherwise `false_fn(*operands)`.

    Both functions return a tensor, or a tuple of the same number of tensors with the same element types. While tracing,
    both are called once, and ModelError is raised if the numbers differ; an eager run calls only one function.
    """
    mode = current_mode()
    if not isinstance(mode, Tracing):
        return true_fn(*operands) if bool(pred) else false_fn(*operands)
    names = ("then_branch", "else_branch")
    bodies = [_branch(mode, f, operands, name) for f, name in zip((true_fn, false_fn), names, strict=True)]
    counts = [len(body.outputs) for body, _ in bodies]
    if counts[0] != counts[1]:
        message = f"the branches return {counts[0]} and {counts[1]} tensors, expected the same number"
        raise ModelError(message, where="cond")
    graphs = {name: body for name, (body, _) in zip(names, bodies, strict=True)}
    return _as_results(mode.writer.emit("If", [pred.value], dict(graphs), counts[0]), bodies[0][1])


def while_loop(
    cond_fn: Callable[..., Tensor], body_fn: Callable[..., Any], carried_inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Replace the carried tensors by `body_fn(*carried)` while `cond_fn(*carried)`, a boolean of one element, is true.

    Returns the last carried tensors. `body_fn` returns as many tensors as it takes, of the same types. ModelError if
    the number differs.
    """
    mode, carried = current_mode(), tuple(carried_inputs)
    if isinstance(mode, Tracing):
        return _loop(mode, cond_fn, body_fn, carried)
    while bool(cond_fn(*carried)):
        carried = _check_count(body_fn(*carried), carried)
    return carried


def _branch(mode: Tracing, function: Callable[..., Any], operands: Sequence[Tensor], name: str) -> tuple[Graph, bool]:
    """The graph of a branch: `function` traced on `operands`, as captured values; and whether it returns a tuple."""
    body = Graph(name)
    with mode.inside(body):
        results = function(*operands)
        body.outputs = [_copy_into_body(mode, each) for each in _as_tuple(results)]
    return body, not isinstance(results, Tensor)


def _loop(
    mode: Tracing, condition: Callable[..., Tensor], function: Callable[..., Any], carried: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    first, body = condition(*carried), Graph("body")
    with mode.inside(body):
        writer = mode.writer
        writer.input("iteration", _COUNT)
        writer.input("goes_on", _CONDITION)
        inner = tuple(Tensor(writer.input("carried", each.value.tensor).value) for each in carried)
        results = _check_count(function(*inner), carried)
        body.outputs = [_copy_into_body(mode, each) for each in (condition(*results).reshape(()), *results)]
    inputs = [None, first.reshape(()).value, *(each.value for each in carried)]
    return tuple(Tensor(value) for value in mode.writer.emit("Loop", inputs, {"body": body}, len(carried)))


def _copy_into_body(mode: Tracing, result: Tensor) -> Value:
    """An Identity of `result` in the body: outputs of a body must be distinct values of its own nodes."""
    return mode.writer.emit("Identity", [result.value])[0]


def _check_count(results: Any, carried: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensors = _as_tuple(results)
    if len(tensors) != len(carried):
        message = f"the body returns {len(tensors)} tensors, expected {len(carried)}, the number of carried tensors"
        raise ModelError(message, where="while_loop")
    return tensors


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _as_results(values: Sequence[Value], is_tuple: bool) -> Results:
    tensors = tuple(map(Tensor, values))
    return tensors if is_tuple else tensors[0]
