"""Writes models that run in microseconds: from scikit-learn's converter, of one operator, of one token.

    python -m tests.exporters.make_small FOLDER

writes FOLDER/<name>/{model.onnx, feeds-<i>.npz}, for batches of 1 and 8 where the batch is free; `python -m loadtest
exported FOLDER` then compares the cost of a call with ONNX Runtime's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.parser import parse_model
from sklearn import datasets, ensemble, linear_model, naive_bayes, neural_network, pipeline, preprocessing, svm, tree

with warnings.catch_warnings():  # the converter's own imports
    warnings.simplefilter("ignore")
    from skl2onnx import to_onnx

Feeds = Mapping[str, np.ndarray[Any, Any]]

BATCHES = (1, 8)
FLOWERS = datasets.load_iris()
DIGITS = datasets.load_digits()
X, KINDS = FLOWERS.data.astype(np.float32), FLOWERS.target
NAMES = FLOWERS.target_names[KINDS]
IMAGES, FIGURES = DIGITS.data.astype(np.float32), DIGITS.target

# With maps from label to probability (the converter's default for classifiers), and without.
CLASSIFIERS: Mapping[str, tuple[Any, Any, Any]] = {
    "logistic": (linear_model.LogisticRegression(max_iter=500), X, KINDS),
    "logistic_of_names": (linear_model.LogisticRegression(max_iter=500), X, NAMES),
    "scaled_logistic": (
        pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()), X, KINDS,
    ),
    "svc_linear": (svm.SVC(kernel="linear", probability=True), X, KINDS),
    "svc_rbf": (svm.SVC(probability=True), X, KINDS),
    "svc_votes": (svm.SVC(), X, KINDS),
    "svc_of_names": (svm.SVC(kernel="linear", probability=True), X, NAMES),
    "forest": (ensemble.RandomForestClassifier(100, random_state=0), X, KINDS),
    "forest_of_digits": (ensemble.RandomForestClassifier(100, random_state=0), IMAGES, FIGURES),
    "tree": (tree.DecisionTreeClassifier(random_state=0), X, KINDS),
    "boosted": (ensemble.GradientBoostingClassifier(n_estimators=20, random_state=0), X, KINDS),
    "naive_bayes": (naive_bayes.GaussianNB(), X, KINDS),
    "perceptron": (neural_network.MLPClassifier(10, solver="lbfgs", max_iter=500, random_state=0), X, KINDS),
}  # fmt: skip
OTHERS: Mapping[str, tuple[Any, Any, Any]] = {
    "linear": (linear_model.LinearRegression(), X, KINDS),
    "svr": (svm.SVR(), X, KINDS),
    "regression_tree": (tree.DecisionTreeRegressor(random_state=0), X, KINDS),
    "regression_forest": (ensemble.RandomForestRegressor(20, random_state=0), X, KINDS),
    "isolation": (ensemble.IsolationForest(n_estimators=10, random_state=0), X, None),
    "scaler": (preprocessing.StandardScaler(), X, None),
    "one_hot": (preprocessing.OneHotEncoder(sparse_output=False), X.round(), None),
    "polynomial": (preprocessing.PolynomialFeatures(2), X, None),
}

# "?" stands for the batch.
GRAPHS: Mapping[str, str] = {
    "relu": "(float[?,4] x) => (float[?,4] y) { y = Relu(x) }",
    "fixed": "(float[1,4] x) => (float[1,4] y) { y = Relu(x) }",
    "of_no_rank": "(float x) => (float y) { y = Exp(x) }",
    "of_two": "(float[?,4] x, float[?,4] z) => (float[?,4] y) { y = Add(x, z) }",
    "two_outputs": "(float[?,4] x) => (float[?,4] y, float[?,4] z) { y = Relu(x) z = Neg(x) }",
    "two_symbols": "(float[?,m] x) => (float[?,m] y) { y = Exp(x) }",
    "two_symbols_of_two": "(float[?,m] x, float[?,m] z) => (float[?,m] y) { y = Add(x, z) }",
    "argmax": "(float[?,4] x) => (int64[?,1] y) { y = ArgMax<axis = 1>(x) }",
    "softmax": "(float[?,10] x) => (float[?,10] y) { y = Softmax(x) }",
    "cast": "(int64[?,4] x) => (float[?,4] y) { y = Cast<to = 1>(x) }",
    "three_layers": """(float[?,4] x) => (float[?,3] y)
        <float[4,3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3,3] v = {1, 2, 3, 4, 5, 6, 7, 8, 9}>
        { a = MatMul(x, w) b = Tanh(a) c = MatMul(b, v) y = Sigmoid(c) }""",
    "gather": """(int64[?] x) => (float[?,2] y) <float[3,2] table = {1, 2, 3, 4, 5, 6}> { y = Gather(table, x) }""",
    "if": """(float[?,4] x, bool c) => (float[?,4] y)
        { y = If(c) <then_branch = t () => (float[?,4] a) { a = Neg(x) },
                     else_branch = e () => (float[?,4] b) { b = Exp(x) }> }""",
}


def converted() -> Iterator[tuple[str, bytes, Any]]:
    """Names, ONNX models and rows of fitted scikit-learn models."""
    for name, (model, rows, labels) in {**CLASSIFIERS, **OTHERS}.items():
        fitted = model.fit(rows) if labels is None else model.fit(rows, labels)
        for suffix, zipmap in {"": None, "_maps": True}.items() if name in CLASSIFIERS else {"": True}.items():
            options = None if zipmap else {id(fitted): {"zipmap": False}}
            made = to_onnx(fitted, rows[:1], options=options, target_opset={"": 17, "ai.onnx.ml": 3})
            yield f"skl_{name}{suffix}", made.SerializeToString(), rows


def graphs() -> Iterator[tuple[str, bytes]]:
    """Names and models of single operators, and of some small graphs."""
    for name, text in GRAPHS.items():
        header = '<ir_version: 8, opset_import: ["": 17]> g '
        yield f"op_{name}", parse_model(header + text.replace("?", "n")).SerializeToString()


def feeds_of(model: bytes, batch: int) -> Feeds | None:
    """Random feeds; None if the model's batch is fixed at another size."""
    sizes = {"n": batch, "m": 5}
    rng, feeds, free = np.random.default_rng(batch), {}, False
    for given in onnx.load_from_string(model).graph.input:
        dims = given.type.tensor_type.shape.dim
        free |= any(dim.dim_param == "n" for dim in dims)
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in dims]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(given.type.tensor_type.elem_type)
        feeds[given.name] = rng.integers(0, 2, shape).astype(dtype) + (rng.random(shape) if dtype.kind == "f" else 0)
        feeds[given.name] = np.asarray(feeds[given.name], dtype)
    return feeds if free or batch == BATCHES[0] else None


