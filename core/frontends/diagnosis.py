"""Adds diagnostics to import errors: the inputs of the node with their types, and the nodes that produced them.

node 'fc2' (MatMul, opset 17): cannot multiply [n,64] by [32,10]: inner extents 64 and 32 differ
  input 0 (A) is %h : float32[n,64]
    %h : float32[n,64] = Relu(%g) "act"
    %g : float32[n,64] = MatMul(%x, %w1) "fc1"
    %x : float32[n,8], an input of graph 'g'
  input 1 (B) is %w2 : float32[32,10], a constant
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import islice

from lathe.core.errors import ModelError
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Node, Value
from lathe.core.ops.opdef import registry

_MAX_STEPS = 4  # of a value's history
_MAX_INPUTS = 6
_MAX_ELEMENTS = 8
_MAX_LINE = 200  # characters: names may have any length


def add_diagnosis(error: ModelError, node: OnnxNode, emitter: Emitter) -> ModelError:
    """A new error of the same class that names the opset of its node, with notes on the node's inputs and their origin.

    It has notes on the first 6 inputs at most.
    """
    is_own = error.where.startswith(f"node '{node.label}'")
    reason = error.reason if is_own or not error.where else f"{error.where}: {error.reason}"
    lines = [line for index, value in enumerate(node.inputs[:_MAX_INPUTS]) if value is not None
             for line in _input_lines(node, index, value, emitter)]  # fmt: skip
    return type(error)(reason, where=node.where, notes=(*map(_shorten, lines), *error.notes))


def history(value: Value, emitter: Emitter) -> list[str]:
    """The last 4 nodes that led to a value, the last one first, as lines of text; then "..." if there is more.

    The node before a node is the one that computes its first input that is not a constant. A shorter history ends with
    the input or constant at its beginning, or with a node that has only constant inputs.
    """
    lines = [_shorten(line) for line in islice(_steps(value, emitter), _MAX_STEPS + 1)]
    return [*lines[:_MAX_STEPS], *(["..."] if len(lines) > _MAX_STEPS else [])]


def suggestion(op: str, domain: str) -> str:
    """Advice for an error message on an operator that nothing defines; never empty.

    In the default domain it is the operator with a similar name, or that ONNX has none; in others how to define one.
    """
    if domain:
        return "define it as a model-local function, or register it (docs/custom-operators.md)"
    known = [name for name in registry.names() if registry.get(name).domain == ""]
    close = difflib.get_close_matches(op, known, 1)
    return f"did you mean {close[0]}?" if close else "no opset of ONNX has it"


def _input_lines(node: OnnxNode, index: int, value: Value, emitter: Emitter) -> Iterator[str]:
    definition = registry.find(node.op)
    name = f" ({definition.input_name(index)})" if definition is not None else ""
    constant = _origin(value, emitter) if value.producer is None else ""
    yield f"  input {index}{name} is {_value_text(value, emitter)}{constant}"
    if value.producer is not None:
        yield from (f"    {line}" for line in history(value, emitter))


def _steps(value: Value, emitter: Emitter) -> Iterator[str]:
    while value.producer is not None:
        yield f"{_value_text(value, emitter)} = {_application(value.producer)}"
        following = next((v for v in value.producer.inputs if v is not None and not _is_constant(v, emitter)), None)
        if following is None:
            return
        value = following
    yield f"{_value_text(value, emitter)}{_origin(value, emitter)}"


def _application(node: Node) -> str:
    inputs = ["_" if value is None else f"%{value.name}" for value in node.inputs[:_MAX_INPUTS]]
    rest = ["..."] if len(node.inputs) > _MAX_INPUTS else []
    return f'{node.op}({", ".join(inputs + rest)}) "{node.name}"'


def _origin(value: Value, emitter: Emitter) -> str:
    if _is_constant(value, emitter):
        return ", a constant"
    own = value in emitter.graph.inputs
    return f", an input of graph '{emitter.graph.name}'" if own else ", from a graph around it"


def _is_constant(value: Value, emitter: Emitter) -> bool:
    return value.producer is None and value in emitter.session.known


def _value_text(value: Value, emitter: Emitter) -> str:
    """The value's name and type as text, with its elements if at most 8 are known (it is mostly a shape then)."""
    known = emitter.session.known.get(value)
    if known is None or known.size > _MAX_ELEMENTS or known.ndim > 1:
        return f"%{value.name} : {value.type}"
    items = ", ".join(map(str, known.ravel().tolist()))
    return f"%{value.name} : {value.type} = [{items}]"


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..."
