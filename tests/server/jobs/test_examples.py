"""The server accepts the job bodies of the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from lathe.server.api.management.job_schemas import EXAMPLES, JobAsked
from lathe.server.jobs.kinds import KINDS

PROJECT = Path(__file__).parents[3]
PAGE = (PROJECT / "docs" / "gates.md").read_text()
NEW = {"model": {"architecture": "mlp"}, "optimizer": {"kind": "adam"}, "epochs": 1}
BODIES = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]


def test_bodies_of_the_page_about_gates_are_accepted() -> None:
    checked = []
    for body in BODIES:
        asked = JobAsked.model_validate_json(json.dumps(body)).to_request()
        if body["recipe"] != {"...": "..."}:
            KINDS[asked.kind].check(asked.recipe)
            checked.append(asked.kind)
    assert checked == ["finetune", "evaluate", "sweep", "sweep", "compress"]


def test_the_examples_of_the_api_description_are_accepted() -> None:
    for body in EXAMPLES:
        asked = JobAsked.model_validate_json(json.dumps(body)).to_request()
        KINDS[asked.kind].check(asked.recipe)
    assert [body["kind"] for body in EXAMPLES] == ["train", "compress"]


def test_the_job_of_the_page_about_compression_is_accepted() -> None:
    page = (PROJECT / "docs" / "compression.md").read_text()
    (body,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    asked = JobAsked.model_validate_json(body).to_request()
    KINDS[asked.kind].check(asked.recipe)
    assert asked.kind == "compress" and asked.publish is not None and asked.publish.alias == "live"


@pytest.mark.parametrize(
    ("kind", "recipe", "says"),
    [
        ("train", {"model": {"parent": True}, "optimizer": {"kind": "adam"}, "epochs": 1}, "expected an architecture"),
        ("finetune", {"model": {"architecture": "mlp"}, "optimizer": {"kind": "adam"}, "epochs": 1}, "parent = true"),
        ("finetune", {"model": {"parent": True}, "epochs": 1}, "optimizer: "),
        ("evaluate", {"rows": "none"}, "rows: "),
        ("sweep", {"recipe": {}, "space": {}}, "recipe: "),
        (
            "train",
            NEW | {"distil": {"teacher": "teacher.onnx"}},
            "distil.teacher: expected 'parent', the job's `model`",
        ),
        (
            "finetune",
            NEW | {"model": {"parent": True}, "distil": {"teacher": "/etc/teacher.onnx"}},
            "distil.teacher: expected 'parent', the job's `model`",
        ),
        (
            "sweep",
            {"recipe": NEW | {"distil": {"teacher": "parent"}}, "space": {"optimizer.rate": {"choices": [0.1, 0.2]}}},
            "distil: not expected in a search",
        ),
        ("compress", {"method": {"kind": "static", "bits": 4}}, "method.bits: there is no such key"),
    ],
)
def test_recipes_that_do_not_fit_their_kind_are_refused(kind: str, recipe: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as refused:
        KINDS[kind].check(recipe)
    assert says in str(refused.value)


def test_a_gate_is_checked_when_the_job_is_submitted() -> None:
    body = {**BODIES[0], "publish": {"model": "m", "gate": {"min": {"accuracy": "high"}}}}
    with pytest.raises(ValidationError, match=r"publish\.gate\.min\.accuracy"):
        JobAsked.model_validate_json(json.dumps(body))
