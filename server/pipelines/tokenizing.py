"""The process of a ``tokenize`` step: texts in, token numbers out.

    python -m server.pipelines.tokenizing MAX_LENGTH MULTIPLE DESCRIPTOR        the open file is a tokenizer.json

What goes over the pipes is said in helper.py. A request: for each text four bytes of its length, then the text in
UTF-8. An answer: eight bytes each for rows and length, then so many INT64 of numbers, of the mask, of types.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the server's workers are the parallelism
from tokenizers import Tokenizer

DONE, REFUSED, FAILED = range(3)  # helper.Kind, which would bring the server's modules along
_HEAD = 9
_PARSING = 5  # niceness: as much as a compilation is let have that somebody waits for


def main(argv: Sequence[str]) -> None:
    """Read the tokenizer, say so, then answer until the server is gone."""
    most, multiple, file = map(int, argv)
    out = os.dup(1)
    os.dup2(2, 1)  # whatever the library prints
    try:
        tokenizer = _parsed(file, most)
    except BaseException as error:  # a panic of the library is no Exception
        _send(out, REFUSED, str(error)[:200].encode())
        return
    _send(out, DONE, b"")
    while (requests := _receive()) is not None:
        for request in _parts(requests, "<Q"):
            try:
                answer = _encoded(tokenizer, [text.decode() for text in _parts(request, "<I")], most, multiple)
            except BaseException as error:
                _send(out, FAILED, type(error).__name__.encode())
            else:
                _send(out, DONE, answer)


def _parsed(file: int, most: int) -> Tokenizer:
    """In a thread that lets others go first: niceness cannot be taken back, and answering is as urgent as any."""
    done: list[Tokenizer | BaseException] = []

    def parse() -> None:
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, max(_PARSING, os.getpriority(os.PRIO_PROCESS, own)))
        try:
            tokenizer = Tokenizer.from_buffer(os.pread(file, os.fstat(file).st_size, 0))
            tokenizer.no_padding()
            tokenizer.enable_truncation(most)
            done.append(tokenizer)
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=parse)
    thread.start()
    thread.join()
    if isinstance(found := done[0], BaseException):
        raise found
    return found


def _parts(whole: bytes, size: str) -> Iterator[bytes]:
    """Yield what comes one after the other, each with its size, of this format, before it."""
    at, head = 0, struct.calcsize(size)
    while at < len(whole):
        begin = at + head
        at = begin + struct.unpack_from(size, whole, at)[0]
        yield whole[begin:at]


def _encoded(tokenizer: Tokenizer, texts: list[str], most: int, multiple: int) -> bytes:
    encodings = tokenizer.encode_batch(texts)
    longest = max((len(one) for one in encodings), default=1)
    length = min(max(-(-longest // multiple), 1) * multiple, max(most, longest))
    columns = (
        _padded([one.ids for one in encodings], length, _filler(tokenizer)),
        _padded([one.attention_mask for one in encodings], length, 0),
        _padded([one.type_ids for one in encodings], length, 0),
    )
    return b"".join([struct.pack("<QQ", len(texts), length), *(column.tobytes() for column in columns)])


def _padded(rows: list[list[int]], length: int, filler: int) -> array[int]:
    made = array("q")
    for row in rows:
        made.extend(row)
        made.extend([filler] * (length - len(row)))
    return made


def _filler(tokenizer: Tokenizer) -> int:
    """Return the token that fills up; which one makes no difference to a model that heeds the mask."""
    found = (tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>"))
    return next((number for number in found if number is not None), 0)


def _send(out: int, kind: int, body: bytes) -> None:
    view = memoryview(bytes((kind,)) + len(body).to_bytes(8, "little") + body)
    while view:
        view = view[os.write(out, view) :]


def _receive() -> bytes | None:
    head = _read(_HEAD)
    return None if head is None else _read(int.from_bytes(head[1:], "little"))


def _read(count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = os.read(0, count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
