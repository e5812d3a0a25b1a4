"""From data to a served version over HTTP: the real server, compiler and training, with images of digits."""

from __future__ import annotations

import io
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.server.jobs.real_server import real_server
from tests.server.server_thread import until

PROJECT = Path(__file__).parents[3]
RECIPE = tomllib.loads((PROJECT / "docs" / "recipes" / "digits-lenet5.toml").read_text())
DIGITS = load_digits()


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        real_server(tmp_path_factory.mktemp("served")) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def upload(http: httpx.Client, name: str, images: Any, labels: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    np.savez(buffer, image=images.astype(np.uint8), label=labels)
    return dict(checked_json(http.post(f"/api/v1/datasets/{name}", content=buffer.getvalue()), 201))


def checked_json(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def run_job(http: httpx.Client, **asked: Any) -> dict[str, Any]:
    """Submit a job and wait for its end."""
    job = checked_json(http.post("/api/v1/jobs", json=asked), 202)
    until(lambda: checked_json(http.get(f"/api/v1/jobs/{job['id']}"))["finished"], 400)
    ended = dict(checked_json(http.get(f"/api/v1/jobs/{job['id']}")))
    assert ended["state"] == "succeeded", ended["error"] + http.get(f"/api/v1/jobs/{job['id']}/logs").text
    return ended


def predicted_digit(http: httpx.Client, image: Any, version: str = "") -> int:
    """The digit that the model recognises."""
    at = f"/versions/{version}" if version else ""
    tensor = {"name": "x", "shape": [1, 8, 8], "datatype": "UINT8", "data": image.astype(int).ravel().tolist()}
    answer = checked_json(http.post(f"/v2/models/digits{at}/infer", json={"inputs": [tensor]}))
    return int(np.argmax(answer["outputs"][0]["data"]))


def lineage(http: httpx.Client, version: int) -> dict[str, Any]:
    return dict(checked_json(http.get(f"/api/v1/models/digits/versions/{version}"))["manifest"]["metadata"]["lineage"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_digits_from_upload_to_a_refused_fine_tuning(http: httpx.Client) -> None:
    data = upload(http, "digits", DIGITS.images, DIGITS.target)
    assert (data["rows"], data["classes"]) == (1797, [str(digit) for digit in range(10)])
    gate = {"min": {"accuracy": 0.98}, "not_worse_than_live": {"metric": "accuracy", "by": 0.005}}
    publish = {"model": "digits", "promote": True, "gate": gate}
    job = run_job(http, kind="train", recipe=RECIPE, dataset="digits", publish=publish)
    assert (job["result"]["version"], job["result"]["moved_alias"]) == (1, True), job["result"]
    right = [predicted_digit(http, DIGITS.images[row]) == DIGITS.target[row] for row in range(20)]
    assert sum(right) >= 19

    first = lineage(http, 1)
    assert (first["job"], first["kind"], first["parent"]) == (job["id"], "train", None)
    assert first["dataset"] == {"name": "digits", "digest": data["digest"]}
    assert first["metrics"] == job["metrics"]["metrics"]
    assert first["recipe"]["optimizer"]["rate"] == 0.01
    assert first["gate"]["passed"] is True

    # A gentle fine-tuning is accepted; a coarse one is refused, stored without an alias, and recorded in the audit log.
    gentle = {"model": {"parent": True}, "optimizer": {"kind": "adam", "rate": 1e-4}, "epochs": 1}
    model = {"name": "digits", "version": "live"}
    tuned = run_job(http, kind="finetune", recipe=gentle, dataset="digits", model=model, publish=publish)
    assert (tuned["result"]["version"], tuned["result"]["moved_alias"]) == (2, True), tuned
    assert lineage(http, 2)["parent"] == {"model": "digits", "version": 1, "digest": tuned["model"]["digest"]}
    assert lineage(http, 2)["gate"]["live"]["metrics"]["accuracy"] == pytest.approx(first["metrics"]["accuracy"])

    rough = {**gentle, "optimizer": {"kind": "adam", "rate": 0.3}}
    worse = run_job(http, kind="finetune", recipe=rough, dataset="digits", model=model, publish=publish)
    assert (worse["result"]["version"], worse["result"]["moved_alias"]) == (3, False)
    state = checked_json(http.get("/api/v1/models/digits"))
    assert (state["aliases"], state["versions"]) == ({"live": 2}, [1, 2, 3])
    assert predicted_digit(http, DIGITS.images[0]) == 0
    refusal = checked_json(http.get("/api/v1/models/digits/audit"))[-1]
    assert refusal["action"] == "publish"
    assert refusal["reason"].startswith("refused by the gate: accuracy: expected at least 0.98, got ")

    # A small model learns from version 1, which its lineage names.
    small = {"model": {"architecture": "mlp", "hidden": [32]}, "optimizer": {"kind": "adam", "rate": 0.01}, "epochs": 8}
    taught = {"kind": "train", "recipe": {**small, "distil": {"teacher": "parent"}}, "dataset": "digits"}
    alone = http.post("/api/v1/jobs", json=taught)
    assert alone.status_code == 400 and "model: expected a version as teacher for a job of kind train" in alone.text
    useless = http.post("/api/v1/jobs", json={**taught, "recipe": small, "model": model})
    assert useless.status_code == 400 and "model: not expected for a job of kind train" in useless.text
    student = run_job(http, **taught, model={"name": "digits", "version": 1}, publish={"model": "student"})
    assert student["metrics"]["metrics"]["accuracy"] > 0.9
    origin = checked_json(http.get("/api/v1/models/student/versions/1"))["manifest"]["metadata"]["lineage"]
    assert (origin["parent"]["model"], origin["parent"]["version"]) == ("digits", 1)

    judged = run_job(http, kind="evaluate", recipe={}, dataset="digits", model=model)
    assert judged["metrics"]["rows"] == 1797
    assert judged["metrics"]["metrics"]["accuracy"] > 0.98
    assert [entry["batch"] for entry in judged["metrics"]["operators"]] == [1, 16, 64]
    assert checked_json(http.delete("/api/v1/datasets/digits"))["digests"] == [data["digest"]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sweep_publishes_its_best_trial(http: httpx.Client) -> None:
    upload(http, "few", DIGITS.images[:400], DIGITS.target[:400])
    recipe = {
        "data": {"validation": 0.2},
        "model": {"architecture": "mlp", "hidden": [32]},
        "optimizer": {"kind": "adam", "rate": 1e-5},
        "epochs": 3,
    }
    space = {"optimizer.rate": {"low": 1e-3, "high": 1e-2, "log": True}}
    asked = {"recipe": recipe, "space": space, "trials": 3, "pruner": "none"}
    job = run_job(http, kind="sweep", recipe=asked, dataset="few", publish={"model": "searched"})
    assert (job["result"]["version"], job["result"]["moved_alias"]) == (1, True)  # the first version goes live
    sweep = job["metrics"]["sweep"]
    assert [trial["state"] for trial in sweep["trials"]] == ["complete"] * 3
    shown = checked_json(http.get("/api/v1/models/searched/versions/1"))["manifest"]["metadata"]["lineage"]
    assert (shown["kind"], shown["recipe"]["optimizer"]["rate"]) == ("sweep", sweep["values"]["optimizer.rate"])
    # the sweep did not try the recipe's own rate, which is outside of its range
    assert 1e-3 <= sweep["values"]["optimizer.rate"] <= 1e-2
