"""Whether kernels go through memory as values lie there.

Elementwise kernels say in their specification how they walk through every operand, and so do those of a simulated
device: that must be what the values' shapes and places ask for. Of other kernels only the catalog knows: where an
operand lies apart inside another tensor, the kernel must be one that the catalog offers for these strides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import TypeAlias

from core.check.boxes import Box, Layout
from core.check.facts import Facts, Sizes, StepFacts
from core.check.identity import Identities
from core.errors import PlanError
from core.ir.dim import Dim, symbol
from core.ir.graph import Value
from core.kernels.catalog.base import Block, In, KernelCall, Out, Request, candidates, is_exact
from core.kernels.catalog.cuda.elementwise import ElementwiseSpec as GpuElementwiseSpec
from core.kernels.catalog.elementwise import ElementwiseSpec
from core.kernels.catalog.nest import Nest
from core.kernels.catalog.reference import ReferenceSpec

Strides = Mapping[Value, tuple[Dim, ...]]
_MOST_WAYS = 1024  # to ask for one kernel: operands of a Concat may be many
_SMALL, _LARGE = 2, 7  # the batch sizes from which strides are told for all


def check_walks(facts: Facts) -> None:
    """PlanError for a kernel that goes through an operand otherwise than the operand lies."""
    counts = (_SMALL, _LARGE) if facts.depends_on_batch else (1, 1)
    small, large = (Identities(facts, Sizes(n)) for n in counts)
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


def _check_nest(each: StepFacts, nest: Nest, sizes: Sizes, same: Identities) -> None:
    """The nest's operands are the inputs, and then one output for all."""
    walks, made = [], []
    result = same.box(each.node.output)
    operands = [pair for pair in zip(each.call.operands, each.values, strict=True) if not isinstance(pair[0], Block)]
    for operand, value in operands:
        box = same.box(value) if value is not None else None
        if box is None or result is None:
            raise PlanError(f"{each} has operand {operand}, which is no value in memory")
        if isinstance(operand, Out):
            made.append(_walk(box, box.shape))
        elif each.node.op == "BatchNormalization" and operand != In(0):
            walks.append(_along_channels(each, box, result.shape))
        else:
            walks.append(_walk(box, result.shape))
    if result is None or 0 in result.shape:
        return
    expected = [(extent, steps) for extent, *steps in zip(result.shape, *walks, made[0], strict=True)]
    given = [
        (sizes.dim(extent), [sizes.dim(strides[k]) for strides in nest.strides])
        for k, extent in enumerate(nest.extents)
    ]
    if any(each_made != made[0] for each_made in made) or _collapsed(given) != _collapsed(expected):
        raise PlanError(
            f"{each} walks {_collapsed(given)} elements, expected {_collapsed(expected)}, for n = {sizes.n}"
        )


