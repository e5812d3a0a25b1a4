"""Sweeps in processes, as jobs run them: trials, results, early stopping, killing and resuming."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from sklearn.datasets import load_digits

from lathe.core.train.recipe import sweep_space
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.run import events, result
from lathe.core.train.run.evolution import EvolutionSampler, candidate_count
from lathe.core.train.run.search import _new_study, importance
from lathe.core.train.run.trials import trial_records
from tests.core.train.small_trainings import RECIPE, quadrants

SPACE: dict[str, Any] = {"optimizer.rate": {"low": 1e-4, "high": 1e-1, "log": True}, "batch": {"choices": [16, 32]}}


def sweep(**changes: Any) -> bytes:
    return json.dumps({"recipe": dict(RECIPE), "space": SPACE, "trials": 4, **changes}).encode()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadrants(tmp_path_factory.mktemp("data") / "data")


def started(folder: Path, data: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "lathe.core.train.run.sweep_process",
        str(folder),
        "--dataset",
        str(data),
        "--threads",
        "2",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, complaint = process.communicate(timeout=110)
    assert "Traceback" not in complaint, complaint
    return process.returncode, output


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event.values for event in events.read(folder) if event.kind == kind]


def processes_in(folder: Path) -> list[int]:
    """The processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


@pytest.mark.slow
def test_the_best_trial_is_the_result(tmp_path: Path, data: Path) -> None:
    (tmp_path / "recipe.json").write_bytes(sweep(pruner="none", trials=2))
    assert ended(started(tmp_path, data)) == (0, "")
    found = result.read_metrics(tmp_path)
    tried = list(trial_records(tmp_path))
    assert [record.number for record in tried] == [0, 1]
    assert {record.state for record in tried} == {"complete"}
    assert tried[0].values == {"optimizer.rate": 0.02, "batch": 16}  # the recipe as it is
    best = max(tried, key=lambda record: (record.merit, -record.number))
    assert (found["sweep"]["best"], found["sweep"]["values"]) == (best.number, best.values)
    assert found["recipe"]["optimizer"]["rate"] == best.values["optimizer.rate"]
    trial = tmp_path / "trials" / str(best.number)
    assert (tmp_path / "result" / "model.onnx").read_bytes() == (trial / "result" / "model.onnx").read_bytes()
    assert not (trial / "checkpoints").exists()
    assert [event["ended"] for event in told(tmp_path, "trial")] == [1, 2]
    assert told(tmp_path, "done")[0]["metrics"] == found["metrics"]
    page = (tmp_path / "result" / "report.html").read_text()
    assert "<h2>2 trials</h2>" in page and "<h2>Loss</h2>" in page  # the search, then its best trial
    for record in tried:
        seen = told(tmp_path / "trials" / str(record.number), "epoch")
        assert record.merits == {event["epoch"]: event["validation"]["accuracy"] for event in seen}


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_importance_of_fields_is_reported_if_trials_suffice() -> None:
    def study(merit: Any, trials: int) -> optuna.Study:
        found = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
        found.optimize(lambda trial: merit(trial.suggest_float("a", 0, 1), trial.suggest_float("b", 0, 1)), trials)
        return found

    decided = importance(study(lambda a, b: a + 0.01 * b, 20))
    assert decided["a"] > 0.8 and sum(decided.values()) == pytest.approx(1)
    assert importance(study(lambda a, b: a, 3)) == {}  # too few trials
    assert importance(study(lambda a, b: 1.0, 20)) == {}  # all merits are equal


@pytest.mark.slow
def test_evolution_changes_one_field_of_a_good_new_trial() -> None:
    space = {
        "model.channels.0": optuna.distributions.IntDistribution(1, 64),
        "optimizer.rate": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
        "batch": optuna.distributions.CategoricalDistribution(["16", "32"]),
    }
    study = optuna.create_study(direction="maximize", sampler=EvolutionSampler(space, trials=40, seed=0))
    seen: list[dict[str, Any]] = []
    for _ in range(40):
        trial = study.ask(space)
        if len(seen) >= 8:  # a fifth of the trials are the population
            distances = [sum(one[path] != trial.params[path] for path in space) for one in seen[-8:]]
            assert 1 in distances  # of the parent; another one may be equal
        seen.append(dict(trial.params))
        study.tell(trial, trial.params["model.channels.0"])
    drawn, bred = ([one["model.channels.0"] for one in part] for part in (seen[:8], seen[-8:]))
    assert np.mean(bred) > np.mean(drawn)


