"""`ItemAnswer`: an answer made of a model's outputs for many items, each a request of its own in the model's queue."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lathe.server.api.openai.connected import while_connected
from lathe.server.api.openai.schemas import ItemRequest
from lathe.server.api.openai.text_response import send_json
from lathe.server.batching.entry import Entry
from lathe.server.errors import BadRequest
from lathe.server.pipelines.pipeline import Pipeline
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable
from lathe.server.types import Array, Tensors, TensorSpec

# Items of one request in the model's queue: enough for full batches; other requests get their turn.
_MOST_IN_FLIGHT = 64
_TOKENS = "tokens"  # the output with the numbers of tokens, for `usage`


class ItemAnswer(Response, ABC):
    """The answer to a request with many items. When the client disconnects, items that wait leave the queue.

    Items of similar lengths from all clients share batches. Each item has a span of its own in the trace of the
    header `traceparent`. Its tokens are charged to the client's quota of tokens when it is done.
    """

    field: ClassVar[str]  # of the request, which has the items; for errors

    def __init__(self, plane: DataPlane, servable: Servable, client: str, asked: ItemRequest) -> None:
        """Raises BadRequest for a bad `truncate_prompt_tokens`, and QuotaExceeded while the quota is used up."""
        self.status_code, self.background = 200, None
        self._plane, self.servable, self._client = plane, servable, client
        self._most_tokens = _most_tokens(servable, asked.truncate_prompt_tokens)
        plane.charge_tokens(servable, client, 0)
        self.tokens = 0  # of the items that are done

    @abstractmethod
    def items(self) -> list[Tensors]:
        """The inputs of each item, BYTES [1, 1]."""

    @abstractmethod
    def document(self, results: Sequence[Tensors]) -> bytes:
        """The answer, from the outputs for each item. Called on a thread."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises what `DataPlane.execute` raises for the first item that fails."""
        traceparent = Headers(scope=scope).get("traceparent", "")
        await while_connected(self._send(send, traceparent), receive)

    async def _send(self, send: Send, traceparent: str) -> None:
        results = await self._results(traceparent)
        await send_json(send, await asyncio.to_thread(self.document, results))  # a long list takes long

    async def _results(self, traceparent: str) -> list[Tensors]:
        """The outputs for each item. After the first error the other items leave the queue."""
        places = asyncio.Semaphore(_MOST_IN_FLIGHT)

        async def result(index: int, inputs: Tensors) -> Tensors:
            async with places:
                try:
                    return await self._result(inputs, traceparent)
                except BadRequest as error:
                    raise BadRequest(f"{self.field} {index}: {error}") from error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(result(*each)) for each in enumerate(self.items())]
        except ExceptionGroup as failures:  # the first error has cancelled the other items
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _result(self, inputs: Tensors, traceparent: str) -> Tensors:
        size = sum(len(each[0, 0]) for each in inputs.values())
        entry = Entry(inputs, self.servable.signature.group_of(inputs), text=size)
        entry.client, entry.most_tokens = self._client, self._most_tokens
        try:
            outputs = await self._plane.outcome(self.servable, entry, traceparent)
        except BaseException:
            self._plane.spend_tokens(self._client, entry.tokens)  # they were made, and may have been computed with
            raise
        tokens = int(outputs[_TOKENS].sum()) if _TOKENS in outputs else entry.tokens
        self._plane.spend_tokens(self._client, tokens)
        self.tokens += tokens
        return outputs

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens, in OpenAI's form; 0 if the model does not tell them."""
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}


def _most_tokens(servable: Servable, asked: int | None) -> int:
    """To how many tokens steps truncate each text; 0: as they are configured. Raises BadRequest."""
    if asked is None or asked == -1:
        return 0
    found = servable.model.truncations if isinstance(servable.model, Pipeline) else range(0)
    if asked not in found:
        permitted = f"-1, or {found.start} to {found.stop - 1}" if found else "-1"
        reason = "" if found else f": no step of {servable.ref.name!r} makes tokens of texts"
        raise BadRequest(f"truncate_prompt_tokens: expected {permitted}, got {asked}{reason}")
    return asked


def text_column(text: str) -> Array:
    """A text as an input BYTES [1, 1]."""
    return np.array([[text.encode()]], np.object_)


def specs_text(specs: Mapping[str, TensorSpec]) -> str:
    """The first inputs or outputs of a model, for an error."""
    return ", ".join(f"{spec.name} {spec.text}" for spec in list(specs.values())[:5])
