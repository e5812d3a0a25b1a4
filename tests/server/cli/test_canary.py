"""`lathe canary` and `lathe rollout`: what a canary compares, what ends it, and how that is shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lathe.server.api.management.canary_schemas import CanaryState
from lathe.server.api.management.schemas import AuditEntry
from lathe.server.canary.guard import SLACK
from lathe.server.cli.canary import share_parser
from lathe.server.cli.canary_view import canary_view, outcome, progress_line
from lathe.server.cli.rollout import fetch_rollout, rollout_view
from lathe.server.cli.top import parse_metrics
from lathe.server.client import ApiError, Client
from tests.server.cli.running import run_lathe
from tests.server.repository.world import toy
from tests.server.service import Service, service

pytestmark = pytest.mark.timeout(600)
ROW = {"x": np.ones((1, 4), np.float32)}


@pytest.fixture(autouse=True)
def no_answer_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal versions get equal verdicts, also where other work on the machine makes single answers slow."""
    monkeypatch.setattr("lathe.server.canary.guard.SLACK", dict.fromkeys(SLACK, 1e6))


@contextmanager
def two_versions(root: Path, second: bytes | None = None) -> Iterator[tuple[Service, Client]]:
    """A server whose model m has version 1 live, and version 2."""
    with service(root) as running, running.client() as client:
        client.upload("m", toy(2.0))
        client.upload("m", toy(3.0) if second is None else second)
        yield running, client


def ask_until_decided(client: Client, watched: threading.Event) -> None:
    assert watched.wait(60)
    while client.audit("m")[-1].action in ("canary", "publish"):
        client.infer("m", ROW)


def test_a_canary_from_start_to_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, look = threading.Event(), Client.canary

    def canary(client: Client, model: str) -> CanaryState:
        state = look(client, model)
        watched.set()
        return state

    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0))
        client.upload("m", toy(float("nan")))
        where = ("--url", running.url)
        assert "version 2 is tested against version 1" in run_lathe(
            "canary", "start", "m", "2", "--weight", "0.5", *where
        )
        assert "the canary of version 2 is cancelled" in run_lathe("canary", "cancel", "m", *where)
        assert run_lathe("canary", "watch", "m", *where) == (
            "no canary is running; the last one: m version 2: cancelled\n"
        )
        client.upload("never", toy(2.0))
        assert "never has had no canary yet" in run_lathe("canary", "watch", "never", *where, fails=True)

        run_lathe("canary", "start", "m", "2", "--weight", "0.2", *where)
        client.upload("m", toy(3.0))  # an upload does not end the trial
        monkeypatch.setattr(Client, "canary", canary)
        asking = threading.Thread(target=ask_until_decided, args=(client, watched))
        asking.start()
        shown = run_lathe("canary", "watch", "m", "--interval", "0.02", *where)
        asking.join()
        first, *_, last = shown.splitlines()
        assert first.startswith("m version 2: 20% of the requests; ") and "undecided, passes after at least" in first
        assert last.startswith("m version 2: rolled back: not finite: 100.00% of")


def test_a_rollout_in_steps_is_started_and_watched(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0))
        client.upload("m", toy(3.0))
        where = ("--url", running.url)
        start = ("canary", "start", "m", "2", *where)
        assert "'--step': expected a share and a duration" in run_lathe(*start, "--step", "1%", fails=True)
        assert "'--start-at': expected a time" in run_lathe(*start, "--start-at", "tomorrow", fails=True)
        # beyond the end of the calendar in UTC
        assert "got '9999-12-31T23:59:59-12:00'" in run_lathe(
            *start, "--start-at", "9999-12-31T23:59:59-12:00", fails=True
        )
        assert "--weight: expected none together with --step" in run_lathe(
            *start, "--weight", "0.2", "--step", "1%:10m", fails=True
        )
        assert "error: --step 2: weight: expected at least 0.1" in run_lathe(
            *start, "--step", "10%:1h", "--step", "1%:1h", fails=True
        )

        steps = ("--step", "1%:10m", "--step", "0.1:1800", "--step", "50%:1h")
        assert "is tested against version 1" in run_lathe(*start, *steps)
        state = client.canary("m")
        assert [(step.weight, step.seconds) for step in state.steps] == [(0.01, 600), (0.1, 1800), (0.5, 3600)]
        assert (state.step, state.weight) == (0, 0.01) and state.remaining is not None and 500 < state.remaining <= 600
        shown = run_lathe("rollout", "watch", "m", "--rounds", "1", "--interval", "0.05", *where)
        assert "step 1 of 3 since" in shown and "candidate for 1%" in shown
        rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in shown.splitlines() if "│" in line]
        assert [row[:3] for row in rows if row[0] in "123" and "%" in row[1]] == [
            ["1", "1%", "10 min"],
            ["2", "10%", "30 min"],
            ["3", "50%", "60 min"],
        ]
        run_lathe("canary", "cancel", "m", *where)

        said = run_lathe(*start, "--start-at", "2100-01-31T02:00:00")
        assert "version 2 is tested against the live version, from 2100-01-31 02:00:00 on" in said
        shown = run_lathe("rollout", "watch", "m", "--rounds", "1", "--interval", "0.05", *where)
        assert "begins at 2100-01-31 02:00:00, in" in shown and "candidate (soon)" in shown
        assert client.canary("m").live is None


