"""A tiny HTTP server for the load generator's tests; the test chooses each answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from loadtest.scenario import Options, Report, Scenario


@dataclass
class Call:
    """One request; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, bytes]
Handler = Callable[[Call], Awaitable[Answer]]
"""A status of 0 closes the connection without an answer."""


async def read_call(reader: asyncio.StreamReader) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *fields = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in fields)}
    method, path, _ = first.split()
    return Call(method, path, headers, await reader.readexactly(int(headers["content-length"])))


async def serve_connection(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            status, body = await handler(await read_call(reader))
            if status == 0:
                return
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
    except asyncio.IncompleteReadError:
        pass  # the client closed the connection
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve requests until the end of the block; yields the server's address."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(serve_connection(handler, reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.sleep(0.01)  # so that a connection that was just accepted gets its task
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run(scenario: Scenario, handler: Handler, connections: int = 4, **options: Any) -> Report:
    """The report of a scenario against a server whose requests `handler` answers."""

    async def drive() -> Report:
        async with serving(handler) as url:
            report = Report(scenario.__name__, {})
            await scenario(Options(url=url, connections=connections, **options), report)
            return report

    return asyncio.run(drive())
