"""Models of scikit-learn through its converter, against scikit-learn and ONNX Runtime."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import pytest
from sklearn import (
    calibration,
    compose,
    datasets,
    decomposition,
    discriminant_analysis,
    ensemble,
    feature_extraction,
    feature_selection,
    impute,
    linear_model,
    multiclass,
    multioutput,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

import lathe
from lathe.core.compiler import child_stages
from lathe.core.passes.proofs.rows import rows
from tests.exporters.agreement import agrees, same

with warnings.catch_warnings():  # the converter's own imports
    warnings.simplefilter("ignore")
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType

OPSETS = {"": 21, "ai.onnx.ml": 3}
IRIS = datasets.load_iris()
X = IRIS.data.astype(np.float32)
KINDS = IRIS.target
TWO = (KINDS > 0).astype(np.int64)
NAMES = IRIS.target_names[KINDS]
REAL = (X @ [1, 2, 3, 4] + 0.5).astype(np.float32)
PAIR = np.stack([REAL, -REAL], axis=1)
HOLES = np.where(np.random.default_rng(0).random(X.shape) < 0.1, np.nan, X).astype(np.float32)
ROUND = X.round()


class Case(NamedTuple):
    """A model and its training data."""

    model: Any
    y: Any = None
    x: Any = X


CASES = {
    "logistic": Case(linear_model.LogisticRegression(max_iter=500), KINDS),
    "logistic of two": Case(linear_model.LogisticRegression(), TWO),
    "logistic of names": Case(linear_model.LogisticRegression(max_iter=500), NAMES),
    "linear": Case(linear_model.LinearRegression(), REAL),
    "linear of two targets": Case(linear_model.Ridge(), PAIR),
    "gradient descent": Case(linear_model.SGDClassifier(random_state=0), KINDS),
    "poisson": Case(linear_model.PoissonRegressor(), REAL),
    "linear svc": Case(svm.LinearSVC(), KINDS),
    "linear svr": Case(svm.LinearSVR(), REAL),
    "svc": Case(svm.SVC(), KINDS),
    "svc of two": Case(svm.SVC(kernel="poly"), TWO),
    "svr": Case(svm.SVR(), REAL),
    "nu svr": Case(svm.NuSVR(kernel="sigmoid", gamma=0.01), REAL),
    "tree": Case(tree.DecisionTreeClassifier(random_state=0), KINDS),
    "tree of two": Case(tree.DecisionTreeClassifier(max_depth=2, random_state=0), TWO),
    "tree of names": Case(tree.DecisionTreeClassifier(max_depth=2, random_state=0), NAMES),
    "regression tree": Case(tree.DecisionTreeRegressor(random_state=0), REAL),
    "tree of two targets": Case(tree.DecisionTreeRegressor(random_state=0), PAIR),
    "forest": Case(ensemble.RandomForestClassifier(20, random_state=0), KINDS),
    "forest of two": Case(ensemble.RandomForestClassifier(20, random_state=0), TWO),
    "regression forest": Case(ensemble.RandomForestRegressor(20, random_state=0), REAL),
    "boosted": Case(ensemble.GradientBoostingClassifier(n_estimators=20, random_state=0), KINDS),
    "boosted of two": Case(ensemble.GradientBoostingClassifier(n_estimators=20, random_state=0), TWO),
    "boosted regression": Case(ensemble.GradientBoostingRegressor(n_estimators=20, random_state=0), REAL),
    "adaboost": Case(ensemble.AdaBoostClassifier(n_estimators=5, random_state=0), KINDS),
    "bagging": Case(ensemble.BaggingClassifier(n_estimators=5, random_state=0), KINDS),
    "isolation": Case(ensemble.IsolationForest(n_estimators=10, random_state=0)),
    "stack": Case(ensemble.StackingClassifier([("a", linear_model.LogisticRegression(max_iter=500))]), KINDS),
    "neighbours": Case(neighbors.KNeighborsClassifier(3), KINDS),
    "regression by neighbours": Case(neighbors.KNeighborsRegressor(3), REAL),
    "boosted regression by a median": Case(ensemble.AdaBoostRegressor(n_estimators=5, random_state=0), REAL),
    "calibrated by steps": Case(
        calibration.CalibratedClassifierCV(naive_bayes.GaussianNB(), cv=2, method="isotonic"), KINDS
    ),
    "naive bayes": Case(naive_bayes.GaussianNB(), KINDS),
    "perceptron": Case(neural_network.MLPClassifier(10, solver="lbfgs", max_iter=500, random_state=0), TWO),
    "discriminant": Case(discriminant_analysis.LinearDiscriminantAnalysis(), KINDS),
    "one against rest": Case(multiclass.OneVsRestClassifier(linear_model.LogisticRegression()), KINDS),
    "one against one": Case(multiclass.OneVsOneClassifier(linear_model.LogisticRegression()), KINDS),
    "calibrated": Case(calibration.CalibratedClassifierCV(svm.LinearSVC(), cv=2), KINDS),
    "several outputs": Case(multioutput.MultiOutputRegressor(linear_model.Ridge()), PAIR),
    "standard scaler": Case(preprocessing.StandardScaler()),
    "min max scaler": Case(preprocessing.MinMaxScaler()),
    "robust scaler": Case(preprocessing.RobustScaler()),
    "l1 norm": Case(preprocessing.Normalizer("l1")),
    "l2 norm": Case(preprocessing.Normalizer("l2")),
    "largest norm": Case(preprocessing.Normalizer("max")),
    "binarizer": Case(preprocessing.Binarizer(threshold=2.0)),
    "polynomial": Case(preprocessing.PolynomialFeatures(2)),
    "power": Case(preprocessing.PowerTransformer()),
    "one hot": Case(preprocessing.OneHotEncoder(handle_unknown="ignore", sparse_output=False), x=ROUND),
    "ordinal": Case(preprocessing.OrdinalEncoder(), x=ROUND),
    "components": Case(decomposition.PCA(2)),
    "selection": Case(feature_selection.SelectKBest(k=2), KINDS),
    "imputer": Case(pipeline.make_pipeline(impute.SimpleImputer(), preprocessing.StandardScaler()), x=HOLES),
    "pipeline": Case(pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()), KINDS),
    "union": Case(pipeline.make_union(preprocessing.StandardScaler(), decomposition.PCA(2))),
}


def converted(model: Any, *sample: Any, **given: Any) -> bytes:
    """The model as ONNX, without scikit-learn's warnings to the converter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bytes(to_onnx(model, *sample, **{"target_opset": OPSETS, **given}).SerializeToString())


