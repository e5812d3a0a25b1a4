"""Restores former faults of Lathe, one at a time, and checks that a random graph shows each of them.

    python -m tests.fuzz.graphs.faults --first 30000 --count 2000
    python -m tests.fuzz.graphs.faults "slices that suppose nothing" --seconds 600

A graph shows a fault if it disagrees with the oracles while the fault is there, and agrees without it. Only the graphs
are checked whose target is the machine's own, as a process has one target; all of them are counted.

Two old faults are missing, because the oracles disagree on the right result: integer division by zero, which crashes
ONNX Runtime, and the scale of zeros in DynamicQuantizeLinear, which is 1 there and 1/255 in ONNX's reference.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

import lathe.core.compiler.pipeline
import lathe.core.frontends.onnx
import lathe.core.ops.nn.matmul
import lathe.core.ops.opdef.assumed_extents
import lathe.core.ops.tensor.slicing
import lathe.core.passes.proofs.rows
import lathe.core.passes.rewrite.discontinuities
import lathe.core.passes.simplify.eliminate
from lathe.core.check.switch import CHECK_VARIABLE
from lathe.core.errors import ShapeWarning, UnknownRankError
from lathe.core.ir.dim import Dim, floor_div
from lathe.core.ir.graph import Array, Node, Value, node_reads
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Infer, MixesRows, OpDef, RowAxis
from lathe.core.ops.opdef.type_rules import Shape, broadcast_rows
from lathe.core.ops.quantized.quantize import integer_range, saturate
from lathe.core.ops.tensor.slicing import Slice, SliceLength
from lathe.core.passes.proofs.row_counts import Counts, ProofFailed
from lathe.core.plan.kernel_choice import KernelChoice
from tests.fuzz.graphs.check import check, confirmed
from tests.fuzz.graphs.config import target_of
from tests.fuzz.graphs.generate import Made, make

Change = tuple[Any, str, Any]  # an object, the name of an attribute, and its value while the fault is restored


@dataclass(frozen=True)
class Fault:
    """A former fault: `changes` restore it, `about` describes it; if `plans`, every plan is checked."""

    name: str
    about: str
    changes: tuple[Change, ...]
    plans: bool = True

    @contextmanager
    def put_back(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, {CHECK_VARIABLE: str(int(self.plans))}))
            for place, attribute, changed in self.changes:
                stack.enter_context(mock.patch.object(place, attribute, changed))
            yield


def _everywhere(function: Callable[..., Any], changed: Callable[..., Any]) -> tuple[Change, ...]:
    """The changes of a function in all modules that import it by its name."""
    name = function.__name__
    modules = [module for key, module in sorted(sys.modules.items()) if key.startswith("lathe.core.")]
    return tuple((module, name, changed) for module in modules if vars(module).get(name) is function)


# -- memory ------------------------------------------------------------------------------------------------------------


def _over_any_operand(choice: KernelChoice, node: Node, index: int) -> bool:
    """Allows overwriting an operand that shares memory with another one (a view or a part), but is not read twice."""
    call, source = choice.calls.get(node), node.input(index)
    if call is None or index not in call.inplace or source is None or source in choice.windows:
        return False
    return call.pointwise or node_reads(node).count(source) == 1


def _over_itself(choice: KernelChoice, node: Node, index: int) -> bool:
    """Allows overwriting an operand that the node reads twice, also by kernels that are not pointwise."""
    call, source = choice.calls.get(node), node.input(index)
    if call is None or index not in call.inplace or source is None or source in choice.windows:
        return False
    return all(value is source or choice.root(value) is not choice.root(source) for value in node_reads(node))


# -- rows --------------------------------------------------------------------------------------------------------------


def _rank_is_known(value: Value | None) -> bool:
    return value is None or not isinstance(value.type, TensorType) or value.type.shape is not None


def _any_parameter(counts: Counts, node: Node) -> None:
    op = registry.get(node.op)
    known = op.shape_arithmetic and all(output in counts.known for output in node.outputs)
    if not known and any(value in counts and i not in op.params.values() for i, value in enumerate(node.inputs)):
        raise ProofFailed("computes with the number of rows")


def _no_dimensions(where: str, value: Value, axis: RowAxis, batch: str) -> None:
    """Check no dimension of a value, but require that its rank is known."""
    if not _rank_is_known(value):
        raise ProofFailed(f"{where}: the rank of '{value.name}' is not known")


_check_dims = lathe.core.passes.proofs.rows._check_dims
_check_steps = lathe.core.passes.proofs.rows._check_steps
_check_counts = Counts.check
_node_rows = lathe.core.passes.proofs.rows._node_rows


def _dimensions_of_known_ranks(where: str, value: Value, axis: RowAxis, batch: str) -> None:
    if _rank_is_known(value):
        _check_dims(where, value, axis, batch)


def _steps_of_known_ranks(node: Node, axes: dict[Value, RowAxis]) -> None:
    _check_steps(node, {value: axis for value, axis in axes.items() if _rank_is_known(value)})


def _rows_where_ranks_are_known(node: Node, axes: dict[Value, RowAxis], counts: Counts) -> Sequence[RowAxis]:
    """The rows of a node; if its rule needs an unknown rank, the proof fails."""
    try:
        return _node_rows(node, axes, counts)
    except UnknownRankError as error:
        raise ProofFailed(str(error)) from error


def _counts_of_known_ranks(counts: Counts, node: Node) -> None:
    if node.op not in ("Shape", "Size") or _rank_is_known(node.inputs[0]):
        _check_counts(counts, node)


def _rows_of_known_ranks(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
    shapes = [c.shape(i) if c.has_input(i) else () for i in range(len(axes))]
    known = [(axis, shape) for axis, shape in zip(axes, shapes, strict=True) if shape is not None]
    found = {axis - len(shape) for axis, shape in known if axis is not None}
    if not found:
        return [None] * len(c.node.outputs)
    if len(found) > 1:
        return MixesRows("its inputs have their rows along different axes")
    back = found.pop()
    if any(axis is None and len(shape) >= -back and shape[back] != 1 for axis, shape in known):
        return MixesRows("an input without rows varies along the row axis")
    return [max(len(shape) for _, shape in known) + back] * len(c.node.outputs)


_UNKNOWN_RANKS: tuple[Change, ...] = (
    (lathe.core.passes.proofs.rows, "_check_dims", _dimensions_of_known_ranks),
    (lathe.core.passes.proofs.rows, "_check_steps", _steps_of_known_ranks),
    (lathe.core.passes.proofs.rows, "_node_rows", _rows_where_ranks_are_known),
)

# -- extents -----------------------------------------------------------------------------------------------------------


def _cut_without_clamping(extent: Dim, start: Dim, end: Dim, step: int) -> SliceLength | None:
    """The length of a slice by its bounds alone, not clamped to the extent."""
    far = lathe.core.ops.tensor.slicing._FAR
    if all(isinstance(dim, int) for dim in (extent, start, end)):
        return SliceLength(len(range(*slice(start, end, step).indices(extent))))  # type: ignore[misc, arg-type]
    if step == 1 and start == 0 and (end == extent or (isinstance(end, int) and end >= far)):
        return SliceLength(extent)
    last = extent if isinstance(end, int) and end >= far else end
    if isinstance(last, int):
        last = extent + last if last < 0 else last
    if step < 0 or not isinstance(start, int) or start < 0 or (isinstance(last, int) and last > 0):
        return None
    length = floor_div(last - start + (step - 1), step)
    return SliceLength(length if not isinstance(length, int) else max(0, length))


def _steps_are_one(c: Infer) -> bool:
    """The conditions for dropping a slice, except that its type must equal that of its input."""
    return c.has_param("ends") and c.param("ends") is not None and all(step == 1 for step in c.param("steps") or (1,))


def _only_what_operators_suppose(node: Node, known: dict[Value, Array]) -> Iterator[Dim]:
    op = registry.get(node.op)
    yield from op.supposes(Infer(op, node, known))


def _as_a_parameter(op: OpDef, name: str, value: Array) -> tuple[Any, ...]:
    return tuple(value.ravel().tolist())


def _fits(bias: Shape, product: Shape) -> bool:
    pairs = zip(reversed(bias), reversed(product), strict=False)
    open_ = (dim in (1, extent) or (isinstance(extent, int) and not isinstance(dim, int)) for dim, extent in pairs)
    return len(bias) <= len(product) and all(open_)


# -- numbers -----------------------------------------------------------------------------------------------------------


def _nan_as_zero_point(rounded: Any, point: Any, dtype: DType) -> Array:
    low, high = integer_range(dtype)
    found = np.clip(np.nan_to_num(rounded, posinf=2.0**40, neginf=-(2.0**40)) + point, low, high)
    return np.asarray(found.astype(dtype.numpy))


# -- the table ---------------------------------------------------------------------------------------------------------

_OVER_ITSELF = ((KernelChoice, "may_overwrite", _over_itself),)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a result over memory of another operand",
        "A kernel writes its result over an operand whose memory another operand shares: h - h[:, k] (C1).",
        ((KernelChoice, "may_overwrite", _over_any_operand),),
    ),
    Fault(
        "updates that are the data, over themselves",
        "A kernel that is not pointwise writes its result over an operand that it reads twice (C1).",
        _OVER_ITSELF,
    ),
    Fault(
        "updates that are the data, over themselves, plans unchecked",
        "The same, with nothing to show it but wrong numbers (C1).",
        _OVER_ITSELF,
        plans=False,
    ),
    Fault(
        "a number of rows as any parameter",
        "The number of rows may be any parameter: sum(x[:, :n]), TopK, Tile, Pad by n; no dimension is checked (C2).",
        ((Counts, "check", _any_parameter), (lathe.core.passes.proofs.rows, "_check_dims", _no_dimensions)),
    ),
    Fault(
        "rows of values of unknown rank",
        "An elementwise operator on rows of unknown rank, and their Shape and Size, count as the same for all (C3).",
        (
            *_UNKNOWN_RANKS,
            *_everywhere(broadcast_rows, _rows_of_known_ranks),
            (Counts, "check", _counts_of_known_ranks),
        ),
    ),
    Fault(
        "rows of values of unknown rank, of elementwise operators alone",
        "An elementwise operator skips an input that has rows, but no known rank (C3).",
        (*_UNKNOWN_RANKS, *_everywhere(broadcast_rows, _rows_of_known_ranks)),
    ),
    Fault(
        "rows of values of unknown rank, of Shape and Size alone",
        "Shape and Size of a value that has rows, but no known rank, count as the same for all (C3).",
        (*_UNKNOWN_RANKS, (Counts, "check", _counts_of_known_ranks)),
    ),
    Fault(
        "a slice from k to n + k taken for the whole",
        "x[k:n+k] gets n elements, and a slice of the type of its input is dropped (C4).",
        (
            (lathe.core.ops.tensor.slicing, "slice_length", _cut_without_clamping),
            (lathe.core.passes.simplify.eliminate, "is_whole_slice", _steps_are_one),
        ),
    ),
    Fault(
        "x / c as x * (1 / c) before a step",
        "A quotient is rounded otherwise although a step sees it: int(x / 41) (C5).",
        ((lathe.core.passes.rewrite.discontinuities, "reaches_discontinuity", lambda *_: False),),
    ),
    Fault(
        "slices that suppose nothing",
        "Slices of symbolic extents are not clamped: x[0:2n], table[0:n], x[-3:].",
        ((Slice, "supposes", lambda *_: ()),),
    ),
    Fault(
        "extents below 0",
        "Batches smaller than what a model cuts off: Pad by negative widths, Split into [n, 8 - n].",
        ((lathe.core.ops.opdef.assumed_extents, "node_assumptions", _only_what_operators_suppose),),
    ),
    Fault(
        "one code for batches of all sizes",
        "No batch gets code of its own, whatever the code for all batches supposes.",
        ((lathe.core.compiler.pipeline, "code_assumptions", lambda *_: ()),),
    ),
    Fault(
        "a symbol as any parameter",
        "A parameter that has to be a number is a symbol: Clip(x, max=n).",
        ((OpDef, "param_of", _as_a_parameter),),
    ),
    Fault(
        "initializers that cannot be fed",
        "An initializer that is a graph input, too, is no input of the session.",
        ((lathe.core.frontends.onnx, "replaceable_defaults", lambda *_: {}),),
    ),
    Fault(
        "a C of another symbol in Gemm",
        "Gemm refuses a C of another symbolic extent than the product has.",
        ((lathe.core.ops.nn.matmul, "_may_fit", _fits),),
    ),
    Fault(
        "a wrong declared output refused",
        "A declared output shape that its nodes contradict is an error.",
        ((lathe.core.frontends.onnx, "_only_shapes_differ", lambda *_: False),),
    ),
    Fault(
        "NaN quantized to the zero point",
        "The reference of QuantizeLinear makes the zero point of NaN, compiled code 0.",
        _everywhere(saturate, _nan_as_zero_point),
    ),
)


# -- the search --------------------------------------------------------------------------------------------------------


@contextmanager
def watched(faults: Collection[Fault]) -> Iterator[set[str]]:
    """The names of the faults whose functions would have returned other results for the calls in the block.

    The block runs without faults. Every other fault changes nothing, since the functions have no side effects."""
    places: dict[tuple[int, str], tuple[Any, list[tuple[str, Any]]]] = {}
    for fault in faults:
        for place, attribute, changed in fault.changes:
            places.setdefault((id(place), attribute), (place, []))[1].append((fault.name, changed))
    differ: set[str] = set()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {CHECK_VARIABLE: "1"}))
        for (_, attribute), (place, changes) in places.items():
            watching = _watching(getattr(place, attribute), changes, differ)
            stack.enter_context(mock.patch.object(place, attribute, watching))
        yield differ


def _watching(function: Callable[..., Any], changes: Sequence[tuple[str, Any]], differ: set[str]) -> Callable[..., Any]:
    def watching(*arguments: Any) -> Any:
        answer = _answer(function, arguments)
        for name, changed in changes:
            if name not in differ and not _alike(_answer(changed, arguments), answer):
                differ.add(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return watching


def _answer(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """A function's result or exception; for a generator the list of its values."""
    try:
        answer = function(*arguments)
        return list(answer) if isinstance(answer, Iterator) else answer
    except Exception as error:
        return error


