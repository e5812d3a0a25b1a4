"""`lathe top` and the dashboard show the server's metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lathe.server.cli.top import parse_metrics, quantile, traffic_table
from lathe.server.telemetry.gpus import READINGS
from tests.server.repository.world import toy
from tests.server.service import service

PROJECT = Path(__file__).parents[3]
ROW = np.ones((1, 4), np.float32)


def cells(now: str, before: str) -> dict[str, list[str]]:
    shown = traffic_table(parse_metrics(now, 2.0), parse_metrics(before, 1.0))
    return {str(column.header).replace("\n", ""): [str(cell) for cell in column.cells] for column in shown.columns}


def test_rates_latencies_and_batches_between_two_scrapes(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0, delay=0.02))
        client.infer("m", {"x": ROW})
        before = client.metrics()
        for _ in range(5):
            client.infer("m", {"x": np.ones((3, 4), np.float32)})
        found = cells(client.metrics(), before)
    assert (found["model"], found["version"]) == (["m"], ["1"])
    assert (found["requests/s"], found["failed/s"]) == (["5"], ["0"])
    assert found["rows/batch"] == ["3.0"]
    assert found["queue"] == ["0"]
    assert 15 < float(found["p50"][0].removesuffix(" ms")) < 1000


def test_a_version_without_requests_has_no_latency(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0))
        client.infer("m", {"x": ROW})
        metrics = client.metrics()
    found = cells(metrics, metrics)
    assert (found["requests/s"], found["p50"], found["rows/batch"]) == (["0"], [""], [""])


@pytest.mark.parametrize(("share", "expected"), [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)])
def test_quantiles_are_interpolated_in_their_bucket(share: float, expected: float) -> None:
    assert quantile({1.0: 10, 2.0: 20, float("inf"): 20}, share) == pytest.approx(expected)


def test_quantiles_beyond_the_last_bound_are_that_bound() -> None:
    assert quantile({1.0: 1, float("inf"): 10}, 0.99) == 1.0
    assert quantile({}, 0.5) is None


def test_the_dashboard_uses_existing_metrics(tmp_path: Path) -> None:
    dashboard = json.loads((PROJECT / "deploy" / "grafana" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\b(?:nv|lathe|process)_\w+", query)}
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0))
        client.infer("m", {"x": ROW})
        exposed = set(re.findall(r"^(\w+)[{ ]", client.metrics(), re.MULTILINE))
    told = {name for name, _, _ in READINGS}  # where there is a GPU
    assert asked - exposed <= {"nv_inference_request_failure", *told}  # no sample before something fails
    assert len(asked) >= 10
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
