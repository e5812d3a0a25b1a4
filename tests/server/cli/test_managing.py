"""Models and versions by the commands that users guess: `lathe models`, `versions`, `promote`, `alias`, `delete` ..."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from lathe.server.client import Client
from tests.server.cli.running import cells, run_lathe
from tests.server.repository.world import toy
from tests.server.service import Service, service, until


class Ask(Protocol):
    """Runs a command against the test's server."""

    def __call__(self, *arguments: str, fails: bool = False) -> str: ...


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Service]:
    """A server with two versions of `digits`, of which the first is live."""
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("digits", toy(2.0))
        client.upload("digits", toy(3.0))
        yield running


@pytest.fixture
def client(served: Service) -> Iterator[Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def ask(served: Service) -> Ask:
    return partial(run_lathe, env={"LATHE_URL": served.url})


def test_models_and_versions_are_listed(client: Client, ask: Ask) -> None:
    assert cells(ask("models")) == [["digits", "1", "1-2", "ready"]]
    client.set_alias("digits", "staging", 2)
    assert cells(ask("models")) == [["digits", "1", "1-2", "staging 2", "ready"]]
    rows = cells(ask("versions", "digits"))
    assert [row[:3] for row in rows] == [["1", "ready", "live"], ["2", "ready", "staging"]]
    assert rows[0][6] == "x FP32[-1, 4] -> y FP32[-1, 4]"
    assert rows[0][4] == "33 bytes" and len(rows[0][5]) == 12
    assert [each["version"] for each in json.loads(ask("versions", "digits", "--json"))] == [1, 2]
    assert json.loads(ask("models", "--json"))[0]["aliases"] == {"live": 1, "staging": 2}


def test_a_version_is_promoted_and_rolled_back(client: Client, ask: Ask) -> None:
    assert ask("promote", "digits", "2") == "digits version 2 is live (before: 1)\n"
    assert client.model("digits").answering == {"live": 2}
    assert ask("promote", "digits", "2") == "digits version 2 is live already: nothing was changed\n"
    assert ask("rollback", "digits", "--to", "2") == "digits version 2 is live already: nothing was changed\n"
    assert ask("rollback", "digits") == "digits version 1 is live\n"
    client.upload("digits", toy(2.0, (-1, 5)))
    assert "--allow-signature-change permits it" in ask("promote", "digits", "3", fails=True)
    assert ask("promote", "digits", "3", "--allow-signature-change") == "digits version 3 is live (before: 1)\n"


def test_aliases_are_set_and_listed(client: Client, ask: Ask) -> None:
    assert ask("alias", "digits", "staging", "2") == "digits staging is version 2\n"
    assert cells(ask("alias", "digits")) == [["live", "1", "1"], ["staging", "2", "2"]]
    assert "expected an alias and a version" in ask("alias", "digits", "staging", fails=True)


def test_a_version_is_deleted_unless_an_alias_names_it(client: Client, ask: Ask) -> None:
    assert "live" in ask("delete", "digits", "1", fails=True)
    assert ask("delete", "digits", "2") == "digits version 2 is deleted\n"
    assert client.model("digits").versions == [1]


def test_a_model_is_unloaded_and_loaded(client: Client, ask: Ask) -> None:
    assert "digits is unloaded" in ask("unload", "digits")
    assert cells(ask("models"))[0][-1] == "not ready: version 1 is unloaded"
    assert ask("load", "digits") == "digits is loaded, version 1 answers\n"
    assert cells(ask("models"))[0][-1] == "ready"


def test_changes_are_listed_with_the_resulting_live_version(client: Client, ask: Ask) -> None:
    ask("promote", "digits", "2")
    rows = cells(ask("audit", "digits"))
    assert [row[1:4] for row in rows] == [["push", "1", "1"], ["push", "2", "1"], ["promote", "2", "2"]]
    ask("alias", "digits", "staging", "1")
    assert [row[1] for row in cells(ask("audit", "digits", "--last", "1"))] == ["alias staging"]
    assert json.loads(ask("audit", "digits", "--json"))[2]["aliases"] == {"live": 2}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "command", ["versions", "audit", "load", "unload", "rollback", "alias", "canary watch", "rollout watch", "infer"]
)
def test_the_error_of_a_misspelt_name_suggests_the_nearest(ask: Ask, command: str) -> None:
    said = ask(*command.split(), "didgits", fails=True)
    assert said == "error: unknown model 'didgits', did you mean 'digits'?\n"


def test_the_error_of_a_name_that_is_near_to_none_lists_all(ask: Ask) -> None:
    assert ask("versions", "elephant", fails=True).endswith("; models: digits\n")


def test_the_list_says_why_a_model_is_not_ready(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0))
        folder = tmp_path / "repo" / "broken" / "1"
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(b"no model")
        until(lambda: any(model.name == "broken" and "failed" in model.reason for model in client.models()))
        shown = run_lathe("models", "--url", running.url)
        assert "not ready: version 1 is failed: no operator 'Bad' in opset 21" in shown
        status = run_lathe("status", "--url", running.url)
        assert "problem: broken does not answer: version 1 is failed" in status
        assert "2, of which 1 answer" in status
