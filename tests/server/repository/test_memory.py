"""The memory budget of models: refusals with the numbers before anything changes, and release with the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lathe.server.backends.base import MemoryNeeds
from lathe.server.errors import OutOfMemory, Unprocessable
from lathe.server.repository.live_models import LiveModel
from lathe.server.repository.memory_budget import MemoryBudget, MemoryMetrics
from lathe.server.repository.model_config import ModelConfig, QueuePolicy, ResponseCaching
from lathe.server.repository.registry import Registry
from tests.server.repository.world import run, toy, world

MIB = 1 << 20


def owner(**config: object) -> LiveModel:
    return LiveModel("m", Registry(), config=ModelConfig.model_validate(config))


def test_a_claim_counts_weights_batches_queue_and_cache() -> None:
    budget = MemoryBudget(1000 * MIB, queue_bytes=50 * MIB, workers=2)
    claim = budget.claim(MemoryNeeds(100 * MIB, 10 * MIB), owner())
    assert claim.nbytes == budget.claimed_bytes == 160 * MIB
    assert str(claim) == "160 MiB of memory (weights 100 MiB, batches 10 MiB, queue 50 MiB)"
    claim.release()
    claim.release()
    assert budget.claimed_bytes == 0


def test_a_claim_follows_the_configuration() -> None:
    budget = MemoryBudget(200 * MIB, queue_bytes=50 * MIB, workers=2)
    model = owner()
    budget.claim(MemoryNeeds(100 * MIB, 10 * MIB), model)
    model.config = ModelConfig(
        instances=3, queue=QueuePolicy(max_queue_bytes=7 * MIB), response_cache=ResponseCaching(max_bytes=3 * MIB)
    )
    assert (
        budget.claimed_bytes == (100 + 2 * 10 + 7 + 3) * MIB
    )  # at most as many batches run at once as there are workers


def test_a_claim_beyond_the_budget_is_refused_with_the_numbers() -> None:
    budget = MemoryBudget(300 * MIB)
    first = budget.claim(MemoryNeeds(200 * MIB, 0), owner())
    with pytest.raises(OutOfMemory, match=r"200 MiB of memory .* of the 300 MiB for all models 200 MiB are"):
        budget.claim(MemoryNeeds(200 * MIB, 0), owner())
    assert budget.claimed_bytes == 200 * MIB
    first.release()
    budget.claim(MemoryNeeds(300 * MIB, 0), owner())


def test_the_metrics_show_claims_and_budget() -> None:
    budget = MemoryBudget(300 * MIB)
    budget.claim(MemoryNeeds(5, 0), owner())
    found = {sample.name: sample.value for metric in MemoryMetrics(budget).collect() for sample in metric.samples}
    assert found == {"lathe_memory_claimed_bytes": 5, "lathe_memory_limit_bytes": 300 * MIB}


def test_an_upload_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, memory=(budget := MemoryBudget(100))) as w:
            await w.push(toy(2.0, weights=60))
            loads = len(w.backend.loads)
            with pytest.raises(OutOfMemory) as refused:
                await w.push(toy(3.0, weights=60), promote=True)
            assert refused.value.http_status == 507
            assert (w.live(), w.scale(), w.store.versions("m"), budget.claimed_bytes) == (1, 2.0, [1], 60)
            assert len(w.backend.loads) == loads
            assert w.leftovers() == []

    run(scenario())


def test_memory_is_released_when_a_model_is_unloaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, memory=(budget := MemoryBudget(100))) as w:
            await w.push(toy(2.0, weights=60))
            with pytest.raises(OutOfMemory):
                await w.push(toy(3.0, weights=60), name="other")
            await w.rollout.unload("m")
            assert budget.claimed_bytes == 0
            await w.push(toy(3.0, weights=60), name="other")
            with pytest.raises(OutOfMemory):
                await w.rollout.load("m", {})
            assert w.scale(name="other") == 3.0

    run(scenario())


def test_a_model_that_fails_to_load_claims_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, memory=(budget := MemoryBudget(100))) as w:
            with pytest.raises(Unprocessable):
                await w.push(toy(2.0, weights=60, do="refuse to load"))
            assert budget.claimed_bytes == 0

    run(scenario())


def test_a_model_can_have_a_limit_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, memory=MemoryBudget()) as w:
            await w.push(toy(2.0, weights=60))
            (tmp_path / "m" / "config.toml").write_text("max_memory_bytes = 70\n")
            await w.rollout.load("m", {})
            with pytest.raises(OutOfMemory, match=r"config\.toml allows .* \(max_memory_bytes\)"):
                await w.push(toy(3.0, weights=80), promote=True)
            await w.push(toy(4.0, weights=70), promote=True)
            assert w.scale() == 4.0

    run(scenario())
