"""The answer to `POST /v1/rerank`, by any model that makes one number of a query and a document."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from lathe.server.api.openai.item_answer import ItemAnswer, specs_text, text_column
from lathe.server.api.openai.schemas import RerankRequest
from lathe.server.errors import BadRequest, Internal
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable
from lathe.server.types import Tensors

_QUERY, _DOCUMENT = "query", "document"


class RerankAnswer(ItemAnswer):
    """The documents of a request, the best first.

    The model has the inputs `query` and `document` BYTES [n, 1], and one output FP32 [n, 1], which is the score; it may
    have an output `tokens` INT64 [n, 1].
    """

    field = "documents"

    def __init__(self, plane: DataPlane, servable: Servable, client: str, asked: RerankRequest) -> None:
        """Raises BadRequest if the model makes no scores of a query and a document."""
        self._asked = asked
        self._output = _score_output(servable)
        super().__init__(plane, servable, client, asked)

    def items(self) -> list[Tensors]:
        query = text_column(self._asked.query)
        return [{_QUERY: query, _DOCUMENT: text_column(text)} for text in self._asked.texts]

    def document(self, results: Sequence[Tensors]) -> bytes:
        scores = np.array([self._score(outputs) for outputs in results])
        best = np.argsort(-scores, kind="stable")[: self._asked.top_n]
        content = {
            "id": f"rerank-{secrets.token_hex(12)}",
            "model": self._asked.model,
            "results": [self._entry(int(index), float(scores[index])) for index in best],
            "usage": self.usage,
        }
        return orjson.dumps(content)

    def _entry(self, index: int, score: float) -> dict[str, Any]:
        entry: dict[str, Any] = {"index": index, "relevance_score": score}
        if self._asked.return_documents:
            entry["document"] = {"text": self._asked.texts[index]}
        return entry

    def _score(self, outputs: Tensors) -> float:
        if self._output not in outputs:
            raise Internal.missing_output(self.servable.ref, self._output)
        return float(outputs[self._output].reshape(()))


def _score_output(servable: Servable) -> str:
    """The name of the output with scores. BadRequest if the model has other inputs or no such output."""
    inputs, outputs = servable.signature.inputs, servable.signature.outputs
    pairs = {spec.name for spec in inputs.values() if spec.datatype == "BYTES" and spec.shape == (-1, 1)}
    scores = [spec.name for spec in outputs.values() if spec.datatype == "FP32" and spec.shape == (-1, 1)]
    if len(inputs) != 2 or pairs != {_QUERY, _DOCUMENT} or len(scores) != 1:
        raise BadRequest(
            f"model: expected one that makes an output FP32 [n, 1] of the inputs query and document BYTES [n, 1], such "
            f"as a pipeline of tokenize_pair and a cross-encoder; {servable.ref.name!r} has {specs_text(inputs)} and "
            f"{specs_text(outputs)}"
        )
    return scores[0]
