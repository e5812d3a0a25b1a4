"""Rules for operators that move numbers: views, windows, copies, indices and updates."""

from __future__ import annotations

import numpy as np
from onnx import helper

from tests.fuzz.graphs.grower import Grower
from tests.fuzz.graphs.rules import rule
from tests.fuzz.graphs.values import ALL, BOOL, F32, F64, FLOATS, I32, I64, NUMBERS, Item, UnfitNode, same_shape

_ANY = ALL


def _axis(f: Grower, x: Item, since: int = 11) -> tuple[int, int]:
    """A random axis, and the same axis as an attribute, which may be negative."""
    rank = x.rank(f.alive)
    if not rank:
        raise UnfitNode("no axis")
    axis = f.choose(rank)
    return axis, axis - rank if f.opset >= since and f.on_frequent(0.3) else axis


@rule("Slice", weight=4)
def _slice(f: Grower) -> None:
    x = f.pick(_ANY, (1, 2, 3, 4))
    rank = x.rank(f.alive) or 1
    axes = sorted(f.world.rng.sample(range(rank), 1 + (f.on_frequent(0.25) and rank > 1)))
    if f.opset < 10 or f.on_frequent(0.25):
        starts = [f.choose(4) - 2 * f.on_frequent(0.3) for _ in axes]
        ends = [start + 1 + f.choose(3) if start >= 0 else 2**31 - 1 for start in starts]
        if f.on_frequent(0.2):
            ends = [f.of((-1, 2**31 - 1, 2**63 - 1)) for _ in axes]
        f.slice(
            x, axes, starts, ends, [f.of((1, 2, 3)) for _ in axes] if f.opset >= 10 and f.on_frequent(0.3) else None
        )
        return
    if f.on_frequent(0.25):  # the axis and the steps are computed
        axis, step = f.whole(0, rank - 1, x=x), f.whole(1, 3, x=x)
        f.one("Slice", x, f.whole(0, 2, x=x), f.whole(1, 5, x=x), axis, step)
        return
    extents = [min(x.extents(axis, f.alive)) for axis in axes]
    starts_ = f.wholes([(-1, max(extent, 1)) for extent in extents], x)
    ends_ = f.wholes([(0, extent + 2) for extent in extents], x)
    f.slice(x, axes, starts_, ends_, [f.of((1, 1, 2)) for _ in axes] if f.on_frequent(0.4) else None)


@rule("Slice", since=10, weight=4)
def _shifted(f: Grower) -> None:
    """Slices such as x[1:n+1], x[k:n], x[-k:], x[:2n] and table[0:n], whose ends may be beyond the extent."""
    x = f.weight(F32, (f.of((3, 5, 12)), 4)) if f.on_frequent(0.2) else f.pick(_ANY, (1, 2, 3, 4))
    axis, written = _axis(f, x, 10)
    moving = [a for a in range(x.rank(f.alive) or 1) if x.fixed(a, f.alive) is None]
    if moving and f.on_frequent(0.6):
        axis = written = f.of(moving)
    kind = f.kind(behind=2, last=1, twice=1, any=3)
    if kind == "last":
        f.slice(x, [written], [-1 - f.choose(5)], [2**31 - 1])
    elif kind == "any":
        first = f.whole(0, 3, x=x)
        count = f.count(0, 60, x=x)
        last = f.one("Add", count, f.vector([f.choose(3)])) if f.on_frequent(0.6) else count
        f.slice(x, [written], first, last)
    else:
        n = f.one("Gather", f.one("Shape", x), f.vector([axis]), axis=0)
        begin = f.vector([f.of((1, 1, 2, -1))])
        end = f.one("Add", n, n if kind == "twice" else begin) if f.on_frequent(0.8) else n
        f.slice(x, [written], begin, end)


@rule("Slice", since=10, weight=1.5)
def _table_of_counts(f: Grower) -> None:
    """A row of a constant table, selected by a number computed from an extent, combined with a value."""
    x = f.pick((F32,), (2, 3))
    width = x.fixed(-1, f.alive)
    if width is None:
        raise UnfitNode("no fixed width")
    table = f.weight(x.dtype, (12, width))
    n = f.count(0, 11, x=x)
    row = f.slice(table, [0], n, f.one("Add", n, f.vector([1])))
    f.one(f.of(("Add", "Mul", "Sub")), x, row)


