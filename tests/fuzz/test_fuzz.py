"""Mutated models: each gives a ModelError or a graph that works, within limits of time and memory."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import campaign, corpus, minimise
from tests.fuzz.mutate import mutated, steps


@pytest.mark.slow
def test_mutated_models() -> None:
    findings = campaign.run(cases=2_000, jobs=2)
    assert not findings.bugs, findings
    assert findings.outcomes["refused"] + findings.outcomes["loaded"] + findings.outcomes["ran"] == 2_000
    assert min(findings.outcomes["loaded"], findings.outcomes["ran"]) > 20, findings


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_thousand_mutated_models() -> None:
    findings = campaign.run(cases=50_000, jobs=min(8, os.cpu_count() or 1), seed=int(os.environ.get("FUZZ_SEED", "1")))
    assert not findings.bugs, findings
    assert sum(findings.outcomes.values()) == 50_000


def test_a_seed_always_makes_the_same_case() -> None:
    seeds = list(corpus.structured())
    cases = [mutated(f"7:{index}", seeds) for index in range(30)]
    assert cases == [mutated(f"7:{index}", seeds) for index in range(30)]
    assert len(set(cases)) > 25
    assert [mutated(f"7:{index}", seeds, steps(f"7:{index}")) for index in range(30)] == cases
    assert all(mutated(f"7:{index}", seeds, []) != cases[index] for index in range(5))


def test_every_way_to_fail_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that raise, crash, hang and hoard, in place of the real check."""
    monkeypatch.setattr(campaign, "WORKER", "tests.fuzz.faulty")
    findings = campaign.run(cases=6, jobs=1)
    texts = [bug.text for bug in findings.bugs]
    assert [bug.seed for bug in findings.bugs] == ["0:1", "0:2", "0:3", "0:4"]
    assert texts[0].startswith("KeyError")
    assert texts[1].startswith("MemoryError")
    assert texts[2] == "crashes: SIGSEGV"
    assert texts[3] == "hangs: takes more processor time than a case may"
    assert findings.outcomes == {"bug": 4, "refused": 2}


def test_a_bug_is_minimised() -> None:
    """Only the node that causes the symptom stays."""
    seeds = list(corpus.structured())
    data = max(seeds, key=len)
    small = minimise.reduced(data, lambda each: "bug" if b"LeakyRelu" in each or b"Add" in each else "none")
    assert len(small) < 60
    assert b"LeakyRelu" in small or b"Add" in small
