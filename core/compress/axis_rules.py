"""How operators tie the axes of their inputs and outputs: the rules of the dependency analysis of structured pruning.

Fang et al. 2023 (DepGraph, https://arxiv.org/abs/2301.12900) tie layers; here single positions are tied, so that
concatenations, flattenings and heads of attention need no special case. An operator without a rule freezes all axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np

from lathe.core.compress.axis_labels import AxisLabels, Labels
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim
from lathe.core.ops.opdef import registry

Rule = Callable[[AxisLabels, Node], None]
_RULES: dict[str, Rule] = {}
_POOLS = ("AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool", "Resize")


def tie_axes(graph: Graph) -> AxisLabels:
    """The labels of all axes of a graph whose types are inferred. The axes of its inputs, outputs and states stay.

    Of axes that a reshape merges, positions of one can be removed: of the outermost one, unless that is frozen and
    another one frees more.
    """
    chosen: dict[Node, int] = {}
    labels = _tie_all(graph, chosen)
    for node in list(labels.merges):
        stuck = _stuck(labels)
        for place in range(1, labels.choices[node] if node in stuck else 0):
            trial = _tie_all(graph, {**chosen, node: place})
            if len(_stuck(trial)) < len(stuck):
                labels, chosen = trial, {**chosen, node: place}
                break
    return labels


def _stuck(labels: AxisLabels) -> set[Node]:
    """The reshapes whose chosen axis is frozen."""
    return {
        node
        for node, chosen in labels.merges.items()
        if all(labels.is_frozen(root) for root in labels.roots(chosen).tolist())
    }


def _tie_all(graph: Graph, chosen: Mapping[Node, int]) -> AxisLabels:
    """The labels, where the merge of a reshape leaves the axis of this number among the merged ones free."""
    labels = AxisLabels(chosen)
    states = [value for state in graph.states for value in (state.value, state.update)]
    for value in [*graph.inputs, *graph.outputs, *states]:
        labels.freeze_value(value)
    for node in graph.nodes:
        _tie_node(labels, node)
    return labels


def _tie_node(labels: AxisLabels, node: Node) -> None:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    has_ranks = all(getattr(value.type, "shape", None) is not None for value in values)
    rule = _RULES.get(node.op) or (_elementwise if registry.get(node.op).is_elementwise else None)
    if rule is None or not has_ranks or node.subgraphs:
        for value in (*values, *_captures(node)):
            labels.freeze_value(value)
    else:
        rule(labels, node)


def _captures(node: Node) -> list[Value]:
    from lathe.core.ir.graph import captures

    return [value for body in node.subgraphs for value in captures(body)]


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _tie_aligned(labels: AxisLabels, value: Value, output: Value, without: Sequence[int] = ()) -> None:
    """Tie the axes of a value with those of the output to which it broadcasts, but for the axes `without` of it."""
    lead = len(output.shape) - len(value.shape)
    for axis in range(len(value.shape)):
        mine, other = value.shape[axis], output.shape[lead + axis]
        if axis not in without and not (mine == 1 and other != 1):
            labels.tie(labels.of(value, axis), labels.of(output, lead + axis))


def _elementwise(labels: AxisLabels, node: Node) -> None:
    for value in node.inputs:
        if value is not None:
            _tie_aligned(labels, value, node.output)


@_rule("Identity", "Dropout")
def _same(labels: AxisLabels, node: Node) -> None:
    for output in node.outputs:
        _tie_aligned(labels, node.required_input(0), output)


@_rule("Softmax", "LogSoftmax")
def _softmax(labels: AxisLabels, node: Node) -> None:
    _tie_aligned(labels, node.required_input(0), node.output)
    axis = node.attrs.get("axis", -1)
    labels.freeze(labels.of(node.output, axis) if isinstance(axis, int) else None)


@_rule("LayerNormalization", "RMSNormalization")
def _layer_norm(labels: AxisLabels, node: Node) -> None:
    """The statistics are those of the normalized axes, which therefore stay."""
    axis = node.attrs.get("axis", -1)
    assert isinstance(axis, int), "type inference checks it"
    value = node.required_input(0)
    first = axis % len(value.shape)
    _tie_aligned(labels, value, node.output)
    for place in range(first, len(value.shape)):
        labels.freeze(labels.of(value, place))
    for other in [*node.inputs[1:], *node.outputs[1:]]:
        if other is not None:
            labels.freeze_value(other)


@_rule("BatchNormalization", "InstanceNormalization")
def _channel_norm(labels: AxisLabels, node: Node) -> None:
    value = node.required_input(0)
    _tie_aligned(labels, value, node.output)
    for parameter in [*node.inputs[1:], *node.outputs[1:]]:
        if parameter is not None:
            labels.tie(labels.of(parameter, 0), labels.of(value, 1))


@_rule("Conv")
def _conv(labels: AxisLabels, node: Node) -> None:
    value, weights, output = node.required_input(0), node.required_input(1), node.output
    groups = node.attrs.get("group", 1)
    labels.tie(labels.of(value, 0), labels.of(output, 0))
    labels.tie(labels.of(weights, 0), labels.of(output, 1))
    if (bias := node.input(2)) is not None:
        labels.tie(labels.of(bias, 0), labels.of(output, 1))
    if groups == 1:
        labels.tie(labels.of(value, 1), labels.of(weights, 1))
    elif is_depthwise(node):
        inputs, outputs = labels.of(value, 1), labels.of(output, 1)
        spread = None if inputs is None or outputs is None else np.repeat(inputs, len(outputs) // len(inputs))
        labels.tie(spread, outputs)
        labels.freeze(labels.of(weights, 1))
    else:
        for each in (labels.of(value, 1), labels.of(weights, 0), labels.of(weights, 1)):
            labels.freeze(each)
    for spatial in (value, weights, output):
        for axis in range(2, len(spatial.shape)):
            labels.freeze(labels.of(spatial, axis))


def is_depthwise(node: Node) -> bool:
    """Whether each channel of the input of a Conv has outputs of its own."""
    groups = node.attrs.get("group", 1)
    return isinstance(groups, int) and groups > 1 and groups == node.required_input(0).shape[1]


@_rule(*_POOLS)
def _pool(labels: AxisLabels, node: Node) -> None:
    value = node.required_input(0)
    for output in node.outputs:
        for axis in range(len(value.shape)):
            if axis < 2:
                labels.tie(labels.of(value, axis), labels.of(output, axis))
            else:
                labels.freeze(labels.of(value, axis))
                labels.freeze(labels.of(output, axis))


@_rule("MatMul")
def _matmul(labels: AxisLabels, node: Node) -> None:
    first, second, output = node.required_input(0), node.required_input(1), node.output
    if min(len(first.shape), len(second.shape)) < 2:
        for value in (first, second, output):
            labels.freeze_value(value)
        return
    rank = len(output.shape)
    _tie_aligned(labels, first, output, without=[len(first.shape) - 1])
    _tie_aligned(labels, second, output, without=[len(second.shape) - 2])
    assert rank >= 2, "of two matrices"
    labels.tie(labels.of(first, -1), labels.of(second, -2))


@_rule("Gemm")
def _gemm(labels: AxisLabels, node: Node) -> None:
    first, second, output = node.required_input(0), node.required_input(1), node.output
    a, b = (int(bool(node.attrs.get(name))) for name in ("transA", "transB"))
    labels.tie(labels.of(first, a), labels.of(output, 0))
    labels.tie(labels.of(second, 1 - b), labels.of(output, 1))
    labels.tie(labels.of(first, 1 - a), labels.of(second, b))
    if (bias := node.input(2)) is not None:
        _tie_aligned(labels, bias, output)


@_rule("Concat")
def _concat(labels: AxisLabels, node: Node) -> None:
    axis = node.attrs["axis"]
    assert isinstance(axis, int), "type inference checks it"
    axis %= len(node.output.shape)
    inputs = [value for value in node.inputs if value is not None]
    for value in inputs:
        _tie_aligned(labels, value, node.output, without=[axis])
    parts = [labels.of(value, axis) for value in inputs]
    known = [part for part in parts if part is not None]
    labels.tie(np.concatenate(known) if len(known) == len(parts) else None, labels.of(node.output, axis))
    if len(known) < len(parts):
        for part in known:
            labels.freeze(part)


@_rule("Split")
def _split(labels: AxisLabels, node: Node) -> None:
    value, axis = node.required_input(0), node.attrs.get("axis", 0)
    assert isinstance(axis, int), "type inference checks it"
    axis %= len(value.shape)
    whole = labels.of(value, axis)
    if whole is None or node.attrs.get("split") is None:  # equal parts would not stay equal
        labels.freeze(whole)
    start = 0
    for output in node.outputs:
        _tie_aligned(labels, output, value, without=[axis])
        part = labels.of(output, axis)
        if part is not None:
            labels.tie(whole[start : start + len(part)] if whole is not None else None, part)
            start += len(part)


@_rule("Slice")
def _slice(labels: AxisLabels, node: Node) -> None:
    """Ties what a slice of step 1 takes; an axis that is sliced otherwise is frozen."""
    value, taken = node.required_input(0), slices_of(node)
    for axis in range(len(value.shape)):
        whole, part = labels.of(value, axis), labels.of(node.output, axis)
        if taken is None or len(node.inputs) > 1:
            labels.freeze(whole)
            labels.freeze(part)
        else:
            labels.tie(whole[taken[axis]] if axis in taken and whole is not None else whole, part)


def slices_of(node: Node) -> dict[int, slice] | None:
    """The slice of each axis that a Slice cuts, with numbers from 0 to the extent.

    None if an index is no number, a step is not 1, or the extent is not known.
    """
    value = node.required_input(0)
    starts, ends = node.attrs.get("starts"), node.attrs.get("ends")
    if not isinstance(starts, tuple) or not isinstance(ends, tuple):
        return None
    axes, steps = node.attrs.get("axes"), node.attrs.get("steps")
    axes = axes if isinstance(axes, tuple) else tuple(range(len(starts)))
    steps = steps if isinstance(steps, tuple) else (1,) * len(starts)
    found = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        extent = value.shape[axis] if isinstance(axis, int) else None
        if not (isinstance(start, int) and isinstance(end, int) and isinstance(extent, int)) or step != 1:
            return None
        found[int(axis) % len(value.shape)] = slice(*slice(start, end).indices(extent)[:2])  # type: ignore[arg-type]
    return found


@_rule("Transpose")
def _transpose(labels: AxisLabels, node: Node) -> None:
    value, perm = node.required_input(0), node.attrs.get("perm")
    order = perm if isinstance(perm, tuple) else tuple(reversed(range(len(value.shape))))
    for place, axis in enumerate(order):
        assert isinstance(axis, int), "type inference checks it"
        labels.tie(labels.of(value, axis), labels.of(node.output, place))


@_rule("ReduceMean", "ReduceSum")
def _reduce(labels: AxisLabels, node: Node) -> None:
    """Reduced axes stay: without some positions, the sum or mean is another one."""
    value, axes = node.required_input(0), node.attrs.get("axes")
    reduced = {int(axis) % len(value.shape) for axis in axes} if isinstance(axes, tuple) else set()  # type: ignore[arg-type]
    if not reduced or len(node.inputs) > 1:
        labels.freeze_value(value)
        labels.freeze_value(node.output)
        return
    place = 0
    for axis in range(len(value.shape)):
        if axis in reduced:
            labels.freeze(labels.of(value, axis))
            place += int(bool(node.attrs.get("keepdims", 1)))
        else:
            labels.tie(labels.of(value, axis), labels.of(node.output, place))
            place += 1


@_rule("Gather")
def _gather(labels: AxisLabels, node: Node) -> None:
    """The gathered axis stays, such as the tokens of an embedding; the others are tied."""
    value, indices, output = node.required_input(0), node.required_input(1), node.output
    axis = node.attrs.get("axis", 0)
    assert isinstance(axis, int), "type inference checks it"
    axis %= len(value.shape)
    labels.freeze(labels.of(value, axis))
    labels.freeze_value(indices)
    more = len(indices.shape) - 1
    for place in range(len(value.shape)):
        if place != axis:
            labels.tie(labels.of(value, place), labels.of(output, place + (more if place > axis else 0)))


@_rule("Pad")
def _pad(labels: AxisLabels, node: Node) -> None:
    value, pads = node.required_input(0), node.attrs.get("pads")
    rank = len(value.shape)
    for axis in range(rank):
        is_kept = isinstance(pads, tuple) and len(pads) == 2 * rank and pads[axis] == pads[rank + axis] == 0
        whole, padded = labels.of(value, axis), labels.of(node.output, axis)
        if is_kept:
            labels.tie(whole, padded)
        else:
            labels.freeze(whole)
            labels.freeze(padded)


@_rule("Flatten", "Reshape", "Squeeze", "Unsqueeze")
def _reshape(labels: AxisLabels, node: Node) -> None:
    """Ties equal axes at both ends, and in the middle one axis with one of those that it merges or becomes.

    Usually that is the outermost one: channels of a flattened image, heads of attention.
    """
    before, after = node.required_input(0), node.output
    left, right = list(range(len(before.shape))), list(range(len(after.shape)))
    if len(node.inputs) > 1:  # a shape that is computed
        labels.freeze_value(before)
        labels.freeze_value(after)
        return
    left, right = _without_ones(labels, before, left), _without_ones(labels, after, right)
    while left and right and before.shape[left[-1]] == after.shape[right[-1]]:
        labels.tie(labels.of(before, left.pop()), labels.of(after, right.pop()))
    while left and right and before.shape[left[0]] == after.shape[right[0]]:
        labels.tie(labels.of(before, left.pop(0)), labels.of(after, right.pop(0)))
    if len(left) == 1 and _extents(after, right) == _extents(before, left) is not None:
        _tie_merged(labels, node, labels.of(before, left[0]), [labels.of(after, axis) for axis in right])
    elif len(right) == 1 and _extents(before, left) == _extents(after, right) is not None:
        _tie_merged(labels, node, labels.of(after, right[0]), [labels.of(before, axis) for axis in left])
    else:
        for value, axes in ((before, left), (after, right)):
            for axis in axes:
                labels.freeze(labels.of(value, axis))


def _without_ones(labels: AxisLabels, value: Value, axes: Sequence[int]) -> list[int]:
    """The axes without those of extent 1, which are frozen."""
    for axis in axes:
        if value.shape[axis] == 1:
            labels.freeze(labels.of(value, axis))
    return [axis for axis in axes if value.shape[axis] != 1]


def _extents(value: Value, axes: Sequence[int]) -> int | None:
    """The product of these extents; None if one is no number."""
    extents: list[Dim] = [value.shape[axis] for axis in axes]
    numbers = [extent for extent in extents if isinstance(extent, int)]
    return prod(numbers) if len(numbers) == len(extents) else None


def _tie_merged(labels: AxisLabels, node: Node, merged: Labels | None, parts: Sequence[Labels | None]) -> None:
    """Tie the positions of one of the axes `parts` with their positions in the axis that merges all."""
    known = [part for part in parts if part is not None]
    if merged is None or len(known) < len(parts) or not known:
        for each in (merged, *parts):
            labels.freeze(each)
        return
    place = labels.chosen.get(node, 0)
    for other, part in enumerate(known):
        if other != place:
            labels.freeze(part)
    inner, outer = (prod(len(part) for part in some) for some in (known[place + 1 :], known[:place]))
    labels.tie(np.tile(np.repeat(known[place], inner), outer), merged)
    labels.merges[node], labels.choices[node] = known[place], len(known)