def fitted(case: Case) -> Any:
    return case.model.fit(case.x) if case.y is None else case.model.fit(case.x, case.y)


def expected(model: Any, x: Any) -> list[Any]:
    """scikit-learn's predictions, in the form of the converter's outputs."""
    if hasattr(model, "transform") and not hasattr(model, "predict"):
        return [model.transform(x).astype(np.float32)]
    answer = model.predict(x)
    answer = answer.astype(np.float32) if answer.dtype.kind == "f" else answer
    if answer.dtype.kind != "f":
        return [answer.astype(object) if answer.dtype.kind == "U" else answer]
    return [answer.reshape(len(x), -1)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    """Lathe agrees with ONNX Runtime in all outputs, and with scikit-learn in the first."""
    case = CASES[name]
    model = fitted(case)
    data = converted(model, case.x[:1])
    theirs = ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"X": case.x})
    agrees(data, {"X": case.x}, theirs, 2e-4)
    # The converter gives the first output of "isolation" the shape [N,1]. Of isotonic steps it takes the nearest one,
    # and scikit-learn interpolates.
    if name not in ("isolation", "calibrated by steps"):
        first = lathe.interpret(lathe.load(data), {"X": case.x}).values()
        for got, wanted in zip(first, expected(model, case.x), strict=False):
            same(got.reshape(wanted.shape), wanted, 2e-3, name)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_rows_share_a_batch(name: str) -> None:
    """Each row of these models is a sample of its own."""
    found = rows(lathe.load(converted(fitted(CASES[name]), CASES[name].x[:1])))
    assert found.batchable, found.reason


@pytest.mark.parametrize("classes", [KINDS, TWO])
def test_probabilities_as_tensors(classes: Any) -> None:
    """With zipmap=False, the form that a server can return, rows share a batch."""
    model = ensemble.RandomForestClassifier(10, random_state=0).fit(X, classes)
    data = converted(model, X[:1], options={id(model): {"zipmap": False}})
    agrees(data, {"X": X}, [model.predict(X), model.predict_proba(X).astype(np.float32)])
    with lathe.compile(data, threads=1, tune="off") as session:
        assert session.batching.batchable, session.batching.reason