@rule("Split", weight=2)
def _split(f: Grower) -> None:
    x = f.pick(_ANY, (1, 2, 3, 4))
    axis, written = _axis(f, x)
    extent = x.fixed(axis, f.alive)
    if extent is None and f.opset >= 13 and f.on_frequent(0.5):
        first = f.count(0, x.extents(axis, f.alive), x=x)
        rest = f.one("Sub", f.one("Gather", f.one("Shape", x), f.vector([axis]), axis=0), first)
        f.emit("Split", [x, f.one("Concat", first, rest, axis=0)], outputs=2, axis=written)
        return
    if not extent or extent < 2:
        raise UnfitNode("nothing to split")
    if f.on_frequent(0.4):
        parts = f.of([n for n in (2, 3, 4, 5) if extent % n == 0] or [1])
        attrs = {"num_outputs": parts} if f.opset >= 18 else {}
        made = f.emit("Split", [x], outputs=parts, axis=written, **attrs)
    else:
        cut = 1 + f.choose(extent - 1)
        if f.opset < 13:
            made = f.emit("Split", [x], outputs=2, axis=written, split=[cut, extent - cut])
        elif f.on_frequent(0.3):
            first = f.whole(0, extent, x=x)
            sizes = f.one("Concat", first, f.one("Sub", f.vector([extent]), first), axis=0)
            made = f.emit("Split", [x, sizes], outputs=2, axis=written)
        else:
            made = f.emit("Split", [x, f.vector([cut, extent - cut])], outputs=2, axis=written)
    if len(made) > 1 and made[0].dtype in FLOATS and f.on_frequent(0.5) and same_shape(made[0], made[1], f.alive):
        f.one(f.of(("Add", "Mul", "Sub")), made[0], made[1])


@rule("Gather", weight=2)
def _gather(f: Grower) -> None:
    x = f.pick(_ANY, (1, 2, 3, 4))
    axis, written = _axis(f, x)
    extent = min(x.extents(axis, f.alive))
    if extent < 1:
        raise UnfitNode("nothing to gather")
    kind = f.kind(constant=2, computed=2, values=1)
    if kind == "computed":
        f.one("Gather", x, f.index(x, axis, scalar=f.on_frequent(0.4)), axis=written)
    elif kind == "values":
        f.one("Gather", x, _indices(f, extent), axis=written)
    else:
        shape = f.of(((), (1,), (3,), (2, 2), (extent,)))
        least = -extent if f.opset >= 11 else 0
        places = f.world.numbers.integers(least, extent, shape)
        f.one("Gather", x, f.constant(places, f.of((np.int64, np.int32))), axis=written)


def _indices(f: Grower, extent: int) -> Item:
    """Integers of the graph, from opset 10 on modulo the extent."""
    source = f.pick((I64, I32), (0, 1, 2))
    if f.opset >= 10:
        return f.one("Mod", source, f.constant(extent, source.dtype))
    return source


@rule("GatherElements", since=11, weight=2)
def _gather_elements(f: Grower) -> None:
    x = f.pick(_ANY, (1, 2, 3))
    axis, written = _axis(f, x)
    rank = x.rank(f.alive) or 1
    least = [min(x.extents(a, f.alive)) for a in range(rank)]
    if min(least) < 1:
        raise UnfitNode("nothing to gather")
    if f.on_frequent(0.4):
        source = f.pick((I64,), (rank,), lambda v: _within(f, v, x))
        places = f.one("Mod", source, f.constant(least[axis], np.int64))
    else:
        places = f.constant(f.world.numbers.integers(0, least[axis], [1 + f.choose(n) for n in least]), np.int64)
    f.one("GatherElements", x, places, axis=written)


def _within(f: Grower, small: Item, large: Item, axis: int | None = None) -> bool:
    """True if no extent of `small` exceeds that of `large`; if `axis` is given, its first extent that along `axis`."""
    shapes = [s if axis is None else s[axis : axis + 1] for s in large.shapes(f.alive)]
    pairs = zip(small.shapes(f.alive), shapes, strict=True)
    return all(a <= b for pair in pairs for a, b in zip(*pair, strict=True))


