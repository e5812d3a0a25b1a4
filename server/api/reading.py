"""A large body on its way from the connection to the queue: beside the event loop, counted, and paid for first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from server.api.codec import Codec, Head
from server.api.compression import inflate
from server.api.ledger import Claim, Ledger
from server.api.readers import Readers
from server.dataplane import DataPlane
from server.datatypes import ELEMENT
from server.errors import BadRequest, TooLarge
from server.settings import Settings
from server.types import Tensors

if TYPE_CHECKING:
    from server.scheduling.servable import Servable


Body: TypeAlias = bytes | bytearray


class Read(NamedTuple):
    """What a body says."""

    head: Head
    tensors: Tensors
    paid: int  # rows that the client's quota was charged with
    text: int  # bytes that the elements of BYTES tensors have, at most


class Reading:
    """Reads what is too large for the event loop; the parts that all transports share."""

    def __init__(self, settings: Settings, plane: DataPlane) -> None:
        self._settings = settings
        self._plane = plane
        self.ledger = Ledger(settings.max_receiving)
        self.readers = Readers()

    def json_size(self, size: int, json_bytes: int | None) -> int:
        """Return how much of a body of ``size`` bytes is JSON; raises BadRequest and TooLarge."""
        if json_bytes is not None and json_bytes > size:
            raise BadRequest(
                f"header inference-header-content-length: expected at most the body's {size} bytes, got {json_bytes}"
            )
        found, limit = size if json_bytes is None else json_bytes, self._settings.max_json
        if found > limit:
            raise TooLarge(f"body: expected at most {limit} bytes of JSON, got {found}; send tensors as binary data")
        return found

    async def read(
        self, servable: Servable, codec: Codec, body: Body, encoding: bytes, json_bytes: int | None, whose: str
    ) -> Read:
        """Return what a body says that may be compressed (``encoding``); None: all of it is JSON, 0: a raw tensor.

        The caller's quota pays one row for having it looked at, and for all its rows before their data are read.
        """
        run = self.readers.run
        with self.ledger.claim(whose, len(body)) as claim:
            self._plane.charge(servable, whose, 1)
            if encoding:
                body = await run(whose, inflate, body, encoding, self._settings.max_inflated, claim.add)
            size = self.json_size(len(body), json_bytes)
            head, taken = await run(whose, codec.begin, body, size)
            self.admit(servable, head, whose, 1)
            self.hold(claim, head, size)
            tensors = await self.readers.run_steps(whose, codec.reading(head, body, size, taken))
        return Read(head, tensors, head.rows, head.text_of(size))

    async def read_tensors(
        self, servable: Servable, codec: Codec, head: Head, body: Body, size: int, whose: str
    ) -> Read:
        """Return the tensors of a body whose JSON, of ``size`` bytes, was read already."""
        with self.ledger.claim(whose, len(body)) as claim:
            self.admit(servable, head, whose)
            self.hold(claim, head)
            tensors = await self.readers.run_steps(whose, codec.reading(head, body, size))
            return Read(head, tensors, head.rows, head.text)

    def hold(self, claim: Claim, head: Head, json_bytes: int = 0) -> None:
        """Count what the inputs will be besides the body, before they are made: texts are objects, each many times as
        large as on the wire, and what is in shared memory is copied.

        Raises TooLarge for more than one client may ever hold, Overloaded where there is no room now.
        """
        size, most = head.made(json_bytes), self.ledger.most // 2
        if claim.size + size > most:
            raise TooLarge(
                f"inputs: expected at most {most} bytes in memory, which is half of LATHE_MAX_RECEIVING, got "
                f"{claim.size + size}: each element of a BYTES tensor takes {ELEMENT} bytes besides its text"
            )
        claim.add(size)

    def admit(self, servable: Servable, head: Head, whose: str, paid: int = 0) -> None:
        """Refuse a request whose data are still to be read, where it would be refused afterwards."""
        self._plane.charge(servable, whose, head.rows, paid)
        error = servable.turn_away(head.group, head.held, head.timeout, whose)
        if error is not None:
            raise error
