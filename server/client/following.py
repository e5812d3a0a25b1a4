"""Following a job over lost connections: what is asked for, and when one gives up. Sending is the client's."""

from __future__ import annotations

import httpx

from server.client.call import path
from server.client.errors import ClientError, refusal
from server.sse import EventReader, JobEvent

PAUSE = 0.5  # seconds between two connections
_MOST_LOST = 10  # connections in a row


class Following:
    """One caller that follows one job, from its start or after the event of an id."""

    def __init__(self, job: str, after: str) -> None:
        self.path = path("/api/v1/jobs", job, "events")
        self._job, self._after, self._lost = job, after, 0
        self._reader = EventReader()

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the next connection, which goes on where the last one ended."""
        self._reader = EventReader()
        return {"last-event-id": self._after} if self._after else {}

    def take(self, line: str) -> JobEvent | None:
        """Return the event that a line ends, if it ends one."""
        event = self._reader.take(line)
        if event is not None:
            self._after, self._lost = event.id or self._after, 0
        return event

    def refused(self, response: httpx.Response) -> ClientError:
        """Return the error that an answer other than success, read in full, stands for."""
        return refusal(response, f"GET {self.path}")

    def lost(self, error: httpx.HTTPError) -> None:
        """Count a lost connection; raises ClientError after too many in a row."""
        self._lost += 1
        if self._lost > _MOST_LOST:
            raise ClientError(f"following job {self._job}: {str(error) or type(error).__name__}") from error