@rule("GatherND", since=11)
def _gather_nd(f: Grower) -> None:
    x = f.pick(_ANY, (2, 3))
    depth = 1 + f.choose(x.rank(f.alive) or 1)
    least = [min(x.extents(axis, f.alive)) for axis in range(depth)]
    if min(least) < 1:
        raise UnfitNode("nothing to gather")
    count = 1 + f.choose(3)
    if f.on_frequent(0.4):
        places = f.one("Reshape", f.wholes([(0, n - 1) for n in least], x), f.vector([1, depth]))
    else:
        places = f.constant(np.stack([f.world.numbers.integers(0, n, count) for n in least], -1), np.int64)
    f.one("GatherND", x, places)


@rule("ScatterElements", since=11, weight=2)
def _scatter_elements(f: Grower, op: str = "ScatterElements") -> None:
    """ScatterElements whose updates are the data itself, a part of it, or other values."""
    x = f.pick((*NUMBERS, BOOL), (1, 2, 3))
    axis, written = _axis(f, x)
    rank = x.rank(f.alive) or 1
    extent = x.fixed(axis, f.alive)
    if not extent:
        raise UnfitNode("no fixed extent")
    kind = f.kind(same=2, part=2, constant=1)
    order = f.world.numbers.permutation(extent)
    if kind == "constant":
        least = [min(x.extents(a, f.alive)) for a in range(rank)]
        shape = [1 + f.choose(n) if n else 1 for n in least]
        shape[axis] = min(shape[axis], extent)
        updates, width = f.fit(x.dtype, shape, x), shape[axis]
        places = _along(order[:width], axis, shape)
        indices = f.constant(places, np.int64)
    else:
        updates = x = f.dying(x) if f.on_frequent(0.5) else x
        width = extent
        if kind == "part" and extent > 1:
            width = 1 + f.choose(extent - 1)
            start = f.choose(extent - width + 1)
            updates = f.slice(x, [axis], [start], [start + width])
        line = [1] * rank
        line[axis] = width
        flat = f.constant(_along(order[:width], axis, line), np.int64)
        if f.on_frequent(0.3):  # rotated by an extent: the indices stay distinct
            flat = f.one("Mod", f.one("Add", flat, f.count(0, 60, scalar=True)), f.constant(extent, np.int64))
        indices = f.one("Expand", flat, f.one("Shape", updates))
    attrs = {"reduction": f.of(("none", "add", "max"))} if f.opset >= 18 and x.dtype in (F32, I64) else {}
    f.one(op, x, indices, updates, axis=written, **attrs)


@rule("Scatter", since=9, until=10)
def _scatter(f: Grower) -> None:
    _scatter_elements(f, "Scatter")


def _along(places: np.ndarray, axis: int, shape: list[int]) -> np.ndarray:
    line = [1] * len(shape)
    line[axis] = len(places)
    return np.broadcast_to(places.reshape(line), shape)


@rule("ScatterND", since=11, weight=2)
def _scatter_nd(f: Grower) -> None:
    x = f.pick((*NUMBERS, BOOL), (1, 2, 3))
    extent = x.fixed(0, f.alive)
    counted = extent is None and f.opset >= 11
    if counted:  # the rows in reverse: n-1, ..., 0
        shape = f.one("Shape", x)
        n = f.one("Gather", shape, f.constant(0, np.int64), axis=0)
        one = f.constant(1, np.int64)
        line = f.one("Range", f.one("Sub", n, one), f.constant(-1, np.int64), f.constant(-1, np.int64))
        f.one("ScatterND", x, f.one("Reshape", line, f.vector([-1, 1])), x)
        return
    if not extent:
        raise UnfitNode("no rows")
    width = extent if f.on_frequent(0.4) else 1 + f.choose(extent)
    places = f.constant(f.world.numbers.permutation(extent)[:width].reshape(-1, 1), np.int64)
    start = f.choose(extent - width + 1)
    x = f.dying(x) if f.on_frequent(0.5) else x
    updates = x if width == extent and f.on_frequent(0.7) else f.slice(x, [0], [start], [start + width])
    attrs = {"reduction": f.of(("none", "add", "mul"))} if f.opset >= 16 and x.dtype in (F32, I64) else {}
    f.one("ScatterND", x, places, updates, **attrs)


