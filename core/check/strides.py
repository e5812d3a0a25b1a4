"""Checks that kernels access their operands with the right strides.

The specs of elementwise kernels and of kernels on a simulated device contain the strides of every operand; these must
match the layout of the values. For all other kernels, only the catalog knows the strides: if an operand is a strided
part of another tensor, the kernel must be one that the catalog offers for these strides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import TypeAlias

from lathe.core.check.aliases import Aliases
from lathe.core.check.boxes import Box, Layout
from lathe.core.check.facts import Facts, Sizes, StepFacts
from lathe.core.errors import PlanError
from lathe.core.ir.dim import Dim, symbol
from lathe.core.ir.graph import Value
from lathe.core.kernels.call import Block, In, KernelCall, Out, Request, is_exact
from lathe.core.kernels.choose import candidates
from lathe.core.kernels.elementwise.cuda_spec import ElementwiseSpec as GpuElementwiseSpec
from lathe.core.kernels.elementwise.spec import ElementwiseSpec
from lathe.core.kernels.reference.spec import ReferenceSpec
from lathe.core.kernels.shared.nest import Nest

Strides = Mapping[Value, tuple[Dim, ...]]
_MAX_REQUESTS = 1024  # requests to the catalog for one kernel: a Concat may have many operands
_SMALL, _LARGE = 2, 7  # batch sizes: strides at both determine the linear function of n


def check_strides(facts: Facts) -> None:
    """PlanError if a step runs a kernel that accesses an operand with other strides than the value has."""
    counts = (_SMALL, _LARGE) if facts.depends_on_batch else (1, 1)
    small, large = (Aliases(facts, Sizes(n)) for n in counts)
    for each in facts.steps:
        boxes = [(a, b) for v in each.values if v is not None and (a := small.box(v)) and (b := large.box(v))]
        spec = each.call.spec
        if isinstance(spec, ElementwiseSpec | GpuElementwiseSpec):
            for sizes, same in zip(map(Sizes, counts), (small, large), strict=True):
                _check_nest(each, spec.nest, sizes, same)
        elif isinstance(spec, ReferenceSpec):
            for sizes, same in zip(map(Sizes, counts), (small, large), strict=True):
                _check_reference(each, spec, sizes, same)
        elif not all(box.is_dense for pair in boxes for box in pair):
            _check_offered(facts, each, small, large)


def _check_nest(each: StepFacts, nest: Nest, sizes: Sizes, same: Aliases) -> None:
    """PlanError unless the loop nest of an elementwise kernel has the strides of the step's inputs and outputs.

    Loops are compared after merging (`_merge_loops`). All outputs must have the same strides, which come last in the
    nest. `same` has the layouts of the values for the batch size of `sizes`.
    """
    input_steps, output_steps = [], []
    result = same.box(each.node.output)
    operands = [pair for pair in zip(each.call.operands, each.values, strict=True) if not isinstance(pair[0], Block)]
    for operand, value in operands:
        box = same.box(value) if value is not None else None
        if box is None or result is None:
            raise PlanError(f"{each} has operand {operand}, which is no value in memory")
        if isinstance(operand, Out):
            output_steps.append(_element_strides(box, box.shape))
        elif each.node.op == "BatchNormalization" and operand != In(0):
            input_steps.append(_channel_strides(each, box, result.shape))
        else:
            input_steps.append(_element_strides(box, result.shape))
    if result is None or 0 in result.shape:
        return
    expected = [(extent, steps) for extent, *steps in zip(result.shape, *input_steps, output_steps[0], strict=True)]
    given = [
        (sizes.dim(extent), [sizes.dim(strides[k]) for strides in nest.strides])
        for k, extent in enumerate(nest.extents)
    ]
    are_outputs_alike = all(steps == output_steps[0] for steps in output_steps)
    if not are_outputs_alike or _merge_loops(given) != _merge_loops(expected):
        raise PlanError(
            f"{each} has loops and strides {_merge_loops(given)}, expected {_merge_loops(expected)}, for n = {sizes.n}"
        )


def _element_strides(box: Box, shape: tuple[int, ...]) -> list[int]:
    """The strides of a value in elements, broadcast to `shape`; PlanError if the value does not broadcast."""
    layout = Layout(box.start, box.shape, box.strides, box.itemsize).broadcast(shape)
    if layout is None:
        raise PlanError(f"a value of shape {box.shape} does not broadcast to {shape}")
    return [stride // box.itemsize for stride in layout.strides]


def _channel_strides(each: StepFacts, box: Box, shape: tuple[int, ...]) -> list[int]:
    """The strides in elements of a per-channel vector, broadcast to `shape`: 0 along all axes but that of channels."""
    channel = len(shape) - 1 if each.node.attrs.get("layout") == "NHWC" else min(1, len(shape) - 1)
    return [box.strides[0] // box.itemsize if axis == channel else 0 for axis in range(len(shape))]


def _merge_loops(loops: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, list[int]]]:
    """Loops (extent, stride per operand) without extent 1, merged where one stride covers both for all operands."""
    found: list[tuple[int, list[int]]] = []
    for extent, steps in loops:
        if extent == 1:
            continue
        if found and found[-1][1] == [step * extent for step in steps]:
            found[-1] = (found[-1][0] * extent, list(steps))
        else:
            found.append((extent, list(steps)))
    return found


def _check_reference(each: StepFacts, spec: ReferenceSpec, sizes: Sizes, same: Aliases) -> None:
    """PlanError unless the strides in the spec of a simulated kernel are those of the node's values."""
    values = [value for value in each.values if value is not None]
    for value, strides in zip(values, spec.strides, strict=True):
        box = same.box(value)
        given = tuple(sizes.dim(stride) for stride in strides)
        if box is None or 0 in box.shape:
            continue
        kernels = Layout(box.start, box.shape, tuple(step * box.itemsize for step in given), box.itemsize)
        if not kernels.is_same_as(Layout(box.start, box.shape, box.strides, box.itemsize)):
            message = f"{each} reads or writes %{value.name} with strides {given} in elements"
            raise PlanError(f"{message}, which has {box.strides} in bytes")


