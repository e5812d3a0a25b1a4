"""Grows graphs node by node. Each new node is computed for every case, so shapes and numbers are always known.

A rule asks for operands, and the grower decides what they are: a constant, a value of the graph, the same value again,
a part of it, something computed from an extent, something of unknown rank. A node is dropped (`UnfitNode`) if an oracle
refuses it, if its results are not finite, or if small changes of the inputs change them much (see `shadows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import helper

from tests.fuzz.graphs.adapt import adapted
from tests.fuzz.graphs.evaluate import LOCAL, reads, tensor, tensor_type
from tests.fuzz.graphs.facts import (
    CARRIES,
    FIXES_RANK,
    JOINS,
    VIEWS,
    WINDOWS,
)
from tests.fuzz.graphs.shadows import MOST_ELEMENTS, computed
from tests.fuzz.graphs.shared_state import SharedState
from tests.fuzz.graphs.unknown_rank import UNKNOWN, holds, of_all, rankless
from tests.fuzz.graphs.values import (
    F32,
    FLOATS,
    I64,
    STRING,
    Array,
    Item,
    UnfitNode,
    broadcast,
    random_array,
)

T = TypeVar("T")
KINDS = ("plain", "constant", "alias", "window", "part", "count", "unknown rank")


class Grower:
    """One graph, or the body of one; a body may read the values of the graphs around it."""

    def __init__(self, world: SharedState, outer: Grower | None = None, closed: bool = False) -> None:
        """`closed`: the body of a function, whose constants are nodes, and which reads no values from outside."""
        self.world, self.outer, self.closed = world, outer, closed
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.items: list[Item] = []
        self.known: dict[str, Item] = {}
        self.kinds: dict[str, list[tuple[str, int, tuple[str, ...]]]] = {}  # by the first output of a node

    # -- choices ------------------------------------------------------------------------------------------------------

    @property
    def opset(self) -> int:
        return self.world.opset

    @property
    def alive(self) -> list[int]:
        return self.world.alive

    def of(self, options: Sequence[T]) -> T:
        return options[self.world.rng.randrange(len(options))]

    def choose(self, below: int) -> int:
        return self.world.rng.randrange(below)

    def on_frequent(self, chance: float) -> bool:
        return self.world.rng.random() < chance

    def kind(self, **weights: float) -> str:
        return self.world.rng.choices(list(weights), list(weights.values()))[0]

    # -- nodes --------------------------------------------------------------------------------------------------------

    def emit(
        self, op: str, inputs: Sequence[Item | None], outputs: int = 1, domain: str = "", keep: bool = True,
        names: Sequence[str] | None = None, **attrs: Any,
    ) -> list[Item]:  # fmt: skip
        """Add a node and return its results; some operands get another form (see `operand_forms`).

        UnfitNode if the node is invalid or its results are not usable."""
        disguise = self.world.disguise
        if disguise is not None and disguise.wanted(self, op, len(inputs)):
            self.world.disguise = None  # nodes that it adds keep their operands
            try:
                with self.attempt():
                    return self._emit(op, disguise.inputs(self, op, inputs), outputs, domain, keep, names, attrs)
            except UnfitNode:
                pass
            finally:
                self.world.disguise = disguise
        return self._emit(op, inputs, outputs, domain, keep, names, attrs)

    def _emit(
        self, op: str, inputs: Sequence[Item | None], outputs: int, domain: str, keep: bool,
        names: Sequence[str] | None, attrs: Mapping[str, Any],
    ) -> list[Item]:  # fmt: skip
        given = [item.name if item is not None else "" for item in inputs]
        while given and not given[-1]:
            given.pop()
        if op == "Reshape" and len(inputs) > 1 and not attrs.get("allowzero"):
            self._without_copied(inputs[0], inputs[1])
        made = list(names) if names is not None else [self.world.name() for _ in range(outputs)]
        node = helper.make_node(op, given, made, domain=domain, **attrs)
        sources = [self.find(name) for name in reads(node)]
        results, shadows, steps = computed(self.world, node, sources)
        flows = op in ("Shape", "Size") or any(item.counted for item in self._carriers(op, domain, inputs, sources))
        if self.world.rowwise and op not in ("Shape", "Size") and not self._keeps_rows(sources, results):
            raise UnfitNode("mixes rows")
        items = []
        for index, name in enumerate(made):
            if not name:
                continue
            arrays = {case: results[case][index] for case in results}
            item = Item(name, arrays, {case: shadows[case][index] for case in shadows}, steps=steps)
            item.counted = flows and len({array.tobytes() for array in arrays.values() if array.dtype != STRING}) > 1
            first = inputs[0] if inputs else None
            if first is not None and op in (*VIEWS, *WINDOWS) and not first.static:
                item.root = first.root
                item.window = first.window or (op in WINDOWS and item.shapes(self.alive) != first.shapes(self.alive))
            loses = op in FIXES_RANK or _is_number(op, inputs, attrs)
            item.rankless = not loses and any(each is not None and each.rankless for each in inputs[: _ranked(op)])
            items.append(item)
        self._note(node, inputs)
        self.nodes.append(node)
        self.known.update({item.name: item for item in items})
        if keep:
            self.items += items
        return items

    def one(self, op: str, *inputs: Item | None, **attrs: Any) -> Item:
        return self.emit(op, inputs, **attrs)[0]

    def _keeps_rows(self, sources: Sequence[Item], results: Mapping[int, Sequence[Array]]) -> bool:
        """True if the results lead with the number of rows whenever an operand does."""
        rows = {case: self.world.cases[case]["N"] for case in results}
        if self.outer is not None or all(item.dtype == I64 and item.counted for item in sources):
            return True  # arithmetic of extents; or a body, whose results are checked
        if any(item.rankless for item in sources):
            return True  # the proof of the compiler must handle values of unknown rank
        leads = any(all(item.at(case).shape[:1] == (n,) for case, n in rows.items()) for item in sources)
        return not leads or all(array.shape[:1] == (rows[case],) for case in results for array in results[case])

    def _carriers(self, op: str, domain: str, inputs: Sequence[Item | None], sources: Sequence[Item]) -> Sequence[Item]:
        """The operands that, if computed from an extent, make the result count as computed from one."""
        if domain or op in _CONTROL:
            return sources
        given = inputs if op in JOINS else inputs[:1] if op in CARRIES else ()
        return [item for item in given if item is not None]

    def _note(self, node: onnx.NodeProto, inputs: Sequence[Item | None]) -> None:
        """Record the kinds of a node's inputs."""
        found = []
        for index, item in enumerate(inputs):
            if item is None:
                continue
            others = [other for i, other in enumerate(inputs) if i != index and other is not None]
            alias = not item.static and any(other.root == item.root for other in others)
            kinds = [
                *(["constant"] if item.static else []),
                *(["alias"] if alias else []),
                *(["window"] if item.window else []),
                *(["part"] if item.window and alias else []),
                *(["count"] if item.counted else []),
                *(["unknown rank"] if item.rankless else []),
            ]
            op = "function" if node.domain == LOCAL else node.op_type
            found.append((op, index, tuple(kinds or ["plain"])))
        self.kinds[next(name for name in node.output if name)] = found

    def find(self, name: str) -> Item:
        grower: Grower | None = self
        while grower is not None:
            if name in grower.known:
                return grower.known[name]
            grower = grower.outer
        raise KeyError(name)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Removes the nodes built in the block if one is unfit."""
        kept = (len(self.nodes), len(self.constants), len(self.items), list(self.alive), dict(self.known))
        functions = len(self.world.functions)
        try:
            yield
        except UnfitNode:
            nodes, constants, items, self.world.alive, self.known = kept
            del self.nodes[nodes:], self.constants[constants:], self.items[items:], self.world.functions[functions:]
            raise

    def without_empty(self, x: Item) -> None:
        """Drop the cases in which a value is empty, because ONNX Runtime would crash or its result is undefined."""
        left = [case for case in self.alive if x.at(case).size]
        if len(left) < 2:
            raise UnfitNode("empty")
        self.world.alive = left

    def _without_copied(self, x: Item | None, target: Item | None) -> None:
        """Drop the cases in which a computed extent in the target of a Reshape is 0.

        A 0 there means "copy the input's extent", but a compiler that knows the target as symbols reads it as 0."""
        if x is None or target is None or not target.counted:
            return
        numbers = {case: target.at(case).tolist() for case in self.alive}
        moving = [len(set(column)) > 1 for column in zip(*numbers.values(), strict=False)]

        def copies(case: int) -> bool:
            shape = x.at(case).shape
            zeros = [axis for axis, n in enumerate(numbers[case]) if n == 0 and axis < len(moving) and moving[axis]]
            return any(axis < len(shape) and shape[axis] != 0 for axis in zeros)

        left = [case for case in self.alive if not copies(case)]
        if len(left) < 2:
            raise UnfitNode("an extent of 0 copies")
        self.world.alive = left

    # -- constants ----------------------------------------------------------------------------------------------------

    def constant(self, array: Any, dtype: Any = None) -> Item:
        """A new constant: an initializer, or a Constant node."""
        array = np.asarray(array, dtype)
        name = self.world.name("c")
        item = Item(name, dict.fromkeys(range(len(self.world.cases)), array), {}, static=True)
        item.shadows = item.arrays
        self.known[name] = item
        if self.closed or self.on_frequent(0.15):
            self.nodes.append(self._constant_node(array, name))
        else:
            self.constants.append(tensor(array, name))
        return item

    def _constant_node(self, array: Array, name: str) -> onnx.NodeProto:
        if self.opset >= 12 and array.dtype == I64 and array.ndim < 2 and self.on_frequent(0.5):
            short = {"value_int": int(array)} if array.ndim == 0 else {"value_ints": array.tolist()}
            if array.size:
                return helper.make_node("Constant", [], [name], **short)
        return helper.make_node("Constant", [], [name], value=tensor(array, name))

    def vector(self, numbers: Sequence[int], dtype: Any = np.int64) -> Item:
        return self.constant(list(numbers), dtype)

    def weight(self, dtype: np.dtype[Any], shape: Sequence[int], low: float = -1.0, high: float = 1.0) -> Item:
        """A constant of random numbers of the element type."""
        if int(np.prod(shape)) > MOST_ELEMENTS:
            raise UnfitNode("large")
        return self.constant(random_array(self.world.numbers, dtype, shape, low, high))

    # -- operands -----------------------------------------------------------------------------------------------------

    def visible(self) -> list[Item]:
        """The values that a node may read, outer graphs included, if they exist in all remaining cases."""
        found = list(self.items)
        if self.outer is not None and not self.closed:
            found += self.outer.visible()
        return [item for item in found if all(case in item.arrays for case in self.alive)]

    def pick(
        self, dtypes: Sequence[np.dtype[Any]] = (F32,), ranks: Sequence[int] | None = None,
        where: Callable[[Item], bool] = lambda item: True,
    ) -> Item:  # fmt: skip
        """A value of the graph; recent and unusual values are likelier. UnfitNode if there is none."""
        fits = [item for item in self.visible() if item.dtype in dtypes and self._ranked(item, ranks) and where(item)]
        if not fits:
            return adapted(self, dtypes, ranks, where)
        if I64 in dtypes and self.on_frequent(0.15):  # the type of parameters, so that both may share memory
            fits = [item for item in fits if item.dtype == I64] or fits
        ages = range(len(fits))
        weights = [
            (1 + 3 * (age + 4 > len(fits)) + 2 * item.window + 2 * item.counted)
            for age, item in zip(ages, fits, strict=True)
        ]
        return self.world.rng.choices(fits, weights)[0]

    def _ranked(self, item: Item, ranks: Sequence[int] | None) -> bool:
        return ranks is None or item.rank(self.alive) in ranks

    def number(self, ranks: Sequence[int] | None = None, where: Callable[[Item], bool] = lambda item: True) -> Item:
        return self.pick(FLOATS, ranks, where)

    def like(self, x: Item, dtype: np.dtype[Any] | None = None) -> Item:
        """An operand for an elementwise operator with `x`."""
        dtype = dtype or x.dtype
        if dtype != x.dtype:
            fits = [item for item in self.visible() if item.dtype == dtype and broadcast(x, item, self.alive)]
            return self.of(fits) if fits and self.on_frequent(0.8) else self._constant_like(x, dtype)
        kind = self.kind(
            same=1, view=0.6, part=3, whole=3 if x.window else 0, pool=3, constant=2, count=1, flip=0.6,
            all=2 * (self.world.hidden == "numbers"),
        )  # fmt: skip
        try:
            with self.attempt():
                return self._of_kind(x, kind)
        except UnfitNode:
            fits = [item for item in self.visible() if item.dtype == dtype and broadcast(x, item, self.alive)]
            return self.of(fits) if fits and self.on_frequent(0.5) else self._constant_like(x, dtype)

    def _of_kind(self, x: Item, kind: str) -> Item:
        if kind == "same":
            return x
        if kind == "view":
            return self.one("Identity", x)
        if kind == "part":
            return self.thin_part(x)
        if kind == "flip":
            return self.flipped(x)
        if kind == "count":
            return self.count_like(x)
        if kind == "all":
            return of_all(self, self.pick((x.dtype,)))
        if kind == "constant":
            return self._constant_like(x, x.dtype)
        fits = [item for item in self.visible() if item.dtype == x.dtype and broadcast(x, item, self.alive)]
        if kind == "whole":
            fits = [item for item in fits if item.root == x.root and item is not x]
        if not fits:
            raise UnfitNode("nothing fits")
        return self.of(fits)

    def _constant_like(self, x: Item, dtype: np.dtype[Any]) -> Item:
        """A constant that broadcasts to `x`: its extents are 1, or those of `x` that are fixed."""
        rank = x.rank(self.alive)
        if rank is None:
            return self.weight(dtype, ())
        fixed = [x.fixed(axis, self.alive) for axis in range(rank)]
        shape = [extent if extent is not None and self.on_frequent(0.6) else 1 for extent in fixed]
        return self.weight(dtype, shape[self.choose(rank + 1) :])

    def count_like(self, x: Item) -> Item:
        """An extent as data, in the element type of `x`; divided by 8 if that is a floating-point type."""
        if x.dtype not in (*FLOATS, I64) or self.opset < 9:
            raise UnfitNode("no such number")
        number = self.count(0, 60, scalar=self.on_frequent(0.5))
        if x.dtype == I64:
            return number
        made = self.one("Cast", number, to=tensor_type(np.zeros(0, x.dtype)))
        return self.one("Mul", made, self.constant(0.125, x.dtype))

    def dying(self, x: Item) -> Item:
        """Neg or Abs of `x` (or `x` if it is not floating-point), hidden from all rules.

        The next node is its last reader, and so may take its memory."""
        return self.emit(self.of(("Neg", "Abs")), [x], keep=False)[0] if x.dtype in FLOATS else x

    def thin_part(self, x: Item) -> Item:
        """One position along an axis, such as x[:, k:k+1], which broadcasts to `x`."""
        rank = x.rank(self.alive)
        axes = [axis for axis in range(rank or 0) if min(x.extents(axis, self.alive)) > 0]
        if not axes:
            raise UnfitNode("nothing to take a part of")
        axis = self.of(axes)
        extent = min(x.extents(axis, self.alive))
        if self.on_frequent(0.3):
            index = self.index(x, axis, scalar=False)
            return self.one("Gather", x, index, axis=axis)
        first = self.choose(extent)
        return self.slice(x, [axis], [first], [first + 1])

    def flipped(self, x: Item) -> Item:
        rank = x.rank(self.alive)
        if not rank or self.opset < 10:
            raise UnfitNode("nothing to flip")
        return self.slice(x, [self.choose(rank)], [-1], [-(2**31)], [-1])

    def slice(
        self, x: Item, axes: Sequence[int], starts: Sequence[int] | Item, ends: Sequence[int] | Item,
        steps: Sequence[int] | None = None,
    ) -> Item:  # fmt: skip
        """A Slice in the form of the opset. Bounds may be values from opset 10 on."""
        if self.opset < 10:
            if steps is not None or isinstance(starts, Item) or isinstance(ends, Item):
                raise UnfitNode("bounds are attributes")
            return self.one("Slice", x, axes=list(axes), starts=list(starts), ends=list(ends))
        given = [*([] if isinstance(starts, Item) else starts), *([] if isinstance(ends, Item) else ends)]
        narrow = self.on_frequent(0.1) and len(given) == 2 * len(axes) and max(map(abs, given)) < 2**31
        kind = np.int32 if narrow else np.int64
        bounds = [given if isinstance(given, Item) else self.vector(given, kind) for given in (starts, ends)]
        last = [self.vector(steps, kind)] if steps is not None else []
        return self.one("Slice", x, *bounds, self.vector(axes, kind), *last)

    def fit(self, dtype: np.dtype[Any], shape: Sequence[int], near: Item | None = None, low: float = -1.0) -> Item:
        """An operand of exactly this shape: a constant, or computed from values of the graph (or from `near`)."""
        size = int(np.prod(shape))
        if size > MOST_ELEMENTS:
            raise UnfitNode("large")
        if self.on_frequent(0.5):
            return self.weight(dtype, shape, low)
        whole = tuple(shape)
        found = [item for item in self.visible() if item.dtype == dtype and set(item.shapes(self.alive)) == {whole}]
        if found and self.on_frequent(0.6):
            return self.of(found)
        try:
            with self.attempt():
                carved = self._carved(dtype, shape, size, near)
                return self.one("Sin", carved) if dtype in FLOATS and self.on_frequent(0.3) else carved
        except UnfitNode:
            return self.weight(dtype, shape, low)

    def _carved(self, dtype: np.dtype[Any], shape: Sequence[int], size: int, near: Item | None) -> Item:
        """Consecutive elements of a value, in another shape."""
        source = near if near is not None and near.dtype == dtype and self.on_frequent(0.7) else self.pick((dtype,))
        flat = self.one("Reshape", source, self.vector([-1]))
        if min(len(flat.at(case)) for case in self.alive) < size:
            filled = self.weight(dtype, (size,))
            flat = self.one("Concat", flat, filled, axis=0)
        kind = self.kind(front=2, count=1)
        start = 0
        if kind == "count" and self.opset >= 10:
            spare = min(len(flat.at(case)) for case in self.alive) - size
            first = self.count(0, spare)
            last = self.one("Add", first, self.vector([size]))
            part = self.slice(flat, [0], first, last)
        else:
            part = self.slice(flat, [0], [start], [start + size])
        seen = tuple(shape) == (size,) and self.on_frequent(0.2)  # otherwise a Reshape declares the extent
        return part if seen else self.one("Reshape", part, self.vector(shape))

    # -- numbers that are parameters ----------------------------------------------------------------------------------

    def extent(self, x: Item | None = None, scalar: bool = False) -> Item:
        """An extent of a value, as a vector [1] or a scalar; extents that differ between cases are likelier."""
        seen = self.visible()
        if x is None or self.on_frequent(0.3):
            moving = [item for item in seen if len(set(item.shapes(self.alive))) > 1 and item.rank(self.alive)]
            x = self.of(moving) if moving else self.of(seen)
        if self.world.hidden == "extents":
            x = rankless(self, x, holds(self))
        rank = x.rank(self.alive)
        if not rank or self.on_frequent(0.1):
            size = self.one("Size", x)
            return size if scalar else self.one("Reshape", size, self.vector([1]))
        axes = [axis for axis in range(rank) if x.fixed(axis, self.alive) is None]
        axis = self.of(axes) if axes and self.on_frequent(0.8) else self.choose(rank)
        if self.opset >= 15 and self.on_frequent(0.4):
            found = self.one("Shape", x, start=axis, end=axis + 1)
            return self.one("Reshape", found, self.vector([])) if scalar else found
        shape = self.one("Shape", x)
        if scalar or self.on_frequent(0.5):
            return self.one("Gather", shape, self.constant(axis if scalar else [axis], np.int64), axis=0)
        return self.slice(shape, [0], [axis], [axis + 1])

    def count(self, low: int, high: int | Sequence[int], scalar: bool = False, x: Item | None = None) -> Item:
        """A number computed from an extent, in this range, whose end may differ between cases."""
        n = self.extent(x, scalar)
        form = self.kind(plain=3, less=1, more=1, double=1, half=1, rest=1, modulo=1)
        small = self.constant(1 + self.choose(3) if scalar else [1 + self.choose(3)], np.int64)
        op = {"less": "Sub", "more": "Add", "double": "Mul", "half": "Div"}.get(form)
        if op is not None:
            n = self.one(op, n, small)
        elif form == "rest":
            n = self.one("Sub", self.constant(8 if scalar else [8], np.int64), n)
        elif form == "modulo" and self.opset >= 10:
            n = self.one("Mod", n, small)
        highs = [high] * len(self.alive) if isinstance(high, int) else list(high)
        if any(n.at(case).size != 1 for case in self.alive):
            raise UnfitNode("no single number")
        if any(not low <= int(n.at(case).reshape(())) <= top for case, top in zip(self.alive, highs, strict=True)):
            if self.opset < 12 or min(highs) < low:
                raise UnfitNode("out of range")
            n = self.one("Min", n, self.constant(min(highs) if scalar else [min(highs)], np.int64))
            n = self.one("Max", n, self.constant(low if scalar else [low], np.int64))
        return n

    def nothing(self) -> Item:
        """The vector [0], known to be 0 only at run time or after constant folding.

        It is computed from data, or from a constant if rows must stay independent."""
        found = [item for item in self.visible() if item.dtype == F32]
        if self.world.rowwise or not found:
            many = self.constant(np.full(UNKNOWN, 0.25), np.float32)
            number = self.one("Reshape", self.one("ReduceMean", many, keepdims=0, keep=False), self.vector([1]))
        else:
            number = self.one("Reshape", self.one("ReduceSum", self.of(found), keepdims=0), self.vector([1]))
        half = self.one("Mul", self.one("Tanh", number), self.constant(0.5, np.float32))
        return self.one("Cast", half, to=tensor_type(np.zeros(0, np.int64)))

    def drawn(self, low: int, high: int, scalar: bool = False) -> Item:
        """An integer in this range that depends on data."""
        if self.opset < 12 or high < low:
            raise UnfitNode("no Min and Max of whole numbers")
        source = self.pick((I64,), where=lambda item: all(item.at(case).size for case in self.alive))
        flat = self.one("Reshape", source, self.vector([-1]))
        one = self.one("Gather", flat, self.constant(0 if scalar else [0], np.int64), axis=0)
        top, bottom = (self.constant(number if scalar else [number], np.int64) for number in (high, low))
        return self.one("Max", self.one("Min", one, top), bottom)

    def whole(self, low: int, high: int | Sequence[int], scalar: bool = False, x: Item | None = None) -> Item:
        """An integer in this range: a constant, or computed from an extent or from data."""
        least = high if isinstance(high, int) else min(high)
        if least < low:
            raise UnfitNode("an empty range")
        kind = self.kind(constant=4, count=3, data=1)
        try:
            with self.attempt():
                if kind == "count":
                    return self.count(low, high, scalar, x)
                if kind == "data":
                    return self.drawn(low, least, scalar)
        except UnfitNode:
            pass
        number = low + self.choose(least - low + 1)
        return self.constant(number if scalar else [number], np.int64)

    def wholes(self, ranges: Sequence[tuple[int, int]], x: Item | None = None) -> Item:
        """A vector of integers, each in its range; some may be computed."""
        if self.on_frequent(0.4):
            return self.vector([low + self.choose(high - low + 1) for low, high in ranges])
        parts = [self.whole(low, high, x=x) for low, high in ranges]
        return parts[0] if len(parts) == 1 else self.one("Concat", *parts, axis=0)

    def index(self, x: Item, axis: int, scalar: bool = False) -> Item:
        """An index along an axis of `x`."""
        extent = min(x.extents(axis, self.alive))
        if extent < 1:
            raise UnfitNode("nothing to take")
        return self.whole(0, extent - 1, scalar, x)


_CONTROL = ("If", "Loop", "Scan")


def _ranked(op: str) -> int:
    """The number of inputs that determine the rank of the result."""
    return 99 if op in JOINS or op == "MatMul" else 1


def _is_number(op: str, inputs: Sequence[Item | None], attrs: Mapping[str, Any]) -> bool:
    """True if an operator reduces a tensor of any rank to one number."""
    return op.startswith("Reduce") and len(inputs) == 1 and "axes" not in attrs and attrs.get("keepdims") == 0