def test_evolution_repeats_no_candidate_until_the_space_is_exhausted() -> None:
    space = {
        "model.channels.0": optuna.distributions.IntDistribution(1, 5),
        "model.block": optuna.distributions.CategoricalDistribution(['"plain"', '"inverted"', '"inverted"']),
        "batch": optuna.distributions.CategoricalDistribution(["16"]),
    }
    assert candidate_count(space) == 10
    study = optuna.create_study(direction="maximize", sampler=EvolutionSampler(space, trials=10, seed=0))
    running = study.ask(space)  # a trial that has not ended counts, too
    seen = [running.params]
    for number in range(9):
        trial = study.ask(space)
        seen.append(trial.params)
        failed = number % 3 == 2
        study.tell(trial, *[None, optuna.trial.TrialState.FAIL] if failed else [trial.params["model.channels.0"]])
    assert len({json.dumps(each, sort_keys=True) for each in seen}) == 10
    assert study.ask(space).params in seen


@pytest.mark.slow
def test_a_search_by_evolution_ends_with_its_candidates(tmp_path: Path, data: Path) -> None:
    space = {"batch": {"choices": [16, 32]}}
    (tmp_path / "recipe.json").write_bytes(sweep(sampler="evolution", space=space, pruner="none", trials=9))
    assert ended(started(tmp_path, data)) == (0, "")
    assert sorted(record.values["batch"] for record in trial_records(tmp_path)) == [16, 32]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tpe", optuna.samplers.TPESampler),
        ("random", optuna.samplers.RandomSampler),
        ("evolution", EvolutionSampler),
    ],
)
def test_a_sweep_names_its_sampler(tmp_path: Path, name: str, kind: type[Any]) -> None:
    assert isinstance(_new_study(sweep_space.from_json(sweep(sampler=name)), tmp_path).sampler, kind)


@pytest.mark.slow
def test_a_killed_sweep_resumes_with_its_trials(tmp_path: Path, data: Path) -> None:
    recipe = {**RECIPE, "epochs": 40}
    (tmp_path / "recipe.json").write_bytes(sweep(recipe=recipe, trials=5, pruner="none"))
    process = started(tmp_path, data)
    until(lambda: len(told(tmp_path, "trial")) >= 2 and len(processes_in(tmp_path / "trials")) == 2)
    process.kill()
    process.communicate()
    until(lambda: not processes_in(tmp_path))  # nothing is orphaned
    before = {record.number: record for record in trial_records(tmp_path)}
    assert sum(record.state == "complete" for record in before.values()) >= 2

    assert ended(started(tmp_path, data)) == (0, "")
    after = list(trial_records(tmp_path))
    assert [record.number for record in after] == [0, 1, 2, 3, 4]
    for record in after:
        if record.number in before:
            assert record.values == before[record.number].values
            assert before[record.number].state == "running" or record == before[record.number]
    assert len(told(tmp_path, "trial")) == 5


@pytest.mark.slow
def test_trials_of_a_stopped_sweep_write_checkpoints(tmp_path: Path, data: Path) -> None:
    (tmp_path / "recipe.json").write_bytes(sweep(recipe={**RECIPE, "epochs": 3000}, trials=2, pruner="none"))
    process = started(tmp_path, data)
    until(lambda: all(told(tmp_path / "trials" / str(number), "epoch") for number in (0, 1)))
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (75, "")
    assert not processes_in(tmp_path)
    assert all(list((tmp_path / "trials" / str(number) / "checkpoints").iterdir()) for number in (0, 1))
    assert [record.state for record in trial_records(tmp_path)] == ["running", "running"]


@pytest.mark.slow
def test_a_sweep_without_a_finished_trial_gives_the_reason(tmp_path: Path, data: Path) -> None:
    recipe = {**RECIPE, "optimizer": {"kind": "sgd", "rate": 1e30}, "schedule": None}
    asked = sweep(recipe=recipe, space={"batch": {"choices": [16, 32]}}, trials=2)
    (tmp_path / "recipe.json").write_bytes(asked)
    status, output = ended(started(tmp_path, data))
    assert (status, "none of 2 trials completed: the loss is" in json.loads(output)["error"]) == (2, True)
    assert [record.state for record in trial_records(tmp_path)] == ["failed", "failed"]
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"space": {}}, "space: "),
        (
            {"space": {"optimizer.speed": {"low": 1, "high": 2}}},
            "'optimizer.speed' = 1: optimizer.speed: there is no such key",
        ),
        ({"space": {"optimizer.rate": {"low": -1.0, "high": 1.0}}}, "'optimizer.rate' = -1.0"),
        ({"space": {"optimizer.rate": {"low": 0.0, "high": 1.0, "log": True}}}, "expected `low` above 0"),
        ({"space": {"optimizer.rate": {"low": 2.0, "high": 1.0}}}, "expected `low` below `high`"),
        ({"space": {"batch": {"choices": [16, "many"]}}}, "'batch' = \"many\""),
        ({"space": {"model.hidden.7": {"choices": [1]}}}, "'model.hidden.7'"),
        (
            {"recipe": {**RECIPE, "data": {}}},
            "data.validation: expected a share above 0, since trials are compared on validation rows",
        ),
        ({"recipe": {**RECIPE, "model": {"parent": True}}}, "model: expected an architecture"),
        ({"recipe": {**RECIPE, "epochs": 0}}, "epochs: "),
        ({"trials": 0}, "trials: "),
    ],
)
def test_invalid_sweeps_are_refused_with_the_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError) as refused:
        sweep_space.from_json(sweep(**changes))
    assert says in str(refused.value)


