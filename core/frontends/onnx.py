"""The importer: from ONNX files to graphs (`load`).

It visits the nodes once, in topological order. Each node is brought to the newest opset, or inlined if it calls a
function, and its types are inferred at once, because old axis rules and context-dependent definitions need the types of
inputs. The resulting graph has only operators of `lathe.core.ops` in their newest form, and is verified.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from lathe.core.errors import LatheError, ModelError, ShapeWarning, UnsupportedError
from lathe.core.frontends import contrib, ml, opsets  # noqa: F401  (ml adds adapters to opsets)
from lathe.core.frontends.annotations import device_of, has_roundable_rows, names_after
from lathe.core.frontends.attributes import attribute_value, check_kinds, check_known
from lathe.core.frontends.declared_types import Symbols, is_compatible, value_type
from lathe.core.frontends.defaults import Types, replaceable_defaults
from lathe.core.frontends.diagnosis import add_diagnosis, history, suggestion
from lathe.core.frontends.external import ExternalFiles
from lathe.core.frontends.functions import (
    MAX_CALL_DEPTH,
    InlinedSize,
    bodies_by_rank,
    check_attributes,
    has_definition,
    standard_body,
)
from lathe.core.frontends.node_order import defined_names, topological_order
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.proto import default_domain, function_table, opset_versions, parse_model, read_opsets
from lathe.core.frontends.scope import Emitter, Frame, FunctionCall, ImportSession, Scope, errors_at
from lathe.core.frontends.tensors import sparse_array, tensor_array
from lathe.core.frontends.unknown_shapes import Lowering, lowering_without_shapes, with_rank
from lathe.core.ir.graph import Array, Attr, Graph, Value, elements_read
from lathe.core.ir.types import DType, SequenceType, TensorType, ValueType
from lathe.core.ir.verify import verify
from lathe.core.ops.ml.scores import DOMAIN as ML_DOMAIN
from lathe.core.ops.opdef import registry

_MAX_BODY_DEPTH = 8  # types in a loop body are inferred several times, so the work grows exponentially with depth

# Before this IR version every initializer also had to be an input, so that does not mean that a run may replace it.
# ONNX Runtime treats all of them as constants.
_OPTIONAL_INPUTS = 4

# Attributes of Constant, and the element type of those that are not tensors.
_CONSTANTS = {
    "value": None,
    "sparse_value": None,
    "value_float": DType.FLOAT32,
    "value_floats": DType.FLOAT32,
    "value_int": DType.INT64,
    "value_ints": DType.INT64,
    "value_string": DType.STRING,
    "value_strings": DType.STRING,
}

STANDARD_DOMAINS = ("", "ai.onnx.preview")  # domains whose operators may have function bodies

Inputs = Sequence[Value | None]


def load(source: str | os.PathLike[str] | bytes, external_data: bool = True) -> Graph:
    """Import an ONNX model, given as a path or as bytes.

    Tensors of a model that is given as a path may lie in other files of its folder, unless `external_data` is False.
    These files are mapped, not copied. Other external data, such as that of a model in bytes, raises ModelError.

    ModelError names the node, operator and opset, what was expected and what was given. UnsupportedError means that the
    model is valid but needs a feature that Lathe lacks. OSError if the file at the path cannot be read. ShapeWarning if
    an output is declared with another shape than its nodes give it, except in models with ai.onnx.ml.
    """
    if isinstance(source, bytes):
        return import_model(parse_model(source))
    path = Path(source)
    files = ExternalFiles.beside(path) if external_data else None
    return import_model(parse_model(path.read_bytes(), files is not None), files)


def import_model(model: onnx.ModelProto, files: ExternalFiles | None = None) -> Graph:
    """Import a model that has passed the checks of `parse_model`; `files` holds its external data.

    The model is imported again if it declares shapes that no run could check, and at most twice more to find the
    defaults that a run may replace (`defaults.py`).
    """
    names, functions, versions = set(defined_names(model.graph)), function_table(model), opset_versions(model)

    unchecked: set[str] = set()

    def make_importer(default_inputs: Types) -> _Importer:
        return _Importer(ImportSession(set(names), files=files), functions, default_inputs, unchecked)

    importer = make_importer({})
    graph = importer.model(model.graph, versions)
    read, used = elements_read(graph), graph.uses()
    unchecked |= {name for value, name in importer.declared_only.items() if value not in read or value not in used}
    if unchecked:
        importer = make_importer({})
        graph = importer.model(model.graph, versions)
    if importer.defaults and model.ir_version >= _OPTIONAL_INPUTS:

        def without(default_inputs: Types) -> Graph:
            return make_importer(default_inputs).model(model.graph, versions)

        found = replaceable_defaults(graph, importer.defaults, importer.session.read, without)
        graph.defaults = {value: found[value.name] for value in graph.constants if value.name in found}
    verify(graph, "import")
    return graph


class _Importer:
    """Imports the graphs of one model.

    `default_inputs` maps the names of initializers that become inputs to their types. `unchecked` has the names of
    values whose declared sizes no run can check: only the rank of their declared shape is used.
    """

    def __init__(
        self,
        session: ImportSession,
        functions: Mapping[tuple[str, str, str], onnx.FunctionProto],
        default_inputs: Types,
        unchecked: Collection[str] = (),
    ) -> None:
        self.session = session
        self.functions = functions
        self.default_inputs = default_inputs
        self.unchecked = unchecked
        self.declared_only: dict[Value, str] = {}  # values whose shapes are declared, but cannot be inferred
        self.defaults: dict[str, TensorType] = {}  # initializers that are inputs, with the types of replacements
        self.unfolding = InlinedSize(functions)

    # Graphs

    def model(self, proto: onnx.GraphProto, versions: Mapping[str, int]) -> Graph:
        _refuse_duplicates([info.name for info in proto.input], "input")
        _refuse_duplicates([info.name for info in proto.output], "output")
        self.session.count_nodes(self.unfolding.size(proto.node))
        graph = Graph(proto.name or "graph")
        frame = Frame(Emitter(graph, self.session), Scope(), versions, declared=_declared_types(proto))
        self._contents(proto, frame, ())
        graph.outputs = [self._model_output(info, frame) for info in proto.output]
        if not graph.outputs:
            raise ModelError("has no outputs, expected at least one", where=f"graph '{graph.name}'")
        return graph

    def body(self, proto: onnx.GraphProto, outer: Frame, arguments: Sequence[ValueType]) -> Graph:
        """Import a nested graph. Each input has its declared type, or if there is none, the type in `arguments`.

        UnsupportedError if graphs are nested more than 8 deep.
        """
        if outer.scope.depth >= _MAX_BODY_DEPTH:
            raise UnsupportedError(f"graphs are nested more than {_MAX_BODY_DEPTH} deep", where=outer.emitter.label)
        graph = Graph(proto.name or "body")
        call = replace(outer.call, results={}) if outer.call else None
        emitter = Emitter(graph, self.session, outer.emitter.label)
        frame = Frame(emitter, Scope(outer.scope), outer.opsets, call, _declared_types(proto))
        self._contents(proto, frame, arguments)
        graph.outputs = [_read_present(info.name, frame, f"graph '{graph.name}'") for info in proto.output]
        return graph

    def _contents(self, proto: onnx.GraphProto, frame: Frame, arguments: Sequence[ValueType]) -> None:
        default_inputs = self.default_inputs if frame.scope.outer is None else {}
        for tensor in proto.initializer:
            if tensor.name not in default_inputs:
                self._initializer(tensor.name, tensor_array(tensor, "initializer", self.session.files), frame)
        for sparse in proto.sparse_initializer:
            if sparse.values.name not in default_inputs:
                self._initializer(sparse.values.name, sparse_array(sparse, "sparse initializer"), frame)
        for index, info in enumerate(proto.input):
            if info.name in frame.scope.values or info.name in default_inputs:
                self._default(info, frame)
            else:
                self._input(info, frame, arguments[index] if index < len(arguments) else None)
        self.session.symbols.inputs_are_known = True
        self._nodes(proto.node, frame, f"graph '{proto.name}'")

    def _initializer(self, name: str, array: Array, frame: Frame) -> None:
        if not name:
            raise ModelError("has no name", where="initializer")
        frame.scope.define(name, frame.emitter.constant(array, frame.value_name(name)))

    def _default(self, info: onnx.ValueInfoProto, frame: Frame) -> None:
        """Define an input of the model that has an initializer and is in `default_inputs` as an input of the graph.

        Every other one is a constant already: the type of its possible replacements is recorded in `self.defaults`. In
        a nested graph nothing is done, since no caller can replace the constant.
        """
        if frame.scope.outer is not None:
            return
        try:  # always, so that symbols get the same names in all imports of the file
            declared = value_type(info.type, self.session.symbols, info.name)
        except LatheError:  # the declared type matters only for a replacement
            declared = None
        if info.name in self.default_inputs:
            value = Value(info.name, self.default_inputs[info.name])
            frame.scope.define(info.name, value)
            frame.emitter.graph.inputs.append(value)
        elif (constant := frame.scope.values[info.name]) is not None:
            self.defaults[info.name] = _replacement_type(constant.tensor, declared)

    def _input(self, info: onnx.ValueInfoProto, frame: Frame, default: ValueType | None) -> None:
        if not info.name:
            raise ModelError("has no name", where="input")
        if info.type.WhichOneof("value") is None and default is not None:
            type_ = default
        else:
            type_ = value_type(info.type, self.session.symbols, info.name)
        value = Value(frame.value_name(info.name), type_)
        frame.scope.define(info.name, value)
        frame.emitter.graph.inputs.append(value)

    def _model_output(self, info: onnx.ValueInfoProto, frame: Frame) -> Value:
        """The value of a model output. ModelError if its declared type contradicts the inferred one.

        If only the shapes contradict each other, it is a ShapeWarning, because nothing depends on the declared shape;
        there is no warning for models with ai.onnx.ml, whose exporters declare wrong shapes. Imports with
        `default_inputs` do not check declared types.
        """
        value = _read_present(info.name, frame, "output")
        if info.type.WhichOneof("value") is not None and not self.default_inputs:
            declared = value_type(info.type, self.session.symbols, info.name)
            if not is_compatible(value.type, declared):
                message = f"is declared {declared}, its nodes make it {value.type}"
                notes = [f"  {line}" for line in history(value, frame.emitter)]
                error = ModelError(message, where=f"output '{info.name}'", notes=notes)
                if not _only_shapes_differ(value.type, declared):
                    raise error
                if ML_DOMAIN not in frame.opsets:  # scikit-learn's converter declares 1 column for several
                    warnings.warn(str(error), ShapeWarning, stacklevel=2)
        return value

    # Nodes

    def _nodes(self, protos: Sequence[onnx.NodeProto], frame: Frame, where: str) -> None:
        for proto in topological_order(protos, where):
            frame.emitter.label = frame.label(proto.name or next(filter(None, proto.output), "unnamed"))
            self._node(proto, frame, f"node '{frame.emitter.label}' ({proto.op_type})")

    def _node(self, proto: onnx.NodeProto, frame: Frame, where: str) -> None:
        after = [_read_present(name, frame, where) for name in names_after(proto, where)]
        count = len(frame.emitter.graph.nodes)
        with frame.emitter.annotated(device_of(proto), after):
            self._annotated(proto, frame, where)
        if after and not any(node.after for node in frame.emitter.graph.nodes[count:]):
            raise UnsupportedError("runs after other nodes, but reads no computed value", where=where)

    def _annotated(self, proto: onnx.NodeProto, frame: Frame, where: str) -> None:
        inputs = [frame.scope.read(name, where) if name else None for name in proto.input]
        attrs = self._attributes(proto, inputs, frame, where)
        domain = default_domain(proto.domain)
        function = self.functions.get((domain, proto.op_type, proto.overload))
        if function is not None:
            self._call(function, proto, inputs, attrs, frame)
        elif domain == "" and proto.op_type == "Constant":
            self._constant(proto, attrs, frame, where)
        elif has_roundable_rows(proto, where):
            node = OnnxNode(proto.op_type, 1, list(inputs), list(proto.output), attrs, frame.emitter.label, domain)
            self._emit(node, frame, _emit_roundable_rows)
        else:
            self._operator(proto, domain, inputs, attrs, frame)

    def _operator(
        self, proto: onnx.NodeProto, domain: str, inputs: Inputs, attrs: dict[str, Attr], frame: Frame
    ) -> None:
        where = f"node '{frame.emitter.label}' ({proto.op_type})"
        version = frame.opsets.get(domain)
        if version is None:
            raise ModelError(f"is of domain '{domain}', of which the model imports no opset", where=where)
        if standard := contrib.as_standard(proto, domain, attrs, where):
            proto, attrs, least = standard
            frame = replace(frame, opsets={**frame.opsets, "": max(frame.opsets.get("", 0), least)})
            self._operator(proto, "", inputs, attrs, frame)
            return
        if _is_supported(proto.op_type, domain) or contrib.find_lowering(domain, proto.op_type):
            label, outputs = frame.emitter.label, _output_names(proto)
            self._emit(OnnxNode(proto.op_type, version, list(inputs), outputs, attrs, label, domain), frame)
            return
        body = standard_body(proto, frame.opsets, inputs, attrs) if domain in STANDARD_DOMAINS else None
        if body is not None:
            self._definition(body, proto, inputs, attrs, frame)
        elif domain in STANDARD_DOMAINS and has_definition(proto.op_type, domain, version):
            self._without_shapes(proto, domain, inputs, attrs, frame)
        else:
            place = f"domain '{domain or 'ai.onnx'}', opset {version}"
            advice = suggestion(proto.op_type, domain)
            raise UnsupportedError(f"operator {proto.op_type} of {place} is not implemented; {advice}", where=where)

    def _without_shapes(
        self, proto: onnx.NodeProto, domain: str, inputs: Inputs, attrs: dict[str, Attr], frame: Frame
    ) -> None:
        """Import an ONNX operator whose function body needs shapes of inputs that are unknown.

        It becomes a branch for each rank of the first input, or a lowering of `unknown_shapes.py`. UnsupportedError if
        there is neither.
        """
        label, outputs = frame.emitter.label, _output_names(proto)
        node = OnnxNode(proto.op_type, frame.opsets[domain], list(inputs), outputs, attrs, label, domain)
        if bodies := bodies_by_rank(proto, frame.opsets, inputs, attrs):
            self._switch_on_rank(bodies, proto, inputs, attrs, frame)
        elif lowering := lowering_without_shapes(domain, proto.op_type):
            self._emit(node, frame, lowering)
        else:
            given = ", ".join(str(value.type) for value in inputs if value is not None)
            message = f"ONNX has no definition of it for inputs {given}: one may need shapes, or further attributes"
            raise UnsupportedError(message, where=node.where)

    def _switch_on_rank(
        self,
        bodies: Mapping[int, onnx.FunctionProto],
        proto: onnx.NodeProto,
        inputs: Inputs,
        attrs: dict[str, Attr],
        frame: Frame,
    ) -> None:
        """Import a function whose body depends on the rank of its first input, as a branch for each rank.

        A rank gets no branch if the body for it does not fit the attributes and the other inputs; ModelError if none
        fits. If only one rank fits, there is no branch: a run in which the input has another rank fails.
        """
        x, branches = _not_none(inputs[0]), list[tuple[int, Graph]]()
        refused: ModelError | None = None
        for rank, body in bodies.items():
            try:
                branches.append((rank, self._branch(rank, body, proto, inputs, attrs, frame)))
            except ModelError as error:
                refused = error
        if not branches and refused is not None:
            raise refused
        if len(branches) == 1:
            ((rank, _),) = branches
            self._definition(bodies[rank], proto, [with_rank(frame.emitter, x, rank), *inputs[1:]], attrs, frame)
            return
        names = [frame.value_name(name) for name in proto.output]
        values = _emit_switch(frame.emitter, x, branches, names)
        for name, value in zip(proto.output, values, strict=True):
            if name:
                self._define(name, value, frame)

    def _branch(
        self,
        rank: int,
        body: onnx.FunctionProto,
        proto: onnx.NodeProto,
        inputs: Inputs,
        attrs: dict[str, Attr],
        frame: Frame,
    ) -> Graph:
        """The function body for a first input of this rank, as a separate graph whose outputs have new names."""
        graph, label = Graph("branch"), frame.emitter.label
        call = replace(frame.call, results={}) if frame.call else None
        inside = Frame(Emitter(graph, self.session, label), Scope(frame.scope), frame.opsets, call)
        inner = onnx.NodeProto()
        inner.CopyFrom(proto)
        inner.output[:] = [self.session.fresh(f"{label}.{index}") for index, _ in enumerate(proto.output)]
        typed = with_rank(inside.emitter, _not_none(inputs[0]), rank)
        self._definition(body, inner, [typed, *inputs[1:]], attrs, inside)
        graph.outputs = [_read_present(name, inside, f"node '{label}'") for name in inner.output]
        return graph

    def _emit(self, node: OnnxNode, frame: Frame, lowering: Lowering | None = None) -> None:
        names, node.outputs = node.outputs, [frame.value_name(name) for name in node.outputs]
        node.unnamed = frozenset(index for index, name in enumerate(names) if not name)
        original = replace(node, inputs=list(node.inputs))
        try:
            values = _emit_newest_form(node, frame.emitter, lowering)
        except ModelError as error:
            raise add_diagnosis(error, original, frame.emitter) from None
        for name, value in zip(names, values, strict=False):
            if name:
                self._define(name, value, frame)

    def _define(self, name: str, value: Value, frame: Frame) -> None:
        """Define a value. If inference does not know its rank, it gets the declared shape, which a run checks.

        A declared shape of rank 0, or one of another element type, is ignored. A value whose elements nothing reads may
        never be computed, so no run checks its shape. An output that no node reads has the shape that its node
        produces, whatever was declared. For both, only the declared rank is used (`unchecked`).
        """
        frame.scope.define(name, value)
        if name in frame.declared and isinstance(value.type, TensorType) and value.type.shape is None:
            symbols = Symbols(open_=True) if name in self.unchecked else self.session.symbols
            declared = value_type(frame.declared[name], symbols, name)
            if is_compatible(value.type, declared) and isinstance(declared, TensorType) and declared.shape:
                self.declared_only[value] = name
                value.type = self._rank_only(declared, name) if name in self.unchecked else declared

    def _rank_only(self, declared: TensorType, name: str) -> TensorType:
        """A type with the declared rank, and a new symbol for each dimension, named after the declared one."""
        hints = (f"{name}_dim{axis}" if isinstance(dim, int) else str(dim) for axis, dim in enumerate(declared.dims))
        return TensorType(declared.dtype, tuple(map(self.session.symbols.fresh, hints)))

    def _constant(self, proto: onnx.NodeProto, attrs: Mapping[str, Attr], frame: Frame, where: str) -> None:
        if len(attrs) != 1 or len(proto.output) != 1 or not proto.output[0]:
            message = f"has {len(attrs)} attributes and {len(proto.output)} outputs, expected one each"
            raise ModelError(message, where=where)
        ((name, value),) = attrs.items()
        if name not in _CONSTANTS:
            raise ModelError(f"has attribute '{name}', expected one of {', '.join(_CONSTANTS)}", where=where)
        check_kinds("Constant", "", attrs, where)
        dtype = _CONSTANTS[name]
        array = np.asarray(value, dtype=dtype.numpy if dtype else None)
        frame.scope.define(proto.output[0], frame.emitter.constant(array, frame.value_name(proto.output[0])))

    # Functions

    def _definition(
        self, body: onnx.FunctionProto, proto: onnx.NodeProto, inputs: Inputs, attrs: Mapping[str, Attr], frame: Frame
    ) -> None:
        """Import `body`, the function by which ONNX defines an operator, in place of the node; count its nodes."""
        self.session.count_nodes(self.unfolding.size(body.node))
        self._call(body, proto, inputs, attrs, frame)

    def _call(
        self,
        function: onnx.FunctionProto,
        proto: onnx.NodeProto,
        inputs: Inputs,
        attrs: Mapping[str, Attr],
        frame: Frame,
    ) -> None:
        """Import the body of a function in place of the node that calls it."""
        label = frame.emitter.label
        where = f"node '{label}' (function {function.name})"
        inside = self._enter(function, proto, inputs, attrs, frame, where)
        self._nodes(function.node, inside, where)
        frame.emitter.label = label
        for inner, outer in zip(function.output, proto.output, strict=False):
            if outer:
                self._define(outer, _function_result(inner, inside, where), frame)

    def _enter(
        self,
        function: onnx.FunctionProto,
        proto: onnx.NodeProto,
        inputs: Inputs,
        attrs: Mapping[str, Attr],
        frame: Frame,
        where: str,
    ) -> Frame:
        """The frame of a function's body, with its arguments bound and its results named after the node's outputs.

        ModelError for too many inputs or outputs, and for attributes that the function does not declare.
        UnsupportedError for calls deeper than `MAX_CALL_DEPTH`.
        """
        depth = frame.call.depth + 1 if frame.call else 1
        if depth > MAX_CALL_DEPTH:
            raise UnsupportedError(f"functions call each other more than {MAX_CALL_DEPTH} deep", where=where)
        if len(inputs) > len(function.input) or len(proto.output) > len(function.output):
            got, expected = (len(inputs), len(proto.output)), (len(function.input), len(function.output))
            raise ModelError(f"has (inputs, outputs) {got}, expected at most {expected}", where=where)
        check_attributes(function, attrs, where)
        defaults = {a.name: self._attribute(a, (), frame, where) for a in function.attribute_proto}
        pairs = zip(function.output, proto.output, strict=False)
        results = {inner: frame.value_name(outer) for inner, outer in pairs if outer}
        call = FunctionCall(frame.emitter.label, {**defaults, **attrs}, results, depth)
        versions = read_opsets(function.opset_import, where) or frame.opsets
        inside = Frame(frame.emitter, Scope(), versions, call)
        for index, name in enumerate(function.input):
            inside.scope.define(name, inputs[index] if index < len(inputs) else None)
        return inside

    # Attributes

    def _attributes(self, proto: onnx.NodeProto, inputs: Inputs, frame: Frame, where: str) -> dict[str, Attr]:
        _refuse_duplicates([attribute.name for attribute in proto.attribute], "attribute", where)
        found: dict[str, Attr] = {}
        for attribute in proto.attribute:
            if not attribute.ref_attr_name:
                found[attribute.name] = self._attribute(attribute, _argument_types(proto, inputs), frame, where)
            elif frame.call is None:
                raise ModelError(f"attribute '{attribute.name}' refers to a function's, outside of one", where=where)
            elif attribute.ref_attr_name in frame.call.attributes:
                value = frame.call.attributes[attribute.ref_attr_name]
                found[attribute.name] = value.clone() if isinstance(value, Graph) else value
        return found

    def _attribute(self, proto: onnx.AttributeProto, arguments: Sequence[ValueType], frame: Frame, where: str) -> Attr:
        return attribute_value(proto, lambda graph: self.body(graph, frame, arguments), where, self.session.files)


def _not_none(value: Value | None) -> Value:
    assert value is not None
    return value


def _emit_switch(e: Emitter, x: Value, branches: Sequence[tuple[int, Graph]], names: Sequence[str]) -> list[Value]:
    """Emit nested Ifs that run the branch for the rank of `x`; their outputs have these names.

    The last branch also runs for all ranks without a branch: it refuses `x`. There must be at least two branches.
    """
    (rank, branch), *others = branches
    is_rank = e("Squeeze", e("Equal", e("Shape", e("Shape", x)), e.constant([rank], dtype=DType.INT64)))
    last = others[0][1]
    if len(others) > 1:
        last = Graph("branch")
        inner = Emitter(last, e.session, e.label)
        last.outputs = _emit_switch(inner, x, others, [e.session.fresh(name) for name in names])
    return e.emit("If", [is_rank], {"then_branch": branch, "else_branch": last}, names, e.label)


def _replacement_type(own: TensorType, declared: ValueType | None) -> TensorType:
    """The type of replacements of a default of type `own`: `declared` if it has a rank and fits, otherwise `own`."""
    usable = isinstance(declared, TensorType) and declared.shape is not None and is_compatible(own, declared)
    return declared if usable and isinstance(declared, TensorType) else own


def _is_supported(op: str, domain: str) -> bool:
    """Whether Lathe has the operator of this domain, possibly in a newer form.

    Operators that only passes emit do not count.
    """
    definition = registry.find(op)
    if definition is None:
        return domain == "" and opsets.has_adapter(op)
    return definition.domain == domain and domain != "lathe"


def _emit_newest_form(node: OnnxNode, emitter: Emitter, lowering: Lowering | None) -> Sequence[Value]:
    """Emit the node in its newest form, or by `lowering`; return its outputs."""
    with errors_at(node.where):
        form = lowering or contrib.find_lowering(node.domain, node.op) or opsets.modernize
        values = form(emitter, node)
    if values is not None:
        return values
    attrs = check_known(node.op, node.attrs, node.where)
    return emitter.emit(node.op, node.inputs, attrs, node.outputs, node.label)


def _emit_roundable_rows(emitter: Emitter, node: OnnxNode) -> list[Value]:
    return contrib.emit_output(emitter, node, "RoundableRows", node.required(0))


def _declared_types(proto: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    infos = (*proto.value_info, *proto.output)
    return {info.name: info.type for info in infos if info.type.WhichOneof("value") is not None}


def _output_names(proto: onnx.NodeProto) -> list[str]:
    """The names of a node's outputs, without trailing outputs that have no name."""
    names = list(proto.output)
    while len(names) > 1 and not names[-1]:
        names.pop()
    return names


