"""Graphs of a decoder in which weights that a file holds in codes of few bits stay codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node
from lathe.core.ir.types import TensorType
from lathe.core.language.adapted_graph import add_adapters
from lathe.core.language.adapters import Adapter
from lathe.core.language.decoder import Decoder
from lathe.core.language.gguf_codes import BlockCodes
from lathe.core.language.weight_sources import StoredWeight
from lathe.core.nn import init
from lathe.core.nn.module import Module
from lathe.core.nn.parameter import Parameter
from lathe.core.nn.trace import trace
from lathe.core.passes.rewrite.editor import Editor

_PREFIX = "decoder."
_INT8_ROWS = "int8-activations"  # the precision in which kernels may round rows to int8


def traced_with_codes(
    decoder: Decoder,
    form: Callable[[Decoder], Module],
    inputs: Mapping[str, TensorType | str],
    outputs: Sequence[str],
    name: str,
    precision: str = "float32",
    adapters: Sequence[Adapter] = (),
) -> Graph:
    """The graph of `form(decoder)`, a module whose attribute `decoder` it is, for this precision of `lathe.compile`.

    With `adapters` it has their products and the input `adapters` (`lathe.core.language.adapted_graph`). Products with
    weights that have codes (`StoredWeight.codes`) become DequantizedMatMul. Such a weight is decoded only if another
    operator reads it.
    """
    parameters = dict(decoder.named_state())
    with init.skipped():
        skeleton = Decoder(decoder.settings)
    for path, parameter in skeleton.named_state():
        parameter.requires_grad = True  # so that constants are read by the products themselves
        parameter.defer(_placeholder(parameters[path]) if _has_codes(parameters[path]) else _reader(parameters[path]))
    graph = trace(form(skeleton), inputs, outputs, name)
    if adapters:
        add_adapters(graph, adapters, {value: _layer(value.name) for value in graph.constants})
    names = {f"{_PREFIX}{path}": parameter for path, parameter in parameters.items() if _has_codes(parameter)}
    coded = {value: names[value.name] for value in graph.constants if value.name in names}
    editor = Editor(graph)
    for node in editor.nodes():
        weight = node.input(1)
        if node.op == "Gemm" and weight in coded and node.attrs.get("transB"):
            codes = _codes(coded[weight])
            assert codes is not None
            _rewrite(editor, node, codes, precision == _INT8_ROWS)
    editor.finish()
    for value in coded.keys() & graph.constants.keys():
        graph.constants[value] = _reader(coded[value])()
    return graph


def _layer(name: str) -> str:
    """The path of the layer whose weight has this name in the graph."""
    return name.removeprefix(_PREFIX).removesuffix(".weight")


def _has_codes(parameter: Parameter) -> bool:
    return isinstance(parameter.source, StoredWeight) and parameter.source.has_codes


def _codes(parameter: Parameter) -> BlockCodes | None:
    return parameter.source.codes() if isinstance(parameter.source, StoredWeight) else None


def _reader(parameter: Parameter) -> Callable[[], Array]:
    """Reads the elements of a parameter, which does not keep them if they come from a file."""
    return parameter.source or (lambda: parameter.data)


def _placeholder(parameter: Parameter) -> Callable[[], Array]:
    """Zeros that nothing reads: the operating system gives them no memory."""

    def zeros() -> Array:
        assert isinstance(parameter.source, StoredWeight)
        array = np.zeros(parameter.source.shape, np.float32)
        array.setflags(write=False)
        return array

    return zeros


def _rewrite(editor: Editor, node: Node, weight: BlockCodes, int8_rows: bool) -> None:
    """Replace a Gemm by a product with the codes of its weight [rows, columns], plus its bias."""
    arrays = {"codes": weight.codes, "scales": weight.scales, "offsets": weight.offsets}
    constants = [editor.constant(np.ascontiguousarray(a.T), label) for label, a in arrays.items() if a is not None]
    attrs: dict[str, Attr] = {"block": weight.block, "numbers": weight.numbers}
    if int8_rows:
        attrs["row_bits"] = 8
    y = editor.emit(node, "DequantizedMatMul", node.required_input(0), *constants, attrs=attrs)
    bias = node.input(2)
    editor.replace(node.output, y if bias is None else editor.emit(node, "Add", y, bias))