@rule("TensorScatter", since=24)
def _tensor_scatter(f: Grower) -> None:
    x = f.pick((F32,), (3, 4), lambda v: (v.fixed(-2, f.alive) or 0) > 1)
    extent = x.fixed(-2, f.alive) or 1
    width = 1 + f.choose(extent - 1)
    axis = (x.rank(f.alive) or 2) - 2
    updates = f.slice(x, [axis], [0], [width]) if f.on_frequent(0.6) else _filled(f, x, axis, width)
    starts = None
    if f.on_frequent(0.5):
        n = f.one("Gather", f.one("Shape", x), f.vector([0]), axis=0)
        starts = f.one("Expand", f.whole(0, extent - width, x=x), n)
    f.one("TensorScatter", x, updates, starts, axis=-2, mode=f.of(("linear", "circular")))


def _filled(f: Grower, x: Item, axis: int, width: int) -> Item:
    """A value of the shape of `x`, but of `width` along `axis`; if the shape is not fixed, of one number."""
    fixed = [x.fixed(a, f.alive) for a in range(x.rank(f.alive) or 1)]
    if None not in fixed:
        return f.fit(F32, [width if a == axis else extent or 0 for a, extent in enumerate(fixed)], x)
    part = f.slice(x, [axis], [0], [width])
    return f.one("Expand", f.fit(F32, [1]), f.one("Shape", part))


@rule("Transpose", weight=2)
def _transpose(f: Grower) -> None:
    x = f.pick(_ANY, (1, 2, 3, 4))
    perm = [int(axis) for axis in f.world.numbers.permutation(x.rank(f.alive) or 1)]
    f.one("Transpose", x, **({"perm": perm} if f.on_frequent(0.9) else {}))


@rule("Reshape", since=5, weight=2)
def _reshape(f: Grower) -> None:
    x = f.pick(_ANY)
    kind = f.kind(flat=1, zero=2, computed=2, like=1)
    rank = x.rank(f.alive)
    if kind == "zero" and rank and rank > 1:
        last = x.fixed(-1, f.alive)
        shapes = [[0, -1], [0, 1, -1], *([[-1, last]] if last else [])]
        cut = [n for n in (2, 3, 4) if last and last % n == 0]
        if cut and last:
            shapes.append([*[0] * (rank - 1), f.of(cut), -1])
        f.one("Reshape", x, f.vector(f.of(shapes)))
    elif kind == "computed" and rank:
        shape = f.one("Shape", x)
        axis = f.choose(rank)
        one = f.one("Gather", shape, f.vector([axis]), axis=0)
        parts = [one, f.vector([-1])] if f.on_frequent(0.5) else [f.vector([-1]), one]
        f.one("Reshape", x, f.one("Concat", *parts, axis=0))
    elif kind == "like":
        y = f.pick(_ANY, where=lambda v: all(v.at(c).size == x.at(c).size for c in f.alive))
        f.one("Reshape", x, f.one("Shape", y))
    else:
        f.one("Reshape", x, f.vector([-1]))


@rule("Flatten")
def _flatten(f: Grower) -> None:
    x = f.pick(FLOATS if f.opset < 9 else _ANY, (1, 2, 3, 4))
    f.one("Flatten", x, axis=f.choose((x.rank(f.alive) or 1) + 1))


@rule("Unsqueeze", weight=1.5)
def _unsqueeze(f: Grower) -> None:
    x = f.pick(_ANY, (0, 1, 2, 3))
    axis = f.choose((x.rank(f.alive) or 0) + 1)
    if f.opset < 13:
        f.one("Unsqueeze", x, axes=[axis])
    else:
        f.one("Unsqueeze", x, f.vector([axis]))


@rule("Squeeze")
def _squeeze(f: Grower) -> None:
    x = f.pick(_ANY, (1, 2, 3, 4), lambda v: 1 in [v.fixed(a, f.alive) for a in range(v.rank(f.alive) or 0)])
    axes = [a for a in range(x.rank(f.alive) or 0) if x.fixed(a, f.alive) == 1]
    axis = f.of(axes)
    if f.opset < 13:
        f.one("Squeeze", x, axes=[axis])
    else:
        f.one("Squeeze", x, f.vector([axis]))


