"""`PagePool`: hands out the pages of the cache, and finds pages that already hold the beginning of a text."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

_KEY_BYTES = 16  # of BLAKE2b: two different beginnings do not meet by chance


def page_keys(
    tokens: Sequence[int], page_size: int, known: Sequence[bytes] = (), adapter: int = 0, source: bytes = b""
) -> list[bytes]:
    """A key for each full page of a text; it depends on all tokens up to the page's end, the adapter and the source.

    `known`: the keys of the first pages, if they were computed before.
    """
    keys, first = list(known), adapter.to_bytes(4) + source
    for start in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        content = np.asarray(tokens[start : start + page_size], np.int64).tobytes()
        keys.append(hashlib.blake2b((keys[-1] if keys else first) + content, digest_size=_KEY_BYTES).digest())
    return keys


class PagePool:
    """Pages 0 to `count - 1`, each with the number of sequences that use it.

    A page that is filled completely can be sealed with the key of its content. A sealed page that no sequence uses
    stays findable until it is taken for another content, the least recently used first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._reusable: OrderedDict[int, None] = OrderedDict()  # sealed and unused, the least recently used first

    @property
    def available(self) -> int:
        """The number of pages that `take` can return."""
        return len(self._free) + len(self._reusable)

    @property
    def used(self) -> int:
        """The number of pages that sequences use."""
        return self.count - self.available

    def take(self) -> int:
        """A page for new content, used by one sequence. IndexError if none is available."""
        if self._free:
            page = self._free.pop()
        else:
            if not self._reusable:
                raise IndexError("no page is available")
            page, _ = self._reusable.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._users[page] = 1
        return page

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the first keys, up to the first key that no page has."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def share(self, pages: Iterable[int]) -> None:
        """Count one more user of sealed pages."""
        for page in pages:
            self._users[page] += 1
            self._reusable.pop(page, None)

    def seal(self, page: int, key: bytes) -> None:
        """Make a full page findable by the key of its content; no effect if another page has this content."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Count one user less of each page of a sequence, in order: of its sealed pages the last is taken first."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._reusable[page] = None
            else:
                self._free.append(page)