def test_a_rollout_is_watched(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        where = ("--url", running.url)
        assert "m" in run_lathe("rollout", "watch", "m", "--rounds", "1", *where, fails=True)
        client.upload("m", toy(2.0))
        client.upload("m", toy(3.0))
        before = parse_metrics(client.metrics(), 1.0)
        for _ in range(6):
            client.infer("m", ROW)
        client.start_canary("m", 2, weight=0.15)
        now = fetch_rollout(client, "m")
        console = Console(width=200)
        with console.capture() as capture:
            console.print(rollout_view(now._replace(look=replace(now.look, at=3.0)), before))
        shown = [line.strip("│ ").split("│") for line in capture.get().splitlines() if line.startswith("│")]
        cells = [[cell.strip() for cell in line] for line in shown]
        assert [row[:5] for row in cells[:2]] == [
            ["1", "ready", "live", "3", "0"],
            ["2", "ready", "candidate for 15%", "0", "0"],
        ]
        assert [row[1:3] for row in cells[-3:]] == [["push", "1"], ["push", "2"], ["canary start", "2"]]
        assert "m: version 2 against 1" in capture.get()
        assert "candidate for 15%" in run_lathe("rollout", "watch", "m", "--rounds", "1", "--interval", "0.05", *where)


@pytest.mark.parametrize(("option", "value"), [("--rtol", "0.1"), ("--atol", "0"), ("--tolerated", "1%")])
def test_an_option_of_comparisons_needs_shadow(option: str, value: str) -> None:
    said = run_lathe("canary", "start", "m", "2", option, value, "--url", "http://127.0.0.1:1", fails=True)
    assert said == f"error: {option}: expected --shadow with it, otherwise answers are not compared\n"


def test_the_server_refuses_settings_of_comparisons_without_shadow(tmp_path: Path) -> None:
    with two_versions(tmp_path / "repo") as (_, client):
        for field, value in {"rtol": 0.1, "atol": 1.0, "tolerated": 0.1}.items():
            with pytest.raises(ApiError, match=rf"{field}: expected shadow above 0 with it") as refused:
                client.start_canary("m", 2, **{field: value})
            assert refused.value.status == 400
        client.start_canary("m", 2, rtol=1e-3, atol=1e-5, tolerated=0.005)  # defaults, as releases before sent them


def test_the_help_says_what_is_compared_and_what_ends_a_canary() -> None:
    shown = " ".join(run_lathe("canary", "start", "--help").replace("│", " ").split())
    for said in (
        "Without this option, answers are not compared.",
        "It compares the answers themselves only with --shadow.",
        "Above 20% it begins with 20%",
        "about 600 of its own",
        "time alone does not end it",
        "undecided after 50,000 requests",
    ):
        assert said in shown, said
    assert shown.count("With --shadow: ") == 3


def test_the_start_says_what_the_canary_does_and_the_next_command(tmp_path: Path) -> None:
    with two_versions(tmp_path / "repo") as (running, _):
        where = ("--url", running.url)
        lines = [line.split(maxsplit=1) for line in run_lathe("canary", "start", "m", "2", *where).splitlines()[1:]]
        said = {title: text for title, text in lines if not title.startswith("--")}
        assert said["shares"] == "10% of the requests"
        assert said["compares"].endswith("; not the answers")
        assert said["passes"] == "when it is no worse in enough requests (525 at least): it goes live"
        assert "50,000" in said["fails"]
        assert said["next"] == f"lathe canary watch m --url {running.url}"

        refused = run_lathe("canary", "start", "m", "2", *where, fails=True)
        assert refused == "error: a canary of version 2 is running: `lathe canary cancel m` cancels it\n"
        refused = run_lathe("delete", "m", "2", *where, fails=True)
        assert refused == "error: a canary of version 2 is running: `lathe canary cancel m` cancels it\n"
        run_lathe("canary", "cancel", "m", *where)

        said = run_lathe("canary", "start", "m", "2", "--weight", "30%", "--shadow", "0.5", "--no-promote", *where)
        assert "20% of the requests until the candidate has answered 1,000, then 30% of the requests" in said
        assert "the answers of 50% of the live version's requests\n" in said and "it stays a candidate" in said


@pytest.mark.slow
def test_a_candidate_that_was_not_compared_passes_with_a_note(tmp_path: Path) -> None:
    """Outside a terminal a running canary prints a line whenever it has made progress."""
    with two_versions(tmp_path / "repo") as (running, client):
        run_lathe("canary", "start", "m", "2", "--weight", "20%", "--url", running.url)
        shown: list[str] = []
        watching = threading.Thread(
            target=lambda: shown.append(run_lathe("canary", "watch", "m", "--interval", "0.02", "--url", running.url))
        )
        watching.start()
        while watching.is_alive():
            client.infer("m", ROW)
        *before, end = shown[0].splitlines()
        assert end.startswith("m version 2: promoted: no worse than the live version in ")
        assert end.endswith("; its answers were not compared")
        assert 2 <= len(before) <= 13 and len(set(before)) == len(before)


def state(**fields: object) -> CanaryState:
    tests = [
        {
            "question": name,
            "stable": 0.0,
            "candidate": 0.0,
            "requests": 9,
            "against": 0.0,
            "in_favour": 0.1,
            "needed": n,
        }
        for name, n in (("failing", 500), ("slow (p90)", 80))
    ]
    document = {
        "version": 2, "live": 1, "weight": 0.1, "shadow": 0.0, "rtol": 0, "atol": 0, "tolerated": 0, "promote": True,
        "generation": 3, "steps": [], "step": 0, "start_at": "", "since": "", "remaining": None, "requests": 9,
        "verdict": "undecided", "reason": "", "evidence": tests, **fields,
    }  # fmt: skip
    return CanaryState.model_validate(document)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {},
            "m version 2: 10% of the requests; 9 requests answered; undecided, passes after at least 500 more requests",
        ),
        ({"requests": 0, "evidence": []}, "m version 2: 10% of the requests; waits for requests; undecided"),
        (
            {"verdict": "promote", "promote": False},
            "m version 2: 10% of the requests; 9 requests answered; passed, waits for `lathe promote` or "
            "`lathe canary cancel`",
        ),
        ({"verdict": "roll_back"}, "m version 2: 10% of the requests; 9 requests answered; failed"),
    ],
)
def test_the_progress_of_a_canary_in_one_line(fields: dict[str, object], expected: str) -> None:
    assert progress_line("m", state(**fields)) == expected


