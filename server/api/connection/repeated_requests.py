"""Repeated requests for one model that came together: one look at who asks, one batch, one answer's head for all."""

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
    from lathe.server.api.connection.request_template import Lane
    from lathe.server.api.inference.infer import InferCall
    from lathe.server.batching.batcher import Batcher
    from lathe.server.serving.dataplane import DataPlane
    from lathe.server.serving.servable import Servable

log = logging.getLogger("lathe.api")
_LANE = itemgetter(1)


class Repeats:
    """A `lathe.server.batching.coalesced_batch.CoalescedBatch` of calls that came by lanes; it is used again and
    again."""

    __slots__ = ("_batcher", "_calls", "_plane", "_servable", "since")

    def __init__(self, plane: DataPlane, servable: Servable, batcher: Batcher) -> None:
        self._plane = plane
        self._servable = servable
        self._batcher = batcher
        self._calls: list[tuple[InferCall, Lane, bytes]] = []
        self.since: list[float] = []

    def join(self, call: InferCall, lane: Lane, data: bytes) -> None:
        """Let a call take part, whose request `data` is as the lane says."""
        call.round = self
        calls = self._calls
        calls.append((call, lane, data))
        self.since.append(monotonic())
        if len(calls) == 1:
            self._batcher.submit_coalesced(self)

    def leave(self, call: InferCall) -> None:
        """The caller is gone."""
        call.round = None
        place = [one for one, _, _ in self._calls].index(call)
        del self._calls[place], self.since[place]
        self._servable.stats.cancelled += 1

    @property
    def rows(self) -> int:
        return sum([lane.rows for _, lane, _ in self._calls])

    @property
    def nbytes(self) -> int:
        return sum([lane.wire.binary_bytes for _, lane, _ in self._calls])

    def is_plain(self) -> bool:
        plane, servable = self._plane, self._servable
        if plane.tracing is not None or plane.quotas is not None or not servable.is_plain:
            return False
        try:
            return all(map(self._is_settled, {lane for _, lane, _ in self._calls}))
        except ServerError:
            return False

    def _is_settled(self, lane: Lane) -> bool:
        head = lane.head
        self._plane.authority.check(head.authorization, Scope.INFER, head.model)
        return self._plane.registry.settled(head.model, head.version) is self._servable

    def stack(self) -> Tensors:
        rows, stacked = self.rows, {}
        for index, (name, shape, dtype, _) in enumerate(self._calls[0][1].wire.views):
            whole = b"".join([data[lane.spans[index]] for _, lane, data in self._calls])
            stacked[name] = np.ndarray((rows, *shape[1:]), dtype, whole)
        return stacked

    def answer(self, outputs: Tensors) -> None:
        calls = self._take()
        try:
            _fill(calls, outputs)
        except Exception as error:  # nobody is answered yet
            for call, _, _ in calls:
                call.refuse(error)
            return
        for call, _, _ in calls:
            try:
                call.deliver(call)
            except Exception:
                log.exception("an answer could not be delivered")

    def queue(self) -> None:
        for call, lane, data in self._take():
            call.repeat(lane, data)

    def _take(self) -> list[tuple[InferCall, Lane, bytes]]:
        calls, self._calls, self.since = self._calls, [], []
        for call, _, _ in calls:
            call.round = None
        return calls


class _Outputs:
    """What a batch gave, as answers have it: made once, and only if one of them asks for it."""

    __slots__ = ("_bytes", "_lists", "tensors")

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._bytes: dict[str, tuple[Payload, int]] = {}
        self._lists: dict[str, list[bytes]] = {}

    def bytes_of(self, name: str) -> tuple[Payload, int]:
        """An output's elements, and how many bytes of them are a row."""
        if name not in self._bytes:
            array = self.tensors[name]
            text = raw_bytes(array)
            self._bytes[name] = text, len(text) // len(array)
        return self._bytes[name]

    def lists_of(self, name: str) -> list[bytes]:
        """An output's elements in JSON, by row."""
        if name not in self._lists:
            self._lists[name] = elements_by_row(self.tensors[name])
        return self._lists[name]


def _fill(calls: list[tuple[InferCall, Lane, bytes]], outputs: Tensors) -> None:
    """Give each call its reply, by its rows of the outputs."""
    first, made = 0, _Outputs(outputs)
    for lane, alike in groupby(calls, _LANE):
        fill = _fill_binary if lane.wire.plain else _fill_json
        first = fill([call for call, _, _ in alike], lane, made, first)


def _fill_binary(calls: list[InferCall], lane: Lane, outputs: _Outputs, first: int) -> int:
    """Give calls of one lane their replies, by the rows from the `first` on; return which is the next."""
    rows = lane.rows
    reply = lane.reply({name: array[first : first + rows] for name, array in outputs.tensors.items()})
    asked = [outputs.bytes_of(output.name) for output in lane.wire.outputs]
    for call in calls:
        end = first + rows
        call.reply = reply
        call.payloads = [text[first * size : end * size] for text, size in asked]
        first = end
    return first


def _fill_json(calls: list[InferCall], lane: Lane, outputs: _Outputs, first: int) -> int:
    """Do the same for calls whose answers are all numbers in JSON."""
    rows, names = lane.rows, [output.name for output in lane.wire.outputs]
    answer = lane.codec.json_answer(lane.wire, tuple([(rows, *outputs.tensors[name].shape[1:]) for name in names]))
    asked = [outputs.lists_of(name) for name in names]
    for call in calls:
        end = first + rows
        call.reply, call.payloads = answer.reply([b",".join(lists[first:end]) for lists in asked], lane.wire.id)
        first = end
    return first
