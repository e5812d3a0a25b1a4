"""A language model from uploaded documents to a version, and its fine-tuning with adapters, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.core.train.text.small_language import DECODER, OPTIMIZER, WORDS
from tests.server.jobs.real_server import real_server
from tests.server.jobs.test_from_data_to_version import checked_json, run_job


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lora_job_lowers_the_perplexity_and_passes_its_gate(tmp_path: Path) -> None:
    documents = [{"text": " ".join(WORDS[(row * 7 + place) % len(WORDS)] for place in range(12))} for row in range(20)]
    recipe: dict[str, Any] = {
        "model": DECODER, "optimizer": OPTIMIZER, "epochs": 2, "batch": 8,
        "text": {"length": 16, "tokenizer": "characters"},
    }  # fmt: skip
    with real_server(tmp_path) as url, httpx.Client(base_url=url, timeout=60) as http:
        lines = "\n".join(map(json.dumps, documents)).encode()
        data = checked_json(http.post("/api/v1/datasets/texts", content=lines), 201)
        assert (data["rows"], data["description"]["format"]) == (20, "jsonl")
        publish = {"model": "writer", "promote": True, "gate": {"max": {"perplexity": 30.0}}}
        first = run_job(http, kind="train", recipe=recipe, dataset="texts", publish=publish)
        assert (first["result"]["version"], first["result"]["moved_alias"]) == (1, True), first["result"]

        tuning = {
            **recipe,
            "model": {"parent": True},
            "text": {"length": 16},
            "lora": {"rank": 4, "layers": ["*_proj"]},
        }
        gate = {"not_worse_than_live": {"metric": "perplexity", "by": -0.01}}
        model = {"name": "writer", "version": "live"}
        publish = {"model": "writer", "promote": True, "gate": gate}
        second = run_job(http, kind="finetune", recipe=tuning, dataset="texts", model=model, publish=publish)
        assert (second["result"]["version"], second["result"]["moved_alias"]) == (2, True), second["result"]
        assert second["metrics"]["metrics"]["perplexity"] < first["metrics"]["metrics"]["perplexity"]
        manifest = checked_json(http.get("/api/v1/models/writer/versions/2"))["manifest"]
        live = manifest["metadata"]["lineage"]["gate"]["live"]["metrics"]["perplexity"]
        assert live == pytest.approx(first["metrics"]["metrics"]["perplexity"], rel=1e-4)
