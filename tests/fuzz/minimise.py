"""Minimises a model with a bug while the bug stays the same."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
from google.protobuf.message import DecodeError, Message

from tests.fuzz import worker
from tests.fuzz.mutate import messages, mutated, steps

_MOST_TRIES = 1500
Symptom = Callable[[bytes], str]


def smallest(seed: str, corpus: Sequence[bytes]) -> bytes:
    """The case of a seed without the mutations and parts of the model that its symptom does not need."""
    symptom = _place(observed(mutated(seed, corpus)))
    kept = list(steps(seed))
    for step in list(kept):
        fewer = [each for each in kept if each != step]
        if _place(observed(mutated(seed, corpus, fewer))) == symptom:
            kept = fewer
    return reduced(mutated(seed, corpus, kept), lambda data: _place(observed(data)))


def reduced(data: bytes, symptom: Symptom) -> bytes:
    """`data` without the parts that its symptom does not need; bytes that are no model stay as they are."""
    wanted, at = symptom(data), 0
    for _ in range(_MOST_TRIES):
        smaller = _without(data, at)
        if smaller is None:
            break
        if symptom(smaller) == wanted:
            data = smaller
        else:
            at += 1
    return data


def _without(data: bytes, at: int) -> bytes | None:
    """The model without its part number `at`, the outermost first: a field, or one item of a repeated field."""
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError:
        return None
    part = next(itertools.islice(_parts(model), at, None), None)
    if part is None:
        return None
    message, field, index = part
    if index is None:
        message.ClearField(field.name)
    else:
        del getattr(message, field.name)[index]
    return bytes(model.SerializeToString())


def _parts(model: onnx.ModelProto) -> Iterator[tuple[Message, Any, int | None]]:
    for message in messages(model):
        for field, value in message.ListFields():
            yield message, field, None
            yield from ((message, field, index) for index in range(len(value) if field.is_repeated else 0))


def observed(data: bytes) -> str:
    """The outcome of a model in a child process, under the limits of a worker."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        worker.limit()
        os.write(write, worker.outcome(data).encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return f"bug ends with {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else text


def _place(text: str) -> str:
    """The symptom without details that change as the model shrinks."""
    return text.partition(": ")[0] if text.startswith("bug") else "none"


def report(data: bytes) -> str:
    """The model as text, and its symptom."""
    try:
        text = str(onnx.ModelProto.FromString(data))
    except DecodeError:
        text = data[:200].hex(" ")
    return f"{observed(data)}\n{text[:3000]}"
