"""The response cache: answers repeated requests of models that have it switched on."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from lathe.server.types import Tensors

_ENTRY_OVERHEAD = 256  # bytes counted for each entry in addition to its tensors


class ResponseCache:
    """A least-recently-used cache of one version's outputs by the digest of its inputs, of at most `max_bytes`.

    It is correct only for models that give equal outputs for equal inputs: not for those that draw random numbers.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[bytes, Tensors] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Tensors | None:
        """The outputs stored under this key, not copied: they must not be changed. None if there are none."""
        outputs = self._entries.get(key)
        if outputs is not None:
            self._entries.move_to_end(key)
        return outputs

    def put(self, key: bytes, outputs: Tensors) -> None:
        """Store outputs, which must not be changed later; the least recently used ones are dropped to make room.

        No effect for a key that is present, and for outputs larger than the whole cache.
        """
        size = entry_bytes(outputs)
        if key in self._entries or size > self.max_bytes:
            return
        self._entries[key] = outputs
        self.nbytes += size
        while self.nbytes > self.max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.nbytes -= entry_bytes(dropped)


def copy_arrays(outputs: Tensors) -> Tensors:
    """Copies of the arrays: outputs may be views that would keep the outputs of a whole batch alive."""
    return {name: array.copy() for name, array in outputs.items()}


def inputs_digest(inputs: Tensors) -> bytes:
    """A 16-byte BLAKE2b digest of names, dtypes, shapes and contents."""
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


def entry_bytes(outputs: Tensors) -> int:
    """The bytes that an entry with these outputs counts for."""
    strings = sum(len(item) for array in outputs.values() if array.dtype.kind == "O" for item in array.ravel().tolist())
    return _ENTRY_OVERHEAD + strings + sum(array.nbytes for array in outputs.values())
