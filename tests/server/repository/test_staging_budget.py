"""The disk space of running uploads is bounded, and shared between the clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lathe.server.errors import QuotaExceeded, StorageFull
from lathe.server.fair_slots import SERVER_ITSELF
from lathe.server.repository.rollout import PublishOptions
from lathe.server.repository.staging_budget import StagingBudget
from lathe.server.repository.store import Origin, Outcome
from tests.server.repository.world import chunks, run, toy, world


def test_all_uploads_together_are_bounded() -> None:
    budget = StagingBudget(10, "models")
    first, second = budget.begin("ann"), budget.begin("bob")
    first.add(6)
    with pytest.raises(StorageFull, match="models: 6 bytes of uploads in progress leave less than 5 of the 10 allowed"):
        second.add(5)
    second.add(4)
    first.release()
    first.release()
    second.add(5)
    second.release()
    budget.begin("ann").add(10)


def test_one_client_with_several_uploads_gets_half() -> None:
    budget = StagingBudget(10, "models")
    first, second = budget.begin("ann"), budget.begin("ann")
    first.add(3)
    second.add(2)
    with pytest.raises(QuotaExceeded, match="2 of your uploads are in progress, expected at most 5 bytes"):
        second.add(1)
    budget.begin("bob").add(2)
    second.release()
    first.add(5)  # now it is the only one
    for claim in (budget.begin(SERVER_ITSELF), budget.begin(SERVER_ITSELF)):
        with pytest.raises(StorageFull):
            claim.add(1)


def test_stored_bytes_reduce_the_space_for_uploads() -> None:
    kept = 0
    budget = StagingBudget(10, "datasets", lambda: kept)
    claim = budget.begin("ann")
    claim.add(4)
    kept = 6
    with pytest.raises(StorageFull, match="6 stored bytes and 4 bytes of uploads"):
        claim.add(1)


def test_concurrent_model_uploads_are_bounded_on_the_disk(tmp_path: Path) -> None:
    """One client sends three uploads, more than half of the total limit; another client's upload fits."""

    async def scenario() -> None:
        content, go_on, all_sent = toy(2.0) + b" " * (3 << 20), asyncio.Event(), asyncio.Queue[None]()

        async def body() -> AsyncIterator[bytes]:
            async for chunk in chunks(content, 1 << 16):
                yield chunk
            all_sent.put_nowait(None)  # and written, except for less than a block
            await go_on.wait()

        async with world(tmp_path, max_upload=4 << 20, max_staging=13 << 20) as w:

            def upload(number: int, actor: str) -> asyncio.Future[Outcome]:
                options = PublishOptions(origin=Origin(actor))
                return asyncio.ensure_future(w.rollout.publish(f"m{number}", body(), options))

            sent = [upload(0, "ann"), upload(1, "ann")]
            for _ in sent:
                await all_sent.get()
            with pytest.raises(
                QuotaExceeded, match="models: 3 of your uploads are in progress, expected at most 6815744"
            ):
                await upload(2, "ann")
            sent.append(upload(3, "bob"))
            await all_sent.get()
            with pytest.raises(StorageFull, match="bytes of uploads in progress leave less than"):
                await asyncio.gather(upload(4, "eve"), upload(5, "eva"))
            go_on.set()
            assert [outcome.version for outcome in await asyncio.gather(*sent)] == [1, 1, 1]
            await w.loader.settle()
            await asyncio.gather(*(w.rollout.publish("m", chunks(content), PublishOptions()) for _ in range(4)))

    run(scenario())
