"""Models of one operator, and changes of them that few models have: attributes of other values, empty inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.core.conformance.models import suite_models

_LARGEST = 100_000  # bytes of a model
_HEAD = '<ir_version: 10, opset_import: ["": 22, "ai.onnx.ml": 5, "com.microsoft": 1]> g'
_TREE = (
    "nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2], nodes_featureids = [1, 0, 0], nodes_values = [0.5, 0.0, 0.0]"
    ', nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0],'
)
_SVM = 'kernel_type = "RBF", kernel_params = [0.5, 0.0, 3.0], support_vectors = [1.0, 2.0, 3.0, 4.0],'

# Operators that the suite lacks.
TEXTS = (
    '(int64[n] x) => (y) { y = ai.onnx.ml.CategoryMapper <cats_int64s = [1, 2], cats_strings = ["a", "b"]> (x) }',
    "(float[n,2] x, float[n,3] z) => (y) { y = ai.onnx.ml.FeatureVectorizer <inputdimensions = [2, 3]> (x, z) }",
    "(float[n,2] x) => (y) { y = ai.onnx.ml.Imputer <imputed_value_floats = [1.0, 2.0]> (x) }",
    "(float[n,2] x) => (y, z) { y, z = ai.onnx.ml.LinearClassifier <coefficients = [1.0, 2.0, 3.0, 4.0],"
    " intercepts = [0.0, 1.0], classlabels_ints = [3, 4]> (x) }",
    "(float[n,2] x) => (y) { y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0], intercepts = [0.5]> (x) }",
    '(float[n,2] x) => (y) { y = ai.onnx.ml.Normalizer <norm = "L2"> (x) }',
    "(int64[n] x) => (y) { y = ai.onnx.ml.OneHotEncoder <cats_int64s = [1, 2]> (x) }",
    "(float[n,2] x) => (y) { y = ai.onnx.ml.Scaler <offset = [1.0, 2.0], scale = [0.5, 2.0]> (x) }",
    f"(float[n,2] x) => (y) {{ y = ai.onnx.ml.SVMRegressor <{_SVM} coefficients = [1.0, -1.0], n_supports = 2,"
    " rho = [0.5]> (x) }",
    f"(float[n,2] x) => (y, z) {{ y, z = ai.onnx.ml.SVMClassifier <{_SVM} coefficients = [1.0, -1.0], rho = [0.5],"
    " vectors_per_class = [1, 1], classlabels_ints = [0, 1]> (x) }",
    f"(float[n,2] x) => (y) {{ y = ai.onnx.ml.TreeEnsembleRegressor <{_TREE} n_targets = 1, target_treeids = [0, 0],"
    " target_nodeids = [1, 2], target_ids = [0, 0], target_weights = [1.0, 2.0]> (x) }",
    f"(float[n,2] x) => (y, z) {{ y, z = ai.onnx.ml.TreeEnsembleClassifier <{_TREE} class_treeids = [0, 0],"
    " class_nodeids = [1, 2], class_ids = [0, 1], class_weights = [1.0, 2.0], classlabels_int64s = [5, 6]> (x) }",
    "(float[n,3] x) => (y) { y = Multinomial <sample_size = 2, seed = 1.0> (x) }",
    "() => (y) { y = RandomNormal <shape = [2, 3], seed = 1.0> () }",
    "() => (y) { y = RandomUniform <shape = [2, 3], seed = 1.0> () }",
    "(float[n,3] x) => (y) { y = RandomNormalLike <seed = 1.0> (x) }",
    "(float[n,2,h,w] x) => (y) { y = GlobalLpPool (x) }",
    "(float[n,2,h,w] x, float[r,5] z) => (y) { y = MaxRoiPool <pooled_shape = [2, 2]> (x, z) }",
)


@dataclass(frozen=True)
class Operator:
    """A model of one node with its inputs by name."""

    label: str
    model: onnx.ModelProto
    feeds: dict[str, Any]

    @property
    def node(self) -> onnx.NodeProto:
        return self.model.graph.node[0]


def operators(all_cases: bool = False) -> Iterator[Operator]:
    """The first case of each operator of the suite, or all cases, and those in `TEXTS`."""
    seen = set[tuple[str, str]]()
    for name, case in suite_models().items():
        if not case.has_data or len(data := case.read()) > _LARGEST:
            continue
        model = onnx.load_from_string(data)
        if len(model.graph.node) == 1 and (all_cases or (key := _kind(model.graph.node[0])) not in seen):
            seen |= set() if all_cases else {key}
            yield Operator(name, model, dict(zip([v.name for v in model.graph.input], case.data()[0], strict=False)))
    for text in TEXTS:
        model = onnx.parser.parse_model(_HEAD + text)
        yield Operator(model.graph.node[0].op_type, model, {v.name: _drawn(v.type) for v in model.graph.input})


def _kind(node: onnx.NodeProto) -> tuple[str, str]:
    return node.domain, node.op_type


def _drawn(type_: onnx.TypeProto) -> Any:
    shape = [dim.dim_value or 4 for dim in type_.tensor_type.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(type_.tensor_type.elem_type)
    return (np.arange(np.prod(shape)) % 3).reshape(shape).astype(dtype)


# Other values by the kind of the attribute, besides shorter and longer lists.
_VALUES: dict[str, tuple[Any, ...]] = {
    "INT": (-(2**63), -1, 0, 1, 3, 99, 2**40),
    "FLOAT": (-1.0, 0.0, 2.0**21, float("nan"), float("inf")),
    "STRING": ("", "?"),
    "INTS": ((), (-1,), (0,), (2**40,), (0, 0, 0, 0, 0)),
    "FLOATS": ((), (0.0,), (-1.0,), (float("nan"),), (1.0,) * 5),
    "STRINGS": ((), ("?",), ("?",) * 5),
    "TENSOR": (
        np.zeros(0, np.float32), np.zeros((1, 1), np.float32), np.zeros(5, np.int64), np.array(["a"], object),
        np.array([300], np.int32), np.array([np.inf], np.float64),
    ),
}  # fmt: skip


def with_other_attributes(operator: Operator) -> Iterator[tuple[str, onnx.ModelProto]]:
    """The model with each attribute of the schema removed, or of another value: a description, and the model."""
    versions = {each.domain: each.version for each in operator.model.opset_import}
    node = operator.node
    try:
        schema = onnx.defs.get_schema(node.op_type, versions[node.domain], node.domain)
    except onnx.defs.SchemaError:
        return
    for name, attribute in schema.attributes.items():
        given = next((each for each in node.attribute if each.name == name), None)
        if given is not None:
            yield f"no {name}", _changed(operator.model, name, None)
        for value in (*_VALUES.get(attribute.type.name, ()), *_lengths(given)):
            yield f"{name} = {value!r}", _changed(operator.model, name, _proto(name, value, attribute.type))


def _lengths(given: onnx.AttributeProto | None) -> Iterator[Any]:
    """Shorter and longer lists than the given one, and other numbers of each element."""
    value = helper.get_attribute_value(given) if given is not None else None
    if isinstance(value, list | tuple) or hasattr(value, "append"):
        items = list(value)
        yield from (items[:-1], [*items, *items[-1:]])
        if items and isinstance(items[0], int):
            yield from ([-1, *items[1:]], [*items[:-1], 2**40])


def _proto(name: str, value: Any, kind: Any) -> onnx.AttributeProto:
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, numpy_helper.from_array(value))
    return helper.make_attribute(name, value, attr_type=onnx.AttributeProto.AttributeType.Value(kind.name))


def _changed(model: onnx.ModelProto, name: str, attribute: onnx.AttributeProto | None) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [each for each in copy.graph.node[0].attribute if each.name != name]
    del copy.graph.node[0].attribute[:]
    copy.graph.node[0].attribute.extend([*kept, *([attribute] if attribute is not None else [])])
    return copy


def with_empty_inputs(operator: Operator) -> Iterator[tuple[str, onnx.ModelProto, dict[str, Any]]]:
    """The model with each extent of each tensor as 0: a description, the model of open extents, and the inputs."""
    for name, array in operator.feeds.items():
        if not isinstance(array, np.ndarray):
            continue
        for axis in range(array.ndim):
            cut = np.take(array, range(0), axis)
            yield f"axis {axis} of {name} empty", _opened(operator.model), {**operator.feeds, name: cut}


def _opened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with symbols, each of its own, for all extents."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    return copy
