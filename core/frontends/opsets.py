"""Adapters from older operator versions to the newest: one small function for each change, in a table.

`@adapts_below(version, *ops)` registers an adapter for nodes of an opset below `version`. All adapters that apply to a
node run, oldest change first, so each handles one change only. An adapter edits the node in place, or returns the
values that replace the node's outputs. It raises ModelError for attributes that the old form does not allow, and
UnsupportedError for old forms that the newest opset cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.declared_types import MAX_RANK
from lathe.core.frontends.old_scan import scan_over_batch
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Attr, Value
from lathe.core.ir.types import DType, TensorType


@dataclass
class OnnxNode:
    """A node of an ONNX file during its import. Adapters edit it until it has the form of the newest opset."""

    op: str
    version: int  # the opset of its domain
    inputs: list[Value | None]
    outputs: list[str]  # "" for an output without a name
    attrs: dict[str, Attr]
    label: str
    domain: str = ""
    unnamed: frozenset[int] = frozenset()  # outputs that the file leaves out, while `outputs` holds names of the graph

    def input(self, index: int) -> Value | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def set_input(self, index: int, value: Value | None) -> None:
        self.inputs += [None] * (index + 1 - len(self.inputs))
        self.inputs[index] = value

    @property
    def where(self) -> str:
        return f"node '{self.label}' ({self.op}, opset {self.version})"

    def required(self, index: int) -> Value:
        value = self.input(index)
        if value is None:
            raise ModelError(f"input {index} is missing", where=self.where)
        return value

    def rank(self, index: int) -> int:
        """The rank of an input. ModelError if it is absent, UnsupportedError if it is not a tensor of known rank."""
        type_ = self.required(index).type
        if not isinstance(type_, TensorType) or type_.shape is None:
            raise UnsupportedError(f"input {index} is {type_}: its rank must be known", where=self.where)
        return len(type_.shape)

    def has_rank(self, *indices: int) -> bool:
        """Whether the ranks of all of these inputs, which must be present tensors, are known."""
        return all(self.required(index).tensor.shape is not None for index in indices)


ANY_VERSION = 1 << 30  # newer than any opset: the adapter applies to every version

Adapter: TypeAlias = Callable[[Emitter, OnnxNode], Sequence[Value] | None]
_ADAPTERS: dict[str, list[tuple[int, Adapter]]] = {}


def adapts_below(version: int, *ops: str) -> Callable[[Adapter], Adapter]:
    """A decorator that registers an adapter for these operators in opsets below `version`."""

    def add(adapter: Adapter) -> Adapter:
        for op in ops:
            _ADAPTERS.setdefault(op, []).append((version, adapter))
            _ADAPTERS[op].sort(key=lambda entry: entry[0])
        return adapter

    return add


def has_adapter(op: str) -> bool:
    return op in _ADAPTERS


def adapter_versions(op: str) -> list[int]:
    """The opset versions of the adapters of `op`, at which its form changes."""
    return [version for version, _ in _ADAPTERS.get(op, ())]


def modernize(e: Emitter, node: OnnxNode) -> Sequence[Value] | None:
    """Bring `node` to the form of the newest opset in place, and return None.

    If an adapter has emitted other nodes for it instead, return the values of its outputs.
    """
    done: set[Adapter] = set()
    while pending := [
        entry for entry in _ADAPTERS.get(node.op, ()) if node.version < entry[0] and entry[1] not in done
    ]:
        done.add(pending[0][1])
        replaced = pending[0][1](e, node)
        if replaced is not None:
            return replaced
    return None


def _ints(value: object) -> list[int]:
    return [int(item) for item in value] if isinstance(value, tuple) else [int(value)]  # type: ignore[call-overload]


def _attr_to_input(e: Emitter, node: OnnxNode, name: str, index: int, dtype: DType = DType.INT64) -> None:
    """Turn attribute `name`, if present, into a constant that is the input at `index`."""
    value: Any = node.attrs.pop(name, None)
    if value is not None:
        node.set_input(index, e.constant(value, dtype=dtype))


# Elementwise operators of the opsets before NumPy broadcasting, which also had in-place hints.

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow")
_LOGIC = ("And", "Or", "Xor", "Equal", "Less", "Greater")
_UNARY = (
    "Abs", "Ceil", "Clip", "Dropout", "Elu", "Exp", "Floor", "HardSigmoid", "InstanceNormalization", "LeakyRelu", "Log",
    "Neg", "Reciprocal", "Relu", "Selu", "Sigmoid", "Sqrt", "Tanh", "BatchNormalization", "PRelu",
)  # fmt: skip


@adapts_below(6, "Add", "Sub", "Mul", "Div", "Max", "Mean", "Min", "Sum", "Reshape", *_UNARY)
def _drop_memory_hint(e: Emitter, node: OnnxNode) -> None:
    node.attrs.pop("consumed_inputs", None)


@adapts_below(6, "Selu")
def _selu_constants(e: Emitter, node: OnnxNode) -> None:
    node.attrs = {"alpha": 1.6732, "gamma": 1.0507, **node.attrs}


@adapts_below(7, *_ARITHMETIC, *_LOGIC)
def _one_sided_broadcast(e: Emitter, node: OnnxNode) -> None:
    """Adds trailing axes of extent 1 to B: before opset 7, its axes were aligned with those of A from `axis` on.

    Removes both attributes. B stays unchanged if `broadcast` is 0 or `axis` is absent.
    """
    axis, enabled = node.attrs.pop("axis", None), node.attrs.pop("broadcast", 0)
    if not enabled or axis is None:
        return
    (start,) = _ints(axis)
    if not node.has_rank(0, 1):
        first = e.constant([start], dtype=DType.INT64)
        reach = _rank(e, node.required(0)) if start >= 0 else e.constant([0], dtype=DType.INT64)
        missing = e("Sub", e("Sub", reach, first), _rank(e, node.required(1)))
        node.set_input(1, _with_axes_behind(e, node.required(1), missing))
        return
    rank, inner = node.rank(0), node.rank(1)
    behind = rank - (start % rank if rank else 0) - inner
    if behind > 0:
        axes = e.constant(range(inner, inner + behind), dtype=DType.INT64)
        node.set_input(1, e("Unsqueeze", node.required(1), axes))


def _rank(e: Emitter, x: Value) -> Value:
    """The rank of a tensor, computed at run time: int64[1]."""
    return e("Shape", e("Shape", x))


def _ones(e: Emitter, count: Value) -> Value:
    """int64[count] of ones, for a `count` of type int64[1]; empty if the count is negative."""
    number = e("Max", count, e.constant([0], dtype=DType.INT64))
    return e("ConstantOfShape", number, value=np.ones(1, np.int64))


def _with_axes_behind(e: Emitter, x: Value, count: Value) -> Value:
    """`x` with `count` (int64[1], known in the run only) trailing axes of extent 1 added; none if it is negative."""
    return e("Reshape", x, e("Concat", e("Shape", x), _ones(e, count), axis=0), allowzero=1)


@adapts_below(7, "PRelu")
def _slope_per_channel(e: Emitter, node: OnnxNode) -> None:
    """Adds trailing axes to a vector of slopes: before opset 7, it has one slope for each channel (axis 1)."""
    if not node.has_rank(0, 1):
        zero, one, two = (e.constant([number], dtype=DType.INT64) for number in range(3))
        is_vector = e("Equal", _rank(e, node.required(1)), one)
        missing = e("Where", is_vector, e("Sub", _rank(e, node.required(0)), two), zero)
        node.set_input(1, _with_axes_behind(e, node.required(1), missing))
        return
    behind = node.rank(0) - 2
    if node.rank(1) == 1 and node.required(1).shape != (1,) and behind > 0:
        node.set_input(1, e("Unsqueeze", node.required(1), e.constant(range(1, 1 + behind), dtype=DType.INT64)))


@adapts_below(6, "Cast")
def _named_element_type(e: Emitter, node: OnnxNode) -> None:
    """Replaces `to`, before opset 6 the name of the element type, by its code. ModelError for other names."""
    name = node.attrs.get("to")
    labels = {dtype.name: dtype.onnx_code for dtype in DType} | {"FLOAT": 1, "DOUBLE": 11}
    if not isinstance(name, str) or name.upper() not in labels:
        raise ModelError(f"attribute 'to' is {name!r}, expected the name of an element type", where=node.where)
    node.attrs["to"] = labels[name.upper()]


@adapts_below(11, "Clip")
def _bounds_to_inputs(e: Emitter, node: OnnxNode) -> None:
    dtype = node.required(0).dtype
    for index, name in ((1, "min"), (2, "max")):
        if (bound := node.attrs.pop(name, None)) is not None:
            node.set_input(index, e.constant(bound, dtype=dtype))


@adapts_below(12, "Dropout")
def _inference_dropout(e: Emitter, node: OnnxNode) -> None:
    """Drops `ratio` and `is_test`: they only matter for training, which the old form does not select by an input."""
    node.attrs.pop("is_test", None)
    node.attrs.pop("ratio", None)


@adapts_below(10, "Dropout")
def _mask_of_the_data_type(e: Emitter, node: OnnxNode) -> Sequence[Value] | None:
    """Casts the mask, if the node outputs it, to the element type of the data, which it has before opset 10."""
    if not any(node.outputs[1:]):
        return None
    x, (name, mask_name, *_) = node.required(0), node.outputs
    y, mask = e.emit("Dropout", [x], {}, [name, e.session.fresh(f"{mask_name}.bool")], node.label)
    return [y, *e.emit("Cast", [mask], {"to": x.dtype.onnx_code}, [mask_name])]


# Axes, shapes and indices that are attributes in older opsets.


@adapts_below(13, "Squeeze", "Unsqueeze", "ReduceSum")
@adapts_below(
    18, "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSumSquare",
)  # fmt: skip
def _axes_to_input(e: Emitter, node: OnnxNode) -> None:
    _attr_to_input(e, node, "axes", 1)


@adapts_below(5, "Reshape")
def _shape_to_input(e: Emitter, node: OnnxNode) -> None:
    _attr_to_input(e, node, "shape", 1)


@adapts_below(10, "Slice")
def _ranges_to_inputs(e: Emitter, node: OnnxNode) -> None:
    for index, name in ((1, "starts"), (2, "ends"), (3, "axes")):
        _attr_to_input(e, node, name, index)


@adapts_below(10, "TopK")
def _count_to_input(e: Emitter, node: OnnxNode) -> None:
    if "k" not in node.attrs:
        raise ModelError("attribute 'k' is required", where=node.where)
    node.set_input(1, e.constant(_ints(node.attrs.pop("k")), dtype=DType.INT64))


@adapts_below(6, "Tile")
def _repeats_of_one_axis(e: Emitter, node: OnnxNode) -> None:
    tiles, axis = e.value_of(node.input(1)), e.value_of(node.input(2))
    rank = node.rank(0) if node.has_rank(0) else MAX_RANK
    if tiles is None or axis is None or tiles.size != 1 or axis.size != 1 or not 0 <= int(axis.item()) < rank:
        raise UnsupportedError("tiles and axis must be known numbers, the axis within the input", where=node.where)
    repeats = e.constant([1] * int(axis.item()) + [int(tiles.item())], dtype=DType.INT64)
    behind = e("Sub", _rank(e, node.required(0)), e("Shape", repeats))
    node.inputs[1:] = [e("Concat", repeats, _ones(e, behind), axis=0)]


@adapts_below(2, "Pad")
def _renamed_paddings(e: Emitter, node: OnnxNode) -> None:
    node.attrs["pads"] = node.attrs.pop("paddings", None)


@adapts_below(11, "Pad")
def _pads_to_inputs(e: Emitter, node: OnnxNode) -> None:
    _attr_to_input(e, node, "pads", 1)
    if (fill := node.attrs.pop("value", None)) is not None:
        node.set_input(2, e.constant(fill, dtype=node.required(0).dtype))


@adapts_below(2, "Split")
def _split_first_axis(e: Emitter, node: OnnxNode) -> None:
    node.attrs.setdefault("axis", 0)


@adapts_below(13, "Split")
def _split_sizes_to_input(e: Emitter, node: OnnxNode) -> None:
    _attr_to_input(e, node, "split", 1)


@adapts_below(18, "Split")
def _split_evenly(e: Emitter, node: OnnxNode) -> None:
    """Sets `num_outputs` to the number of outputs if there are no sizes, as the form before opset 18 implies."""
    if node.input(1) is None:
        node.attrs["num_outputs"] = len(node.outputs)


@adapts_below(4, "Concat")
def _concat_channels(e: Emitter, node: OnnxNode) -> None:
    node.attrs.setdefault("axis", 1)


@adapts_below(11, "Scatter")
def _renamed_scatter(e: Emitter, node: OnnxNode) -> None:
    node.op = "ScatterElements"


# Operators whose semantics changed.


@adapts_below(13, "Softmax", "LogSoftmax", "Hardmax")
def _flattened_softmax(e: Emitter, node: OnnxNode) -> Sequence[Value] | None:
    """Flattens the axes from `axis` on into one, as the form before opset 13 does, and reshapes the result back.

    For the last axis, old and new form agree: then nothing is emitted, and the result is None.
    """
    (axis,), x = _ints(node.attrs.pop("axis", 1)), node.required(0)
    rank = node.rank(0) if node.has_rank(0) else None
    if rank is not None and not -rank <= axis <= rank:
        raise ModelError(f"axis {axis} is out of range for rank {rank}", where=node.where)
    if axis == -1 or (rank is not None and axis == rank - 1):
        node.attrs["axis"] = -1
        return None
    flat = e(node.op, e("Flatten", x, axis=axis), axis=-1)
    return e.emit("Reshape", [flat, e("Shape", x)], {"allowzero": 1}, node.outputs, node.label)


@adapts_below(7, "Gemm")
def _gemm_broadcasts(e: Emitter, node: OnnxNode) -> None:
    node.attrs.pop("broadcast", None)


@adapts_below(14, "BatchNormalization")
def _batch_norm_inference(e: Emitter, node: OnnxNode) -> None:
    """Keeps the first output only. UnsupportedError if the model uses others: in the old form, that means training.

    Removes `is_test` and `spatial`; UnsupportedError if `spatial` is 0.
    """
    node.attrs.pop("is_test", None)
    if not node.attrs.pop("spatial", 1):
        raise UnsupportedError("spatial is 0, expected statistics per channel", where=node.where)
    if any(node.outputs[1:]):
        raise UnsupportedError("reads the statistics of an old training form", where=node.where)
    del node.outputs[1:]


@adapts_below(21, "GroupNormalization")
def _scale_per_channel(e: Emitter, node: OnnxNode) -> None:
    """Repeats scale and bias, which are per group before opset 21, for each channel of the group."""
    shape, (groups,) = node.required(0).tensor.shape, _ints(node.attrs.get("num_groups", 0))
    channels = shape[1] if shape is not None else None
    if groups < 1 or (isinstance(channels, int) and channels % groups):
        raise ModelError(f"num_groups is {groups}, expected a divisor of the {channels} channels", where=node.where)
    count = e.constant([groups], dtype=DType.INT64)
    group_size = e("Div", e("Shape", node.required(0), start=1, end=2), count)
    shape_by_group = e("Concat", count, group_size, axis=0)
    for index in (1, 2):
        column = e("Reshape", node.required(index), e.constant([groups, 1], dtype=DType.INT64))
        repeated = e("Expand", column, shape_by_group)
        node.set_input(index, e("Reshape", repeated, e.constant([-1], dtype=DType.INT64)))


@adapts_below(2, "LpPool", "GlobalLpPool")
def _whole_norm(e: Emitter, node: OnnxNode) -> None:
    """Makes `p`, before opset 2 a float, an integer. UnsupportedError if it is not whole."""
    power = node.attrs.get("p", 2)
    if not isinstance(power, int | float) or power != int(power):
        raise UnsupportedError(f"p is {power!r}, expected a whole number", where=node.where)
    node.attrs["p"] = int(power)


@adapts_below(20, "GridSample")
def _renamed_modes(e: Emitter, node: OnnxNode) -> None:
    mode: Any = node.attrs.get("mode", "bilinear")
    node.attrs["mode"] = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)


@adapts_below(16, "RoiAlign")
def _unaligned_rois(e: Emitter, node: OnnxNode) -> None:
    node.attrs.setdefault("coordinate_transformation_mode", "output_half_pixel")


@adapts_below(7, "RNN", "GRU", "LSTM")
def _all_steps(e: Emitter, node: OnnxNode) -> None:
    node.attrs.pop("output_sequence", None)


@adapts_below(9, "Scan")
def _scan_over_a_batch(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    inputs = [node.required(index) for index in range(1, len(node.inputs))]
    scanned = node.attrs.get("num_scan_inputs")
    if not isinstance(scanned, int) or not 1 <= scanned <= len(inputs):
        raise ModelError(f"num_scan_inputs is {scanned!r}, expected 1 to {len(inputs)}", where=node.where)
    return scan_over_batch(e, node.input(0), inputs, scanned, node.attrs, node.outputs)


@adapts_below(20, "DFT")
def _transformed_axis(e: Emitter, node: OnnxNode) -> None:
    node.set_input(2, e.constant(_ints(node.attrs.pop("axis", 1))[0], dtype=DType.INT64))


# Resize and its predecessor Upsample.


@adapts_below(7, "Upsample")
def _scales_of_the_image(e: Emitter, node: OnnxNode) -> None:
    scales = (1.0, 1.0, node.attrs.pop("height_scale", 1.0), node.attrs.pop("width_scale", 1.0))
    node.attrs["scales"] = scales
    mode: Any = node.attrs.get("mode", "nearest")
    node.attrs["mode"] = {"bilinear": "linear"}.get(mode, mode)


@adapts_below(9, "Upsample")
def _scales_to_input(e: Emitter, node: OnnxNode) -> None:
    _attr_to_input(e, node, "scales", 1, DType.FLOAT32)


@adapts_below(ANY_VERSION, "CastLike")
def _cast_by_the_type_of_a_value(e: Emitter, node: OnnxNode) -> None:
    """Turns CastLike into a Cast to the element type of its second input; ModelError if that is no tensor."""
    target = node.required(1).type
    if not isinstance(target, TensorType):
        raise ModelError(f"input 1 (target_type) is {target}, expected a tensor", where=node.where)
    node.op, node.inputs = "Cast", node.inputs[:1]
    node.attrs["to"] = target.dtype.onnx_code


@adapts_below(ANY_VERSION, "Upsample")
def _upsample_is_resize(e: Emitter, node: OnnxNode) -> None:
    node.op, node.version = "Resize", 10


@adapts_below(11, "Resize")
def _resize_from_corner(e: Emitter, node: OnnxNode) -> None:
    """Moves the scales from input 1 to input 2, and sets the modes of the form before opset 11.

    It scales coordinates from the corner ("asymmetric") and rounds down ("floor").
    """
    node.inputs = [node.required(0), None, node.required(1)]
    node.attrs.update(coordinate_transformation_mode="asymmetric", nearest_mode="floor")


@adapts_below(ANY_VERSION, "Resize")
def _drop_empty_parameters(e: Emitter, node: OnnxNode) -> None:
    """Removes inputs 1 to 3 (roi, scales, sizes) that are empty constants: in Resize these mean absent inputs."""
    for index in (1, 2, 3):
        array = e.value_of(node.input(index))
        if array is not None and array.size == 0:
            node.set_input(index, None)
