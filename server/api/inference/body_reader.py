"""Reads large bodies on threads: counts their memory, and charges the client's quota before their data are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.api.codec.compression import inflate
from lathe.server.api.inference.memory_ledger import MemoryClaim, MemoryLedger
from lathe.server.api.inference.reader_threads import ReaderThreads
from lathe.server.datatypes import ELEMENT_OVERHEAD
from lathe.server.errors import BadRequest, TooLarge
from lathe.server.serving.dataplane import DataPlane
from lathe.server.settings import Settings
from lathe.server.types import Tensors

if TYPE_CHECKING:
    from lathe.server.serving.servable import Servable


Body: TypeAlias = bytes | bytearray


class ReadBody(NamedTuple):
    """A request read from its body: the parsed request, its input arrays, and what the quota and admission need."""

    head: ParsedRequest
    tensors: Tensors
    charged_rows: int  # rows charged to the client's quota
    text: int  # the most bytes that the elements of BYTES tensors can have


class BodyReader:
    """Reads bodies that are too large for the event loop; shared by all transports."""

    def __init__(self, settings: Settings, plane: DataPlane) -> None:
        self._settings = settings
        self._plane = plane
        self.ledger = MemoryLedger(settings.max_receiving)
        self.readers = ReaderThreads()
        self.most_bytes = settings.max_body

    def json_size(self, size: int, json_bytes: int | None) -> int:
        """The bytes of JSON in a body of `size` bytes; `json_bytes` is the header's value, None without one.

        BadRequest if it exceeds the body, TooLarge if it exceeds the setting `max_json`.
        """
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
    ) -> ReadBody:
        """Read a whole body of the client `whose`; `encoding` is its compression (gzip, deflate, or empty).

        `json_bytes`: the bytes of JSON at the start of the decompressed body; None: all of it is JSON; 0: it is one raw
        tensor. The client's quota is charged one row before the body is parsed, and all rows of the request before
        their data are read. Raises any ServerError: of the quota, the ledger, the body or the admission.
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
        return ReadBody(head, tensors, head.rows, head.max_text_bytes(size))

    async def read_tensors(
        self, servable: Servable, codec: Codec, head: ParsedRequest, body: Body, size: int, whose: str
    ) -> ReadBody:
        """Read the tensors of a body whose JSON (its first `size` bytes, without tensor data) is parsed as `head`.

        Charges the quota of the client `whose` for all rows first. Raises the errors of `read`.
        """
        with self.ledger.claim(whose, len(body)) as claim:
            self.admit(servable, head, whose)
            self.hold(claim, head)
            tensors = await self.readers.run_steps(whose, codec.reading(head, body, size))
            return ReadBody(head, tensors, head.rows, head.text)

    def hold(self, claim: MemoryClaim, head: ParsedRequest, json_bytes: int = 0) -> None:
        """Add the memory of the input arrays, which the body does not hold, to `claim` before they are made.

        Elements of BYTES tensors are objects, many times larger than on the wire, and inputs in shared memory are
        copied. TooLarge if one client may never hold that much, Overloaded if there is no room now.
        """
        size, most = head.extra_memory(json_bytes), self.ledger.most // 2
        if claim.size + size > most:
            raise TooLarge(
                f"inputs: expected at most {most} bytes in memory, which is half of LATHE_MAX_RECEIVING, got "
                f"{claim.size + size}: each element of a BYTES tensor takes {ELEMENT_OVERHEAD} bytes besides its text"
            )
        claim.add(size)

    def admit(self, servable: Servable, head: ParsedRequest, whose: str, paid: int = 0) -> None:
        """Charge the quota of client `whose` for the request's rows, and check admission before its data are read.

        `paid` rows were charged before. Raises the refusal, such as QuotaExceeded or Overloaded.
        """
        self._plane.charge(servable, whose, head.rows, paid)
        error = servable.turn_away(head.group, head.element_bytes, head.timeout, whose, head.priority)
        if error is not None:
            raise error
