"""A tiny Open Inference server for the load generator's tests: the behaviour of every answer is the test's choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""`(request line, body)` -> `(status, body)`; a status of 0 closes the connection without an answer."""


async def serve_connection(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
            status, body = await handler(head.split("\r\n")[0], await reader.readexactly(length))
            if status == 0:
                return
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
    except asyncio.IncompleteReadError:
        pass  # the client is done
    finally:
        writer.close()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """The server's address."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(serve_connection(handler, reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
