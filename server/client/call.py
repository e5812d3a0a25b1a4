"""One request and how its answer is read, apart from who sends it; and operations, which both clients have.

An operation is written once, as a method that returns a `Call`. Read from a client that blocks it is a function that
returns what the call yields; read from one for asyncio it is a coroutine function.
"""

from __future__ import annotations

import base64
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload
from urllib.parse import quote

import httpx
import orjson
from pydantic import BaseModel

from server.archive import Body
from server.client.errors import ClientError, refusal
from server.errors import BadRequest

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

Progress: TypeAlias = Callable[[int, int], None]  # bytes sent so far, bytes in all


@dataclass(frozen=True, slots=True)
class Upload:
    """A body that is read, or made, when its request is sent. ``open`` may raise OSError and core.errors.ModelError."""

    open: Callable[[], AbstractContextManager[Body]]
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. ``read`` makes its result of an answer, which is a success unless ``any_status`` is set."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    upload: Upload | None = None
    timeout: float | None = None  # seconds, in place of the client's
    is_long: bool = False  # it may wait for a compilation
    is_repeatable: bool = True  # whether making it twice does no more than making it once
    any_status: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def result(self, response: httpx.Response) -> T:
        """Return what an answer says; raises ApiError for a refusal, ClientError for what cannot be understood."""
        if not (response.is_success or self.any_status):
            raise refusal(response, str(self))
        try:
            return self.read(response)
        except (ValueError, KeyError, TypeError, BadRequest) as error:
            raise ClientError(f"{self}: the answer cannot be understood: {error!r}") from error

    def opened(self) -> AbstractContextManager[Outgoing]:
        """Return the request as it is sent, as long as the block lasts. An upload is read once, for its digest."""
        return nullcontext(Outgoing(self.headers)) if self.upload is None else _opened(self.headers, self.upload)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What goes out with a call: its headers, and its body where that is more than ``Call.content``."""

    headers: Mapping[str, str]
    body: Body | None = None
    progress: Progress | None = None

    def pieces(self, body: Body) -> Iterator[bytes]:
        """Yield the body in order and tell how much has gone; again for every attempt."""
        sent, size = 0, body.size
        for piece in body.pieces():
            yield piece
            sent += len(piece)
            if self.progress is not None:
                self.progress(sent, size)


class Sender(ABC):
    """What sends calls and blocks until they are answered."""

    @abstractmethod
    def run(self, call: Call[T]) -> T:
        """Send a call, and return what it yields."""


class AsyncSender(ABC):
    """What sends calls in an event loop."""

    @abstractmethod
    async def run(self, call: Call[T]) -> T:
        """Send a call, and return what it yields."""


class operation(Generic[P, T]):
    """Makes a method of both clients of one that returns a `Call`."""

    def __init__(self, make: Callable[Concatenate[Any, P], Call[T]]) -> None:
        self.make = make
        self._signature = _signature(make)
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Any]: ...
    @overload
    def __get__(self, client: Sender, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncSender, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Sender | AsyncSender | None, owner: type) -> Any:
        if client is None:
            return self._described(_unbound(self), without_self=False)
        run: Callable[..., Any] = _asynchronous if isinstance(client, AsyncSender) else _blocking
        return self._described(run(client, self.make), without_self=True)

    def _described(self, function: Any, *, without_self: bool) -> Any:
        """Give a function the name, the text and the signature that an editor shows."""
        function.__name__, function.__qualname__ = self.make.__name__, self.make.__qualname__
        function.__doc__, function.__signature__ = self.__doc__, self._signature[without_self]
        return function


def _unbound(called: operation[Any, Any]) -> Callable[..., Any]:
    def call(client: Any, /, *args: Any, **options: Any) -> Any:
        bound: Callable[..., Any] = called.__get__(client, type(client))
        return bound(*args, **options)

    return call


def _blocking(client: Any, make: Callable[..., Call[T]]) -> Callable[..., T]:
    def call(*args: Any, **options: Any) -> T:
        result: T = client.run(make(client, *args, **options))
        return result

    return call


def _asynchronous(client: Any, make: Callable[..., Call[T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    async def call(*args: Any, **options: Any) -> T:
        result: T = await client.run(make(client, *args, **options))
        return result

    return call


def _signature(make: Callable[..., Any]) -> tuple[inspect.Signature, inspect.Signature]:
    """The signature as callers see it, with ``self`` and without; it returns what the call yields."""
    found = inspect.signature(make)
    yields = str(found.return_annotation).removeprefix("Call[").removesuffix("]")
    found = found.replace(return_annotation=yields)
    return found, found.replace(parameters=list(found.parameters.values())[1:])


@contextmanager
def _opened(headers: Mapping[str, str], upload: Upload) -> Iterator[Outgoing]:
    with upload.open() as body:
        about = {
            "content-type": body.content_type,
            "content-length": str(body.size),
            "content-digest": f"sha-256=:{base64.b64encode(body.sha256()).decode()}:",
        }
        yield Outgoing({**headers, **about}, body, upload.progress)


# -- parts of calls ---------------------------------------------------------------------------------------------------


def path(*parts: str | int) -> str:
    """Return a path; each part but the first, which is the route's beginning, is one segment."""
    first, *others = parts
    return "/".join([str(first), *(quote(str(part), safe="") for part in others)])


def document(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call whose body is JSON; raises ClientError for what JSON cannot hold."""
    try:
        content = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ClientError(f"the request cannot be written as JSON: {error}") from error
    return {"content": content, "headers": {"content-type": "application/json"}}


def one(kind: type[M]) -> Callable[[httpx.Response], M]:
    """Return what reads an answer of this kind."""
    return lambda response: kind.model_validate_json(response.content)


def many(kind: type[M]) -> Callable[[httpx.Response], list[M]]:
    """Return what reads a list of answers of this kind."""
    return lambda response: [kind.model_validate(item) for item in response.json()]


def text(response: httpx.Response) -> str:
    """Read an answer that is text."""
    return response.text


def values(response: httpx.Response) -> Any:
    """Read an answer that is JSON of no declared kind."""
    return response.json()


def nothing(response: httpx.Response) -> None:
    """Read an answer that says no more than that it was done."""