def _check_offered(facts: Facts, each: StepFacts, small: Aliases, large: Aliases) -> None:
    """PlanError unless the catalog offers this kernel for the strides of its operands, and the kernel supports them.

    `small` and `large` have the layouts of the values for two batch sizes. If the plan's kernels need not be those of
    the catalog (`Facts.offered`), the kernel only has to support strides.
    """
    values = [value for value in dict.fromkeys(each.values) if value is not None]
    parts = {value: strides for value in values if (strides := _part_strides(value, small, large)) is not None}
    strided = {value for value in parts if not _is_dense(value, small, large)}
    if not facts.offered and _supports_strides(each, each.call, strided):
        return
    placed = small.inside.get(each.node, frozenset())
    for strides_by_value in _possible_requests(parts, strided):
        request = Request(
            each.node, facts.graph.constants, facts.target, facts.plan.threads,
            winograd=facts.winograd and not is_exact(each.node), strides=strides_by_value, inputs_in_place=placed,
        )  # fmt: skip
        for call in candidates(request):
            if call.spec.symbol == each.call.spec.symbol and _supports_strides(each, call, strided):
                return
    names = ", ".join(f"%{value.name} {tuple(map(str, parts[value]))}" for value in strided)
    raise PlanError(
        f"{each} runs {each.call.spec.summary}, which the catalog does not offer for the strides of {names}"
    )


_Steps: TypeAlias = tuple[Dim, ...]
_Strides: TypeAlias = Mapping[Value, _Steps]


def _possible_requests(parts: _Strides, strided: Collection[Value]) -> Iterator[_Strides]:
    """Yield mappings of values to strides with which the planner may have asked the catalog for this kernel.

    `parts` has the strides of all operands that are parts of other values; `strided` names those that are not dense.
    Along an axis of extent 1 every stride is right: that of the parent tensor, 0, or that of a dense array. A dense
    part may also have been treated as a tensor of its own. First all operands are treated alike, then all combinations
    follow, up to `_MAX_REQUESTS`.
    """
    subsets = ({value: parts[value] for value in strided}, parts)
    variants = (lambda _, steps: steps, _with_zero_strides, _with_row_major_strides)
    for variant in variants:
        yield from ({value: variant(value, steps) for value, steps in subset.items()} for subset in subsets)
    choices: list[list[_Steps | None]] = [
        [*([] if value in strided else [None]), *dict.fromkeys(variant(value, steps) for variant in variants)]
        for value, steps in parts.items()
    ]
    for chosen in islice(product(*choices), _MAX_REQUESTS):
        yield {value: steps for value, steps in zip(parts, chosen, strict=True) if steps is not None}


def _with_zero_strides(value: Value, steps: _Steps) -> _Steps:
    """The strides `steps` of `value`, with 0 along its axes of extent 1."""
    return tuple(0 if extent == 1 else step for extent, step in zip(value.shape, steps, strict=True))


def _with_row_major_strides(value: Value, steps: _Steps) -> _Steps:
    """The strides `steps` of `value`, with those of a row-major array along its axes of extent 1."""
    result: list[Dim] = []
    for extent, step in reversed(list(zip(value.shape, steps, strict=True))):
        dense = value.shape[len(steps) - len(result)] * result[0] if result else 1
        result.insert(0, dense if extent == 1 else step)
    return tuple(result)


def _supports_strides(each: StepFacts, call: KernelCall, strided: set[Value]) -> bool:
    operands = zip(each.call.operands, each.values, strict=True)
    return all(operand in call.strided for operand, value in operands if value in strided)


def _is_dense(value: Value, small: Aliases, large: Aliases) -> bool:
    boxes = small.box(value), large.box(value)
    return all(box is not None and box.is_dense for box in boxes)


def _part_strides(value: Value, small: Aliases, large: Aliases) -> tuple[Dim, ...] | None:
    """The strides of a value that is part of another one, in elements, as functions of n; None for any other value."""
    a, b = small.box(value), large.box(value)
    if a is None or b is None or a.home is value:
        return None
    return tuple(_linear_dim(x // a.itemsize, y // a.itemsize) for x, y in zip(a.strides, b.strides, strict=True))


def _linear_dim(small: int, large: int) -> Dim:
    """The linear function of n that is `small` at n = 2 and `large` at n = 7; PlanError if its slope is no integer."""
    slope, rest = divmod(large - small, _LARGE - _SMALL)
    if rest:
        raise PlanError(f"a stride is {small} for n = {_SMALL} and {large} for n = {_LARGE}, which is not linear in n")
    return symbol("n") * slope + (small - _SMALL * slope)
