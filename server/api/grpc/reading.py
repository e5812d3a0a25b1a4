"""A request over gRPC on its way to the queue: large ones beside the event loop, counted, and paid for first."""

from __future__ import annotations

from server.api.codec import Codec
from server.api.grpc import tensors
from server.api.grpc.sent import Sent, glance, read
from server.api.readers import HERE
from server.api.reading import Read, Reading
from server.dataplane import DataPlane
from server.scheduling.servable import Servable


class MessageReading:
    """Reads messages of inference; shares the threads and the ledger with HTTP."""

    def __init__(self, reading: Reading, plane: DataPlane) -> None:
        self._reading = reading
        self._plane = plane

    async def sent(self, data: bytes, whose: str) -> Sent:
        """Return what a message says; raises BadRequest, TooLarge."""
        found = glance(data)
        return found if found is not None else await self._reading.readers.run(whose, read, data)

    async def tensors(self, servable: Servable, codec: Codec, sent: Sent, whose: str) -> Read:
        """Return the inputs; the caller's quota pays as for a request over HTTP (:meth:`Reading.read`)."""
        run, paid = self._reading.readers.run, 0
        if len(sent.shell) > HERE:
            self._plane.charge(servable, whose, 1)
            head, raws = await run(whose, tensors.begin, codec, sent)
            self._reading.admit(servable, head, whose, 1)
            paid = head.rows
        else:
            head, raws = tensors.begin(codec, sent)
        if head.copied <= HERE:
            found = tensors.inputs(head, raws)
        else:
            if not paid:
                self._reading.admit(servable, head, whose)
                paid = head.rows
            found = await run(whose, tensors.inputs, head, raws)
        return Read(head, {**found, **codec.shared(head)}, paid)
