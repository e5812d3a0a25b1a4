"""A request over gRPC on its way to the queue: large ones beside the event loop, counted, and paid for first."""

from __future__ import annotations

from server.api.codec import Codec, Head
from server.api.grpc import tensors
from server.api.grpc.sent import Sent, glance, read
from server.api.ledger import Claim
from server.api.readers import HERE
from server.api.reading import Read, Reading
from server.dataplane import DataPlane
from server.scheduling.servable import Servable
from server.steps import whole
from server.types import Tensors


class MessageReading:
    """Reads messages of inference; shares the threads and the ledger with HTTP."""

    def __init__(self, reading: Reading, plane: DataPlane) -> None:
        self._reading = reading
        self._plane = plane

    async def sent(self, data: bytes, whose: str) -> Sent:
        """Return what a message says; raises BadRequest, TooLarge."""
        found = glance(data)
        return found if found is not None else await self._reading.readers.run(whose, read, data)

    async def tensors(self, servable: Servable, codec: Codec, sent: Sent, claim: Claim, whose: str) -> Read:
        """Return the inputs, which ``claim`` counts while they are made; the caller's quota pays as for a request over
        HTTP (:meth:`Reading.read`)."""
        run, paid = self._reading.readers.run, 0
        if len(sent.shell) > HERE:
            self._plane.charge(servable, whose, 1)
            head, raws = await run(whose, tensors.begin, codec, sent)
            self._reading.admit(servable, head, whose, 1)
            paid = head.rows
        else:
            head, raws = tensors.begin(codec, sent)
        if head.copied <= HERE:
            found = whole(tensors.reading(codec, head, raws))
        else:
            if not paid:
                self._reading.admit(servable, head, whose)
                paid = head.rows
            self._reading.hold(claim, head)
            found = await self._reading.readers.run_steps(whose, tensors.reading(codec, head, raws))
        return Read(head, found, paid, head.text)

    async def answer(self, codec: Codec, head: Head, outputs: Tensors, whose: str, in_stream: bool) -> bytes:
        """Return the answer as it travels, written on a thread where that takes long."""
        steps = tensors.encoding(codec, head, outputs, in_stream)
        if tensors.cost(codec, head, outputs) <= HERE:
            return whole(steps)
        return await self._reading.readers.run_steps(whose, steps)