def _alike(answer: Any, other: Any) -> bool:
    if isinstance(answer, Exception):
        return type(answer) is type(other)
    if isinstance(answer, np.ndarray) and isinstance(other, np.ndarray):
        return answer.dtype == other.dtype and np.array_equal(answer, other)
    if isinstance(answer, list | tuple) and isinstance(other, list | tuple):
        return list(answer) == list(other)
    return bool(answer == other)


@dataclass(frozen=True)
class Found:
    """A graph that shows a fault: the `after`-th graph of the search."""

    fault: Fault
    seed: int
    after: int
    kind: str

    def __str__(self) -> str:
        return f"{self.fault.name}: seed {self.seed}, after {self.after} graphs, {self.kind}"


def search(faults: Collection[Fault], seeds: Sequence[int], seconds: float = float("inf")) -> Iterator[Found | int]:
    """The first graph that shows each fault, then the number of graphs. Each graph is generated only once."""
    left, end, count = list(faults), time.monotonic() + seconds, 0
    own = os.environ.get("LATHE_TARGET", "")
    for count, seed in enumerate(seeds, 1):
        for fault, kind in _shown(left, make(seed)) if target_of(seed) == own else ():
            left.remove(fault)
            yield Found(fault, seed, count, kind)
        if not left or time.monotonic() > end:
            break
    yield count


