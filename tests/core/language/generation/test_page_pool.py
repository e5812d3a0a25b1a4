"""Pages are found by their content, shared, and taken again, the least recently used first."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.language.generation.page_pool import PagePool, page_keys


def test_keys_depend_on_all_tokens_before() -> None:
    keys = page_keys(range(10), 4)
    assert len(keys) == 2
    assert page_keys([*range(8), 99], 4) == keys
    assert page_keys([1, *range(1, 8)], 4)[1] != keys[1]
    assert page_keys(range(10), 4, keys[:1]) == keys


def test_the_least_recently_used_page_is_taken_first() -> None:
    pool = PagePool(3)
    pages = [pool.take() for _ in range(3)]
    for page, key in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.seal(page, key)
    with pytest.raises(IndexError):
        pool.take()
    pool.release(pages[:2])
    pool.share(pool.find([b"a"]))
    assert pool.find([b"a", b"b", b"c"]) == pages and pool.available == 1
    assert pool.take() == pages[1]
    assert pool.find([b"a", b"b", b"c"]) == pages[:1]


def test_random_use_keeps_the_counts() -> None:
    """Every page is used by exactly the sequences that hold it, and no content is found on a page that lost it."""
    rng, pool = np.random.default_rng(0), PagePool(20)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}
    for number in range(3000):
        if held and rng.random() < 0.45:
            pool.release(held.pop(int(rng.integers(len(held)))))
        else:
            keys = [bytes([number % 7]), bytes([number % 7, int(rng.integers(3))])]
            found = pool.find(keys)
            assert [content[page] for page in found] == keys[: len(found)]
            pool.share(found)
            mine = list(found)
            for key in keys[len(found) :]:
                if not pool.available:
                    break
                page = pool.take()
                assert all(page not in others for others in held)
                content[page] = key
                pool.seal(page, key)
                mine.append(page)
            held.append(mine)
        assert pool.used == len({page for each in held for page in each})
    for each in held:
        pool.release(each)
    assert pool.available == pool.count


def test_texts_of_different_adapters_share_no_pages() -> None:
    keys = [page_keys(range(8), 4, (), adapter) for adapter in range(3)]
    assert len({key for each in keys for key in each}) == 6
    assert page_keys(range(8), 4, keys[1][:1], 1) == keys[1]
