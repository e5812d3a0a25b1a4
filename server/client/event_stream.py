"""The state of following a job's events over lost connections, independent of the client."""

from __future__ import annotations

import httpx

from lathe.server.client.call import path
from lathe.server.client.errors import ClientError, refusal
from lathe.server.sse import EventReader, JobEvent

PAUSE = 0.5  # seconds before reconnecting
_MOST_LOST = 10  # lost connections in a row


class JobFollower:
    """Follows the events of one job, from its start or after the event with the id `after`."""

    def __init__(self, job: str, after: str) -> None:
        self.path = path("/api/v1/jobs", job, "events")
        self._job, self._after, self._lost = job, after, 0
        self._reader = EventReader()

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the next connection, which resumes after the last event; resets the event reader."""
        self._reader = EventReader()
        return {"last-event-id": self._after} if self._after else {}

    def take(self, line: str) -> JobEvent | None:
        """Add a line of the stream; returns the event that it completes, otherwise None."""
        event = self._reader.take(line)
        if event is not None:
            self._after, self._lost = event.id or self._after, 0
        return event

    def refused(self, response: httpx.Response) -> ClientError:
        """Return the error of an unsuccessful response whose body is read."""
        return refusal(response, f"GET {self.path}")

    def lost(self, error: httpx.HTTPError) -> None:
        """Count a lost connection; raises ClientError after more than 10 in a row without an event."""
        self._lost += 1
        if self._lost > _MOST_LOST:
            raise ClientError(f"following job {self._job}: {str(error) or type(error).__name__}") from error