@pytest.mark.parametrize("classes", [KINDS, NAMES])
def test_a_server_answers_with_tensors_where_the_model_gives_maps(classes: Any, tmp_path: Path) -> None:
    model = linear_model.LogisticRegression(max_iter=500).fit(X, classes)
    (tmp_path / "model.onnx").write_bytes(converted(model, X[:1]))
    assert child_stages.main(["parse", str(tmp_path / "model.onnx"), str(tmp_path / "ir")]) == 0
    graph = child_stages.read_parsed(tmp_path / "ir")
    label, scores = lathe.interpret(graph, {"X": X}).values()
    assert label.tolist() == model.predict(X).tolist()
    np.testing.assert_allclose(scores, model.predict_proba(X), 1e-4, 1e-5)
    with lathe.compile(graph, threads=1, tune="off") as session:
        assert session.batching.batchable, session.batching.reason


@pytest.mark.parametrize("classes", [KINDS, TWO, NAMES])
def test_maps_for_each_row_are_batched(classes: Any) -> None:
    model = ensemble.RandomForestClassifier(10, random_state=0).fit(X, classes)
    data = converted(model, X[:1])
    with lathe.compile(data, threads=1, tune="off") as session:
        assert session.batching.batchable, session.batching.reason
        for count in (1, 0, 8, 1):
            for _ in range(3):
                label, maps = session.run({"X": X[:count]}).values()
                assert label.tolist() == model.predict(X)[:count].tolist()
                assert [list(each) for each in maps] == [model.classes_.tolist()] * count
                got = [list(each.values()) for each in maps]
                np.testing.assert_allclose(
                    got or np.zeros((0, len(model.classes_))), model.predict_proba(X)[:count], 1e-5
                )


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    [
        "isolation", "one hot", "tree of names", "logistic of names", "ordinal", "svc of two", "adaboost", "stack",
        "regression by neighbours", "boosted regression by a median", "calibrated by steps",
    ],
)  # fmt: skip
def test_only_strings_and_maps_run_on_the_reference(name: str) -> None:
    case = CASES[name]
    with lathe.compile(converted(fitted(case), case.x[:1]), threads=1, tune="off") as session:
        left = [
            node for each in session._shapes.cached_runners().values() for node in each.shares[0].plan.fallbacks.nodes
        ]
    assert {node.op for node in left} <= {"Gather", "ZipMap"}
    assert all(node.op == "ZipMap" or "string" in str(node.output.type) for node in left)


def test_columns_of_several_types() -> None:
    """A pipeline over strings and numbers, each column an input of its own."""
    words = np.array([["red"], ["green"], ["blue"], ["red"]] * 5, object)
    number, whole = X[:20, :1], ROUND[:20, :1].astype(np.int64)
    table = np.hstack([words, number.astype(object), whole.astype(object)])
    model = pipeline.make_pipeline(
        compose.make_column_transformer(
            (preprocessing.OneHotEncoder(handle_unknown="ignore"), [0]), (preprocessing.StandardScaler(), [1, 2])
        ),
        linear_model.LogisticRegression(),
    ).fit(table, np.arange(20) % 2)
    kinds = {"word": StringTensorType, "number": FloatTensorType, "whole": Int64TensorType}
    declared = [(name, kind([None, 1])) for name, kind in kinds.items()]
    data = converted(model, initial_types=declared, options={"zipmap": False})
    feeds = {"word": words, "number": number, "whole": whole}
    agrees(data, feeds, [model.predict(table), model.predict_proba(table).astype(np.float32)], 1e-3)


TEXTS = np.array(["The cat sat", "on the mat, the dog", "dog and cat", "nothing here 42", "cat cat dog"], object)


@pytest.mark.parametrize(
    "vectorizer",
    [
        feature_extraction.text.CountVectorizer(),
        feature_extraction.text.CountVectorizer(ngram_range=(1, 2), binary=True),
        feature_extraction.text.CountVectorizer(analyzer="char", ngram_range=(1, 2)),
        feature_extraction.text.TfidfVectorizer(),
        feature_extraction.text.TfidfVectorizer(stop_words=["the", "a"], sublinear_tf=False, norm="l1"),
    ],
    ids=["words", "pairs", "characters", "tf-idf", "stop words"],
)
def test_texts(vectorizer: Any) -> None:
    counts = vectorizer.fit_transform(TEXTS).toarray().astype(np.float32)
    declared = [("text", StringTensorType([None, 1]))]
    data = converted(
        vectorizer, initial_types=declared, options={id(vectorizer): {"locale": "C"}},
        target_opset={"": 18, "ai.onnx.ml": 3},
    )  # fmt: skip
    agrees(data, {"text": TEXTS[:, None]}, [counts])
