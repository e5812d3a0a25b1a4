"""A request with the parser of its answer, independent of the client; and operations, which both clients share.

An operation is written once, as a method that returns a `Call`. As an attribute of a blocking client it is a function
that returns the call's result; as an attribute of an asyncio client it is a coroutine function.
"""

from __future__ import annotations

import base64
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload
from urllib.parse import quote

import httpx
import orjson
from pydantic import BaseModel, ValidationError

from lathe.server.archive import UploadBody
from lathe.server.client.errors import ClientError, refusal
from lathe.server.errors import BadRequest

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

Content: TypeAlias = str | os.PathLike[str] | bytes  # a path, or the bytes of a file
Progress: TypeAlias = Callable[[int, int], None]  # bytes sent so far, bytes in all


@dataclass(frozen=True, slots=True)
class Upload:
    """A body that is opened once, when its call is sent; each attempt of the call reads it from the start.

    `open` returns a context manager of the body. It may raise OSError, ClientError and lathe.core.errors.ModelError.
    """

    open: Callable[[], AbstractContextManager[UploadBody]]
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `read` parses a successful response to its result, or any response if `any_status` is set."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    upload: Upload | None = None
    timeout: float | None = None  # seconds, instead of the client's timeout
    is_long: bool = False  # it may wait for an upload or a compilation
    is_repeatable: bool = True  # idempotent: sending it twice has the same effect as once
    any_status: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def result(self, response: httpx.Response) -> T:
        """Return the result in a response; raises ClientError for a malformed body.

        Raises ApiError for an error status, unless the call takes `any_status`.
        """
        if not (response.is_success or self.any_status):
            raise refusal(response, str(self))
        try:
            return self.read(response)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadRequest) as error:
            raise ClientError(f"{self}: the server's answer is malformed: {_fault(error, response)}") from error

    def open_body(self) -> AbstractContextManager[OpenedCall]:
        """Open the call's body for sending, as a context manager. An upload is read once first, for its digest."""
        return nullcontext(OpenedCall(self.headers)) if self.upload is None else _open(self.headers, self.upload)


@dataclass(frozen=True, slots=True)
class OpenedCall:
    """A call with its body opened: the headers to send, and the body of an upload, otherwise None."""

    headers: Mapping[str, str]
    body: UploadBody | None = None
    progress: Progress | None = None

    def pieces(self, body: UploadBody) -> Iterator[bytes]:
        """Yield the body in chunks, and report the progress after each; each attempt starts a new iterator."""
        sent, size = 0, body.size
        for chunk in body.pieces():
            yield chunk
            sent += len(chunk)
            if self.progress is not None:
                self.progress(sent, size)


class Sender(ABC):
    """A client that sends calls and blocks until they are answered."""

    @abstractmethod
    def run(self, call: Call[T]) -> T:
        """Send a call and return its result; raises ClientError, or what `Upload.open` raises."""


class AsyncSender(ABC):
    """A client that sends calls on an event loop."""

    @abstractmethod
    async def run(self, call: Call[T]) -> T:
        """Send a call and return its result; raises ClientError, or what `Upload.open` raises."""


class operation(Generic[P, T]):
    """Decorator (a descriptor): turns a method that returns a `Call` into a method of both clients that sends it."""

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
            return self._describe(_unbound(self), without_self=False)
        run: Callable[..., Any] = _asynchronous if isinstance(client, AsyncSender) else _blocking
        return self._describe(run(client, self.make), without_self=True)

    def _describe(self, function: Any, *, without_self: bool) -> Any:
        """Set a function's name, docstring and signature, for `help` and editors."""
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
    """Return the signature for callers, with and without `self`; its return annotation is the call's result."""
    found = inspect.signature(make)
    yields = str(found.return_annotation).removeprefix("Call[").removesuffix("]")
    found = found.replace(return_annotation=yields)
    return found, found.replace(parameters=list(found.parameters.values())[1:])


@contextmanager
def _open(headers: Mapping[str, str], upload: Upload) -> Iterator[OpenedCall]:
    with upload.open() as body:
        described = {
            "content-type": body.content_type,
            "content-length": str(body.size),
            "content-digest": f"sha-256=:{base64.b64encode(body.sha256()).decode()}:",
        }
        yield OpenedCall({**headers, **described}, body, upload.progress)


# -- parts of calls ---------------------------------------------------------------------------------------------------


def path(*parts: str | int) -> str:
    """Return a URL path: the first part is a prefix, each other part is quoted as one segment.

    Raises ClientError for text that UTF-8 cannot express, such as an argument that was not UTF-8 itself.
    """
    first, *others = parts
    try:
        return "/".join([str(first), *(quote(str(part), safe="") for part in others)])
    except UnicodeEncodeError as error:
        raise ClientError(f"{error.object[:80]!r}: expected text in UTF-8") from error


def file_or_bytes(content: Content) -> Path | bytes:
    """Return the content of an upload: bytes unchanged, a path as a Path; raises ClientError for anything else."""
    if isinstance(content, bytes):
        return content
    if isinstance(content, str | os.PathLike):
        return Path(content)
    raise ClientError(f"content: expected the path of a file or bytes, got {type(content).__name__}")


def _fault(error: Exception, response: httpx.Response) -> str:
    """Return in one line what is wrong with the body of a response."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if first["type"] != "json_invalid":
            place = ".".join(map(str, first["loc"]))
            return f"{place}: {first['msg']}" if place else first["msg"]
    elif not isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return " ".join(str(error).split()) or type(error).__name__
    return f"expected JSON, got {response.content[:60]!r}"


def json_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return content and headers of a call with a JSON body; raises ClientError for values that JSON cannot express."""
    try:
        content = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ClientError(f"the request cannot be written as JSON: {error}") from error
    return {"content": content, "headers": {"content-type": "application/json"}}


def parse_one(kind: type[M]) -> Callable[[httpx.Response], M]:
    """Return the parser of a response with one object of this kind."""
    return lambda response: kind.model_validate_json(response.content)


def parse_list(kind: type[M]) -> Callable[[httpx.Response], list[M]]:
    """Return the parser of a response with a list of objects of this kind."""
    return lambda response: [kind.model_validate(item) for item in _read_list(response)]


def _read_list(response: httpx.Response) -> list[Any]:
    found = response.json()
    if not isinstance(found, list):
        raise ValueError(f"expected a list, got {response.text[:60]!r}")
    return found


def parse_text(response: httpx.Response) -> str:
    """Return the text of a response."""
    return response.text


def parse_object(*fields: str) -> Callable[[httpx.Response], dict[str, Any]]:
    """Return the parser of a response with a JSON object that has at least these fields."""

    def parse(response: httpx.Response) -> dict[str, Any]:
        found = response.json()
        if not isinstance(found, dict) or not found.keys() >= set(fields):
            expected = f"an object with {', '.join(fields)}" if fields else "an object"
            raise ValueError(f"expected {expected}, got {response.text[:60]!r}")
        return found

    return parse


def parse_objects(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the objects of a response whose body is a JSON list of objects.

    ValueError for any other body; `Call.result` turns it into a ClientError.
    """
    found = _read_list(response)
    if not all(isinstance(each, dict) for each in found):
        raise ValueError(f"expected a list of objects, got {response.text[:60]!r}")
    return found


def ignore_body(response: httpx.Response) -> None:
    """Ignore the body of a response: its status says that the request succeeded."""
