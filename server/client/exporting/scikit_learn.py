"""Exports fitted scikit-learn estimators to ONNX, by skl2onnx."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_TREES = 3  # the version of ai.onnx.ml that all converters of skl2onnx support


class NotExported(Exception):
    """An estimator cannot be exported; the message says why in one sentence."""


def export(estimator: Any, example: Any = None) -> bytes:
    """Return an estimator's ONNX file, with a symbolic number of rows.

    Without an example the only input is `X`, float32, with the number of features the estimator was fitted to. An
    example sets other types, columns of a table, or strings. Raises NotExported.
    """
    try:
        import skl2onnx
    except ImportError as error:
        raise NotExported(f"scikit-learn models need skl2onnx: pip install skl2onnx ({error})") from error
    _check_fitted(estimator)
    inputs = _inputs(skl2onnx, estimator, example)
    try:
        return bytes(_convert(skl2onnx, estimator, **inputs).SerializeToString())
    except Exception as error:  # converters raise exceptions of any type for estimators that they do not support
        raise NotExported(f"skl2onnx: {type(error).__name__}: {error}") from error


def _check_fitted(estimator: Any) -> None:
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(estimator)
    except NotFittedError as error:
        raise NotExported(str(error)) from error


def _inputs(skl2onnx: Any, estimator: Any, example: Any) -> dict[str, Any]:
    """Return the arguments of `to_onnx` that describe the inputs: an example, or the number of features.

    Raises NotExported if there is no example and the estimator does not know its number of features.
    """
    if example is not None:
        return {"X": _array(example)}
    width = getattr(estimator, "n_features_in_", None)
    if width is None:
        name = type(estimator).__name__
        raise NotExported(f"{name} has no n_features_in_; give an example of its inputs: push(name, model, X[:1])")
    return {"initial_types": [("X", skl2onnx.common.data_types.FloatTensorType([None, width]))]}


def _array(example: Any) -> Any:
    """Return an example in the form that the converter reads: a DataFrame unchanged, strings as objects."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(example, pandas.DataFrame):
        return example
    array = np.asarray(example)
    return array.astype(object) if array.dtype.kind == "U" else array


def _convert(skl2onnx: Any, estimator: Any, **inputs: Any) -> Any:
    """Convert an estimator; probabilities of classifiers are a tensor instead of a sequence of maps (ZipMap)."""
    from sklearn.base import is_classifier

    inputs["name"] = type(
        estimator
    ).__name__  # the graph's name; the default is random, so bytes would differ each time
    versions = {"": skl2onnx.__max_supported_opset__, "ai.onnx.ml": _TREES}
    if is_classifier(estimator):
        try:
            as_tensor = {id(estimator): {"zipmap": False}}
            return skl2onnx.to_onnx(estimator, options=as_tensor, target_opset=versions, **inputs)
        except NameError as error:  # this classifier's converter has no option `zipmap`
            if "'zipmap' not in" not in str(error):
                raise
    return skl2onnx.to_onnx(estimator, target_opset=versions, **inputs)