def test_fields_of_lists_and_whole_tables_can_be_varied() -> None:
    asked = sweep_space.from_json(
        sweep(
            space={
                "model.hidden.0": {"low": 8, "high": 64},
                "optimizer": {"choices": [{"kind": "sgd", "rate": 0.1}, RECIPE["optimizer"]]},
                "clip.norm": {"choices": [1.0]},
            }
        )
    )
    trial = asked.trial({"model.hidden.0": 32, "optimizer": {"kind": "sgd", "rate": 0.1}, "clip.norm": 1.0})
    assert (trial.model.hidden, trial.optimizer.kind, trial.clip.norm) == ((32,), "sgd", 1.0)  # type: ignore[union-attr]
    assert asked.default is None  # the recipe does not clip
    plain = {**RECIPE, "model": {"architecture": "mlp"}}
    widths = sweep_space.from_json(sweep(recipe=plain, space={"model.hidden.1": {"low": 8, "high": 64}}))
    assert widths.trial({"model.hidden.1": 9}).model.hidden == (128, 9)  # type: ignore[union-attr]
    assert widths.default == {"model.hidden.1": 64}


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_twenty_trials_on_digits_beat_the_default(tmp_path: Path) -> None:
    """The default is poor on purpose: a learning rate far too low for the number of epochs."""
    digits = load_digits()
    np.savez(tmp_path / "digits.npz", x=digits.images.astype(np.uint8), y=digits.target)
    recipe = {
        "data": {"validation": 0.2},
        "preprocess": [{"kind": "standardize"}],
        "model": {"architecture": "mlp", "hidden": [32]},
        "optimizer": {"kind": "adam", "rate": 1e-4},
        "epochs": 12,
    }
    asked = {
        "optimizer.rate": {"low": 1e-4, "high": 1e-1, "log": True},
        "model.hidden.0": {"low": 16, "high": 128},
        "batch": {"choices": [32, 64, 128]},
    }
    (tmp_path / "recipe.json").write_bytes(sweep(recipe=recipe, space=asked, trials=20))
    assert ended_late(started(tmp_path, tmp_path / "digits.npz")) == 0
    found, tried = result.read_metrics(tmp_path), list(trial_records(tmp_path))
    assert len(tried) == 20
    states = [record.state for record in tried]
    assert states.count("pruned") >= 3 and states.count("complete") >= 3
    assert tried[0].values["optimizer.rate"] == 1e-4
    assert tried[0].merits is not None
    assert found["sweep"]["merit"] > max(tried[0].merits.values()) + 0.02
    assert found["metrics"]["accuracy"] > 0.95
    mattered = found["sweep"]["importance"]
    # The most important field depends on the tried values, and these on which trials end first;
    # test_importance_of_fields_is_reported_if_trials_suffice has fixed trials.
    assert set(mattered) == set(asked) and sum(mattered.values()) == pytest.approx(1)
    lives = [lived(tmp_path / "trials" / str(number)) for number in range(20)]
    shared = sum(
        any(began < other_end and other_start < ended for other_start, other_end in lives[:at] + lives[at + 1 :])
        for at, (began, ended) in enumerate(lives)
    )
    assert shared >= 15  # two run at once; in turns, no span would intersect another one


def lived(trial: Path) -> tuple[int, int]:
    """The time span of a trial's process, from the modification times of its files."""
    return (trial / "recipe.json").stat().st_mtime_ns, (trial / "trial.json").stat().st_mtime_ns


def ended_late(process: subprocess.Popen[str]) -> int:
    _, complaint = process.communicate(timeout=1_780)
    assert "Traceback" not in complaint, complaint
    return process.returncode