def token() -> tuple[bytes, Feeds]:
    """Attention of one token to 32 cached ones, with 4 query and 2 key heads, as ONNX Runtime GenAI writes it."""
    heads, shared, size, past = 4, 2, 16, 32
    rng = np.random.default_rng(0)
    inputs = {
        "q": [1, 1, heads * size], "k": [1, 1, shared * size], "v": [1, 1, shared * size],
        "past_key": [1, shared, past, size], "past_value": [1, shared, past, size],
    }  # fmt: skip
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in inputs.items()}
    numbers = {"lengths": np.array([past], np.int32)}
    turns = rng.random((past + 1, size // 2)).astype(np.float32) * 6
    known = {"total": np.array(past + 1, np.int32), "cos": np.cos(turns), "sin": np.sin(turns)}
    node = onnx.helper.make_node(
        "GroupQueryAttention", [*feeds, *numbers, *known], ["y", "key", "value"], domain="com.microsoft",
        num_heads=heads, kv_num_heads=shared, do_rotary=1,
    )  # fmt: skip
    everything = {**feeds, **numbers}
    declared = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in everything.items()
    ]
    constants = [onnx.numpy_helper.from_array(table, name) for name, table in known.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = onnx.helper.make_graph([node], "token", declared, outputs, constants)
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString(), everything


def write(folder: Path, name: str, model: bytes, feeds: list[Feeds]) -> None:
    at = folder / name
    at.mkdir(parents=True, exist_ok=True)
    (at / "model.onnx").write_bytes(model)
    for index, each in enumerate(feeds):
        np.savez(at / f"feeds-{index}.npz", **each)


def main(folder: Path) -> None:
    with warnings.catch_warnings():  # scikit-learn's warnings of future removals and of missing convergence
        warnings.simplefilter("ignore")
        for name, model, rows in converted():
            write(folder, name, model, [{"X": rows[:batch]} for batch in BATCHES])
    for name, model in graphs():
        write(folder, name, model, [feeds for batch in BATCHES if (feeds := feeds_of(model, batch)) is not None])
    model, feeds = token()
    write(folder, "token_after_32", model, [feeds])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