@rule("Concat", weight=2)
def _concat(f: Grower) -> None:
    x = f.pick(_ANY, (1, 2, 3, 4))
    axis, written = _axis(f, x)

    def joins(v: Item) -> bool:
        shapes = zip(v.shapes(f.alive), x.shapes(f.alive), strict=True)
        return all((*s[:axis], *s[axis + 1 :]) == (*t[:axis], *t[axis + 1 :]) and len(s) == len(t) for s, t in shapes)

    parts = [x]
    for _ in range(1 + f.choose(2)):
        if f.on_frequent(0.35) and x.rank(f.alive):
            start = f.choose(3)
            parts.append(f.slice(x, [axis], [start], [start + 1 + f.choose(2)]))
        else:
            parts.append(f.pick((x.dtype,), (x.rank(f.alive) or 1,), joins))
    f.world.rng.shuffle(parts)
    f.one("Concat", *parts, axis=written)


@rule("Expand", since=8, weight=1.5)
def _expand(f: Grower) -> None:
    x = f.pick(_ANY, (0, 1, 2, 3))
    kind = f.kind(constant=1, count=2, like=1)
    if kind == "like":
        y = f.pick(_ANY, (1, 2, 3, 4))
        f.one("Expand", x, f.one("Shape", y))
    elif kind == "count":
        n = f.count(0, 12, x=x)
        rank = x.rank(f.alive) or 0
        ones = f.vector([1] * rank) if rank else None
        f.one("Expand", x, f.one("Concat", n, ones, axis=0) if ones is not None else n)
    else:
        rank = x.rank(f.alive) or 0
        shape = [1 if x.fixed(a, f.alive) != 1 else 1 + f.choose(3) for a in range(rank)]
        f.one("Expand", x, f.vector([1 + f.choose(3), *shape]))


@rule("Tile", since=6)
def _tile(f: Grower) -> None:
    x = f.pick(_ANY, (1, 2, 3))
    f.one("Tile", x, f.wholes([(0 if f.on_frequent(0.1) else 1, 3)] * (x.rank(f.alive) or 1), x))


@rule("Pad", since=2, weight=1.5)
def _pad(f: Grower) -> None:
    x = f.pick((F32,) if f.opset < 11 else (F32, *NUMBERS), (1, 2, 3, 4))
    rank = x.rank(f.alive) or 1
    mode = f.of(("constant", "constant", "edge", "reflect"))
    low = -1 if mode == "constant" and f.on_frequent(0.3) else 0
    most = [1 if mode == "reflect" and min(x.extents(a, f.alive)) < 3 else 2 for a in range(rank)] * 2
    if f.opset < 11:
        f.one("Pad", x, mode=mode, pads=[low + f.choose(m + 1) for m in most])
        return
    value = f.constant(f.of((0, 1)), x.dtype) if mode == "constant" and f.on_frequent(0.5) else None
    if f.opset >= 18 and f.on_frequent(0.4):
        axis = f.choose(rank)
        f.one("Pad", x, f.wholes([(low, 2)] * 2, x), value, f.vector([axis]), mode=mode)
    else:
        f.one("Pad", x, f.wholes([(low, m) for m in most], x), value, mode=mode)


@rule("DepthToSpace", weight=2)
def _depth_to_space(f: Grower) -> None:
    x = f.pick((F32,), (4,), lambda v: (v.fixed(1, f.alive) or 1) % 4 == 0)
    f.one("DepthToSpace", x, blocksize=2, **({"mode": f.of(("DCR", "CRD"))} if f.opset >= 11 else {}))


@rule("SpaceToDepth", weight=2.5)
def _space_to_depth(f: Grower) -> None:
    x = f.pick((F32,), (4,))
    for size in (2, 3):
        if all((x.fixed(axis, f.alive) or 1) % size == 0 for axis in (2, 3)):
            f.one("SpaceToDepth", x, blocksize=size)
            return
    raise UnfitNode("no blocks")


@rule("Compress", since=9)
def _compress(f: Grower) -> None:
    x = f.pick(_ANY, (1, 2, 3))
    axis, written = _axis(f, x)
    least = min(x.extents(axis, f.alive))
    fits = [v for v in f.visible() if v.dtype == BOOL and v.rank(f.alive) == 1 and _within(f, v, x, axis)]
    flags = f.of(fits) if fits and f.on_frequent(0.6) else f.weight(BOOL, (least,))
    f.one("Compress", x, flags, axis=written)


@rule("NonZero", since=9, weight=1.3)
def _non_zero(f: Grower) -> None:
    f.one("NonZero", f.pick((BOOL, F32, I64, I32), (1, 2, 3), lambda v: v.exact))


