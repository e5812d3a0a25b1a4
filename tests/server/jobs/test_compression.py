"""Jobs of kind `compress` over HTTP: the real server, the bundled digits, and scikit-learn's images of digits."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime as ort
import pytest
from sklearn.datasets import load_digits

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.client import Client
from tests.core.small_models import model as small_model
from tests.server.cli.running import run_lathe
from tests.server.jobs.real_server import real_server
from tests.server.repository.test_children import children_of, processes
from tests.server.server_thread import until

PROJECT = Path(__file__).parents[3]
DIGITS = load_digits()
STATIC = {"method": {"kind": "static"}}
PASSED = {
    "min": {"accuracy": 0.95},
    "max": {"accuracy_drop": 0.01, "size_ratio": 0.5, "output_error": 0.1, "latency_ratio": 100.0},
    "not_worse_than_live": {"metric": "accuracy", "by": 0.01},
}
OUT_OF_REACH = {"max": {"size_ratio": 0.01}}

pytestmark = pytest.mark.timeout(1800)
PATIENCE = 900  # seconds: jobs have nice 19, and may wait until other tests have ended


def archive(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def repository(folder: Path) -> Path:
    """A folder with both versions of the bundled digits."""
    shutil.copytree(PROJECT / "model_repo" / "digits", folder / "digits")
    return folder


def upload_data(http: httpx.Client) -> None:
    """The datasets `labelled` (one column has another name than the input), `images`, `narrow` and `columns`."""
    images = DIGITS.images.astype(np.uint8)
    datasets = {
        "labelled": archive(x=images, y=DIGITS.target),
        "images": archive(image=DIGITS.images[:200, None].astype(np.float32)),
        "narrow": archive(image=images[:, :7], y=DIGITS.target),
        "columns": archive(left=images, right=images, y=DIGITS.target),
        "many": archive(x=images, y=DIGITS.target + 1),
        "points": archive(x=np.zeros((40, 4), np.float32), y=np.zeros(40, np.int64)),
    }
    for name, content in datasets.items():
        checked(http.post(f"/api/v1/datasets/{name}", content=content), 201)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = repository(tmp_path_factory.mktemp("served"))
    with real_server(root) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        until(lambda: client.get("/v2/models/digits/ready").status_code == 200)
        upload_data(client)
        yield client


def checked(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def order(**more: Any) -> dict[str, Any]:
    return {"kind": "compress", "dataset": "labelled", "model": {"name": "digits"}, "recipe": STATIC, **more}


def submitted(http: httpx.Client, **more: Any) -> str:
    return str(checked(http.post("/api/v1/jobs", json=order(**more)), 202)["id"])


def ended(http: httpx.Client, job: str) -> dict[str, Any]:
    until(lambda: checked(http.get(f"/api/v1/jobs/{job}"))["finished"], PATIENCE)
    return dict(checked(http.get(f"/api/v1/jobs/{job}")))


def state_of(http: httpx.Client) -> tuple[dict[str, int], list[int]]:
    state = checked(http.get("/api/v1/models/digits"))
    return state["aliases"], state["versions"]


def right_answers(http: httpx.Client, version: str = "") -> float:
    """The share of images that the served model classifies correctly."""
    image = {"name": "image", "shape": [1797, 1, 8, 8], "datatype": "FP32", "data": DIGITS.images.ravel().tolist()}
    answer = checked(http.post(f"/v2/models/digits{version}/infer", json={"inputs": [image]}))
    found = np.reshape(answer["outputs"][0]["data"], (1797, 10)).argmax(axis=1)
    return float((found == DIGITS.target).mean())


@pytest.mark.slow
def test_a_version_goes_live_only_through_its_gate_and_a_rollback_brings_the_source_back(http: httpx.Client) -> None:
    before, versions = state_of(http)
    publish = {"model": "digits", "promote": True}
    discarded = {**OUT_OF_REACH, "refused": "discard"}
    job = ended(http, submitted(http, publish={**publish, "gate": discarded}))
    assert (job["state"], job["result"]["version"], job["result"]["moved_alias"]) == ("succeeded", None, False)
    assert job["result"]["decision"]["checks"][0]["text"].startswith("size_ratio: expected at most 0.01, got 0.3")
    assert state_of(http) == (before, versions)

    job = ended(http, submitted(http, publish={**publish, "gate": OUT_OF_REACH}))
    kept = job["result"]["version"]
    assert (kept, job["result"]["moved_alias"]) == (versions[-1] + 1, False)
    assert state_of(http) == (before, [*versions, kept])
    assert "refused by the gate: size_ratio" in checked(http.get("/api/v1/models/digits/audit"))[-1]["reason"]

    job = ended(http, submitted(http, publish={**publish, "gate": PASSED}))
    made = job["result"]["version"]
    assert (made, job["result"]["moved_alias"]) == (kept + 1, True), job
    assert state_of(http) == ({"live": made}, [*versions, kept, made])
    assert right_answers(http) > 0.98
    assert right_answers(http) == pytest.approx(right_answers(http, f"/versions/{before['live']}"), abs=0.01)

    checked(http.post("/api/v1/models/digits/rollback"))
    assert state_of(http)[0] == before


@pytest.mark.slow
def test_the_version_has_its_lineage_figures_and_report(http: httpx.Client, tmp_path: Path) -> None:
    method = {"kind": "static", "calibration": "mse", "sensitivity": True}
    recipe = {"method": method, "rows": 100, "data": {"held_out": 0.5}}
    model = {"name": "digits", "version": 2}
    job = ended(http, submitted(http, recipe=recipe, model=model, publish={"model": "digits"}))
    path = f"/api/v1/models/digits/versions/{job['result']['version']}"
    manifest = checked(http.get(path))["manifest"]
    lineage = manifest["metadata"]["lineage"]
    assert (lineage["kind"], lineage["job"], lineage["dataset"]["name"]) == ("compress", job["id"], "labelled")
    source = checked(http.get("/api/v1/models/digits/versions/2"))
    assert lineage["parent"] == {"model": "digits", "version": 2, "digest": source["digest"]}
    assert lineage["recipe"]["method"].items() >= method.items()
    assert lineage["rows"] == {"calibration": 100, "test": 898, "timed": 1}
    sizes = [lineage["figures"][which]["bytes"] for which in ("source", "result")]
    stored = [each["files"]["model.onnx"]["size"] for each in (source["manifest"], manifest)]
    assert sizes == stored
    assert lineage["metrics"]["size_ratio"] == pytest.approx(stored[1] / stored[0])

    content = http.get(f"/api/v1/jobs/{job['id']}/model").content
    session = ort.InferenceSession(content)
    scores = session.run(None, {"image": DIGITS.images[:, None].astype(np.float32)})[0]
    assert (scores.argmax(axis=1) == DIGITS.target).mean() == pytest.approx(lineage["metrics"]["accuracy"], abs=0.01)

    layers = job["metrics"]["layers"]
    assert [layer["name"] for layer in layers] == ["c1", "c2", "d1", "logits"]
    assert {(layer["inputs_type"], layer["weights_type"]) for layer in layers} == {("uint8", "int8")}
    assert all(0 < layer["error_alone"] < 0.05 and 0 < layer["error"] < 0.05 for layer in layers)
    report = http.get(f"/api/v1/jobs/{job['id']}/report").text
    assert all(text in report for text in ("Compression report", "accuracy_drop", "<td>c2</td>", "mse"))
    log = http.get(f"/api/v1/jobs/{job['id']}/logs").text
    assert all(stage in log for stage in ("calibrating: 0 of ", "comparing: 0 of ", "timing: 0 of "))
    shown = run_lathe("versions", "digits", "--url", str(http.base_url))
    assert "compress, from digits 2" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"kind": "mixed", "budget": 0.05},
        {"kind": "weight-only", "weights": "gptq", "bits": 4},
        {"kind": "weight-only", "weights": "nearest"},
    ],
)
def test_every_method_runs_without_labels(http: httpx.Client, method: dict[str, Any]) -> None:
    job = ended(http, submitted(http, dataset="images", recipe={"method": method}))
    assert (job["state"], job["error"]) == ("succeeded", "")
    metrics = job["metrics"]["metrics"]
    assert metrics.keys() == {"output_error", "size_ratio", "latency_ratio"}
    assert 0 <= metrics["output_error"] < 0.1 and 0.2 < metrics["size_ratio"] < 1
    assert job["result"] is None  # without `publish` it stays with the job


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("change", "status", "complaint"),
    [
        ({"dataset": "none"}, 404, "none"),
        ({"dataset": None}, 400, "dataset: expected a text, got None"),
        ({"dataset": "narrow"}, 422, "rows of input 'image' are uint8[7,8], but the model takes float32[1,8,8]"),
        ({"dataset": "columns"}, 422, "inputs are ['left', 'right'], but the model takes ['image']"),
        ({"dataset": "many"}, 422, "has 11 classes, but the model's output float32[batch,10] has 10"),
        ({"dataset": "images", "recipe": {**STATIC, "data": {"target": "label"}}}, 422, "label"),
        ({"model": None}, 400, "model: expected a version to start from for a job of kind compress"),
        ({"model": {"name": "none"}}, 404, "'none'"),
        ({"model": {"name": "digits", "version": 99}}, 404, "99"),
        ({"model": {"name": "digits", "version": "champion"}}, 404, "'champion'"),
        ({"recipe": {}}, 422, "recipe: method: is missing"),
        (
            {"recipe": {"method": {}}},
            422,
            "method.kind: is missing, expected one of 'static', 'mixed', 'dynamic', 'weight-only', 'channels', 'zeros'",
        ),
        ({"recipe": {"method": {"kind": "statik"}}}, 422, "did you mean 'static'?"),
        ({"recipe": {"method": {"kind": "mixed"}}}, 422, "method.budget: is missing"),
        (
            {"recipe": {"method": {"kind": "static", "percentile": 5}}},
            422,
            "recipe: method.percentile: expected more than 50, got 5",
        ),
        (
            {"recipe": {"method": {"kind": "weight-only", "bits": 3}}},
            422,
            "recipe: method.bits: expected 2, 4 or 8, got 3",
        ),
        (
            {"recipe": {"method": {"kind": "weight-only", "weights": "gptq", "rounding": "ceil"}}},
            422,
            "rounding: expected nearest with gptq, got 'ceil'",
        ),
        ({"recipe": {**STATIC, "rows": 0}}, 422, "recipe: rows: expected at least 1, got 0"),
        (
            {"recipe": {"method": {"kind": "static", "skip": ["c9"]}}},
            422,
            "skip: expected names of nodes, got c9",
        ),
        (
            {"model": {"name": "sums"}, "dataset": "points"},
            422,
            "expected a Conv, MatMul or Gemm of float32 with constant weights, got none",
        ),
        (
            {"dataset": "images", "publish": {"model": "digits", "gate": {"max": {"accuracy_drop": 0.01}}}},
            422,
            "publish.gate.max.accuracy_drop: expected a metric that the job measures on these data (output_error, size",
        ),
        (
            {"publish": {"model": "digits", "gate": {"max": {"size": 0.5}}}},
            422,
            "publish.gate.max.size: expected a metric that the job measures",
        ),
        (
            {"publish": {"model": "digits", "gate": {"not_worse_than_live": {"metric": "size_ratio"}}}},
            422,
            "publish.gate.not_worse_than_live.metric: expected a metric that the job measures",
        ),
        (
            {
                "recipe": {**STATIC, "data": {"held_out": 0.0}},
                "publish": {"model": "digits", "gate": {"min": {"accuracy": 0.9}}},
            },
            422,
            "publish.gate.min.accuracy: expected a metric that the job measures on these data (size_ratio, latency",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_job_is_kept(
    http: httpx.Client, change: dict[str, Any], status: int, complaint: str
) -> None:
    if change.get("model", {}) == {"name": "sums"}:
        content = small_model("float[n,4] x => float[n,4] y", "y = Add(x, one)", "float[4] one = {1, 1, 1, 1}")
        http.post("/api/v1/models/sums/versions", content=content)
    before = (state_of(http), [job["id"] for job in checked(http.get("/api/v1/jobs"))])
    answer = http.post("/api/v1/jobs", json=order(**change))
    assert answer.status_code == status, answer.text
    assert complaint in answer.json()["error"]
    assert before == (state_of(http), [job["id"] for job in checked(http.get("/api/v1/jobs"))])


def test_a_refused_job_leaves_no_files(http: httpx.Client, tmp_path: Path) -> None:
    """Also with an idempotency key: the same request may be corrected and sent again."""
    bad = http.post("/api/v1/jobs", json=order(dataset="narrow"), headers={"idempotency-key": "again"})
    assert bad.status_code == 422
    good = http.post("/api/v1/jobs", json=order(), headers={"idempotency-key": "again"})
    assert good.status_code == 202 and good.json()["replayed"] is False
    same = http.post("/api/v1/jobs", json=order(), headers={"idempotency-key": "again"})
    assert (same.json()["id"], same.json()["replayed"]) == (good.json()["id"], True)
    checked(http.post(f"/api/v1/jobs/{good.json()['id']}/cancel"), 202)
    assert ended(http, good.json()["id"])["state"] == "cancelled"


@pytest.mark.slow
def test_a_deadline_ends_a_compression(http: httpx.Client) -> None:
    job = ended(http, submitted(http, limits={"seconds": 0.2}, publish={"model": "digits", "promote": True}))
    assert (job["state"], job["error"]) == ("failed", "the job ran longer than its limit of seconds")
    assert job["result"] is None


@pytest.mark.slow
def test_the_command_line_compresses_a_served_model(http: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "digits.npz").write_bytes(archive(x=DIGITS.images.astype(np.uint8), y=DIGITS.target))
    url, data = ("--url", str(http.base_url)), ("--data", str(tmp_path / "digits.npz"))
    before, versions = state_of(http)
    shown = run_lathe("compress", "digits", *data, "--promote", "--max-size", "1%", *url)
    assert "calibrating" in shown and "refused: size_ratio: expected at most 0.01" in shown
    assert state_of(http) == (before, [*versions, versions[-1] + 1])
    shown = run_lathe(
        "compress", "digits", "--dataset", "labelled", "--promote", "--max-accuracy-drop", "1%", "--max-size", "60%",
        "--weights", "awq", *url,
    )  # fmt: skip
    assert "live" in shown and "size_ratio" in shown
    assert state_of(http)[0] == {"live": versions[-1] + 2}
    run_lathe("rollback", "digits", *url)
    assert state_of(http)[0] == before
    submitted_only = run_lathe("compress", "digits:2", "--dataset", "labelled", "--no-wait", *url)
    job = submitted_only.split()[1]
    assert f"lathe jobs watch {job}" in submitted_only
    assert ended(http, job)["model"]["version"] == 2


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "expected either --data with a file or folder to upload, or --dataset with a name"),
        (["--data", "labelled"], "--data: expected a file or folder, got 'labelled'; --dataset names a dataset on the"),
        (["--dataset", "labelled", "--percentile", "5"], "--percentile: expected more than 50, got 5.0"),
        (["--dataset", "labelled", "--max-size", "half"], "--max-size: expected a percentage above 0 such as 1%"),
        (["--dataset", "labelled", "--max-accuracy-drop", "-1%"], "expected a percentage of at least 0 such as 1%"),
        (
            ["--dataset", "labelled", "--max-size", "5%", "--gate", "{}"],
            "--gate: expected either --gate or the options --max-..., got both",
        ),
        (["--dataset", "labelled", "--budget", "1%", "--weights", "awq"], "--budget: expected int8 products, got --we"),
        (["--dataset", "images", "--max-accuracy-drop", "1%"], "--gate: max.accuracy_drop: expected a metric that the"),
        (["--dataset", "narrow"], "but the model takes float32[1,8,8]"),
        (["--dataset", "none"], "none"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(http: httpx.Client, options: list[str], complaint: str) -> None:
    shown = run_lathe("compress", "digits", *options, "--url", str(http.base_url), fails=True)
    assert shown.startswith("error: ") and complaint in shown and shown.count("\n") == 1, shown


def test_a_recipe_file_excludes_the_options_of_methods(http: httpx.Client, tmp_path: Path) -> None:
    file, url = tmp_path / "small.toml", ("--url", str(http.base_url))
    file.write_text('rows = 10\n[method]\nkind = "weight-only"\nbits = 5\n')
    given = ("compress", "digits", "--dataset", "labelled", "--recipe", str(file), *url)
    assert "small.toml: method.bits: expected 2, 4 or 8, got 5" in run_lathe(*given, fails=True)
    assert "--bits: has no effect with --recipe" in run_lathe(*given, "--bits", "4", fails=True)


@dataclass
class Process:
    """A server process over a folder, and its client."""

    root: Path
    server: subprocess.Popen[str]
    client: Client

    def kill(self, victim: str, job: str) -> None:
        """Kill the process of a job, or that of the server, with SIGKILL."""
        if victim == "server":
            self.server.kill()
            self.server.wait()
            until(lambda: children_of(self.root) == [])
            return
        pids = [pid for pid, command in processes().items() if f"{self.root}/.lathe/jobs/{job}" in command]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert pids


@contextmanager
def process(root: Path) -> Iterator[Process]:
    command = [sys.executable, "-m", "tests.server.jobs.real_server", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT) as server:
        assert server.stdout is not None
        with Client(f"http://127.0.0.1:{int(server.stdout.readline())}", timeout=PATIENCE) as client:
            try:
                until(client.ready)
                yield Process(root, server, client)
            finally:
                server.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["job", "server"])
def test_a_compression_that_was_killed_begins_again_and_publishes_once(victim: str, tmp_path: Path) -> None:
    root = repository(tmp_path / "repo")
    method, gate = {"kind": "static", "sensitivity": True}, {"max": {"accuracy_drop": 0.01, "size_ratio": 0.5}}
    with process(root) as first:
        first.client.upload_dataset("labelled", archive(x=DIGITS.images.astype(np.uint8), y=DIGITS.target))
        job = first.client.compress("digits", method, "labelled", gate=gate, promote=True, key="once").id
        until(lambda: (first.client.job(job).progress or {}).get("kind") == "stage")
        first.kill(victim, job)
        if victim == "job":
            ends_well(first.client, job)
    with process(root) as second:
        ends_well(second.client, job)
        again = second.client.compress("digits", method, "labelled", gate=gate, promote=True, key="once")
        assert (again.id, again.replayed) == (job, True)
        assert os.listdir(root / ".lathe" / "jobs" / ".trash") == []
        second.client.rollback("digits")
        assert second.client.model("digits").aliases == {"live": 2}


def ends_well(client: Client, job: str) -> None:
    """Wait for the end of a job that was killed once; it has published version 3."""
    until(lambda: client.job(job).finished, PATIENCE)
    found = client.job(job)
    assert (found.state, found.error, found.attempts) == ("succeeded", "", 2)
    assert found.result is not None and (found.result.version, found.result.moved_alias) == (3, True)
    assert [version.version for version in client.versions("digits")] == [1, 2, 3]


@pytest.mark.slow
def test_only_the_owner_sees_a_compression_and_rights_and_limits_hold(tmp_path: Path) -> None:
    root, now = repository(tmp_path / "repo"), int(time.time())
    usual = [scope for scope in Scope if scope is not Scope.ADMIN]
    ann, of_ann = make_key("ann", usual, ["*"], now, None)
    bob, of_bob = make_key("bob", usual, ["*"], now, None)
    reader, of_reader = make_key("eve", [Scope.TRAIN, Scope.READ], ["*"], now, None)
    blind, of_blind = make_key("sam", usual, ["other"], now, None)
    write_keys(tmp_path / "keys.json", [ann, bob, reader, blind])
    with real_server(root, keys_file=tmp_path / "keys.json", max_jobs=1) as url:
        callers = {
            name: httpx.Client(base_url=url, timeout=PATIENCE, headers={"authorization": f"Bearer {secret}"})
            for name, secret in (("ann", of_ann), ("bob", of_bob), ("eve", of_reader), ("sam", of_blind))
        }
        with closing(callers["ann"]), closing(callers["bob"]), closing(callers["eve"]), closing(callers["sam"]):
            until(lambda: callers["ann"].get("/v2/models/digits/ready").status_code == 200)
            upload_data(callers["ann"])
            publish = {"model": "digits", "promote": True}
            job = submitted(callers["ann"], publish=publish)
            assert callers["bob"].get(f"/api/v1/jobs/{job}").status_code == 404
            assert callers["bob"].post(f"/api/v1/jobs/{job}/cancel").status_code == 404
            assert callers["bob"].get(f"/api/v1/jobs/{job}/model").status_code == 404
            assert checked(callers["bob"].get("/api/v1/jobs")) == []
            assert callers["ann"].post("/api/v1/jobs", json=order()).status_code == 429  # one unfinished job
            assert callers["eve"].post("/api/v1/jobs", json=order(publish=publish)).status_code == 403
            assert callers["sam"].post("/api/v1/jobs", json=order()).status_code == 403
            done = ended(callers["ann"], job)
            assert (done["state"], done["result"]["moved_alias"]) == ("succeeded", True)
            entry = checked(callers["ann"].get("/api/v1/models/digits/audit"))[-1]
            assert (entry["actor"], entry["version"]) == ("ann", 3)
            metrics = callers["ann"].get("/metrics").text
            assert 'lathe_job_seconds_total{kind="compress"}' in metrics
