"""The answer to `POST /v1/embeddings`, by any model that makes one vector of a text."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from lathe.server.api.openai.item_answer import ItemAnswer, specs_text, text_column
from lathe.server.api.openai.schemas import EmbeddingRequest
from lathe.server.errors import BadRequest, Internal
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable
from lathe.server.types import Array, Tensors


class EmbeddingAnswer(ItemAnswer):
    """The embeddings of a request's texts.

    The model has one input BYTES [n, 1] and an output FP32 [n, d]; it may have an output `tokens` INT64 [n, 1].
    """

    field = "input"

    def __init__(self, plane: DataPlane, servable: Servable, client: str, asked: EmbeddingRequest) -> None:
        """Raises BadRequest if the model makes no embeddings, and for `dimensions` that it does not have."""
        self._asked = asked
        self._input, self._output = _ends(servable)
        width = servable.signature.outputs[self._output].shape[-1]
        if asked.dimensions is not None and 0 <= width < asked.dimensions:
            raise BadRequest(f"dimensions: expected at most {width}, got {asked.dimensions}")
        super().__init__(plane, servable, client, asked)

    def items(self) -> list[Tensors]:
        return [{self._input: text_column(text)} for text in self._asked.texts]

    def document(self, results: Sequence[Tensors]) -> bytes:
        vectors = [self._vector(outputs) for outputs in results]
        if self._asked.encoding_format == "base64":
            items: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        else:
            items = vectors
        content = {
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": item} for index, item in enumerate(items)],
            "model": self._asked.model,
            "usage": self.usage,
        }
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)

    def _vector(self, outputs: Tensors) -> Array:
        """The embedding in a model's outputs: float32, as long as the request asks."""
        if self._output not in outputs:
            raise Internal.missing_output(self.servable.ref, self._output)
        vector = np.ascontiguousarray(outputs[self._output][0], np.float32)
        if self._asked.dimensions is None or self._asked.dimensions == len(vector):
            return vector
        if self._asked.dimensions > len(vector):
            raise BadRequest(f"dimensions: expected at most {len(vector)}, got {self._asked.dimensions}")
        shorter = vector[: self._asked.dimensions]
        return np.asarray(shorter / max(float(np.linalg.norm(shorter)), 1e-12), np.float32)


def _ends(servable: Servable) -> tuple[str, str]:
    """The names of the input for texts and of the output with embeddings. BadRequest if there are none."""
    inputs, outputs = servable.signature.inputs, servable.signature.outputs
    texts = [spec.name for spec in inputs.values() if spec.datatype == "BYTES" and spec.shape == (-1, 1)]
    vectors = [spec.name for spec in outputs.values() if spec.datatype == "FP32" and len(spec.shape) == 2]
    if len(inputs) != 1 or len(texts) != 1 or len(vectors) != 1:
        raise BadRequest(
            f"model: expected one that makes an output FP32 [n, d] of one input BYTES [n, 1]; {servable.ref.name!r} "
            f"has {specs_text(inputs)} and {specs_text(outputs)}"
        )
    return texts[0], vectors[0]
