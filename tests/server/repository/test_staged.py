"""What uploads under way take of the disk is bounded, and shared between those who send them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.errors import QuotaExceeded, StorageFull
from server.places import OWN
from server.repository.rollout import PublishOptions
from server.repository.staged import StagingBudget
from server.repository.store import Origin, Outcome
from tests.server.repository.world import chunks, run, toy, world


def test_all_uploads_together_have_a_bound() -> None:
    budget = StagingBudget(10, "models")
    first, second = budget.begin("ann"), budget.begin("bob")
    first.add(6)
    with pytest.raises(StorageFull, match="models: 6 bytes of uploads under way leave less than 5 of the 10 allowed"):
        second.add(5)
    second.add(4)
    first.release()
    first.release()
    second.add(5)
    second.release()
    budget.begin("ann").add(10)


def test_one_client_with_several_uploads_has_half() -> None:
    budget = StagingBudget(10, "models")
    first, second = budget.begin("ann"), budget.begin("ann")
    first.add(3)
    second.add(2)
    with pytest.raises(QuotaExceeded, match="2 of your uploads are under way, expected at most 5 bytes"):
        second.add(1)
    budget.begin("bob").add(2)
    second.release()
    first.add(5)  # now it is the only one
    for claim in (budget.begin(OWN), budget.begin(OWN)):
        with pytest.raises(StorageFull):
            claim.add(1)


def test_what_is_kept_is_not_there_for_uploads() -> None:
    kept = 0
    budget = StagingBudget(10, "datasets", lambda: kept)
    claim = budget.begin("ann")
    claim.add(4)
    kept = 6
    with pytest.raises(StorageFull, match="6 bytes are kept and 4 bytes of uploads"):
        claim.add(1)


def test_model_uploads_at_once_have_a_bound_on_the_disk(tmp_path: Path) -> None:
    """One client sends three, which are more than half of what all may take; another one's finds room."""

    async def scenario() -> None:
        content, go_on, all_sent = toy(2.0) + b" " * (3 << 20), asyncio.Event(), asyncio.Queue[None]()

        async def body() -> AsyncIterator[bytes]:
            async for chunk in chunks(content, 1 << 16):
                yield chunk
            all_sent.put_nowait(None)  # and written, but for less than a block
            await go_on.wait()

        async with world(tmp_path, max_upload=4 << 20, max_staging=13 << 20) as w:

            def upload(number: int, actor: str) -> asyncio.Future[Outcome]:
                options = PublishOptions(origin=Origin(actor))
                return asyncio.ensure_future(w.rollout.publish(f"m{number}", body(), options))

            sent = [upload(0, "ann"), upload(1, "ann")]
            for _ in sent:
                await all_sent.get()
            with pytest.raises(
                QuotaExceeded, match="models: 3 of your uploads are under way, expected at most 6815744"
            ):
                await upload(2, "ann")
            sent.append(upload(3, "bob"))
            await all_sent.get()
            with pytest.raises(StorageFull, match="bytes of uploads under way leave less than"):
                await asyncio.gather(upload(4, "eve"), upload(5, "eva"))
            go_on.set()
            assert [outcome.version for outcome in await asyncio.gather(*sent)] == [1, 1, 1]
            await w.loader.settle()
            await asyncio.gather(*(w.rollout.publish("m", chunks(content), PublishOptions()) for _ in range(4)))

    run(scenario())
