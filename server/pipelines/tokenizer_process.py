"""The process of a `tokenize` step: texts in, token ids out.

    python -m lathe.server.pipelines.tokenizer_process MAX_LENGTH MULTIPLE TEXTS DESCRIPTOR      (of tokenizer.json)

`step_process` describes the frames. The first one says that the process is ready; its body is the number of special
tokens of a row, in decimal digits. A request is two UINT32, then a list of texts in UTF-8, each after four bytes for
its length. The two numbers take the place of MAX_LENGTH and MULTIPLE for this request, unless they are 0. TEXTS, 1 or
2, of the texts form a row. An answer is two INT64, rows and length, and three arrays of rows * length INT64: token ids,
attention mask, type ids.
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

DONE, REFUSED, FAILED = range(3)  # step_process.FrameKind, whose import would load the server's modules
_HEAD = 9
_LIMITS = "<II"  # of a request: the most tokens of a row, and the multiple up to which lengths are padded
_PARSING_NICENESS = 5  # niceness while parsing, as for a compilation that a client waits for


def main(argv: Sequence[str]) -> None:
    """Parse the tokenizer, report success or the error, then answer requests until stdin is closed."""
    most, multiple, count, file = map(int, argv)
    out = os.dup(1)
    os.dup2(2, 1)  # output of the library goes to stderr, not into the frames
    try:
        tokenizer = _parse(file, most)
        special = tokenizer.num_special_tokens_to_add(count == 2)
    except BaseException as error:  # a panic of the Rust library is a BaseException
        _send(out, REFUSED, str(error)[:200].encode())
        return
    _send(out, DONE, b"%d" % special)
    while (requests := _receive()) is not None:
        for request in _parts(requests, "<Q"):
            try:
                limits = struct.unpack_from(_LIMITS, request)
                texts = [text.decode() for text in _parts(request[struct.calcsize(_LIMITS) :], "<I")]
                rows: list[str] | list[tuple[str, str]] = (
                    texts if count == 1 else list(zip(texts[::2], texts[1::2], strict=True))
                )
                answer = _encode(tokenizer, rows, limits[0] or most, limits[1] or multiple)
            except BaseException as error:
                _send(out, FAILED, type(error).__name__.encode())
            else:
                _send(out, DONE, answer)


def _parse(file: int, most: int) -> Tokenizer:
    """Parse the tokenizer in the file (a descriptor); it truncates to `most` tokens and does not pad.

    Parsing runs in a thread of its own with a higher niceness, since a thread cannot lower its niceness afterwards.
    """
    done: list[Tokenizer | BaseException] = []

    def parse() -> None:
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, max(_PARSING_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
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
    """Split a list of byte strings, each after its length in the `struct` format `size`."""
    at, head = 0, struct.calcsize(size)
    while at < len(whole):
        begin = at + head
        at = begin + struct.unpack_from(size, whole, at)[0]
        yield whole[begin:at]


def _encode(tokenizer: Tokenizer, texts: list[str] | list[tuple[str, str]], most: int, multiple: int) -> bytes:
    tokenizer.enable_truncation(most)
    encodings = tokenizer.encode_batch(texts)
    longest = max((len(one) for one in encodings), default=1)
    length = min(max(-(-longest // multiple), 1) * multiple, max(most, longest))
    columns = (
        _pad([one.ids for one in encodings], length, _padding_id(tokenizer)),
        _pad([one.attention_mask for one in encodings], length, 0),
        _pad([one.type_ids for one in encodings], length, 0),
    )
    return b"".join([struct.pack("<QQ", len(texts), length), *(column.tobytes() for column in columns)])


def _pad(rows: list[list[int]], length: int, padding: int) -> array[int]:
    flat = array("q")
    for row in rows:
        flat.extend(row)
        flat.extend([padding] * (length - len(row)))
    return flat


def _padding_id(tokenizer: Tokenizer) -> int:
    """Return the id of the padding token (`[PAD]` or `<pad>`), otherwise 0: a model that uses the mask ignores it."""
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