def _shown(faults: Collection[Fault], made: Made) -> list[tuple[Fault, str]]:
    """The faults that a graph shows, and the kinds of its disagreements; none if it disagrees without faults."""
    cases, doubt = confirmed(made.model, made.cases)
    with watched(faults) as differ:
        outcome = check(made.model, cases, made.config, doubt)
    if outcome.wrong:
        print(f"seed {made.seed} disagrees without any fault: {outcome.kind}", file=sys.stderr)
    if outcome.kind != "agrees":
        return []
    shown = []
    for fault in faults:
        if fault.name in differ:
            with fault.put_back():
                outcome = check(made.model, cases, made.config)
            shown += [(fault, outcome.kind)] if outcome.wrong else []
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 if every fault was found."""
    arguments = _parser().parse_args(argv)
    wanted = {name: _named(name) for name in arguments.names} or {fault.name: fault for fault in FAULTS}
    warnings.simplefilter("ignore", ShapeWarning)  # models declare wrong shapes on purpose
    seeds = range(arguments.first, arguments.first + arguments.count)
    for found in search(wanted.values(), seeds, arguments.seconds):
        if isinstance(found, Found):
            del wanted[found.fault.name]
            print(found, flush=True)
        else:
            for name in wanted:
                print(f"{name}: not found in {found} graphs")
    return bool(wanted)


def _named(name: str) -> Fault:
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise SystemExit(f"no fault '{name}', expected one of: {', '.join(fault.name for fault in FAULTS)}")


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.graphs.faults", description=summary)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to put back, by default all")
    parser.add_argument("--first", type=int, default=30_000, help="the first seed")
    parser.add_argument("--count", type=int, default=2000, help="how many graphs to make at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="make no further graph after so long")
    return parser


if __name__ == "__main__":
    sys.exit(main())