def _walk(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Strides in elements in a shape that a value broadcasts to."""
    walked = Layout(box.start, box.shape, box.strides, box.itemsize).broadcast(shape)
    if walked is None:
        raise PlanError(f"a value of shape {box.shape} does not broadcast to {shape}")
    return [stride // box.itemsize for stride in walked.strides]


def _along_channels(each: StepFacts, box: Box, shape: tuple[int, ...]) -> list[int]:
    """The walk of a vector with an element for each channel."""
    channel = len(shape) - 1 if each.node.attrs.get("layout") == "NHWC" else min(1, len(shape) - 1)
    return [box.strides[0] // box.itemsize if axis == channel else 0 for axis in range(len(shape))]


def _collapsed(loops: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, list[int]]]:
    """Loops without those of one step, and neighbours as one where every operand goes through both with one stride."""
    found: list[tuple[int, list[int]]] = []
    for extent, steps in loops:
        if extent == 1:
            continue
        if found and found[-1][1] == [step * extent for step in steps]:
            found[-1] = (found[-1][0] * extent, list(steps))
        else:
            found.append((extent, list(steps)))
    return found


def _check_reference(each: StepFacts, spec: ReferenceSpec, sizes: Sizes, same: Identities) -> None:
    """The first operands are all values that the node has."""
    values = [value for value in each.values if value is not None]
    for value, strides in zip(values, spec.strides, strict=True):
        box = same.box(value)
        given = tuple(sizes.dim(stride) for stride in strides)
        if box is None or 0 in box.shape:
            continue
        kernels = Layout(box.start, box.shape, tuple(step * box.itemsize for step in given), box.itemsize)
        if not kernels.is_same(Layout(box.start, box.shape, box.strides, box.itemsize)):
            raise PlanError(f"{each} goes through %{value.name} by {given} elements, which lies by {box.strides} bytes")


def _check_offered(facts: Facts, each: StepFacts, small: Identities, large: Identities) -> None:
    """The catalog must offer the kernel for operands that lie so, and say that it honours their strides."""
    values = [value for value in dict.fromkeys(each.values) if value is not None]
    apart = {value: strides for value in values if (strides := _told(value, small, large)) is not None}
    spread = {value for value in apart if not _is_dense(value, small, large)}
    if not facts.offered and _honours(each, each.call, spread):
        return
    placed = small.inside.get(each.node, frozenset())
    for asked in _ways_to_ask(apart, spread):
        request = Request(
            each.node, facts.graph.constants, facts.target, facts.plan.threads,
            winograd=facts.winograd and not is_exact(each.node), strides=asked, placed=placed,
        )  # fmt: skip
        for call in candidates(request):
            if call.spec.symbol == each.call.spec.symbol and _honours(each, call, spread):
                return
    names = ", ".join(f"%{value.name} {tuple(map(str, apart[value]))}" for value in spread)
    raise PlanError(
        f"{each} runs {each.call.spec.summary}, which the catalog does not offer for the strides of {names}"
    )


_Steps: TypeAlias = tuple[Dim, ...]
_Strides: TypeAlias = Mapping[Value, _Steps]


def _ways_to_ask(apart: _Strides, spread: Collection[Value]) -> Iterator[_Strides]:
    """The strides with which the catalog may have been asked for operands that lie so.

    Along an extent of 1 any stride will do: that of the larger tensor, 0, or that of a dense array. A dense operand may
    also have been taken for one that is no part of another. First all operands are asked for in one way, then each in
    its own.
    """
    told = ({value: apart[value] for value in spread}, apart)
    forms = (lambda _, steps: steps, _without_needless_strides, _with_row_major_strides)
    for form in forms:
        yield from ({value: form(value, steps) for value, steps in given.items()} for given in told)
    ways: list[list[_Steps | None]] = [
        [*([] if value in spread else [None]), *dict.fromkeys(form(value, steps) for form in forms)]
        for value, steps in apart.items()
    ]
    for chosen in islice(product(*ways), _MOST_WAYS):
        yield {value: steps for value, steps in zip(apart, chosen, strict=True) if steps is not None}


def _without_needless_strides(value: Value, steps: _Steps) -> _Steps:
    return tuple(0 if extent == 1 else step for extent, step in zip(value.shape, steps, strict=True))


def _with_row_major_strides(value: Value, steps: _Steps) -> _Steps:
    made: list[Dim] = []
    for extent, step in reversed(list(zip(value.shape, steps, strict=True))):
        behind = value.shape[len(steps) - len(made)] * made[0] if made else 1
        made.insert(0, behind if extent == 1 else step)
    return tuple(made)


def _honours(each: StepFacts, call: KernelCall, spread: set[Value]) -> bool:
    operands = zip(each.call.operands, each.values, strict=True)
    return all(operand in call.strided for operand, value in operands if value in spread)


def _is_dense(value: Value, small: Identities, large: Identities) -> bool:
    boxes = small.box(value), large.box(value)
    return all(box is not None and box.is_dense for box in boxes)


def _told(value: Value, small: Identities, large: Identities) -> tuple[Dim, ...] | None:
    """The strides of a value that is part of another one, in elements, as the batch size makes them; None for any
    other."""
    a, b = small.box(value), large.box(value)
    if a is None or b is None or a.home is value:
        return None
    return tuple(_line(x // a.itemsize, y // a.itemsize) for x, y in zip(a.strides, b.strides, strict=True))


def _line(small: int, large: int) -> Dim:
    """The dimension that has these values for the two batch sizes."""
    slope, rest = divmod(large - small, _LARGE - _SMALL)
    if rest:
        raise PlanError(
            f"a stride is {small} for n = {_SMALL} and {large} for n = {_LARGE}, which no line goes through"
        )
    return symbol("n") * slope + (small - _SMALL * slope)
