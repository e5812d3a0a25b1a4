"""Repeated requests for one version that arrive together: one batch, and one access check for each template."""

from __future__ import annotations

import logging
from itertools import groupby
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from lathe.server.access.scopes import Scope
from lathe.server.api.codec.json_answer import elements_by_row
from lathe.server.api.codec.payloads import Payload, raw_bytes
from lathe.server.errors import ServerError
from lathe.server.types import Tensors

if TYPE_CHECKING:
    from lathe.server.api.connection.request_template import RequestTemplate
    from lathe.server.api.inference.infer import InferCall
    from lathe.server.batching.batcher import Batcher
    from lathe.server.serving.dataplane import DataPlane
    from lathe.server.serving.servable import Servable

log = logging.getLogger("lathe.api")
_TEMPLATE = itemgetter(1)


class RepeatedRequests:
    """The calls that match a `RequestTemplate` and wait for the next batch of one model version.

    It implements `lathe.server.batching.coalesced_batch.CoalescedBatch`. One object serves all batches of a version: a
    batch takes the calls that wait, and the list starts empty again.
    """

    __slots__ = ("_batcher", "_calls", "_plane", "_servable", "since")

    def __init__(self, plane: DataPlane, servable: Servable, batcher: Batcher) -> None:
        self._plane = plane
        self._servable = servable
        self._batcher = batcher
        self._calls: list[tuple[InferCall, RequestTemplate, bytes]] = []
        self.since: list[float] = []

    def join(self, call: InferCall, template: RequestTemplate, data: bytes) -> None:
        """Add a call to the next batch. `data` holds the tensors of its request, at the offsets of the template."""
        call.repeated_requests = self
        calls = self._calls
        calls.append((call, template, data))
        self.since.append(monotonic())
        if len(calls) == 1:
            self._batcher.submit_coalesced(self)

    def leave(self, call: InferCall) -> None:
        """Remove a call whose caller has closed the connection."""
        call.repeated_requests = None
        place = [one for one, _, _ in self._calls].index(call)
        del self._calls[place], self.since[place]
        self._servable.stats.cancelled += 1

    @property
    def rows(self) -> int:
        return sum([template.rows for _, template, _ in self._calls])

    @property
    def nbytes(self) -> int:
        return sum([template.wire.binary_bytes for _, template, _ in self._calls])

    def is_plain(self) -> bool:
        plane, servable = self._plane, self._servable
        if plane.tracing is not None or plane.quotas is not None or not servable.is_plain:
            return False
        try:
            return all(map(self._is_settled, {template for _, template, _ in self._calls}))
        except ServerError:
            return False

    def _is_settled(self, template: RequestTemplate) -> bool:
        head = template.head
        self._plane.authority.check(head.authorization, Scope.INFER, head.model)
        return self._plane.registry.settled(head.model, head.version) is self._servable

    def stack(self) -> Tensors:
        rows, stacked = self.rows, {}
        for index, (name, shape, dtype, _) in enumerate(self._calls[0][1].wire.views):
            whole = b"".join([data[template.spans[index]] for _, template, data in self._calls])
            stacked[name] = np.ndarray((rows, *shape[1:]), dtype, whole)
        return stacked

    def answer(self, outputs: Tensors) -> None:
        calls = self._take()
        try:
            _set_replies(calls, outputs)
        except Exception as error:  # no call has an answer yet
            for call, _, _ in calls:
                call.refuse(error)
            return
        for call, _, _ in calls:
            try:
                call.deliver(call)
            except Exception:
                log.exception("an answer could not be delivered")

    def queue(self) -> None:
        for call, template, data in self._take():
            call.repeat(template, data)

    def _take(self) -> list[tuple[InferCall, RequestTemplate, bytes]]:
        calls, self._calls, self.since = self._calls, [], []
        for call, _, _ in calls:
            call.repeated_requests = None
        return calls


class _Outputs:
    """The outputs of a batch as bytes and as JSON. Each form is computed at its first use and then reused."""

    __slots__ = ("_bytes", "_lists", "tensors")

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._bytes: dict[str, tuple[Payload, int]] = {}
        self._lists: dict[str, list[bytes]] = {}

    def bytes_of(self, name: str) -> tuple[Payload, int]:
        """Return the bytes of an output for the whole batch, and the number of bytes per row."""
        if name not in self._bytes:
            array = self.tensors[name]
            text = raw_bytes(array)
            self._bytes[name] = text, len(text) // len(array)
        return self._bytes[name]

    def lists_of(self, name: str) -> list[bytes]:
        """Return for each row of an output its elements as JSON, separated by commas."""
        if name not in self._lists:
            self._lists[name] = elements_by_row(self.tensors[name])
        return self._lists[name]


def _set_replies(calls: list[tuple[InferCall, RequestTemplate, bytes]], outputs: Tensors) -> None:
    """Give each call the reply with its rows of the outputs."""
    first, encoded = 0, _Outputs(outputs)
    for template, group in groupby(calls, _TEMPLATE):
        set_replies = _set_binary_replies if template.wire.plain else _set_json_replies
        first = set_replies([call for call, _, _ in group], template, encoded, first)


def _set_binary_replies(calls: list[InferCall], template: RequestTemplate, outputs: _Outputs, first: int) -> int:
    """Give the calls of one template their binary replies, from row `first` on; return the row after the last."""
    rows = template.rows
    reply = template.reply({name: array[first : first + rows] for name, array in outputs.tensors.items()})
    asked = [outputs.bytes_of(output.name) for output in template.wire.outputs]
    for call in calls:
        end = first + rows
        call.reply = reply
        call.payloads = [text[first * size : end * size] for text, size in asked]
        first = end
    return first


def _set_json_replies(calls: list[InferCall], template: RequestTemplate, outputs: _Outputs, first: int) -> int:
    """Give the calls of one template their JSON replies, from row `first` on; return the row after the last."""
    rows, names = template.rows, [output.name for output in template.wire.outputs]
    answer = template.codec.json_answer(
        template.wire, tuple([(rows, *outputs.tensors[name].shape[1:]) for name in names])
    )
    asked = [outputs.lists_of(name) for name in names]
    for call in calls:
        end = first + rows
        call.reply, call.payloads = answer.reply([b",".join(lists[first:end]) for lists in asked], template.wire.id)
        first = end
    return first