def _read_present(name: str, frame: Frame, where: str) -> Value:
    """The value of this name. ModelError if nothing defines it, or if it is an absent argument of a function."""
    value = frame.scope.read(name, where)
    if value is None:
        raise ModelError(f"reads '{name}', an argument that the call does not give", where=where)
    return value


def _function_result(inner: str, inside: Frame, where: str) -> Value:
    """The value of the function's result `inner`; a copy (Identity) if that has another name, as an argument has."""
    value, name = _read_present(inner, inside, where), inside.value_name(inner)
    return value if value.name == name else inside.emitter.emit("Identity", [value], {}, [name])[0]


def _argument_types(proto: onnx.NodeProto, inputs: Inputs) -> list[ValueType]:
    """The types of the inputs of a node's body, from the node's inputs; used where the file declares none.

    Tensors keep their element type but not their rank, because shapes may change from one iteration to the next. Loop's
    body first gets the iteration number and the condition, both scalars; SequenceMap's gets elements of the sequences.
    """
    given = [value.type for value in inputs if value is not None]
    types = [TensorType(type_.dtype, None) if isinstance(type_, TensorType) else type_ for type_ in given]
    if proto.op_type == "Loop":  # the iteration number and the condition come first
        return [TensorType(DType.INT64, ()), TensorType(DType.BOOL, ()), *types[sum(map(bool, proto.input[:2])) :]]
    if proto.op_type == "SequenceMap":  # the body takes one element of each sequence
        return [type_.element if isinstance(type_, SequenceType) else type_ for type_ in types]
    return types


def _only_shapes_differ(inferred: ValueType, declared: ValueType) -> bool:
    return isinstance(inferred, TensorType) and isinstance(declared, TensorType) and inferred.dtype is declared.dtype


def _refuse_duplicates(names: Sequence[str], kind: str, where: str = "") -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ModelError(f"{kind} '{name}' is given twice", where=where)
        seen.add(name)
