"""Normalization. Statistics of half-precision inputs are computed in float32, as `stash_type` 1 requires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.nn.spatial import as_summed, batch_rows, channels_last, first_shape, to_first, to_layout
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import broadcast_rows, expect_shape, mean_over, normalize_axis

_EPSILON = 1e-5  # the default of the ONNX schemas


@register
class BatchNormalization(OpDef):
    """(X - mean) / sqrt(var + epsilon) * scale + B per channel.

    In training mode, mean and variance are those of the batch, and there are two more outputs: each running statistic
    times `momentum`, plus the batch's times 1 - momentum.
    """

    agreeing = True
    rounds_freely = True
    inputs = "X, scale, B, input_mean, input_var"
    outputs = "Y, running_mean, running_var"
    attrs = {"epsilon": _EPSILON, "momentum": 0.9, "training_mode": 0, "layout": "NCHW"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        if x.shape is not None and len(x.shape) >= 1:
            _check_channels(c, range(1, 5), first_shape(c, x.shape)[1] if len(x.shape) >= 2 else 1)
        outputs: list[ValueType] = [x]
        if c.attr("training_mode"):
            outputs += [c.tensor(3), c.tensor(4)]
        return outputs

    def reference(self, c: Call, x: Array, scale: Array, b: Array, mean: Array, var: Array) -> Any:
        first = as_summed(to_first(c, x))
        if not c.attr("training_mode"):
            return to_layout(c, _affine_channels(c, first, mean, var, scale, b).astype(x.dtype))
        axes = (0, *range(2, first.ndim))
        batch_mean = mean_over(first, axes)
        batch_mean, batch_var = batch_mean.reshape(-1), mean_over(np.square(first - batch_mean), axes).reshape(-1)
        y = to_layout(c, _affine_channels(c, first, batch_mean, batch_var, scale, b).astype(x.dtype))
        return y, _running(c, mean, batch_mean), _running(c, var, batch_var)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if c.attr("training_mode") and axes[0] is not None:
            return MixesRows("in training mode it takes statistics over the batch")
        return batch_rows(c, axes)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x, scale, bias, mean, var = g.terms
        if not g.attr("training_mode"):
            return [_channel_affine(g, x, mean, var, scale, bias)]
        axes = [axis for axis in range(x.rank) if axis != _channel_axis(g, x)]
        momentum = g.attr("momentum")
        batch_mean = x.mean(axes)
        batch_var = (x - batch_mean).square().mean(axes)
        results = [_channel_affine(g, x, batch_mean, batch_var, scale, bias)]
        for before, batch in ((mean, batch_mean), (var, batch_var)):
            results.append(before * momentum + batch.reshape(before.shape) * (1 - momentum))
        return results


@register
class InstanceNormalization(OpDef):
    """(X - mean) / sqrt(var + epsilon) * scale + B; statistics are those of each channel of each row."""

    agreeing = True
    rounds_freely = True
    inputs = "input, scale, B"
    outputs = "output"
    attrs = {"epsilon": _EPSILON, "layout": "NCHW"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        if x.shape is not None:
            _check_channels(c, (1, 2), first_shape(c, x.shape)[1])
        return [x]

    def reference(self, c: Call, x: Array, scale: Array, b: Array) -> Array:
        first = as_summed(to_first(c, x))
        normal = _normalize(first, tuple(range(2, first.ndim)), c.attr("epsilon"))[0]
        return to_layout(c, _apply_scale(normal, scale, b).astype(x.dtype))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x, scale, bias = g.terms
        axes = [axis for axis in range(1, x.rank) if axis != _channel_axis(g, x)]
        return [_scaled_term(g, _normal_term(x, axes, g.attr("epsilon"))[0], scale, bias)]


@register
class GroupNormalization(OpDef):
    """Normalization by statistics of each of `num_groups` groups of channels of a row; scale and bias per channel."""

    agreeing = True
    rounds_freely = True
    inputs = "X, scale, bias"
    outputs = "Y"
    attrs = {"num_groups": Required("int"), "epsilon": _EPSILON, "stash_type": 1, "layout": "NCHW"}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x, groups = c.tensor(0), c.attr("num_groups")
        if x.shape is None:
            return [x]
        channels = first_shape(c, x.shape)[1]
        _check_channels(c, (1, 2), channels)
        if groups < 1 or (isinstance(channels, int) and channels % groups):
            c.fail(f"num_groups is {groups}, expected a divisor of the {channels} channels")
        return [x]

    def reference(self, c: Call, x: Array, scale: Array, bias: Array) -> Array:
        first = as_summed(to_first(c, x))
        groups, elements = c.attr("num_groups"), int(np.prod(first.shape[1:]))
        grouped = first.reshape(len(first), groups, elements // groups)  # -1 is ambiguous for an empty batch
        normal = _normalize(grouped, (2,), c.attr("epsilon"))[0].reshape(first.shape)
        return to_layout(c, _apply_scale(normal, scale, bias).astype(x.dtype))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x, scale, bias = g.terms
        if channels_last(g):
            g.unsupported("only images with their channels first are differentiated")
        groups = g.attr("num_groups")
        grouped = x.reshape((x.shape[0], groups, product(x.shape[1:]) // groups))
        normal = _normal_term(grouped, [2], g.attr("epsilon"))[0].reshape(x.shape)
        return [_scaled_term(g, normal, scale, bias)]


class TrailingNormalization(OpDef):
    """Family base: the axes from `axis` to the last are normalized together; scale and bias broadcast to the input."""

    agreeing = True
    rounds_freely = True
    attrs = {"axis": -1, "epsilon": _EPSILON, "stash_type": 1}

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if axes[0] is None and all(axis is None for axis in axes):
            return [None] * len(c.node.outputs)
        if axes[0] is None or any(axis is not None for axis in axes[1:]):
            return MixesRows("a parameter differs from row to row")
        rank = c.tensor(0).rank
        if axes[0] >= c.attr("axis") % rank:
            return MixesRows("it normalizes over the row axis")
        return broadcast_rows(c, axes)


@register
class LayerNormalization(TrailingNormalization):
    inputs = "X, Scale, B?"
    outputs = "Y, Mean, InvStdDev"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        statistics = DType.FLOAT32 if c.attr("stash_type") == 1 else x.dtype
        if x.shape is None:
            return [x, TensorType(statistics, None), TensorType(statistics, None)]
        axis = normalize_axis(c, c.attr("axis"), len(x.shape))
        _check_trailing(c, x.shape)
        kept = (*x.shape[:axis], *(1 for _ in x.shape[axis:]))
        return [x, TensorType(statistics, kept), TensorType(statistics, kept)]

    def reference(self, c: Call, x: Array, scale: Array, b: Array | None = None) -> tuple[Array, ...]:
        data = _in_stash_type(c, x)
        normal, mean, inverse = _normalize(data, _trailing(c, x), c.attr("epsilon"))
        # As in the schema's function body: statistics in the stash type, scale and bias in the input's type.
        y = normal.astype(scale.dtype) * scale
        y = y if b is None else y + b
        return y.astype(x.dtype, copy=False), mean.astype(data.dtype), inverse.astype(data.dtype)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x = g.x()
        normal, mean, inverse = _normal_term(x, range(g.attr("axis") % x.rank, x.rank), g.attr("epsilon"))
        y, bias = normal * g.x(1), g.x_or_none(2)
        statistics = [each.cast(value.dtype) for each, value in zip((mean, inverse), g.node.outputs[1:], strict=False)]
        return [y if bias is None else y + bias, *statistics]


@register
class RMSNormalization(TrailingNormalization):
    inputs = "X, scale"
    outputs = "Y"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        if x.shape is not None:
            normalize_axis(c, c.attr("axis"), len(x.shape))
            _check_trailing(c, x.shape)
        return [TensorType(c.dtype(1), x.shape)]

    def reference(self, c: Call, x: Array, scale: Array) -> Array:
        data = _in_stash_type(c, x)
        square = mean_over(data * data, _trailing(c, x))
        normal: Any = data / np.sqrt(square + data.dtype.type(c.attr("epsilon")))
        return np.asarray(normal.astype(scale.dtype) * scale)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x = g.x()
        square = x.square().mean(range(g.attr("axis") % x.rank, x.rank))
        return [(x / (square + g.attr("epsilon")).sqrt()).cast(g.x(1).dtype) * g.x(1)]


@register
class MeanVarianceNormalization(OpDef):
    """(X - mean) / (deviation + 1e-9) over the given axes."""

    rounds_freely = True
    inputs = "X"
    outputs = "Y"
    attrs = {"axes": (0, 2, 3)}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        if x.shape is not None:
            for axis in c.attr("axes"):
                normalize_axis(c, axis, len(x.shape))
        return [x]

    def reference(self, c: Call, x: Array) -> Array:
        data, axes = as_summed(x), tuple(c.attr("axes"))
        centred = data - mean_over(data, axes)
        deviation = np.sqrt(mean_over(centred * centred, axes))
        return np.asarray(centred / (deviation + data.dtype.type(1e-9))).astype(x.dtype, copy=False)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _apart_from(c, axes, c.attr("axes"))

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x, axes = g.x(), g.attr("axes")
        centred = x - x.mean(axes)
        return [centred / (centred.square().mean(axes).sqrt() + 1e-9)]


@register
class LpNormalization(OpDef):
    """X divided by its p-norm along one axis; zero vectors stay zero."""

    inputs = "input"
    outputs = "output"
    attrs = {"axis": -1, "p": 2}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        if x.shape is not None:
            normalize_axis(c, c.attr("axis"), len(x.shape))
        if c.attr("p") not in (1, 2):
            c.fail(f"p is {c.attr('p')}, expected 1 or 2")
        return [x]

    def reference(self, c: Call, x: Array) -> Array:
        data = as_summed(x)
        norm = np.linalg.norm(data, ord=c.attr("p"), axis=c.attr("axis"), keepdims=True)
        return np.asarray(data / np.where(norm == 0, norm.dtype.type(1), norm)).astype(x.dtype, copy=False)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return _apart_from(c, axes, (c.attr("axis"),))

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x, axes = g.x(), [g.attr("axis")]
        total = (x.abs() if g.attr("p") == 1 else x.square()).sum(axes)
        divisor = total.equals(0).where(1, total)
        return [x / (divisor if g.attr("p") == 1 else divisor.sqrt())]


@register
class LRN(OpDef):
    """X / (bias + alpha/size * sum of squares over `size` neighbouring channels) ** beta."""

    inputs = "X"
    outputs = "Y"
    attrs = {
        "size": Required("int"), "alpha": 9.999999747378752e-05, "beta": 0.75, "bias": 1.0, "layout": "NCHW",
    }  # fmt: skip

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        if x.shape is not None:
            first_shape(c, x.shape)
        if c.attr("size") < 1:
            c.fail(f"size is {c.attr('size')}, expected at least 1")
        return [x]

    def reference(self, c: Call, x: Array) -> Array:
        first, size = as_summed(to_first(c, x)), c.attr("size")
        before = (size - 1) // 2
        widths = [(0, 0), (before, size - 1 - before), *[(0, 0)] * (first.ndim - 2)]
        squares = np.pad(first * first, widths)
        total = sum(squares[:, i : i + first.shape[1]] for i in range(size))
        base: Any = c.attr("bias") + c.attr("alpha") / size * total
        return to_layout(c, (first / base ** c.attr("beta")).astype(x.dtype, copy=False))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        x, size = g.x(), g.attr("size")
        axis, before = _channel_axis(g, x), (size - 1) // 2
        widths = [(before, size - 1 - before) if i == axis else (0, 0) for i in range(x.rank)]
        padded = x.square().pad(widths)
        window = [padded.slice(axis, i, x.shape[axis] + i) for i in range(size)]
        total = window[0].op("Sum", *window[1:])
        return [x / (total * (g.attr("alpha") / size) + g.attr("bias")) ** g.attr("beta")]


def _channel_axis(g: Rewrite, x: Term) -> int:
    return x.rank - 1 if channels_last(g) else min(1, x.rank - 1)


def _normal_term(x: Term, axes: Sequence[int], epsilon: float) -> tuple[Term, Term, Term]:
    """x normalized to mean 0 and variance 1 over `axes`, the mean, and 1 / sqrt(variance + epsilon), as terms."""
    mean = x.mean(axes)
    centred = x - mean
    inverse = 1 / (centred.square().mean(axes) + epsilon).sqrt()
    return centred * inverse, mean, inverse


def _scaled_term(g: Rewrite, x: Term, scale: Term, bias: Term) -> Term:
    shape = [scale.value.tensor.size if axis == _channel_axis(g, x) else 1 for axis in range(x.rank)]
    return x * scale.reshape(shape) + bias.reshape(shape)


def _channel_affine(g: Rewrite, x: Term, mean: Term, var: Term, scale: Term, bias: Term) -> Term:
    shape = [scale.value.tensor.size if axis == _channel_axis(g, x) else 1 for axis in range(x.rank)]
    deviation = (var.reshape(shape) + g.attr("epsilon")).sqrt()
    return _scaled_term(g, (x - mean.reshape(shape)) / deviation, scale, bias)


def _check_channels(c: Infer, indices: Sequence[int], channels: Dim) -> None:
    for index in indices:
        expect_shape(c, index, (channels,))


def _check_trailing(c: Infer, x: Sequence[Dim]) -> None:
    """ModelError unless scale and bias broadcast to the input's shape x without enlarging it."""
    for index in range(1, len(c.node.inputs)):
        shape = c.shape(index) if c.has_input(index) else ()
        if shape is None:
            continue
        pairs = [(a, b) for a, b in zip(reversed(shape), reversed(x), strict=False) if a != 1]
        for pair in pairs:
            c.broadcast(pair)
        if len(shape) > len(x) or any(a != b for a, b in pairs if isinstance(a, int) and isinstance(b, int)):
            c.fail(f"{c.op.input_name(index)} is {c.tensor(index)}, expected a shape that broadcasts to {c.tensor(0)}")


