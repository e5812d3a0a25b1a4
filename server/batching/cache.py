"""Answers to requests that were asked before, for models whose owner wants it."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from server.types import Tensors

_ENTRY = 256  # bytes counted for an entry beside its tensors


class ResponseCache:
    """The outputs of one version by its inputs, at most ``max_bytes``; the longest unused go first.

    Whoever turns it on says that equal inputs give equal outputs: a model that draws random numbers must not have one.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._found: OrderedDict[bytes, Tensors] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: bytes) -> Tensors | None:
        """Return the outputs that were put under this key."""
        outputs = self._found.get(key)
        if outputs is not None:
            self._found.move_to_end(key)
        return outputs

    def put(self, key: bytes, outputs: Tensors) -> None:
        """Remember outputs, which nobody changes any more."""
        size = size_of(outputs)
        if key in self._found or size > self.max_bytes:
            return
        self._found[key] = outputs
        self.nbytes += size
        while self.nbytes > self.max_bytes:
            _, dropped = self._found.popitem(last=False)
            self.nbytes -= size_of(dropped)


def copied(outputs: Tensors) -> Tensors:
    """Return copies: outputs may be views into those of a whole batch."""
    return {name: array.copy() for name, array in outputs.items()}


def key_of(inputs: Tensors) -> bytes:
    """Return a digest of names, types, shapes and contents."""
    digest = blake2b(digest_size=16)
    for name, array in sorted(inputs.items()):
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        if array.dtype.kind == "O":
            for item in array.ravel().tolist():
                digest.update(b"%d\0" % len(item))
                digest.update(item)
        else:
            digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.digest()


def size_of(outputs: Tensors) -> int:
    """Return the bytes that an entry with these outputs counts."""
    strings = sum(len(item) for array in outputs.values() if array.dtype.kind == "O" for item in array.ravel().tolist())
    return _ENTRY + strings + sum(array.nbytes for array in outputs.values())
