"""Traces of texts: the spans of a request, sent to a collector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.generation.tiny_model import NAME, serving
from tests.server.telemetry.test_tracing import CALLER, TRACE, collector  # noqa: F401 - a fixture

HEADER = {"traceparent": f"00-{TRACE}-{CALLER}-01"}


def value_of(attribute: Any) -> Any:
    kind = attribute.value.WhichOneof("value")
    found = getattr(attribute.value, kind)
    return [each.string_value for each in found.values] if kind == "array_value" else found


def test_the_trace_of_a_request_for_texts(tmp_path: Path, collector: Any) -> None:  # noqa: F811
    address, got = collector
    body = {"model": NAME, "prompt": "One", "n": 2, "max_tokens": 5, "ignore_eos": True}
    with serving(tmp_path / "repository", otlp_endpoint=address, trace_share=0.0) as server:
        for more, headers, status in (({}, HEADER, 200), ({}, {}, 200), ({"prompt": [10**8]}, HEADER, 400)):
            answer = httpx.post(f"{server.url}/v1/completions", json={**body, **more}, headers=headers, timeout=60)
            assert answer.status_code == status
            if not headers:
                usage = answer.json()["usage"]
    spans = [span for sent in got for each in sent.resource_spans for s in each.scope_spans for span in s.spans]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    good, bad = sorted((span for span in spans if span.name == f"generate {NAME}"), key=lambda span: span.status.code)
    assert bad.status.message.startswith("prompt: expected tokens from 0") and good.parent_span_id.hex() == CALLER
    texts = [span for span in spans if span.name == "text"]
    assert len(texts) == 2
    for text in texts:
        assert text.parent_span_id == good.span_id
        found = {each.key: value_of(each) for each in text.attributes}
        assert found["gen_ai.usage.output_tokens"] == 5
        assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert found["gen_ai.response.finish_reasons"] == ["length"]
        first, further = (
            span for name in ("first token", "further tokens") for span in spans
            if span.name == name and span.parent_span_id == text.span_id
        )  # fmt: skip
        times = (text.start_time_unix_nano, first.end_time_unix_nano, further.end_time_unix_nano)
        assert found["lathe.time_to_first_token"] == pytest.approx((times[1] - times[0]) / 1e9, abs=1e-5)
        assert times[0] < times[1] <= times[2] == text.end_time_unix_nano