@rule("Unique", since=11, weight=1.2)
def _unique(f: Grower) -> None:
    x = f.pick((F32, I64), (1, 2), lambda v: v.exact)
    f.emit("Unique", [x], outputs=1 + f.choose(4), **({"sorted": 1} if f.on_frequent(0.5) else {}))


@rule("ReverseSequence", since=10, weight=1.5)
def _reverse_sequence(f: Grower) -> None:
    x = f.pick((F32, I64), (2, 3))
    batch = f.choose(2)
    lengths = [x.extents(batch, f.alive), x.extents(1 - batch, f.alive)]
    if min(lengths[1]) < 1:
        raise UnfitNode("empty")
    n = f.one("Gather", f.one("Shape", x), f.vector([batch]), axis=0)
    length = f.one("Expand", f.whole(1, lengths[1], x=x), n)
    f.one("ReverseSequence", x, length, batch_axis=batch, time_axis=1 - batch)


@rule("OneHot", since=9, weight=1.5)
def _one_hot(f: Grower) -> None:
    x = f.pick((I64, I32), (0, 1, 2))
    values = f.weight(f.of((F32, I64)), (2,))
    f.one("OneHot", x, f.whole(1, 9, scalar=f.on_frequent(0.5), x=x), values, axis=f.of((-1, 0)))


@rule("Trilu", since=14)
def _trilu(f: Grower) -> None:
    x = f.pick((F32, F64, I64, BOOL), (2, 3))
    offset = f.whole(-2, 3, scalar=True, x=x) if f.on_frequent(0.8) else None
    f.one("Trilu", x, offset, upper=f.choose(2))


@rule("EyeLike", since=9, weight=1.2)
def _eye_like(f: Grower) -> None:
    x = f.pick((F32, I64), (2,))
    f.one(
        "EyeLike",
        x,
        k=f.choose(3) - 1,
        **({"dtype": helper.np_dtype_to_tensor_dtype(F32)} if f.on_frequent(0.5) else {}),
    )


@rule("Range", since=11, weight=2)
def _range(f: Grower) -> None:
    n = f.count(-3, 12, scalar=True)
    start, step = f.constant(f.choose(5) - 1, np.int64), f.constant(f.of((1, 1, 2)), np.int64)
    made = f.one("Range", start, n, step)
    if f.on_frequent(0.5):
        f.one("Cast", made, to=helper.np_dtype_to_tensor_dtype(F32))


@rule("ConstantOfShape", since=9)
def _constant_of_shape(f: Grower) -> None:
    shape = f.wholes([(0, 5)] * (1 + f.choose(3))) if f.on_frequent(0.5) else f.one("Shape", f.pick(_ANY))
    kind = f.of((F32, I64, BOOL))
    value = helper.make_tensor("value", helper.np_dtype_to_tensor_dtype(kind), [1], [1])
    f.one("ConstantOfShape", shape, **({"value": value} if f.on_frequent(0.7) else {}))


@rule("Shape", weight=0.6)
def _shape(f: Grower) -> None:
    x = f.pick(_ANY)
    attrs = {"start": f.of((0, 1, -1)), "end": f.of((1, 2, -1))} if f.opset >= 15 and f.on_frequent(0.6) else {}
    y = f.one("Shape", x, **attrs)
    if f.on_frequent(0.5):
        f.one("Cast", y, to=helper.np_dtype_to_tensor_dtype(F32))


@rule("Size", weight=0.6)
def _size(f: Grower) -> None:
    x = f.pick(_ANY)
    size = f.one("Size", x)
    if f.on_frequent(0.6):
        number = f.one("Cast", size, to=helper.np_dtype_to_tensor_dtype(F32))
        scaled = f.one("Mul", number, f.constant(0.01, np.float32))
        f.one("Add", f.pick((F32,)), scaled)


@rule("CenterCropPad", since=18, weight=1.2)
def _center_crop_pad(f: Grower) -> None:
    x = f.pick((F32, I64), (2, 3))
    axis = f.choose(x.rank(f.alive) or 1)
    f.one("CenterCropPad", x, f.whole(1, 6, x=x), axes=[axis])


@rule("Col2Im", since=18, weight=1.5)
def _col2im(f: Grower) -> None:
    x = f.fit(F32, (2, 8, 6))
    f.one("Col2Im", x, f.vector([3, 4]), f.vector([2, 2]))