def test_the_last_tables_say_that_they_are_from_before_the_end() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(canary_view("m", state(), is_last=True))
    title, *_ = capture.get().splitlines()
    assert title.strip() == "m: version 2 against 1, before its end: 9 requests"
    assert "undecided" not in capture.get() and capture.get().endswith("\n")


@pytest.mark.parametrize(
    ("action", "live", "expected"),
    [
        ("alias", 2, "ended: version 2 was promoted by hand"),
        ("rollback", 1, "ended: version 1 was made live by a rollback"),
        ("publish", 4, "ended: version 4 went live"),
        ("rolled_back", 3, "rolled back: why"),
        ("promoted", 2, "promoted: why"),
        ("cancelled", 3, "cancelled: why"),
    ],
)
def test_the_outcome_of_a_canary_in_words(action: str, live: int, expected: str) -> None:
    def entry(generation: int, action: str, live: int) -> AuditEntry:
        return AuditEntry.model_construct(
            generation=generation, action=action, version=2, aliases={"live": live}, reason="why"
        )

    assert outcome("m", 5, [entry(5, "canary", 3), entry(6, action, live)]) == f"m version 2: {expected}"


@pytest.mark.parametrize(("text", "share"), [("0.1", 0.1), ("10%", 0.1), ("1e-3", 1e-3), ("50%", 0.5)])
def test_a_share_is_a_number_or_a_percentage(text: str, share: float) -> None:
    assert share_parser(0, 0.5)(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["10", "60%", "x", "1.2.3", "-1", "nan", "%"])
@pytest.mark.parametrize("option", ["--weight", "--step"])
def test_another_share_is_refused(option: str, text: str) -> None:
    value = text if option == "--weight" else f"{text}:10m"
    said = run_lathe("canary", "start", "m", "2", f"{option}={value}", fails=True)
    assert f"error: Invalid value for '{option}': expected a share from 0 to 0.5" in said


@pytest.mark.parametrize("command", [("top",), ("rollout", "watch", "m")])
def test_tables_outside_a_terminal_are_printed_at_each_round(command: tuple[str, ...], tmp_path: Path) -> None:
    with two_versions(tmp_path / "repo") as (running, client):
        client.infer("m", ROW)
        shown = run_lathe(*command, "--rounds", "2", "--interval", "0.05", "--url", running.url)
    assert shown.count("┃ p50") == 2 and shown.endswith("\n")
