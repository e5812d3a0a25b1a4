"""Evaluates one node with ONNX Runtime, or with ONNX's reference evaluator if ONNX Runtime has no kernel."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as _state

from tests import onnx_runtime
from tests.fuzz.graphs.values import BF16, Array, UnfitNode

REFUSALS = (*onnx_runtime.REFUSALS, TypeError, ValueError)
LOCAL = "local"  # the domain of functions
_MOST_BYTES = 1 << 22


def ir_version(opset: int) -> int:
    """The oldest IR version for files of the opset; functions need 8."""
    return max(8, helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))


def opset_ids(opset: int) -> list[onnx.OperatorSetIdProto]:
    return [helper.make_opsetid("", opset), helper.make_opsetid(LOCAL, 1)]


def tensor_type(array: Array) -> int:
    if array.dtype == object:
        return int(TensorProto.STRING)
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def tensor(array: Array, name: str) -> onnx.TensorProto:
    if array.dtype == object:
        return helper.make_tensor(name, TensorProto.STRING, array.shape, [str(item) for item in array.ravel()])
    return numpy_helper.from_array(np.asarray(array, order="C"), name)


def ort_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """ONNX Runtime without optimizations, on one thread."""
    return onnx_runtime.plain_session(model.SerializeToString())


class Evaluator:
    """Evaluates nodes of one opset, with the functions of one model. `engines` counts the answers by engine."""

    def __init__(self, opset: int, functions: Sequence[onnx.FunctionProto]) -> None:
        self.opset, self.functions = opset, functions
        self.engines: dict[str, int] = {"ort": 0, "reference": 0}

    def node(
        self, node: onnx.NodeProto, constants: Mapping[str, Array], feeds: Sequence[Mapping[str, Array]]
    ) -> list[list[Array] | None]:
        """The outputs for each feed; None if the feed is refused. UnfitNode if the node is invalid."""
        model = self._model(node, constants, feeds[0])
        narrow = [array for array in (*constants.values(), *feeds[0].values()) if array.dtype == BF16]
        if not narrow:
            try:
                answers = self._by_ort(model, feeds)
                self._compare(model, feeds, answers)
                return answers
            except _state.NotImplemented:
                pass
            except REFUSALS as error:
                if "bfloat16" not in str(error).lower():
                    raise UnfitNode(str(error)) from None
        if node.op_type == "Loop":
            raise UnfitNode(
                "ONNX's reference runs no Loop that has no condition, and gives its iteration number an axis"
            )
        answers = self._by_reference(model, feeds)
        return self._sharper(node, constants, feeds, answers) if narrow else answers

    def _compare(
        self, model: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]], answers: Sequence[list[Array] | None]
    ) -> None:
        """UnfitNode if ONNX's reference gives other results in cases for which ONNX Runtime is known to be wrong.

        These are text (Gather copies one string of each row) and results of empty inputs (their mean is 0)."""
        doubtful = [(feed, answer) for feed, answer in zip(feeds, answers, strict=True) if _is_doubtful(feed, answer)]
        if not doubtful:
            return
        try:
            others = self._by_reference(model, [feed for feed, _ in doubtful])
        except UnfitNode:  # the reference lacks the operator, or this form of it
            return
        for (_, answer), other in zip(doubtful, others, strict=True):
            if answer is not None and other is not None and not all(map(_same, answer, other)):
                raise UnfitNode("the oracles contradict each other")

    def _sharper(
        self,
        node: onnx.NodeProto,
        constants: Mapping[str, Array],
        feeds: Sequence[Mapping[str, Array]],
        answers: list[list[Array] | None],
    ) -> list[list[Array] | None]:
        """The results of the reference, with bfloat16 results replaced by ONNX Runtime's in float32, rounded.

        The reference sums in bfloat16, and knows only the newest form of some operators."""
        if any(attribute.HasField("g") for attribute in node.attribute) or node.domain == LOCAL:
            return answers
        wide = [{name: _wide(array) for name, array in feed.items()} for feed in feeds]
        constants = {name: _wide(array) for name, array in constants.items()}
        try:
            found = self._by_ort(self._model(node, constants, wide[0]), wide)
        except REFUSALS:
            return answers
        return [_rounded(ours, theirs) for ours, theirs in zip(found, answers, strict=True)]

    def _model(
        self, node: onnx.NodeProto, constants: Mapping[str, Array], feed: Mapping[str, Array]
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            [node],
            "one",
            [helper.make_tensor_value_info(name, tensor_type(array), None) for name, array in feed.items()],
            [onnx.ValueInfoProto(name=name) for name in node.output if name],
            [tensor(array, name) for name, array in constants.items()],
        )
        model = helper.make_model(graph, opset_imports=opset_ids(self.opset), ir_version=ir_version(self.opset))
        model.functions.extend(self.functions)
        return model

    def _by_ort(self, model: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]]) -> list[list[Array] | None]:
        session = ort_session(model)
        results: list[list[Array] | None] = []
        for feed in feeds:
            try:
                results.append(_arrays(session.run(None, dict(feed))))
            except _state.NotImplemented:
                raise
            except REFUSALS as error:
                if "bfloat16" in str(error).lower():
                    raise
                results.append(None)
        self.engines["ort"] += 1
        return results

    def _by_reference(self, model: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]]) -> list[list[Array] | None]:
        from onnx.reference import ReferenceEvaluator

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                evaluator = ReferenceEvaluator(model)
            except Exception as error:  # it raises all kinds of errors for nodes that it does not know
                raise UnfitNode(str(error)) from None
            results: list[list[Array] | None] = []
            for feed in feeds:
                try:
                    results.append(_arrays(evaluator.run(None, dict(feed))))
                except Exception:
                    results.append(None)
        self.engines["reference"] += 1
        return results


def _is_doubtful(feed: Mapping[str, Array], answer: list[Array] | None) -> bool:
    """True if a node has strings, or an empty input but outputs that are not empty."""
    if answer is None:
        return False
    texts = any(array.dtype == object for array in (*feed.values(), *answer))
    return texts or (any(array.size == 0 for array in feed.values()) and any(array.size for array in answer))


def _same(ours: Array, theirs: Array) -> bool:
    if ours.dtype.kind not in "fc":
        return bool(np.array_equal(ours, theirs))
    return ours.shape == theirs.shape and bool(np.allclose(ours, theirs, 1e-2, 1e-2, equal_nan=True))


def _wide(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == BF16 else array


def _rounded(found: list[Array] | None, answers: list[Array] | None) -> list[Array] | None:
    """The answers, with bfloat16 ones replaced by the results computed in float32, rounded to bfloat16."""
    if found is None or answers is None:
        return None
    pairs = list(zip(found, answers, strict=True))
    if any(ours.shape != theirs.shape for ours, theirs in pairs):
        raise UnfitNode("the oracles contradict each other")
    return [ours.astype(BF16) if theirs.dtype == BF16 else theirs for ours, theirs in pairs]


def _arrays(results: Sequence[Any]) -> list[Array]:
    arrays = [np.asarray(result) for result in results]
    if any(array.nbytes > _MOST_BYTES for array in arrays):
        raise UnfitNode("large")
    return arrays


def captured(graph: onnx.GraphProto) -> list[str]:
    """Names that a nested graph reads from outside, each once."""
    inside = {value.name for value in (*graph.input, *graph.initializer)}
    found: dict[str, None] = {}
    for node in graph.node:
        names = [name for name in node.input if name]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                names += captured(attribute.g)
        found.update(dict.fromkeys(name for name in names if name not in inside))
        inside.update(node.output)
    found.update(dict.fromkeys(value.name for value in graph.output if value.name not in inside))
    return list(found)


def reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node reads: its inputs, and what its nested graphs capture."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        if attribute.HasField("g"):
            names += captured(attribute.g)
    return list(dict.fromkeys(names))


def live(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes that some output needs."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed & set(node.output):
            kept.append(node)
            needed.update(reads(node))
    return kept[::-1]
