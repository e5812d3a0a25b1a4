"""Tables in a narrow terminal: nothing is cut off, and ids and times can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from rich.table import Column

from lathe.server.cli.terminal import filled_table, local_time
from lathe.server.client import Client
from tests.server.cli.running import run_lathe
from tests.server.jobs.world import DIGEST, fake_jobs
from tests.server.repository.world import toy
from tests.server.service import Service, service, until

TIME = r"\b20\d\d-\d\d-\d\d(?: \d\d:\d\d:\d\d)?(?![\d-])"
narrow = partial(run_lathe, env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server with two versions, a canary that is running, and a job that has published a version."""
    with (
        service(tmp_path_factory.mktemp("tables") / "repo", make_jobs=fake_jobs) as running,
        running.client() as client,
    ):
        client.upload("a-model-with-a-name", toy(2.0))
        client.upload("a-model-with-a-name", toy(3.0))
        client.start_canary("a-model-with-a-name", 2, weight=0.3)
        client.set_alias("a-model-with-a-name", "staging", 2)
        publish = {"model": "trained-by-a-job", "promote": True}
        job = client.submit_job({"steps": 1, "model": toy(3.0).decode()}, DIGEST, publish=publish).id
        until(lambda: client.job(job).finished is not None)
        yield running


def test_tables_in_80_columns_are_whole(served: Service, tmp_path: Path) -> None:
    where = ("--url", served.url)
    keys = ("--file", str(tmp_path / "keys.json"))
    run_lathe("keys", "add", "a-user-with-a-name", "--scope", "infer", "--scope", "read", "--days", "2", *keys)
    once = ("--rounds", "1", "--interval", "0.05")
    shown = {
        command: narrow(*command.split(), *more)
        for command, more in {
            "models": where,
            "versions a-model-with-a-name": where,
            "audit a-model-with-a-name": where,
            "jobs list": where,
            "datasets list": where,
            "keys list": keys,
            "rollout watch a-model-with-a-name": (*once, *where),
            "top": (*once, *where),
        }.items()
    }
    for command, text in shown.items():
        assert "…" not in text, text
        assert max(map(len, text.splitlines())) <= 80, text
        heads = [cell.strip() for line in text.splitlines() if line.startswith("┃") for cell in line.split("┃")]
        assert {"s/s", "request", "tch"}.isdisjoint(heads), text  # words of a header are whole
        for time in re.findall(r"20\d\d-\S*", text):
            assert re.fullmatch(TIME, time), (command, text)
    with served.client() as client:
        (job,) = client.jobs()
    assert f"│ {job.id} │" in shown["jobs list"] and "succeeded" in shown["jobs list"]


def test_a_job_shows_the_name_of_its_dataset_and_its_version(served: Service) -> None:
    with served.client() as client:
        (job,) = client.jobs()
    shown = narrow("jobs", "show", job.id, "--url", served.url)
    assert re.search(r"^  dataset +digits$", shown, re.MULTILINE), shown
    assert re.search(rf"^  submitted +{TIME}$", shown, re.MULTILINE), shown
    assert DIGEST[:12] not in narrow("jobs", "list", "--url", served.url)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("models", "version 2, 20%"),
        ("versions a-model-with-a-name", "candidate"),
        ("status", "a-model-with-a-name version 2, 20%"),
    ],
)
def test_a_running_canary_is_shown(served: Service, command: str, expected: str) -> None:
    assert expected in run_lathe(*command.split(), "--url", served.url)


def test_the_models_say_that_a_canary_is_running(served: Service) -> None:
    with served.client() as client:
        (model,) = (model for model in client.models() if model.canary)
    assert model.canary is not None
    assert (model.canary.version, model.canary.weight) == (2, 0.2)


def test_the_list_of_changes_is_in_the_same_order_everywhere(served: Service) -> None:
    def changes(*command: str) -> list[str]:
        return re.findall(r"│ (push|canary start|alias staging) +│", run_lathe(*command, "--url", served.url))

    watched = changes("rollout", "watch", "a-model-with-a-name", "--rounds", "1", "--interval", "0.05")
    assert changes("audit", "a-model-with-a-name") == watched == ["push", "push", "canary start", "alias staging"]


def test_columns_without_content_are_left_out() -> None:
    table = filled_table(("a", Column("b"), "c"), [("1", "", "3"), ("4", "", "")])
    assert [str(column.header) for column in table.columns] == ["a", "c"]
    assert [str(column.header) for column in filled_table(("a", "b"), []).columns] == ["a", "b"]


@pytest.mark.parametrize("time", ["2026-01-31T02:00:00.123Z", "2026-01-31T03:00:00+01:00", 1769824800])
def test_times_have_one_form(time: str | float) -> None:
    assert re.fullmatch(r"2026-01-(30|31) \d\d:\d\d:00", local_time(time))
    assert local_time(time) == local_time("2026-01-31T02:00:00Z")
    assert local_time(None) == local_time("") == ""


def test_a_client_reads_models_of_servers_without_canaries(served: Service) -> None:
    """The field is absent in answers of earlier releases."""
    from lathe.server.api.management.schemas import ModelState

    with Client(served.url) as client:
        document = client.models()[0].model_dump(exclude={"canary"})
    assert ModelState.model_validate(document).canary is None
