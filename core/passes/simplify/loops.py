"""Sets the trip count of a Loop whose condition counts, and moves loop-invariant carried values out of it.

TensorFlow exports a recurrent layer as a while loop: a counter grows by one, and the loop runs while it is less than
the number of steps. Without a trip count, the length of the loop's scan outputs is data-dependent, and no reader of
them has a kernel. Such loops also carry their weights from iteration to iteration, which hides that they are constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.rewrite.base import PassResult
from lathe.core.passes.rewrite.editor import Editor

_EXACT = 1 << 24  # float32 represents all integers up to 2^24
_WIDE = (DType.INT32, DType.INT64, DType.FLOAT32, DType.FLOAT64)  # types that represent all these integers


@dataclass(frozen=True)
class SimplifyLoops:
    name: str = "loops"

    def run(self, graph: Graph) -> PassResult:
        """Repeats until nothing changes: the length of one loop's scan outputs may be the trip count of another."""
        changed = _hoist_invariants(graph)
        while any(node.op == "Loop" for node in graph.nodes):
            known, editor = infer_graph(graph), Editor(graph)
            for node in editor.nodes():
                if node.op == "Loop" and (trips := _trip_count(node, known)) is not None:
                    _set_trip_count(editor, node, trips)
            changed += (found := editor.finish().changed)
            if not found:
                break
        return PassResult(changed)


def _hoist_invariants(graph: Graph) -> int:
    """Removes carried values that no iteration changes: the body captures them. Returns the edits, 2 for each value."""
    editor = Editor(graph)
    for node in editor.nodes():
        body = node.attrs["body"] if node.op == "Loop" else None
        if isinstance(body, Graph):
            for place in reversed(range(2, len(node.inputs))):
                _hoist_invariant(editor, node, body, place)
    return editor.finish().changed


def _hoist_invariant(editor: Editor, node: Node, body: Graph, place: int) -> None:
    outer, inner, result = node.inputs[place], body.inputs[place], body.outputs[place - 1]
    while result.producer is not None and result.producer.op == "Identity" and result.producer.inputs[0] is not None:
        result = result.producer.inputs[0]
    has_others = 1 < len(node.outputs) > place - 2
    if outer is None or result is not inner or outer.type != inner.type or not has_others:
        return
    editor.replace(node.outputs[place - 2], outer)
    del node.outputs[place - 2], body.inputs[place], body.outputs[place - 1]
    body.replace_uses({inner: outer})
    editor.set_inputs(node, [*node.inputs[:place], *node.inputs[place + 1 :]])


def _set_trip_count(editor: Editor, node: Node, trips: int) -> None:
    """Replaces the condition of a Loop with a constant trip count: the body's condition becomes always true."""
    body = node.attrs["body"]
    assert isinstance(body, Graph)
    body.outputs[0] = body.inputs[1]
    body.remove_dead()
    editor.set_inputs(node, [editor.constant(np.array(trips), "trips"), None, *node.inputs[2:]])


def _trip_count(node: Node, known: Mapping[Value, Array]) -> int | None:
    """The number of iterations of a Loop, if its condition compares a counter with a known bound; otherwise None.

    A known trip count of the Loop itself limits the number. None also if the first condition is not known to be true.
    """
    limit, first, body = node.input(0), node.input(1), node.attrs["body"]
    assert isinstance(body, Graph)
    most = known.get(limit) if limit is not None else np.array(_EXACT)
    holds = first is None or _number(first, known)
    less = _origin(body.outputs[0]).producer
    if most is None or most.size != 1 or most.dtype.kind != "i" or not holds or less is None or less.op != "Less":
        return None
    counter, bound = (_origin(value) for value in less.inputs if value is not None)
    stop, steps = _invariant(node, body, bound, known), _counter_steps(node, body, counter, known)
    if stop is None or steps is None:
        return None
    start, step = steps
    return min(max(-(-(stop - start) // step), 1), max(int(most.reshape(-1)[0]), 0))


def _counter_steps(node: Node, body: Graph, counter: Value, known: Mapping[Value, Array]) -> tuple[int, int] | None:
    """The start and positive step of a carried counter whose value after an iteration is `counter`; otherwise None."""
    add = counter.producer
    if add is None or add.op != "Add" or counter.dtype not in _WIDE:
        return None
    for before, step in (add.inputs, add.inputs[::-1]):
        if before is None or step is None or (before := _origin(before)) not in body.inputs[2:]:
            continue
        place = body.inputs.index(before)
        start, by = _number(node.inputs[place], known), _number(step, {**known, **body.constants})
        if _origin(body.outputs[place - 1]) is counter and start is not None and by is not None and by > 0:
            return start, by
    return None


def _invariant(node: Node, body: Graph, value: Value, known: Mapping[Value, Array]) -> int | None:
    """The integer that a value of the body equals in every iteration; None if it is not known, or may change."""
    if value in body.inputs[2:]:
        place = body.inputs.index(value)
        is_unchanged = _origin(body.outputs[place - 1]) is value
        return _number(node.inputs[place], known) if is_unchanged else None
    return _number(value, {**known, **body.constants})


def _origin(value: Value) -> Value:
    """The source of a value through Identity, and through Casts that keep integers up to `_EXACT` exact."""
    while (node := value.producer) is not None and node.inputs and node.inputs[0] is not None:
        if node.op != "Identity" and (node.op != "Cast" or value.dtype not in _WIDE):
            break
        value = node.inputs[0]
    return value


def _number(value: Value | None, known: Mapping[Value, Array]) -> int | None:
    """The integer that a known value of one element equals, if below `_EXACT` in magnitude; None for other values."""
    array = known.get(value) if value is not None else None
    if array is None or array.size != 1 or array.dtype.kind not in "biuf":
        return None
    number = array.reshape(-1)[0]
    return int(number) if np.isfinite(number) and number == int(number) and abs(int(number)) < _EXACT else None
