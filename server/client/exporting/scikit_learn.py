"""Fitted estimators of scikit-learn as ONNX, by skl2onnx."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_TREES = 3  # the version of ONNX's operators for trees and the like that all of skl2onnx's converters can write


class NotExported(Exception):
    """A sentence about an estimator that cannot be exported, and why."""


def export(estimator: Any, example: Any = None) -> bytes:
    """Return an estimator's ONNX file, for any number of rows.

    Without an example the only input is ``X``, float32, as wide as what the estimator was fitted to; an example says
    other types, several columns of a table, or texts. Raises NotExported.
    """
    try:
        import skl2onnx
    except ImportError as error:
        raise NotExported(f"scikit-learn models need skl2onnx: pip install skl2onnx ({error})") from error
    _check_fitted(estimator)
    inputs = _inputs(skl2onnx, estimator, example)
    try:
        return bytes(_converted(skl2onnx, estimator, **inputs).SerializeToString())
    except Exception as error:  # whatever a converter meets in an estimator that it does not know
        raise NotExported(f"skl2onnx: {type(error).__name__}: {error}") from error


def _check_fitted(estimator: Any) -> None:
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(estimator)
    except NotFittedError as error:
        raise NotExported(str(error)) from error


def _inputs(skl2onnx: Any, estimator: Any, example: Any) -> dict[str, Any]:
    """Return the arguments that say what the inputs are."""
    if example is not None:
        return {"X": _array(example)}
    width = getattr(estimator, "n_features_in_", None)
    if width is None:
        name = type(estimator).__name__
        raise NotExported(f"{name} does not say how wide its rows are; give an example: push(name, model, X[:1])")
    return {"initial_types": [("X", skl2onnx.common.data_types.FloatTensorType([None, width]))]}


def _array(example: Any) -> Any:
    """Return an example as the converter reads it: tables as they are, texts as objects."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(example, pandas.DataFrame):
        return example
    array = np.asarray(example)
    return array.astype(object) if array.dtype.kind == "U" else array


def _converted(skl2onnx: Any, estimator: Any, **inputs: Any) -> Any:
    """Convert; classifiers give probabilities as a tensor, those that know of maps being told so."""
    from sklearn.base import is_classifier

    inputs["name"] = type(estimator).__name__  # of the graph; a random one would make other bytes of the same model
    versions = {"": skl2onnx.__max_supported_opset__, "ai.onnx.ml": _TREES}
    if is_classifier(estimator):
        try:
            plain = {id(estimator): {"zipmap": False}}
            return skl2onnx.to_onnx(estimator, options=plain, target_opset=versions, **inputs)
        except NameError as error:
            if "'zipmap' not in" not in str(error):
                raise
    return skl2onnx.to_onnx(estimator, target_opset=versions, **inputs)
