"""Reports of a training, made from its events and its result."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lathe.core.train.report import page, read_history, search_section, slowest_operators, write, write_tensorboard
from lathe.core.train.run.events import EventLog

MODEL = Path(__file__).resolve().parents[3] / "model_repo" / "digits" / "2" / "model.onnx"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training of two epochs that was killed in the second one, after a checkpoint at step 3, and resumed."""
    events = EventLog(tmp_path)
    events.emit("started", rows={"train": 8}, epochs=2, parameters=1234)
    for step in (1, 2):
        events.emit("step", step=step, epoch=1, loss=3.0 - step, rate=0.1, rows_per_second=100.0, seconds=0.1 * step)
    events.emit("epoch", epoch=1, step=2, loss=1.5, validation={"accuracy": 0.5, "loss": 1.25}, seconds=0.2)
    events.emit("step", step=3, epoch=2, loss=0.75, rate=0.1, rows_per_second=100.0, seconds=0.3)
    events.emit("checkpoint", step=3)
    events.emit("step", step=4, epoch=2, loss=99.0, rate=0.1, rows_per_second=100.0, seconds=0.4)
    events.emit("resumed", step=3, epoch=2)
    events.emit("step", step=4, epoch=2, loss=0.5, rate=0.05, rows_per_second=120.0, seconds=0.5)
    events.emit("epoch", epoch=2, step=4, loss=0.6, validation={"accuracy": 0.75, "loss": 0.8}, seconds=0.5)
    result = tmp_path / "result"
    result.mkdir()
    (result / "model.onnx").write_bytes(MODEL.read_bytes())
    metrics: dict[str, Any] = {"metrics": {"accuracy": 0.875}, "confusion": [[3, 1], [0, 4]]}
    lineage = {"rows": {"train": 8, "test": 8}, "classes": ["<cat>", "dog"], "data": "abc", "seed": 1, "version": "0"}
    (result / "metrics.json").write_text(json.dumps(metrics | lineage))
    (tmp_path / "recipe.json").write_text('{"epochs": 2}')
    return tmp_path


def test_repeated_steps_after_a_resume_count_once(folder: Path) -> None:
    history = read_history(folder)
    assert history.train["loss"] == [(1, 2.0), (2, 1.0), (3, 0.75), (4, 0.5)]
    assert history.validation == {"accuracy": [(2, 0.5), (4, 0.75)], "loss": [(2, 1.25), (4, 0.8)]}
    assert (history.epochs, history.resumed, history.seconds) == ([2, 4], 1, 0.5)


def test_a_page_shows_metrics_curves_confusions_operators_and_graph(folder: Path) -> None:
    text = write(folder, threads=1).read_text()
    assert "0.875" in text and "&lt;cat&gt;" in text and "<cat>" not in text
    titles = re.findall(r"<h2>([^<]+)</h2>", text)
    expected = ["Loss", "accuracy", "Learning rate", "Throughput", "Confusion matrix", "The model", "The recipe"]
    assert [title for title in titles if not title.startswith("Slowest")] == expected
    assert [title.split(", ")[1].split(" (")[0] for title in titles if title.startswith("Slowest")] == [
        "batch 1",
        "batch 16",
        "batch 64",
    ]
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert "http://" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")  # nothing comes from elsewhere
    assert list((folder / "result").iterdir()).__len__() == 3  # nothing is left behind


def test_a_training_without_validation_or_classes_has_a_page(folder: Path) -> None:
    record = json.loads((folder / "result" / "metrics.json").read_text())
    del record["confusion"]
    (folder / "result" / "metrics.json").write_text(json.dumps(record | {"metrics": {"rmse": 0.5}}))
    (folder / "events.jsonl").write_text("")
    assert "rmse" in page(folder)


def test_operators_are_sorted_and_their_shares_add_up() -> None:
    found = slowest_operators(MODEL, batches=(1, 4), threads=1)
    assert [entry["batch"] for entry in found] == [1, 4]
    for entry in found:
        times = [operator["microseconds"] for operator in entry["operators"]]
        assert times == sorted(times, reverse=True) and 0 < len(times) <= 10
        assert sum(operator["share"] for operator in entry["operators"]) <= 1.01


def test_event_files_hold_every_point(folder: Path, tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    write_tensorboard(folder, tmp_path / "board")
    (file,) = (tmp_path / "board").iterdir()
    data, found = file.read_bytes(), {}
    while data:  # records of TFRecord: length, its checksum, the message, its checksum
        size = struct.unpack("<Q", data[:8])[0]
        event = Event.FromString(data[12 : 12 + size])
        found.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
        data = data[16 + size :]
    assert found["train/loss", 4] == 0.5
    assert found["validation/accuracy", 2] == 0.5
    assert len(found) == 3 * 4 + 2 * 2


def test_a_search_is_shown_by_its_trials_the_best_one_first() -> None:
    tried = [("complete", 0.5), ("pruned", 0.75), ("complete", 0.625), ("failed", None)]
    trials = [
        {"trial": number, "state": state, "merit": merit, "values": {"rate": 0.01, "loss": {"kind": "<mse>"}}}
        for number, (state, merit) in enumerate(tried)
    ]
    search = {"trials": trials, "importance": {"rate": 0.875, "loss": 0.125}}
    text = search_section(search, {0: {1: 0.25, 2: 0.5}, 1: {1: 0.75}, 2: {1: 0.5, 2: 0.625}})
    assert re.findall(r"<h2>([^<]+)</h2>", text) == [
        "Best so far",
        "The best trials by epoch",
        "Importance of settings",
        "4 trials",
    ]
    rows = re.findall(r"<tr><td>(\d)</td><td>(\w+)</td><td>([\d.]*)</td>", text)
    expected = [("2", "complete", "0.625"), ("0", "complete", "0.5"), ("1", "pruned", "0.75"), ("3", "failed", "")]
    assert rows == expected
    assert "<tr><td>rate</td><td>88%</td></tr>" in text
    assert "<mse>" not in text and "&lt;mse&gt;" in text
    assert len(ElementTree.fromstring(f"<div>{text}</div>").findall(".//{*}polyline")) == 4
