"""The data plane: resolve, admit, enqueue, await. It knows nothing of HTTP, and every transport goes through it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeAlias

from server.access.authority import Authority
from server.access.nearest import hinted
from server.access.quotas import Quotas
from server.access.scopes import Scope
from server.batching.entry import Entry, Outcome
from server.batching.signature import Group
from server.errors import BadRequest, ServerError, Unavailable, UnknownModel
from server.regions import Regions
from server.scheduling.servable import Servable
from server.types import Awaited, InferRequest, InferResult, Tensors

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing


class Resolver(Protocol):
    """What is live. Reads take no lock and are used for every request."""

    def resolve(self, model: str, version: str = "") -> Servable:
        """Return what answers for this model; version "" is the live one, digits that one, else an alias.

        Raises ``NotFound`` for an unknown model or version, ``Unavailable`` for one that is not loaded.
        """
        ...

    def route(self, model: str, version: str = "", key: str = "") -> Servable:
        """Return what answers this request: as :meth:`resolve`, but a request that names no version may go to a
        candidate; requests with the same ``key`` go the same way."""
        ...

    def settled(self, model: str, version: str = "") -> Servable | None:
        """Return what :meth:`route` would; None where that is not plain to see."""
        ...

    def servables(self) -> Iterable[Servable]:
        """Return everything that is loaded."""
        ...


TURNING_AWAY = 4  # ticks of the clock for which a refusal makes others likely

# What answers a request, and whose it is: the id of a key, or an address. A mere tuple, as every request makes one.
Admitted: TypeAlias = tuple[Servable, str]


class DataPlane:
    """Inference, whatever brought the request here. Transports route and execute; :meth:`infer` is for callers in this
    process, who need no key."""

    def __init__(
        self, registry: Resolver, authority: Authority, quotas: Quotas | None = None, *, strict: bool = True
    ) -> None:
        """``strict``: not ready while a version that should answer is not in memory."""
        self.registry = registry
        self.authority = authority
        self.quotas = quotas
        self.tracing: Tracing | None = None
        self.regions = Regions()  # of shared memory
        self.draining = False  # set at the first signal to stop: not ready any more, but still answering
        self.turning_away = 0  # ticks of the clock since the last refusal, counted down; see :meth:`crowded`
        self.started = False  # set once the repository's live versions are loaded, or refused
        self.awaited: Callable[[], Sequence[Awaited]] = tuple  # asks what should answer and is not in memory
        self.alarms: Callable[[], Sequence[str]] = tuple  # asks what somebody should do something about
        self._strict = strict

    def start(self) -> None:
        """Say that the live versions are loaded, as far as they can be."""
        self.started = True

    @property
    def ready(self) -> bool:
        """Whether new callers should come here."""
        return not self.unready

    @property
    def unready(self) -> str:
        """Why new callers should not come here; empty where they should."""
        if self.draining:
            return "the server is stopping"
        if not self.started:
            return "the server is starting"
        return "live versions are not in memory" if self._strict and self.awaited() else ""

    def resolve(self, model: str, version: str = "") -> Servable:
        """Return the servable that this name stands for."""
        return self.registry.resolve(model, version)

    def route(self, model: str, version: str = "", *, key: str, authorization: str, address: str) -> Admitted:
        """Return the servable that answers, with which the request stays whatever happens to the alias later; and whose
        the request is.

        ``address``: where the call comes from; who it is where there are no keys. Raises Unauthorized or Forbidden when
        the caller may not run this model, and what :meth:`resolve` raises.
        """
        client = self.authority.check(authorization, Scope.INFER, model) or address
        try:
            return self.registry.route(model, version, key), client
        except UnknownModel as error:
            raise hinted(error, self.authority.caller(authorization)) from None

    def crowded(self, model: str, version: str, authorization: str) -> Admitted | None:
        """Return what would answer, where requests are being refused, so that further ones need not be read for that;
        and the key that was shown, empty where none is needed.

        None: a request has to be read, whatever becomes of it. Raises Unauthorized and Forbidden.
        """
        if not self.turning_away or self.tracing is not None:  # traces show what was refused, too
            return None
        key = self.authority.check(authorization, Scope.INFER, model)
        servable = self.registry.settled(model, version)
        return None if servable is None else (servable, key)

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether this model answers; raises NotFound when there is none of that name."""
        try:
            self.registry.resolve(model, version)
        except Unavailable:
            return False
        return True

    def tick(self) -> None:
        """A moment has passed."""
        self.turning_away = max(0, self.turning_away - 1)

    async def infer(self, request: InferRequest) -> InferResult:
        """Answer one request; cancelling the awaiting task takes waiting work out of its queue."""
        servable = self.registry.route(request.model, request.version, request.sticky_key)
        signature = servable.signature
        group = signature.group_of(request.inputs)
        requested = signature.requested(request.outputs)
        if any(output.classes for output in requested):
            raise BadRequest("outputs: classification belongs to the wire protocol")
        outputs = await self.execute(servable, request.inputs, group, request.deadline, request.priority, id=request.id)
        return InferResult(servable.ref, {output.name: outputs[output.name] for output in requested}, request.id)

    def submit(self, servable: Servable, entry: Entry, traceparent: str) -> None:
        """Queue a request of any transport; raises Overloaded, DeadlineExceeded or QuotaExceeded at the door."""
        if self.quotas is not None or servable.rules.quotas is not None:
            self.charge(servable, entry.client, entry.rows, entry.paid)
        refused = self.tracing.watch(entry, servable.ref, traceparent) if self.tracing is not None else None
        try:
            servable.submit(entry)
        except ServerError as error:
            self.turning_away = TURNING_AWAY
            if refused is not None:
                refused(error)
            raise

    def charge(self, servable: Servable, client: str, rows: int, paid: int = 0) -> None:
        """Count a request against its client's quotas, but for the ``paid`` rows for which that was done before.

        Raises QuotaExceeded. Callers in this process, whose name is empty, have no quotas.
        """
        if not client or rows == paid:
            return
        try:
            for quotas in (servable.rules.quotas, self.quotas):
                if quotas is not None:
                    quotas.take(client, rows, monotonic(), paid)
        except ServerError as error:
            servable.stats.refused(error.code)
            raise

    async def execute(
        self,
        servable: Servable,
        inputs: Tensors,
        group: Group,
        deadline: float | None,
        priority: int = 0,
        traceparent: str = "",
        client: str = "",
        id: str = "",
        paid: int = 0,
        text: int = 0,
    ) -> Tensors:
        """Queue checked inputs and return all outputs; ``deadline`` in monotonic seconds, ``id``: the caller's name
        for the request, ``paid``: rows that the client's quota was charged with, ``text``: bytes that the elements of
        BYTES tensors have. Cancelling works as above."""
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def answer(outcome: Outcome) -> None:
            if not answered.done():  # else cancelled, and this task is about to hear of it
                answered.set_result(outcome)

        entry = Entry(inputs, group, answer, deadline, priority, text)
        entry.client, entry.id, entry.paid = client, id, paid
        self.submit(servable, entry, traceparent)
        try:
            outcome = await answered
        except asyncio.CancelledError:
            servable.cancel(entry)
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