def _trailing(c: NodeView, x: Array) -> tuple[int, ...]:
    return tuple(range(c.attr("axis") % x.ndim, x.ndim))


def _in_stash_type(c: NodeView, x: Array) -> Any:
    """The input in the type of its statistics: half precision as float32 if `stash_type` is 1, otherwise unchanged."""
    return as_summed(x) if c.attr("stash_type") == 1 else x


def _normalize(x: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any]:
    """x normalized to mean 0 and variance 1 over `axes`, the mean, and 1 / sqrt(variance + epsilon)."""
    mean = mean_over(x, axes)
    centred = x - mean
    inverse = 1 / np.sqrt(mean_over(centred * centred, axes) + x.dtype.type(epsilon))
    return centred * inverse, mean, inverse


def _per_channel(parameter: Any, like: Any) -> Any:
    return parameter.astype(like.dtype).reshape(-1, *(1,) * (like.ndim - 2))


def _apply_scale(x: Any, scale: Any, bias: Any) -> Any:
    return x * _per_channel(scale, x) + _per_channel(bias, x)


def _affine_channels(c: NodeView, x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
    if x.ndim == 1:
        return _affine_channels(c, x[:, None], mean, var, scale, bias)[:, 0]
    deviation = np.sqrt(var.astype(x.dtype) + x.dtype.type(c.attr("epsilon")))
    return _apply_scale((x - _per_channel(mean, x)) / _per_channel(deviation, x), scale, bias)


def _running(c: NodeView, before: Any, batch: Any) -> Any:
    momentum = c.attr("momentum")
    return (before * momentum + batch.astype(before.dtype) * (1 - momentum)).astype(before.dtype)


def _apart_from(c: Infer, axes: Sequence[RowAxis], normalized: Sequence[int]) -> Sequence[RowAxis] | MixesRows:
    if axes[0] is None:
        return [None]
    rank = c.tensor(0).rank
    if axes[0] in {axis % rank for axis in normalized}:
        return MixesRows("it normalizes over the row axis")
    return [axes[0]]
