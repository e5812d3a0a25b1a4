"""The API description's recipes for each kind of job agree with what the jobs accept."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from fastapi import FastAPI

from lathe.server.api.management.job_schemas import EXAMPLES, JobAsked
from lathe.server.jobs.kinds import KINDS
from tests.server.jobs.test_examples import BODIES

RECIPE = {"model": {"architecture": "mlp"}, "optimizer": {"kind": "adam"}, "epochs": 1}
TRAIN = {"recipe": RECIPE, "dataset": "digits"}


@pytest.fixture(scope="module")
def described() -> jsonschema_rs.Validator:
    app = FastAPI()

    @app.post("/jobs")
    async def submit(asked: JobAsked) -> None: ...

    schemas = {"components": app.openapi()["components"]}
    return jsonschema_rs.validator_for({**schemas, "$ref": "#/components/schemas/JobAsked"})


def test_every_kind_is_described(described: jsonschema_rs.Validator) -> None:
    bodies = [TRAIN, *(body for body in BODIES if body["recipe"] != {"...": "..."})]
    assert {body.get("kind", "train") for body in bodies} == KINDS.keys()
    for body in (*bodies, *EXAMPLES):
        described.validate(body)


@pytest.mark.parametrize(
    "body",
    [
        {**TRAIN, "recipe": {**RECIPE, "optimizer": {"kind": "adam", "speed": 1}}},
        {**TRAIN, "recipe": {**RECIPE, "epochs": "many"}},
        {**TRAIN, "recipe": {"rows": "all"}},
        {**TRAIN, "kind": "sweep"},
        {**TRAIN, "kind": "sweep", "recipe": {"recipe": RECIPE, "space": {}}},
        {**TRAIN, "kind": "evaluate", "recipe": {"rows": "none"}, "model": {"name": "m"}},
        {**TRAIN, "kind": "finetune", "recipe": {**RECIPE, "model": {"parent": True}}},  # `model` is missing
        {**TRAIN, "kind": "compress", "model": {"name": "m"}},
        {**TRAIN, "kind": "compress", "model": {"name": "m"}, "recipe": {"method": {"kind": "mixed"}}},
        {**TRAIN, "kind": "compress", "recipe": {"method": {"kind": "static"}}},  # `model` is missing
        {**TRAIN, "kind": "dance"},
    ],
)
def test_a_recipe_that_no_kind_accepts_is_described_by_none(described: jsonschema_rs.Validator, body: Any) -> None:
    assert not described.is_valid(body)
