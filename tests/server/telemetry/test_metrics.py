"""The metrics, with the names that dashboards use."""

from __future__ import annotations

import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.server.fakes import FakeModel, doubler
from tests.server.repository.world import toy
from tests.server.running import Running, infer_request, rows, serving
from tests.server.service import service


class Scrape:
    """One scrape; `get` looks up a sample by its exact name and some of its labels."""

    def __init__(self, running: Running) -> None:
        answer = running.ask("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.text = answer.body.decode()
        assert list(text_string_to_metric_families(self.text))  # well-formed

    def get(self, name: str, **labels: str) -> float:
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in self.text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        found = [float(line.split(" ")[-1]) for line in lines if all(label in line for label in wanted)]
        assert len(found) == 1, (name, labels, lines)
        return found[0]


def test_metrics_have_tritons_names_and_lathes_histograms() -> None:
    model = doubler()
    model.function = lambda tensors: (time.sleep(0.02), {"y": tensors["x"]})[1]
    with serving({"doubler": model}) as running:
        for count in (1, 2, 5):
            assert running.ask_raw(infer_request("doubler", rows(count))).status == 200
        model.function = lambda tensors: {}[0]
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 500
        scrape = Scrape(running)
    assert scrape.get("nv_inference_request_success", model="doubler", version="1") == 3
    assert scrape.get("nv_inference_request_failure", model="doubler", reason="internal") == 1
    assert scrape.get("nv_inference_count") == 8
    assert scrape.get("nv_inference_exec_count") == 4
    assert scrape.get("nv_inference_pending_request_count") == 0
    steps = ("queue", "compute_input", "compute_infer", "compute_output")
    took = [scrape.get(f"nv_inference_{step}_duration_us") for step in steps]
    assert took[2] >= 60_000  # three executions of 20 ms
    assert max(took[1], took[3]) < took[2]
    assert scrape.get("nv_inference_request_duration_us") >= sum(took) - 4  # each is rounded down
    assert scrape.get("lathe_batch_rows_count") == 3
    assert scrape.get("lathe_batch_rows_bucket", le="2") == 2
    assert scrape.get("lathe_batch_rows_sum") == 8
    assert scrape.get("lathe_queue_seconds_count") == 4
    assert scrape.get("lathe_batches_released_total", reason="idle") == 4
    assert scrape.get("lathe_model_memory_bytes") == FakeModel.memory_bytes
    assert scrape.get("process_open_fds") > 0


def test_the_load_time_of_a_model_is_measured(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0))
        (line,) = [line for line in client.metrics().splitlines() if line.startswith("nv_model_load_duration_secs{")]
    labels, _, seconds = line.rpartition(" ")
    assert labels.endswith('{model="m",version="1"}')
    assert 0 < float(seconds) < 60


def test_statistics_outlive_a_reload() -> None:
    with serving({"doubler": doubler()}) as running:
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 200
        assert running.ask("POST", "/v2/repository/models/doubler/unload").status == 200
        assert Scrape(running).get("nv_inference_request_success") == 1
        stats = running.ask("GET", "/v2/models/doubler/stats").json["model_stats"][0]
        assert stats["inference_stats"]["success"]["count"] == 1
