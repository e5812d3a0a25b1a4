"""The answer to `POST /v1/embeddings`, by any model that makes one vector of a text."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lathe.server.api.openai.connected import while_connected
from lathe.server.api.openai.item_results import item_results, specs_text, text_column, token_total
from lathe.server.api.openai.schemas import EmbeddingRequest
from lathe.server.api.openai.text_response import send_json
from lathe.server.errors import BadRequest, Internal
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable
from lathe.server.types import Array, Tensors


class EmbeddingAnswer(Response):
    """The embeddings of a request's texts. When the client disconnects, texts that wait are taken out of the queue.

    Each text is a request to the model of its own, so texts of similar lengths from all clients share batches. The
    model has one input BYTES [n, 1] and an output FP32 [n, d]; it may have an output `tokens` INT64 [n, 1].
    """

    def __init__(self, plane: DataPlane, servable: Servable, client: str, asked: EmbeddingRequest) -> None:
        """Raises BadRequest if the model makes no embeddings, and for `dimensions` that it does not have."""
        self.status_code, self.background = 200, None
        self._plane, self._servable, self._client, self._asked = plane, servable, client, asked
        self._input, self._output = _ends(servable)
        width = servable.signature.outputs[self._output].shape[-1]
        if asked.dimensions is not None and 0 <= width < asked.dimensions:
            raise BadRequest(f"dimensions: expected at most {width}, got {asked.dimensions}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        traceparent = Headers(scope=scope).get("traceparent", "")
        await while_connected(self._send(send, traceparent), receive)

    async def _send(self, send: Send, traceparent: str) -> None:
        items: list[Tensors] = [{self._input: text_column(text)} for text in self._asked.texts]
        results = await item_results(self._plane, self._servable, self._client, items, "input", traceparent)
        body = await asyncio.to_thread(self._body, results)  # a long list takes long
        await send_json(send, body)

    def _body(self, results: list[Tensors]) -> bytes:
        vectors = [self._vector(outputs) for outputs in results]
        if self._asked.encoding_format == "base64":
            items: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        else:
            items = vectors
        tokens = token_total(results)
        content = {
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": item} for index, item in enumerate(items)],
            "model": self._asked.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)

    def _vector(self, outputs: Tensors) -> Array:
        """The embedding in a model's outputs: float32, as long as the request asks."""
        if self._output not in outputs:
            raise Internal.missing_output(self._servable.ref, self._output)
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
