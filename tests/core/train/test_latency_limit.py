"""Latency limits of searches: predicted times, candidates that are not trained, finals with further seeds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.compiler.time_prediction import Measurement, TimePrediction, Work, fit_prediction, work_of
from lathe.core.errors import UnsupportedError
from lathe.core.train.recipe import sweep_space
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.sweep_space import Latency
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import events, result
from lathe.core.train.run.latency import LatencyLimit
from lathe.core.train.run.search import Search, run_search
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.run.trials import read_record, trial_records
from lathe.core.train.run.work_folder import Sources
from tests.core.train.small_trainings import RECIPE, quadrants

WIDTHS = {"choices": [8, 16, 4096]}


def asked(**changes: Any) -> bytes:
    settings = {
        "recipe": {**RECIPE, "model": {"architecture": "mlp", "hidden": [16, 16]}, "epochs": 2},
        "space": {"model.hidden.0": WIDTHS, "model.hidden.1": WIDTHS},
        "trials": 3,
        "sampler": "evolution",
        "pruner": "none",
        "latency": {"limit_ms": 0.5, "finalists": 2, "seeds": 2},
    }
    return json.dumps({**settings, **changes}).encode()


def test_a_fit_finds_the_factors_of_the_machine() -> None:
    works = [Work(flops, size) for flops, size in [(10**6, 10**5), (10**7, 10**5), (10**6, 10**7), (10**8, 10**6)]]
    found = fit_prediction([Measurement(work, 0.01 + 1e-8 * work.flops + 2e-7 * work.bytes) for work in works])
    assert (found.start, found.per_flop, found.per_byte) == pytest.approx((0.01, 1e-8, 2e-7))
    assert (found.error, found.excess, found.shortfall) == pytest.approx((0, 1, 1), abs=1e-9)
    assert found.ms(Work(5 * 10**6, 10**6)) == pytest.approx(0.01 + 0.05 + 0.2)


def test_a_fit_has_no_negative_factors_and_knows_its_errors() -> None:
    noise = np.tile([0.5, 2.0], 20)
    works = [Work(10**7 * count, 10**6 * (41 - count)) for count in range(1, 41)]
    found = fit_prediction([Measurement(work, 1e-7 * work.flops * n) for work, n in zip(works, noise, strict=True)])
    assert min(found.start, found.per_flop, found.per_byte) == 0
    assert found.error == pytest.approx(1.0, abs=0.2)
    assert (found.shortfall, found.excess) == pytest.approx((0.5, 2.0), rel=0.2)
    with pytest.raises(UnsupportedError, match="at least 4 measured models, got 1"):
        fit_prediction([Measurement(works[0], 1.0)])


def test_the_work_of_a_model_is_that_of_its_products() -> None:
    layers = lathe.nn.Sequential(lathe.nn.Linear(64, 128), lathe.nn.ReLU(), lathe.nn.Linear(128, 10))
    work = work_of(lathe.nn.trace(layers, {"x": "float32[n,64]"}, ["y"]), 32)
    products = 2 * 32 * (64 * 128 + 128 * 10)
    weights = 4 * (64 * 128 + 128 * 10)
    assert products <= work.flops <= 1.1 * products
    assert weights < work.bytes < weights + 4 * 32 * (64 + 4 * 128 + 2 * 10)
    with pytest.raises(UnsupportedError, match="symbols tokens"):
        work_of(lathe.nn.trace(lathe.nn.ReLU(), {"x": "float32[n,tokens]"}, ["y"]), 1)


def test_only_times_that_errors_cannot_explain_are_far_from_the_limit() -> None:
    limit = LatencyLimit(Latency(limit_ms=2.0))
    limit._prediction = TimePrediction(0, 0, 0, error=0.2, excess=1.5, shortfall=0.8)
    assert [limit.is_far_above(ms) for ms in (None, 1.9, 2.9, 3.1)] == [False, False, False, True]
    assert [limit.is_far_below(ms) for ms in (None, 1.5, 1.7, 3.1)] == [False, True, False, False]


def test_fields_without_effect_make_no_new_candidate(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", x=np.zeros((20, 1, 8, 8), np.uint8), y=np.arange(20) % 2)
    model = {"architecture": "convnet", "channels": [4, 8]}
    space = {
        "model.stages": {"choices": [1, 2]},
        "model.channels.1": {"choices": [8, 16]},
        "model.kernels": {"choices": [[3], [3, 5]]},
        "model.block": {"choices": ["plain", "separable"]},
        "batch": {"choices": [16, 8]},
        "preprocess": {"choices": [[], [{"kind": "resize", "height": 1, "width": 1}]]},
    }
    (tmp_path / "recipe.json").write_bytes(asked(recipe={**RECIPE, "model": model}, space=space, latency=None))
    first = {"model.stages": 1, "model.channels.1": 8, "model.kernels": [3], "model.block": "plain", "batch": 16}
    with events.EventLog(tmp_path) as event_log:
        search = Search(tmp_path, Sources(tmp_path / "images.npz"), Resources(threads=1), event_log)
        made = search._new_record(first)
        search._finished_trials.append(made)
        assert (made.number, made.state) == (0, "running")
        same = search._new_record(
            {**first, "model.channels.1": 16, "model.kernels": [3, 5], "model.block": "separable"}
        )
        assert (same.number, same.state, same.error) == (1, "repeated", "the same as trial 0")
        for change in ({"batch": 8}, {"model.stages": 2}, {"model.stages": 2, "model.channels.1": 16}):
            search._finished_trials.append(search._new_record(first | change))
            assert search._finished_trials[-1].state == "running"
        assert len({record.digest for record in search._finished_trials}) == 4
        assert search._candidates is not None
        wrong = [{"kind": "resize", "height": 1, "width": 1}]  # no image is left for the pooling of two stages
        assert search._candidates.build({**first, "model.stages": 2, "preprocess": wrong}) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_trains_no_slow_candidates_and_the_finals_choose(tmp_path: Path) -> None:
    data = quadrants(tmp_path / "data")
    (tmp_path / "recipe.json").write_bytes(asked())
    sources, resources = Sources(data), Resources(threads=2)
    calls = iter(range(10**6))

    def stop() -> bool:  # once, in the finals
        return (tmp_path / "finals").exists() and next(calls) == 1

    assert run_search(tmp_path, sources, resources, stop) is Outcome.STOPPED
    assert run_search(tmp_path, sources, resources, stop) is Outcome.DONE
    tried = list(trial_records(tmp_path))
    states = {(one.values["model.hidden.0"], one.values["model.hidden.1"]): one.state for one in tried}
    assert len(states) == len(tried)
    assert [one.state for one in tried].count("complete") == 3
    assert "complete" not in [state for widths, state in states.items() if widths == (4096, 4096)]
    for one in tried:
        has_trained = bool(list(events.read(tmp_path / "trials" / str(one.number))))
        assert has_trained == (one.state == "complete") and one.predicted_ms is not None
        if one.measured_ms is not None:
            assert (one.state == "skipped") == (one.measured_ms > 0.5)

    metrics = result.read_metrics(tmp_path)
    latency = metrics["sweep"]["latency"]
    assert latency["skipped"] == [one.state for one in tried].count("skipped")
    assert len(latency["calibration"]) == 9 and latency["prediction"]["excess"] >= 1
    assert len(latency["finalists"]) == 2 and all(each["measured_ms"] <= 0.5 for each in latency["finalists"])
    for each in latency["finalists"]:
        records = [read_record(tmp_path / "finals" / f"{each['trial']}-{number}") for number in range(2)]
        assert each["merits"] == [record.merit for record in records if record is not None]
        assert each["mean"] == pytest.approx(statistics.fmean(each["merits"]))
    best = max(latency["finalists"], key=lambda each: (each["mean"], -each["measured_ms"]))
    assert latency["chosen"] == metrics["sweep"]["best"] == best["trial"]
    number = int(np.argmax(best["merits"]))
    winner = tmp_path / "finals" / f"{best['trial']}-{number}"
    assert (tmp_path / "result" / "model.onnx").read_bytes() == (winner / "result" / "model.onnx").read_bytes()
    assert metrics["recipe"]["seed"] == 1 + number
    page = (tmp_path / "result" / "report.html").read_text()
    assert f"<p>trial {best['trial']} has the highest mean merit" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_without_candidates_below_the_limit_says_so(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_bytes(asked(trials=1, latency={"limit_ms": 1e-6}))
    with pytest.raises(RecipeError, match=r"none of .* trials completed: .* exceed the latency limit"):
        run_search(tmp_path, Sources(quadrants(tmp_path / "data")), Resources(threads=1), lambda: False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"latency": {"limit_ms": 0}}, "latency.limit_ms: "),
        ({"latency": {}}, "latency.limit_ms: "),
        ({"latency": {"limit_ms": 1.0, "seeds": 0}}, "latency.seeds: "),
        ({"space": {"quantize": {"choices": [{"weights": "int8"}]}}}, "latency: expected no table `quantize`"),
    ],
)
def test_invalid_limits_are_refused_with_the_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError) as refused:
        sweep_space.from_json(asked(**changes))
    assert says in str(refused.value)
