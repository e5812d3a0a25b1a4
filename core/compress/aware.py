"""Quantization-aware training: a model that computes with the numbers of its quantized form, and learns its scales.

`add_fake_quantization` puts operators before products that give the results of the quantized model and the gradients of
straight-through estimators (`core/ops/quantized/training.py`); the scales are parameters (LSQ, Esser et al. 2020). Any
training then trains the model, and `as_quantized` writes the result in ONNX's QDQ form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.calibration import Feeds, collect_histograms
from lathe.core.compress.grids import Grid
from lathe.core.compress.products import CHANNEL_AXIS, check_skipped, prepare
from lathe.core.compress.qdq import QdqWriter, StoredWeights
from lathe.core.compress.ranges import choose_range
from lathe.core.compress.static import layers_of
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef import registry
from lathe.core.ops.quantized.training import POWERS, coded, powers_code, step_scale, uniform_code
from lathe.core.passes.rewrite.editor import Editor

WeightCode = Literal["int8", "int4", "int2", "ternary", "trained_ternary", "binary", "power_of_two"]
WEIGHT_CODES: tuple[WeightCode, ...] = get_args(WeightCode)
ActivationCode = Literal["int8", "float32"]
ACTIVATION_CODES: tuple[ActivationCode, ...] = get_args(ActivationCode)
FAKE = frozenset({"FakeQuantize", "CodedWeight"})
_LIMITS = {"int8": (-127, 127), "int4": (-8, 7), "int2": (-2, 1)}
_PERCENTILE = 99.99


@dataclass(frozen=True)
class AwareQuantization:
    """The choices of quantization-aware training.

    `weights` is their code: "int8", "int4" and "int2" with learned scales; "ternary" (TWN), "trained_ternary" (TTQ) and
    "binary" (XNOR-Net); "power_of_two": 0 or one of seven powers of two, with either sign. Scales are per output
    channel if `per_channel`, otherwise per tensor; "trained_ternary" has two for a tensor in any case. `activations`
    are "int8" (uint8 if they are never negative) or "float32". `keeps_ends`: the weights of the first and of the last
    product are int8, whatever `weights` says. The nodes of `skip` stay float32. UnsupportedError for other codes.
    """

    weights: WeightCode = "int8"
    activations: ActivationCode = "int8"
    per_channel: bool = True
    keeps_ends: bool = True
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, given, known in (
            ("weights", self.weights, WEIGHT_CODES),
            ("activations", self.activations, ACTIVATION_CODES),
        ):
            if given not in known:
                raise UnsupportedError(f"{name}: expected one of {', '.join(known)}, got {given!r}")


DEFAULTS = AwareQuantization()


def add_fake_quantization(
    graph: Graph, batches: Iterable[Feeds], options: AwareQuantization = DEFAULTS, threads: int | None = None
) -> Graph:
    """A copy of `graph` that computes with quantized weights and activations, for training.

    Passes rewrite the copy first, as in `quantize_static`: normalizations are folded into weights. The scales start
    from the weights, and from the activations of a run on `batches` (inputs by name). Scales are further constants,
    named after what they scale, which training changes like weights. UnsupportedError if `options.skip` names no node,
    no product has constant weights, or `graph` computes with integers already; DataError and FeedError as in
    `collect_histograms`.
    """
    prepared = prepare(graph)
    check_skipped(prepared, options.skip)
    nodes = [prepared.nodes[index] for index in layers_of(prepared, options.skip)]
    products = [node for node in nodes if node.op in CHANNEL_AXIS]
    if not products:
        raise UnsupportedError("expected a Conv, MatMul or Gemm of float32 with constant weights, got none")
    if options.activations == "float32":
        nodes, ranges = products, dict[str, tuple[float, float]]()
    else:
        ranges = _ranges(prepared, nodes, batches, threads)
    editor = Editor(prepared)
    faked: dict[Value, Value] = {}
    for node in nodes:
        inputs = list(node.inputs)
        for place, value in enumerate(inputs[:2]):
            if value is not None and value.name in ranges and editor.array(value) is None:
                if value not in faked:
                    faked[value] = _fake_activation(editor, node, value, *ranges[value.name])
                inputs[place] = faked[value]
        if node.op in CHANNEL_AXIS:
            is_end = options.keeps_ends and node in (products[0], products[-1])
            inputs[1] = _fake_weights(editor, node, "int8" if is_end else options.weights, options.per_channel)
        editor.set_inputs(node, inputs)
    editor.finish()
    return prepared


def _ranges(
    graph: Graph, nodes: Iterable[Node], batches: Iterable[Feeds], threads: int | None
) -> dict[str, tuple[float, float]]:
    """The range of each activation that the nodes read: 99.99 % of its numbers."""
    read = [value for node in nodes for value in node.inputs[:2] if value is not None]
    names = dict.fromkeys(value.name for value in read if graph.constant_of(value) is None)
    found = collect_histograms(graph, names, batches, threads)
    chosen = {
        name: choose_range(each, "percentile", DType.UINT8, symmetric=False, percentile=_PERCENTILE)
        for name, each in found.items()
    }
    return {name: (min(low, found[name].least, 0.0) and low, high) for name, (low, high) in chosen.items()}


def _fake_activation(editor: Editor, anchor: Node, value: Value, low: float, high: float) -> Value:
    limits = (0, 255) if low >= 0 else (-128, 127)
    unit = max(high, -low) / limits[1] or 1.0
    features = prod(extent for extent in value.shape[1:] if isinstance(extent, int))
    return _fake_quantize(editor, anchor, value, {"axis": 0}, limits, np.array([unit]), features)


def _fake_weights(editor: Editor, node: Node, code: WeightCode, per_channel: bool) -> Value:
    value = node.required_input(1)
    weights = editor.array(value)
    assert weights is not None, "layers_of"
    axis = CHANNEL_AXIS[node.op](node) % weights.ndim
    if code in ("ternary", "binary"):
        attrs: dict[str, Attr] = {"code": code, "axis": axis}
        return editor.emit(node, "CodedWeight", value, attrs=attrs, name=f"{value.name}_coded")
    if code == "trained_ternary":
        mean = np.float32(np.abs(weights).mean())
        scales = editor.constant(np.array([mean, mean], np.float32), f"{value.name}.scales")
        attrs = {"code": code, "axis": axis}
        return editor.emit(node, "CodedWeight", value, scales, attrs=attrs, name=f"{value.name}_coded")
    others = tuple(each for each in range(weights.ndim) if each != axis) if per_channel else None
    size = np.abs(weights.astype(np.float64))
    if code == "power_of_two":
        limits, units = (-1, 1), np.atleast_1d(size.max(axis=others))
    else:
        limits = _LIMITS[code]
        units = np.atleast_1d(_first_scale(size, limits[1], others))
    attrs = {"axis": axis, "code": "powers" if code == "power_of_two" else "uniform"}
    return _fake_quantize(editor, node, value, attrs, limits, units, weights.size // units.size)


def _first_scale(size: NDArray[np.float64], most: int, others: tuple[int, ...] | None) -> NDArray[np.float64]:
    """For few bits 2 * mean / sqrt(most), section 2.1 of LSQ; for 8 bits the greatest weight becomes `most`."""
    if most >= _LIMITS["int8"][1]:
        return size.max(axis=others) / most
    return 2 * size.mean(axis=others) / np.sqrt(most)


def _fake_quantize(
    editor: Editor,
    anchor: Node,
    value: Value,
    attrs: Mapping[str, Attr],
    limits: tuple[int, int],
    units: NDArray[np.float64],
    count: int,
) -> Value:
    """`value` through FakeQuantize; each of `units` scales `count` numbers (the gradient scale of LSQ, section 2.2)."""
    units = np.where(units > 0, units, 1.0).astype(np.float32)  # channels that are 0
    step = editor.constant(np.ones(len(units), np.float32), f"{value.name}.step")
    full: dict[str, Attr] = {
        **attrs,
        "low": limits[0],
        "high": limits[1],
        "unit": tuple(float(unit) for unit in units),
        "gradient_scale": float(1 / np.sqrt(max(count, 1) * limits[1])),
    }
    return editor.emit(anchor, "FakeQuantize", value, step, attrs=full, name=f"{value.name}_fake")


def as_quantized(graph: Graph) -> Graph:
    """A copy of a graph that `add_fake_quantization` made, with its present weights and scales, in QDQ form.

    Weights of the codes "int4", "int2", "ternary" and "binary" are stored as int4, others as int8, but those of
    "trained_ternary" as bytes that choose among three numbers. A graph without such operators is copied as it is.
    """
    copy = graph.clone()
    editor = Editor(copy)
    grids: dict[str, Grid] = {}
    stored: dict[Node, StoredWeights] = {}
    touched: dict[Node, None] = {}
    for node in [node for node in copy.nodes if node.op in FAKE]:
        value = node.required_input(0)
        array = editor.array(value)
        readers = editor.readers(node.output)
        if array is None:
            grids[value.name] = _activation_grid(editor, node)
        elif node.attrs["code"] == "trained_ternary":
            _store_table(editor, node, array)
            continue
        else:
            stored |= dict.fromkeys(readers, _stored_weights(editor, node, array))
        touched |= dict.fromkeys(readers)
        for reader in readers:
            editor.set_inputs(reader, [value if each is node.output else each for each in reader.inputs])
    places = {node: place for place, node in enumerate(copy.nodes)}
    QdqWriter(editor, grids, stored).write(sorted(touched, key=places.__getitem__))
    editor.finish()
    return copy


def _activation_grid(editor: Editor, node: Node) -> Grid:
    scale = _scale_of(editor, node).reshape(())
    dtype = DType.UINT8 if node.attrs["low"] == 0 else DType.INT8
    return Grid(dtype, scale, np.zeros((), dtype.numpy))


def _scale_of(editor: Editor, node: Node) -> Array:
    step = editor.array(node.input(1))
    assert step is not None, "scales are constants"
    return step_scale(registry.Infer(registry.get(node.op), node, {}), step)


def _stored_weights(editor: Editor, node: Node, weights: Array) -> StoredWeights:
    axis = node.attrs["axis"]
    assert isinstance(axis, int), "add_fake_quantization"
    if node.op == "CodedWeight":
        codes, scale = coded(weights, str(node.attrs["code"]), axis)
        return _as_stored(codes, scale.reshape(-1), axis, DType.INT4)
    scale = _scale_of(editor, node)
    spread = scale.reshape([-1 if place == axis and scale.size > 1 else 1 for place in range(weights.ndim)])
    low, high = node.attrs["low"], node.attrs["high"]
    assert isinstance(low, int) and isinstance(high, int), "add_fake_quantization"
    if node.attrs["code"] == "powers":
        most = 1 << (POWERS - 1)  # 2^-6 becomes 1
        return _as_stored(powers_code(weights / spread) * most, scale / np.float32(most), axis, DType.INT8)
    dtype = DType.INT8 if high > _LIMITS["int4"][1] else DType.INT4
    return _as_stored(uniform_code(weights / spread, low, high), scale, axis, dtype)


def _as_stored(codes: Array, scale: Array, axis: int, dtype: DType) -> StoredWeights:
    scale = scale.reshape(()) if scale.size == 1 else scale
    grid = Grid(dtype, scale.astype(np.float32), np.zeros(scale.shape, dtype.numpy))
    return StoredWeights(grid, codes.astype(dtype.numpy), axis)


def _store_table(editor: Editor, node: Node, weights: Array) -> None:
    """Replace trained ternary weights by Gather of three numbers with bytes as indices."""
    scales = editor.array(node.input(1))
    assert scales is not None, "scales are constants"
    signs, _ = coded(weights, "trained_ternary", 0)
    name = node.required_input(0).name
    table = editor.constant(np.array([-scales[1], 0, scales[0]], np.float32), f"{name}_numbers")
    codes = editor.constant((signs + 1).astype(np.uint8), f"{name}_codes")
    indices = editor.emit(node, "Cast", codes, attrs={"to": DType.INT32})
    editor.replace(node.output, editor.emit(node, "Gather", table, indices, attrs={"axis": 0}))
