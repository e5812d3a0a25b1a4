"""The data plane: resolve, admit, enqueue, await. All transports use it; it is independent of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeAlias

from lathe.server.access.authority import Authority
from lathe.server.access.quotas import Quotas
from lathe.server.access.scopes import Scope
from lathe.server.access.suggestions import with_suggestion
from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.signature import BatchGroup
from lathe.server.errors import BadRequest, Internal, ServerError, Unavailable, UnknownModel
from lathe.server.serving.servable import Servable
from lathe.server.shared_memory import Regions
from lathe.server.types import InferRequest, InferResult, MissingVersion, Tensors

if TYPE_CHECKING:
    from lathe.server.telemetry.tracing import Tracing


class Resolver(Protocol):
    """The registry of loaded versions. Every request reads it, so reads take no lock."""

    def resolve(self, model: str, version: str = "") -> Servable:
        """Return the servable of a version: "" is the live version, digits a version number, otherwise an alias.

        Raises `NotFound` for an unknown model or version, `Unavailable` for one that is not loaded (while the server
        starts, also for an unknown model), and `BadRequest` for a malformed version.
        """
        ...

    def route(self, model: str, version: str = "", key: str = "") -> Servable:
        """Return the servable that answers a request: as `resolve`, but without a version it may be the candidate.

        During a canary, requests with the same `key` (not empty) go to the same version; when the candidate's share
        grows, further keys go to the candidate.
        """
        ...

    def settled(self, model: str, version: str = "") -> Servable | None:
        """Return the servable that `route` would return; None if that depends on the request, or if `route` raises."""
        ...

    def servables(self) -> Iterable[Servable]:
        """Return all loaded servables."""
        ...


REFUSING_TICKS = 4  # ticks of the clock after a refusal during which further refusals are expected

# A servable, and the client of the request: a key's id or an address. A plain tuple, since every request makes one.
Admitted: TypeAlias = tuple[Servable, str]


class DataPlane:
    """Inference for all transports, which call `route` and `submit` or `execute`.

    `infer` is for callers in this process, which need no key.
    """

    def __init__(
        self, registry: Resolver, authority: Authority, quotas: Quotas | None = None, *, strict: bool = True
    ) -> None:
        """`strict`: the server is not ready while a live version is not in memory."""
        self.registry = registry
        self.authority = authority
        self.quotas = quotas
        self.token_quotas: Quotas | None = None  # of the tokens of language models, embeddings and rankings
        self.tracing: Tracing | None = None
        self.regions = Regions()  # of shared memory
        self.draining = False  # set at the first signal to stop: not ready any more, but still answering
        self.refusing_ticks = 0  # ticks of the clock until refusals are no longer expected
        self.started = False  # set once each live version of the repository is loaded or has failed
        self.missing_versions: Callable[[], Sequence[MissingVersion]] = (
            tuple  # returns the live versions that are not in memory
        )
        self.alarms: Callable[[], Sequence[str]] = tuple  # returns problems that need an operator, such as a full disk
        self._strict = strict

    def start(self) -> None:
        """Note that the live versions are loaded, as far as they can be."""
        self.started = True

    @property
    def ready(self) -> bool:
        """Whether the server is ready for requests (readiness probe)."""
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        """Why the server is not ready; empty if it is."""
        if self.draining:
            return "the server is stopping"
        if not self.started:
            return "the server is starting"
        return "live versions are not in memory" if self._strict and self.missing_versions() else ""

    def resolve(self, model: str, version: str = "") -> Servable:
        """Return the servable of a version or alias, as `Resolver.resolve`, with the same errors."""
        return self.registry.resolve(model, version)

    def route(self, model: str, version: str = "", *, key: str, authorization: str, address: str) -> Admitted:
        """Authorize a request; return the servable that answers it, even if the alias moves later, and the client.

        The client is the id of the key, or `address` if there are no keys. Raises Unauthorized or Forbidden if the
        caller may not run this model, and what `resolve` raises.
        """
        client = self.authority.check(authorization, Scope.INFER, model) or address
        try:
            return self.registry.route(model, version, key), client
        except UnknownModel as error:
            raise with_suggestion(error, self.authority.caller(authorization)) from None

    def route_if_overloaded(self, model: str, version: str, authorization: str) -> Admitted | None:
        """While requests are being refused: return servable and key id, so that a request can be refused unread.

        The id is empty if no key is needed. None: the request must be read in any case. Raises Unauthorized or
        Forbidden if the caller may not run the model.
        """
        if not self.refusing_ticks or self.tracing is not None:  # traces record refused requests too
            return None
        key = self.authority.check(authorization, Scope.INFER, model)
        servable = self.registry.settled(model, version)
        return None if servable is None else (servable, key)

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether this version is loaded; raises NotFound for an unknown one, BadRequest for a malformed one."""
        try:
            self.registry.resolve(model, version)
        except Unavailable:
            return False
        return True

    def tick(self) -> None:
        """Count down `refusing_ticks`; called at each tick of the clock."""
        self.refusing_ticks = max(0, self.refusing_ticks - 1)

    async def infer(self, request: InferRequest) -> InferResult:
        """Answer one request of this process, without authorization or quotas.

        Raises BadRequest for inputs or outputs that do not fit the model, and for classification, Internal if the model
        leaves out an output, otherwise the errors of `Resolver.route` and `execute`. If the task is cancelled, a
        waiting request is taken out of its queue.
        """
        servable = self.registry.route(request.model, request.version, request.sticky_key)
        signature = servable.signature
        group = signature.group_of(request.inputs)
        requested = signature.requested_outputs(request.outputs)
        if any(output.classes for output in requested):
            raise BadRequest("outputs: classification is only supported over HTTP and gRPC")
        outputs = await self.execute(servable, request.inputs, group, request.deadline, request.priority, id=request.id)
        for output in requested:
            if output.name not in outputs:
                raise Internal.missing_output(servable.ref, output.name)
        return InferResult(servable.ref, {output.name: outputs[output.name] for output in requested}, request.id)

    def submit(self, servable: Servable, entry: Entry, traceparent: str) -> None:
        """Charge a request to its client's quotas, queue it, and trace it; `traceparent`: that header, may be empty.

        Raises QuotaExceeded, and what `Servable.submit` raises; then the request has no other outcome. The request may
        run before this returns.
        """
        if self.quotas is not None or servable.rules.quotas is not None:
            self.charge(servable, entry.client, entry.rows, entry.charged_rows)
        refused = self.tracing.watch(entry, servable.ref, traceparent) if self.tracing is not None else None
        try:
            servable.submit(entry)
        except ServerError as error:
            self.refusing_ticks = REFUSING_TICKS
            if refused is not None:
                refused(error)
            raise

    def charge(self, servable: Servable, client: str, rows: int, paid: int = 0) -> None:
        """Charge a request to its client's quotas, except the `paid` rows that were charged before.

        Raises QuotaExceeded. Callers in this process, whose `client` is empty, have no quotas.
        """
        if client and rows != paid:
            _take(servable, (servable.rules.quotas, self.quotas), client, rows, paid)

    def charge_tokens(self, servable: Servable, client: str, tokens: int) -> None:
        """Charge the tokens of a prompt to its client's quota of tokens. Raises QuotaExceeded, and as `charge`."""
        if client:
            _take(servable, (self.token_quotas,), client, tokens)

    def spend_tokens(self, client: str, tokens: int) -> None:
        """Charge tokens that a text has got to its client's quota of tokens, which may be used up before."""
        if client and self.token_quotas is not None:
            self.token_quotas.spend(client, tokens, monotonic())

    async def execute(
        self,
        servable: Servable,
        inputs: Tensors,
        group: BatchGroup,
        deadline: float | None,
        priority: int = 0,
        traceparent: str = "",
        client: str = "",
        id: str = "",
        paid: int = 0,
        text: int = 0,
    ) -> Tensors:
        """Queue validated inputs and return all outputs.

        `deadline` is in monotonic seconds; `id` is the client's name for the request; `paid` are rows charged to the
        client's quota before; `text` is an upper bound of the bytes of all elements of BYTES tensors. If the task is
        cancelled, a waiting request is taken out of its queue. Raises the error of the request.
        """
        entry = Entry(inputs, group, deadline=deadline, priority=priority, text=text)
        entry.client, entry.id, entry.charged_rows = client, id, paid
        return await self.outcome(servable, entry, traceparent)

    async def outcome(self, servable: Servable, entry: Entry, traceparent: str) -> Tensors:
        """Queue a request and return all outputs; its callback is set here. Otherwise as `execute`."""
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def answer(outcome: Outcome) -> None:
            if not answered.done():  # it is done if this task was cancelled
                answered.set_result(outcome)

        entry.done = answer
        self.submit(servable, entry, traceparent)
        try:
            outcome = await answered
        except asyncio.CancelledError:
            servable.cancel(entry)
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _take(servable: Servable, limits: Iterable[Quotas | None], client: str, count: int, paid: int = 0) -> None:
    """Take `count` out of all quotas of a client, and count a refusal in the statistics of the version."""
    try:
        for quotas in limits:
            if quotas is not None:
                quotas.take(client, count, monotonic(), paid)
    except ServerError as error:
        servable.stats.refused(error.code)
        raise
