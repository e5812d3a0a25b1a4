"""The answer to `POST /v1/embeddings`, by any model that makes one vector of a text."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lathe.server.api.openai.connected import while_connected
from lathe.server.api.openai.schemas import EmbeddingRequest
from lathe.server.api.openai.text_response import send_json
from lathe.server.errors import BadRequest, Internal
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable
from lathe.server.types import Array, Tensors

# Texts of one request in the model's queue: enough for full batches; other requests get their turn.
_MOST_IN_FLIGHT = 64
_TOKENS = "tokens"  # the output with the numbers of tokens, for `usage`


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
        await while_connected(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        try:
            results = await self._results()
        except ExceptionGroup as group:  # the first error has cancelled the other texts
            raise group.exceptions[0] from None
        body = await asyncio.to_thread(self._body, results)  # a long list takes long
        await send_json(send, body)

    async def _results(self) -> list[Tensors]:
        """The model's outputs for each text. ExceptionGroup if a text fails."""
        places = asyncio.Semaphore(_MOST_IN_FLIGHT)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._result(*each, places)) for each in enumerate(self._asked.texts)]
        return [task.result() for task in tasks]

    async def _result(self, index: int, text: str, places: asyncio.Semaphore) -> Tensors:
        servable = self._servable
        content = text.encode()
        inputs: Tensors = {self._input: np.array([[content]], np.object_)}
        group, size = servable.signature.group_of(inputs), len(content)
        async with places:
            try:
                return await self._plane.execute(servable, inputs, group, None, client=self._client, text=size)
            except BadRequest as error:
                raise BadRequest(f"input {index}: {error}") from error

    def _body(self, results: list[Tensors]) -> bytes:
        vectors = [self._vector(outputs) for outputs in results]
        if self._asked.encoding_format == "base64":
            items: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        else:
            items = vectors
        tokens = sum(int(outputs[_TOKENS].sum()) for outputs in results if _TOKENS in outputs)
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
            f"has {_texts_of(inputs)} and {_texts_of(outputs)}"
        )
    return texts[0], vectors[0]


def _texts_of(specs: Any) -> str:
    return ", ".join(f"{spec.name} {spec.text}" for spec in list(specs.values())[:5])
