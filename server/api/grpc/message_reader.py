"""Reads gRPC inference messages and writes their answers, large ones on threads; counts memory and charges quotas."""

from __future__ import annotations

from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.api.grpc import tensors
from lathe.server.api.grpc.split_message import SplitMessage, split_large, split_small
from lathe.server.api.inference.body_reader import BodyReader, ReadBody
from lathe.server.api.inference.memory_ledger import MemoryClaim
from lathe.server.api.inference.reader_threads import INLINE_BYTES
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable
from lathe.server.steps import run_all
from lathe.server.types import Tensors


class MessageReader:
    """Reads inference messages; shares the threads and the memory ledger with HTTP."""

    def __init__(self, reading: BodyReader, plane: DataPlane) -> None:
        self._reading = reading
        self._plane = plane

    async def sent(self, data: bytes, whose: str) -> SplitMessage:
        """Parse a message of the client `whose`, a large one on a thread; may raise BadRequest or TooLarge."""
        found = split_small(data)
        return found if found is not None else await self._reading.readers.run(whose, split_large, data)

    async def tensors(
        self, servable: Servable, codec: Codec, sent: SplitMessage, claim: MemoryClaim, whose: str
    ) -> ReadBody:
        """Read the inputs of a message of the client `whose`; `claim` counts the memory of those read on a thread.

        If parsing or reading takes long, the quota is charged before, as in `BodyReader.read`; otherwise `charged_rows`
        is 0, and the caller charges the quota. Raises any ServerError.
        """
        run, paid = self._reading.readers.run, 0
        if len(sent.shell) > INLINE_BYTES:
            self._plane.charge(servable, whose, 1)
            head, raws = await run(whose, tensors.parse, codec, sent)
            self._reading.admit(servable, head, whose, 1)
            paid = head.rows
        else:
            head, raws = tensors.parse(codec, sent)
        if head.read_cost <= INLINE_BYTES:
            found = run_all(tensors.read_steps(codec, head, raws))
        else:
            if not paid:
                self._reading.admit(servable, head, whose)
                paid = head.rows
            self._reading.hold(claim, head)
            found = await self._reading.readers.run_steps(whose, tensors.read_steps(codec, head, raws))
        return ReadBody(head, found, paid, head.text)

    async def answer(self, codec: Codec, head: ParsedRequest, outputs: Tensors, whose: str, in_stream: bool) -> bytes:
        """The serialized answer, written on a thread if that takes long."""
        steps = tensors.encode_steps(codec, head, outputs, in_stream)
        if tensors.write_cost(codec, head, outputs) <= INLINE_BYTES:
            return run_all(steps)
        return await self._reading.readers.run_steps(whose, steps)
