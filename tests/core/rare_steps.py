"""Steps of random graphs for rare operators: rare functions, bits, rounding, recurrences.

Discontinuous operators (rounding, comparing with a threshold) are applied only to numbers that are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType
from tests.core.random_nets import BATCH, IDS, Net, Step

_HIDDEN = (1, 3, 4, 7, 16, 17)


def _hyperbolic(net: Net) -> Value:
    x = net.bounded()
    return net.op(net.of(("Asinh", "Sinh", "Cosh", "Swish")), x, size=30 if net.size[x] > 1 else 2)


def _inverse(net: Net) -> Value:
    """A function of numbers between -0.9 and 0.9, or above 1."""
    inside = net.b("Mul", net.b("Tanh", net.pick()), net.b.constant(np.float32(0.9)))
    op = net.of(("Asin", "Acos", "Atanh", "Tan", "Acosh"))
    if op == "Acosh":
        inside = net.b("Add", net.b("Abs", inside), net.b.constant(np.float32(1.5)))
    return net.op(op, inside, size=3.0)


def _shrink(net: Net) -> Value:
    """A Shrink whose bias equals its threshold, so that it is continuous."""
    x, bound = net.pick(), net.of((0.25, 0.5, 1.0))
    return net.op("Shrink", x, size=net.size[x], lambd=bound, bias=bound)


def _exact(net: Net) -> Value:
    """Multiples of a quarter, [batch, T], which are exact in float32."""
    number = net.b("Cast", net.ids[0], to=DType.FLOAT32)
    return net.b("Mul", number, net.b.constant(np.float32(net.of((0.25, 0.5, 0.75)))))


def _rounded(net: Net) -> Value:
    op = net.of(("Round", "Floor", "Ceil", "Sign", "ThresholdedRelu", "Shrink"))
    attrs = {"ThresholdedRelu": {"alpha": 0.5}, "Shrink": {"lambd": 0.5, "bias": 0.25}}
    return net.op(op, _exact(net), size=4.0, **attrs.get(op, {}))


def _numbered(net: Net) -> Value:
    """A value plus tanh of a quarter of an Iota over the positions in a row."""
    x = net.pick()
    steps = (0, *(net.choose(3) for _ in x.shape[1:]))
    places = net.b("Iota", dtype=DType.INT64.onnx_code, shape=x.shape, start=net.choose(4), steps=steps)
    quarters = net.b("Mul", net.b("Cast", places, to=DType.FLOAT32), net.b.constant(np.float32(0.25)))
    return net.op("Add", x, net.b("Tanh", quarters), size=net.size[x] + 1)


def _not_finite(net: Net) -> Value:
    """Infinities and NaN where ids are small, and the operators that detect them."""
    x = _exact(net)
    strange = net.b.constant(np.float32(net.of((np.inf, -np.inf, np.nan))))
    mixed = net.b("Where", net.b("Less", net.ids[0], net.b.constant(np.int64(0))), strange, x)
    if net.choose(2):
        found = net.b("IsNaN", mixed)
    else:
        found = net.b("IsInf", mixed, detect_negative=net.choose(2), detect_positive=net.choose(2))
    return net.op("Cast", found, to=x.dtype, size=1.0)


def _bits(net: Net) -> Value:
    dtype = net.of((DType.INT32, DType.UINT8, DType.INT64, DType.UINT32, DType.INT8, DType.UINT16))
    x = net.b("Cast", net.b("Abs", net.ids[0]), to=dtype)
    other = net.b.constant(net.rng.integers(0, 7, net.dims(x)).astype(dtype.numpy))
    op = net.of(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift"))
    if op == "BitShift":
        x = net.b("Cast", x, to=DType.UINT32)
        other = net.b.constant(net.rng.integers(0, 7, net.dims(x)).astype(np.uint32))
        y = net.b(op, x, other, direction=net.of(("LEFT", "RIGHT")))
    else:
        y = net.b(op, x) if op == "BitwiseNot" else net.b(op, x, other)
    few = net.b("BitwiseAnd", y, net.b.constant(np.array(7, y.dtype.numpy)))
    return net.op("Cast", few, size=7.0, to=DType.FLOAT32)


def _whole_arithmetic(net: Net) -> Value:
    """Division and remainder of integers, whose signs operators treat differently."""
    dtype = net.of((DType.INT32, DType.INT64))
    x = net.b("Cast", net.ids[0], to=dtype)
    by = net.b.constant(net.of((-3, -2, 1, 2, 5)) * np.ones((), dtype.numpy))
    y = net.b(net.of(("Div", "Mod", "Max", "Min", "Mul", "Sub")), x, by)
    return net.op("Cast", y, size=20.0, to=DType.FLOAT32)


def _rare_reduction(net: Net) -> Value:
    x = net.bounded(3, 4)
    near_one = net.b(
        "Add", net.b("Mul", net.b("Tanh", x), net.b.constant(np.float32(0.1))), net.b.constant(np.float32(1))
    )
    op = net.of(("ReduceProd", "ReduceLogSum", "ReduceLogSumExp"))
    axis = net.axis(x)
    if op == "ReduceProd" and net.dims(x)[axis - 1 if axis > 0 else axis] > 60:
        op = "ReduceLogSum"
    return net.op(op, near_one, size=300.0 if op == "ReduceProd" else 10.0, axes=(axis,), keepdims=net.choose(2))


def _rms_norm(net: Net) -> Value:
    x = net.pick(2, 3)
    return net.op("RMSNormalization", x, net.weight(net.dims(x)[-1]), size=6.0, axis=-1)


def _barrier(net: Net) -> Value:
    """A barrier of training graphs, without effect in inference."""
    x = net.pick()
    return net.op("StopGradient", x, size=net.size[x])


def _there_and_back(net: Net) -> Value:
    x = net.pick(2, 3)
    axis = 1 + net.choose(len(x.shape))
    return net.op("Squeeze", net.b("Unsqueeze", x, axes=(axis,)), size=net.size[x], axes=(axis,))


def _recurrent(net: Net) -> Value:
    """An RNN, GRU or LSTM over the tokens, possibly in both directions."""
    x = net.b("Transpose", net.bounded(3), perm=(1, 0, 2))
    op, hidden = net.of((("RNN", 1), ("GRU", 3), ("LSTM", 4))), net.of(_HIDDEN)
    features, directions = x.shape[2], net.of((1, 1, 2))
    assert isinstance(features, int)
    w = net.weight(directions, op[1] * hidden, features, scale=1 / features**0.5)
    r = net.weight(directions, op[1] * hidden, hidden, scale=1 / hidden**0.5)
    bias = net.of((None, net.weight(directions, 2 * op[1] * hidden)))
    direction = "bidirectional" if directions == 2 else net.of(("forward", "reverse"))
    attrs = {"linear_before_reset": net.choose(2)} if op[0] == "GRU" else {}
    all_steps, last = net.b.emit(
        op[0], x, w, r, bias, outputs=2, hidden_size=hidden, direction=direction, **attrs
    )  # fmt: skip
    if net.choose(2):
        return net.op("Transpose", net.b("Squeeze", last, axes=(0,)) if directions == 1 else last, size=1.0,
                      perm=(0, 1) if directions == 1 else (1, 0, 2))  # fmt: skip
    rows = net.b("Transpose", all_steps, perm=(2, 0, 1, 3))
    return net.op("Reshape", rows, size=1.0, shape=(symbol(BATCH), x.shape[0], directions * hidden))


def _trees(net: Net) -> Value:
    """Full trees of two levels; numbers never lie so near a split that rounding could decide."""
    x, trees, targets = _exact(net), net.of((1, 3, 9)), net.of((1, 2))
    features = [net.choose(net.dims(x)[0]) for _ in range(3 * trees)]
    splits = (net.rng.integers(-3, 4, 3 * trees) + 0.1).astype(np.float32)
    weights = net.rng.uniform(-1, 1, 4 * trees).astype(np.float32)
    owners = [net.choose(targets) for _ in range(4 * trees)]
    kind = net.of(("TreeEnsembleRegressor", "TreeEnsemble"))
    if next((node.op for node in net.graph.nodes if node.op.startswith("Tree")), kind) == "TreeEnsembleRegressor":
        attrs = _by_name(trees, features, splits, owners, weights)  # no opset has both operators
        return net.op("TreeEnsembleRegressor", x, size=float(trees), n_targets=targets, **attrs)
    inner, leaf = [3 * tree for tree in range(trees)], [4 * tree for tree in range(trees)]
    return net.op(
        "TreeEnsemble", x, size=float(trees), n_targets=targets, tree_roots=tuple(inner),
        nodes_modes=np.zeros(3 * trees, np.uint8), nodes_featureids=tuple(features), nodes_splits=splits,
        nodes_truenodeids=tuple(at for i, j in zip(inner, leaf, strict=True) for at in (i + 1, j, j + 2)),
        nodes_falsenodeids=tuple(at for i, j in zip(inner, leaf, strict=True) for at in (i + 2, j + 1, j + 3)),
        nodes_trueleafs=(0, 1, 1) * trees, nodes_falseleafs=(0, 1, 1) * trees,
        leaf_targetids=tuple(owners), leaf_weights=weights,
    )  # fmt: skip


def _by_name(trees: int, features: list[int], splits: Any, owners: list[int], weights: Any) -> dict[str, Any]:
    """The attributes of the older operator for these trees: nodes 0 to 2 branch, 3 to 6 are leaves."""
    branches = [(list(features[3 * t : 3 * t + 3]), splits[3 * t : 3 * t + 3].tolist()) for t in range(trees)]
    return {
        "nodes_treeids": tuple(t for t in range(trees) for _ in range(7)),
        "nodes_nodeids": tuple(range(7)) * trees,
        "nodes_modes": (*("BRANCH_LEQ",) * 3, *("LEAF",) * 4) * trees,
        "nodes_featureids": tuple(i for ids, _ in branches for i in (*ids, 0, 0, 0, 0)),
        "nodes_values": tuple(v for _, values in branches for v in (*values, 0.0, 0.0, 0.0, 0.0)),
        "nodes_truenodeids": (1, 3, 5, 0, 0, 0, 0) * trees,
        "nodes_falsenodeids": (2, 4, 6, 0, 0, 0, 0) * trees,
        "target_treeids": tuple(t for t in range(trees) for _ in range(4)),
        "target_nodeids": (3, 4, 5, 6) * trees,
        "target_ids": tuple(owners),
        "target_weights": tuple(weights.tolist()),
    }


def _batched_weights(net: Net) -> Value:
    """A product in which both operands are computed, and neither is square."""
    x = net.bounded(3)
    t, k = net.dims(x)
    w = net.b("Reshape", net.b("Mul", x, net.weight(t, k)), shape=(0, k, t))
    return net.op("MatMul", x, w, size=net.size[x] ** 2 * k)


def _scattered_rows(net: Net) -> Value:
    """Sums over all tokens of a batch scattered into the rows of a table, like the gradient of an embedding."""
    x = net.bounded(2, 3)
    width = net.dims(x)[-1]
    found = net.b("Gather", net.weight(IDS, width), net.ids[0], axis=0)
    places = net.b("Unsqueeze", net.ids[0], axes=(2,))
    table = net.b("ScatterND", net.weight(IDS, width), places, found, reduction=net.of(("add", "max", "min")))
    return net.op("Add", x, net.b("Tanh", net.b("ReduceMean", table, axes=(0,), keepdims=0)), size=net.size[x] + 1)


def _scattered_elements(net: Net) -> Value:
    x, ids = net.bounded(2), net.ids[0]
    places = net.b("Mod", ids, net.b.constant(np.int64(net.dims(x)[0])))
    updates = net.b("Tanh", net.b("Cast", ids, to=DType.FLOAT32))
    made = net.b("ScatterElements", x, places, updates, axis=1, reduction=net.of(("add", "max", "min", "mul")))
    return net.op("Tanh", made, size=1.0)


def _gathered(net: Net) -> Value:
    """Elements of each row, or rows of a table, that ids select."""
    ids = net.ids[0]
    if net.choose(2):
        x = net.bounded(2)
        places = net.b("Mod", ids, net.b.constant(np.int64(net.dims(x)[0])))
        return net.op("GatherElements", x, places, size=net.size[x], axis=1)
    places = net.b("Unsqueeze", ids, axes=(2,))
    return net.op("GatherND", net.weight(IDS, net.of(_HIDDEN)), places, size=4.0)


def _running_product(net: Net) -> Value:
    """A running product of numbers between -1 and 1, which stays bounded."""
    x = net.b("Tanh", net.bounded())
    attrs = {"exclusive": net.choose(2), "reverse": net.choose(2)}
    return net.op("CumProd", x, size=1.0, axis=(net.axis(x),), **attrs)


def _support_vectors(net: Net) -> Value:
    """The scores of a support vector machine, which are continuous; its labels are not."""
    x = net.b("Tanh", net.bounded(2))
    features, count, kind = net.dims(x)[0], net.of((2, 5, 20)), net.of(("RBF", "LINEAR", "SIGMOID"))
    numbers = net.rng.uniform(-1, 1, (count, features)).astype(np.float32)
    weights = tuple(net.rng.uniform(-1, 1, count).astype(np.float32).tolist())
    attrs = {"kernel_type": kind, "kernel_params": (0.5, 0.1, 0.0), "coefficients": weights, "rho": (0.25,),
             "support_vectors": tuple(numbers.ravel().tolist())}  # fmt: skip
    size = float(count * (features if kind == "LINEAR" else 1) + 1)
    if net.choose(2):
        return net.op("SVMRegressor", x, size=size, n_supports=count, **attrs)
    sizes = {"vectors_per_class": (1, count - 1), "classlabels_ints": (3, 4)}
    return net.keep(net.b("Tanh", net.b.emit("SVMClassifier", x, outputs=2, **sizes, **attrs)[1]), 1.0)


def _first_few(net: Net) -> Value:
    """The greatest or least elements of each row, or their indices."""
    x = _exact(net)
    axis = 1
    found = net.b.emit(
        "TopK", x, net.b.constant(np.array([1 + net.choose(net.dims(x)[0])])), outputs=2, axis=axis,
        largest=net.choose(2),
    )  # fmt: skip
    return net.op("Cast", net.of(found), size=20.0, to=DType.FLOAT32)


def _sampled(net: Net) -> Value:
    """A GridSample whose positions are computed from the pixels: between pixels, and outside of the image."""
    x = net.bounded(3)
    places = net.b("Unsqueeze", net.b("Tanh", x), axes=(3,))
    wide = net.b("Mul", places, net.b.constant(np.float32(net.of((0.5, 1.25)))))
    grid = net.b("Concat", places, wide, axis=3)
    attrs = {"padding_mode": net.of(("zeros", "border")), "align_corners": net.choose(2)}
    pixels = net.b("GridSample", net.b("Unsqueeze", x, axes=(1,)), grid, mode="linear", **attrs)
    return net.op("Squeeze", pixels, size=net.size[x] * max(net.dims(x)), axes=(1,))


RARE_STEPS: tuple[Step, ...] = (
    _hyperbolic, _inverse, _inverse, _shrink, _rounded, _rounded, _numbered, _not_finite, _bits, _bits,
    _whole_arithmetic, _rare_reduction, _rare_reduction, _rms_norm, _barrier, _there_and_back, _recurrent, _recurrent,
    _trees, _batched_weights, _scattered_rows, _scattered_elements, _gathered, _running_product, _support_vectors,
    _first_few, _sampled,
)  # fmt: skip
