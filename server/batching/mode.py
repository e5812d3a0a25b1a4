"""The modes of a batcher: which event makes it form the next batch.

    IDLE, DELAYING, BUSY --> SCHEDULED --> FORMING --> IDLE, DELAYING, BUSY, SCHEDULED
              '------------------------------^

| From | To | Event |
|---|---|---|
| IDLE, DELAYING | SCHEDULED | a request is queued |
| BUSY | SCHEDULED | a request is queued that makes the next batch full: it may be staged behind a running one |
| IDLE, DELAYING, BUSY | SCHEDULED | a coalesced batch comes, or the policy changes while requests wait |
| IDLE, DELAYING, BUSY | FORMING | the same, except for the policy, while requests come one by one (`SingleBatches`) |
| SCHEDULED | FORMING | the next iteration of the event loop begins |
| DELAYING | FORMING | the batching delay ends |
| SCHEDULED, DELAYING, BUSY | FORMING | a worker has become free while requests wait, or may have a full batch staged |
| FORMING | SCHEDULED | an instance was free and requests still wait, or a coalesced batch has come meanwhile |
| FORMING | DELAYING | the waiting requests are delayed for further ones |
| FORMING | BUSY | all instances run batches |
| FORMING | IDLE | an instance is free and no request waits, or an error occurred |
| BUSY | IDLE | a worker has become free and no request waits |
| IDLE, DELAYING, BUSY | IDLE, BUSY | the policy changes, and no request waits |

How many batches run or are staged is the dispatcher's state. Draining and closing are not modes: a batcher that drains
forms batches as before, and one that is closed gets no requests.

A batcher assigns its mode without a check, since it does so for every request. The tests compare each assignment with
`TRANSITIONS`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Mode(enum.Enum):
    """What a batcher waits for before it forms the next batch; FORMING: it forms one now."""

    IDLE = enum.auto()  # for a request; fewer than `instances` batches run
    SCHEDULED = enum.auto()  # for the next iteration of the event loop
    DELAYING = enum.auto()  # for further requests, until a timer fires
    FORMING = enum.auto()  # the batch is formed, and run on this thread or staged; requests that come are only queued
    BUSY = enum.auto()  # for a worker, or for enough requests to stage a full batch; `instances` batches run


# global names: looking up a member of an Enum takes ten times as long
IDLE, SCHEDULED, DELAYING, FORMING, BUSY = Mode

TRANSITIONS: Mapping[Mode, frozenset[Mode]] = {
    IDLE: frozenset({SCHEDULED, FORMING, BUSY}),
    SCHEDULED: frozenset({FORMING}),
    DELAYING: frozenset({SCHEDULED, FORMING, IDLE, BUSY}),
    FORMING: frozenset({SCHEDULED, DELAYING, IDLE, BUSY}),
    BUSY: frozenset({SCHEDULED, FORMING, IDLE}),
}
