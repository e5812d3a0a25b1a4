"""Jobs over HTTP, with the client, the command line and raw requests."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.api.management import jobs as jobs_module
from lathe.server.cli.app import app as cli
from lathe.server.client import ApiError, Client
from lathe.server.errors import Overloaded
from lathe.server.jobs.assembly import Jobs
from lathe.server.jobs.event_stream import EventStreams
from tests.server.access.test_tokens import CLAIMS, signed, write_key_set
from tests.server.jobs.world import DIGEST, fake_jobs
from tests.server.repository.world import toy
from tests.server.service import Service, service, until

LONG = {"steps": 100_000, "seconds": 0.01}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("jobs") / "repo", make_jobs=fake_jobs, job_slots=8) as running:
        yield running


@pytest.fixture
def client(served: Service) -> Iterator[Client]:
    with served.client() as found:
        yield found


def wait_until_ended(client: Client, job: str) -> Any:
    until(lambda: client.job(job).finished is not None)
    return client.job(job)


def test_data_and_a_recipe_become_a_served_version(client: Client) -> None:
    recipe = {"steps": 3, "model": toy(3.0).decode()}
    accepted = client.submit_job(recipe, "digits", publish={"model": "trained", "promote": True})
    assert (accepted.state, accepted.replayed, accepted.dataset.digest) == ("queued", False, DIGEST)
    job = wait_until_ended(client, accepted.id)
    assert (job.state, job.error) == ("succeeded", "")
    assert (job.result.model, job.result.version, job.result.moved_alias) == ("trained", 1, True)
    assert job.metrics["metrics"] == {"accuracy": 0.9}
    assert job.progress["kind"] == "done"
    assert client.version("trained", 1).state == "ready"
    assert client.job_report(job.id) == "<h1>report</h1>"
    assert client.job_model(job.id) == toy(3.0)


def test_a_repeated_submission_with_its_key_returns_the_same_job(client: Client) -> None:
    first = client.submit_job({"steps": 1}, "digits", key="one")
    again = client.submit_job({"steps": 1}, "digits", key="one")
    assert (again.id, again.replayed) == (first.id, True)
    with pytest.raises(ApiError, match="used before with another request") as refused:
        client.submit_job({"steps": 2}, "digits", key="one")
    assert refused.value.status == 422


def test_events_are_streamed_and_continue_after_a_lost_connection(client: Client, served: Service) -> None:
    job = client.submit_job({"steps": 6, "seconds": 0.05}, "digits").id
    events = list(client.job_events(job))
    assert [event.data["step"] for event in events if event.kind == "step"] == [1, 2, 3, 4, 5, 6]
    assert [event.data["state"] for event in events if event.kind == "state"][-1] == "succeeded"
    third = next(event for event in events if event.kind == "step" and event.data["step"] == 3)
    later = list(client.job_events(job, after=third.id))
    assert [event.data["step"] for event in later if event.kind == "step"] == [4, 5, 6]
    wrong = httpx.get(f"{served.url}/api/v1/jobs/{job}/events", headers={"last-event-id": "x"})
    assert (wrong.status_code, "last-event-id" in wrong.json()["error"]) == (400, True)


def test_a_stream_of_a_silent_job_has_heartbeats(
    client: Client, served: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lathe.server.jobs.event_stream.HEARTBEAT", 0.05)
    job = client.submit_job({"steps": 1, "seconds": 60}, "digits").id
    with httpx.stream("GET", f"{served.url}/api/v1/jobs/{job}/events", timeout=10) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert any(line == ": nothing new" for line in itertools.islice(lines, 40))
    client.cancel_job(job)
    assert wait_until_ended(client, job).state == "cancelled"


def test_the_number_of_followers_is_bounded(tmp_path: Path) -> None:
    def two_followers(*arguments: Any) -> Jobs:
        jobs = fake_jobs(*arguments)
        return replace(jobs, followers=EventStreams(arguments[-1], limit=3))  # one place is left for another client

    with service(tmp_path / "repo", make_jobs=two_followers) as running, running.client() as client:
        job = client.submit_job(LONG, "digits").id
        url = f"{running.url}/api/v1/jobs/{job}/events"
        with ExitStack() as open_streams:
            streams = [open_streams.enter_context(httpx.stream("GET", url, timeout=10)) for _ in range(2)]
            lines = [stream.iter_lines() for stream in streams]
            assert all(next(begun) for begun in lines)  # the streams have begun, so they count
            full = httpx.get(url, timeout=10)
            assert (full.status_code, full.json()["code"]) == (503, "overloaded")
        until(lambda: _can_follow(url))  # closed streams do not count
        client.cancel_job(job)


def test_places_of_followers_are_shared_between_clients() -> None:
    followers, held = EventStreams(lambda: False, limit=12), ExitStack()

    def free_places(client: str) -> int:
        """The number of further places that a client gets."""
        before = followers._open_streams[client]
        with suppress(Overloaded):
            while True:
                held.enter_context(followers.place(client))
        return followers._open_streams[client] - before

    with held:
        assert [free_places(client) for client in "abcdef"] == [6, 3, 2, 1, 0, 0]
    with followers.place("f"):
        pass


@pytest.mark.sample(5)
@pytest.mark.parametrize("how", ["revoked", "expired", "without the scope", "token expired", "signing key withdrawn"])
def test_a_stream_of_events_ends_when_its_key_is_revoked(tmp_path: Path, how: str) -> None:
    keys, now = tmp_path / "keys.json", int(time.time())
    (key, shown), (root, _) = (make_key(name, Scope, ["*"], now, None) for name in ("ann", "root"))
    write_keys(keys, [key, root])
    if "token" in how or "signing" in how:
        shown = signed(scope="lathe:train", exp=int(time.time()) + (4 if "token" in how else 100))
    files = {"keys_file": keys, "jwt_keys": write_key_set(tmp_path / "jwks.json"), "jwt_issuer": CLAIMS["iss"]}
    with service(tmp_path / "repo", make_jobs=fake_jobs, **files) as running, Client(running.url, api_key=shown) as ann:
        job = ann.submit_job(LONG, "digits").id
        url, headers = f"{running.url}/api/v1/jobs/{job}/events", {"authorization": f"Bearer {shown}"}
        with httpx.stream("GET", url, headers=headers, timeout=20) as response:
            lines = response.iter_lines()
            assert "event: state" in lines  # reads up to it: the job's own events may come first
            if how == "signing key withdrawn":
                write_key_set(tmp_path / "jwks.json", kid="another")
            elif how != "token expired":
                changed = {
                    "revoked": [],
                    "expired": [replace(key, expires=int(time.time()) + 1)],
                    "without the scope": [replace(key, scopes=frozenset({Scope.READ}))],
                }
                write_keys(keys, [root, *changed[how]])
            rest = list(lines)
        assert not any("succeeded" in line or "cancelled" in line for line in rest)
        status = httpx.get(url, headers=headers, timeout=20).status_code
        assert status == (403 if how == "without the scope" else 401)


def _can_follow(url: str) -> bool:
    with httpx.stream("GET", url, timeout=10) as response:
        return response.status_code == 200


def test_a_job_is_cancelled_and_deleted(client: Client) -> None:
    job = client.submit_job(LONG, "digits").id
    until(lambda: client.job(job).state == "running")
    with pytest.raises(ApiError, match="cancel it first"):
        client.delete_job(job)
    assert client.cancel_job(job).cancelling
    assert wait_until_ended(client, job).state == "cancelled"
    assert job in {found.id for found in client.jobs(state="cancelled")}
    client.delete_job(job)
    with pytest.raises(ApiError) as gone:
        client.job(job)
    assert gone.value.status == 404


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"recipe": {}}, 422, "recipe: steps: expected a whole number, got None"),
        ({"recipe": {"steps": 1, "pad": "x" * 300_000}}, 413, "recipe"),
        ({"recipe": [1]}, 400, "recipe"),
        ({"recipe": {"steps": 1 << 64}}, 400, "recipe"),
        ({"recipe": {"steps": 1, "rate": math.nan}}, 400, "recipe"),
        ({"kind": "shell"}, 400, "kind: expected one of train, finetune, compress, got 'shell'"),
        ({"kind": "finetune"}, 400, "model: expected a version to start from"),
        ({"model": {"name": "m"}}, 400, "model: not expected"),
        ({"dataset": "none"}, 404, "no dataset 'none'"),
        ({"command": "rm"}, 400, "command"),
        ({"priority": 11}, 400, "priority"),
        ({"priority": True}, 400, "priority"),
        ({"limits": {"seconds": 0}}, 400, "limits.seconds"),
        ({"limits": {"memory": 1 << 90}}, 400, "limits.memory"),
        ({"publish": {"model": "../x"}}, 400, "model name"),
        ({"publish": {"model": "m", "alias": "a/b"}}, 400, "alias"),
    ],
)
def test_an_invalid_job_is_refused_by_field(change: dict[str, Any], status: int, message: str, served: Service) -> None:
    body = {"recipe": {"steps": 1}, "dataset": "digits", **change}
    content, headers = json.dumps(body), {"content-type": "application/json"}  # json.dumps writes NaN, unlike httpx
    refused = httpx.post(f"{served.url}/api/v1/jobs", content=content, headers=headers)
    assert refused.status_code == status, refused.text
    assert message in refused.json()["error"]


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["0" * 20, "..", "x", "0" * 19 + "%2F", "%2e%2e%2fjobs.db"])
@pytest.mark.parametrize("part", ["", "/logs", "/events", "/report", "/model"])
def test_unknown_jobs_are_not_found(name: str, part: str, served: Service) -> None:
    assert httpx.get(f"{served.url}/api/v1/jobs/{name}{part}").status_code == 404


@pytest.mark.slow
def test_inference_works_while_the_job_database_is_lost_and_restored(tmp_path: Path) -> None:
    """Requests about jobs are answered 503 meanwhile, and work again without a restart."""
    with service(tmp_path / "repo", make_jobs=fake_jobs) as running, running.client() as client:
        client.upload("m", toy(2.0))
        job = client.submit_job({"steps": 1}, "digits").id
        wait_until_ended(client, job)
        statuses, over = Counter[int](), threading.Event()

        def infer() -> None:
            with httpx.Client(base_url=running.url) as caller:
                while not over.is_set():
                    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
                    statuses[caller.post("/v2/models/m/infer", json={"inputs": [tensor]}).status_code] += 1

        def up() -> bool:
            return "lathe_jobs_up 1.0" in client.metrics()

        (database,) = (tmp_path / "repo").rglob("jobs.db")
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(infer)
            try:
                database.unlink()
                with pytest.raises(ApiError) as refused:
                    client.submit_job({"steps": 1}, "digits")
                assert refused.value.status == 503
                until(up)
                assert client.job(job).state == "succeeded"
                wait_until_ended(client, client.submit_job({"steps": 1}, "digits").id)
                database.write_bytes(b"no database at all" * 1000)
                with pytest.raises(ApiError) as refused:  # the first change notices it
                    client.submit_job({"steps": 1}, "digits")
                assert refused.value.status == 503
                assert not up()
                database.rename(tmp_path / "damaged")
                until(up)
                assert client.job(job).state == "succeeded"
            finally:
                over.set()
            asking.result(30)
        assert set(statuses) == {200} and statuses[200] > 20


def test_the_metrics_include_jobs(client: Client) -> None:
    job = client.submit_job({"steps": 1}, "digits").id
    wait_until_ended(client, job)
    text = client.metrics()
    assert "lathe_jobs_up 1.0" in text
    assert 'lathe_jobs{state="queued"} 0.0' in text
    assert float(text.split('lathe_jobs{state="succeeded"} ')[1].split()[0]) >= 1
    assert 'lathe_job_seconds_total{kind="train"}' in text


def test_the_routes_of_jobs_are_described(served: Service) -> None:
    paths = httpx.get(f"{served.url}/openapi.json").json()["paths"]
    assert {path for path in paths if path.startswith("/api/v1/jobs")} == {
        "/api/v1/jobs",
        "/api/v1/jobs/{job}",
        *(f"/api/v1/jobs/{{job}}/{part}" for part in ("cancel", "logs", "events", "report", "model")),
    }
    assert "429" in paths["/api/v1/jobs"]["post"]["responses"]


def test_callers_see_their_own_jobs_and_administrators_all(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    now = int(time.time())
    made = {
        name: make_key(name, scopes, models, now, None)
        for name, scopes, models in (
            ("ann", [Scope.TRAIN], ["*"]),
            ("bob", [Scope.TRAIN, Scope.WRITE], ["team-*"]),
            ("eve", [Scope.TRAIN, Scope.ADMIN], ["*"]),
        )
    }
    write_keys(file, [key for key, _ in made.values()])
    with service(tmp_path / "repo", make_jobs=fake_jobs, keys_file=file, max_jobs=2) as running:
        ann, bob, eve = (Client(running.url, api_key=shown) for _, shown in made.values())
        jobs = [who.submit_job(LONG, "digits") for who in (ann, bob)]
        assert [job.owner for job in jobs] == ["ann", "bob"]
        assert [job.id for job in ann.jobs()] == [jobs[0].id]
        assert {job.id for job in eve.jobs()} == {job.id for job in jobs}
        for call in (bob.job, bob.cancel_job, bob.delete_job, bob.job_log):
            with pytest.raises(ApiError, match="there is no job") as hidden:
                call(jobs[0].id)
            assert hidden.value.status == 404
        with pytest.raises(ApiError, match="'write'"):
            ann.submit_job(LONG, "digits", publish={"model": "m"})
        with pytest.raises(ApiError, match="for model 'm'"):
            bob.submit_job(LONG, "digits", publish={"model": "m"})
        with pytest.raises(ApiError, match="'promote'"):
            bob.submit_job(LONG, "digits", publish={"model": "team-a", "promote": True})
        with pytest.raises(ApiError, match="at most 0"):
            ann.submit_job(LONG, "digits", priority=1)
        bob.submit_job(LONG, "digits", publish={"model": "team-a"})
        with pytest.raises(ApiError, match="2 of your jobs") as many:
            bob.submit_job(LONG, "digits")
        assert many.value.status == 429
        assert eve.cancel_job(jobs[0].id).id == jobs[0].id
        for who in (ann, bob, eve):
            who.close()


def test_streams_end_when_the_server_stops_and_continue_with_the_next(tmp_path: Path) -> None:
    seen: list[str] = []
    with service(tmp_path / "repo", make_jobs=fake_jobs) as running:
        with running.client() as client:
            job = client.submit_job(LONG, "digits").id
        url = f"{running.url}/api/v1/jobs/{job}/events"

        def follow() -> None:
            with httpx.stream("GET", url, timeout=30) as response:
                seen.extend(line for line in response.iter_lines() if line.startswith("event"))

        thread = threading.Thread(target=follow)
        thread.start()
        until(lambda: "event: step" in seen)
    thread.join(10)
    assert not thread.is_alive()


def run_lathe(url: str, *arguments: str) -> Any:
    return CliRunner().invoke(cli, ["jobs", *arguments, "--url", url])


@pytest.mark.slow
def test_jobs_on_the_command_line(client: Client, served: Service) -> None:
    job = client.submit_job({"steps": 2, "do": "talk"}, "digits").id
    wait_until_ended(client, job)
    assert "succeeded" in run_lathe(served.url, "show", job).output
    assert job in run_lathe(served.url, "list").output
    assert "xxxx" in run_lathe(served.url, "logs", job).output
    running = client.submit_job(LONG, "digits").id
    until(lambda: client.job(running).state == "running")
    silent = run_lathe(served.url, "logs", running)
    assert (silent.exit_code, silent.stdout) == (0, "")
    assert silent.stderr == f"job {running} has written nothing to its log\n"
    assert "being cancelled" in run_lathe(served.url, "cancel", running).output
    wait_until_ended(client, running)
    assert run_lathe(served.url, "delete", running).exit_code == 0
    assert "there is no job" in run_lathe(served.url, "show", running).output


def test_a_running_job_shows_the_time_that_it_has_run_so_far(client: Client, served: Service) -> None:
    job = client.submit_job(LONG, "digits").id
    until(lambda: client.job(job).ran > 0.2)
    (listed,) = (found for found in client.jobs(state="running") if found.id == job)
    assert listed.ran > 0.2
    until(lambda: client.job(job).ran > listed.ran)  # times are rounded to milliseconds
    assert "ran        0.0 s" not in run_lathe(served.url, "show", job).output
    client.cancel_job(job)
    ended = wait_until_ended(client, job)
    assert ended.ran == client.job(job).ran > listed.ran


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", ["model", "report"])
def test_one_range_of_a_file_is_served_and_other_range_headers_are_ignored(
    client: Client, served: Service, part: str
) -> None:
    job = client.submit_job({"steps": 1}, "digits").id
    wait_until_ended(client, job)
    url = f"{served.url}/api/v1/jobs/{job}/{part}"
    whole = httpx.get(url).content
    for value, start, end in (("0-2", 0, 3), ("3-", 3, None), ("-2", -2, None), (f"1-{'9' * 18}", 1, None)):
        answer = httpx.get(url, headers={"range": f"bytes={value}"})
        assert (answer.status_code, answer.content) == (206, whole[start:end]), value
    for value in ("bytes=abc", "bytes=", "bytes=-", "bytes=2-1", "bytes=0-0,2-3", "bytes=0-" + "9" * 5000, "rows=0-1",
                  "bytes=\xb2-", "0-1", "bytes=0-1,", "bytes=+1-2", "bytes = 0-1"):  # fmt: skip
        answer = httpx.get(url, headers={"range": value.encode("latin-1")})
        assert (answer.status_code, answer.content) == (200, whole), value
    beyond = httpx.get(url, headers={"range": "bytes=999999-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(whole)}")


@pytest.mark.slow
def test_a_file_whose_job_is_deleted_meanwhile_is_not_found(
    client: Client, served: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = client.submit_job({"steps": 1}, "digits").id
    wait_until_ended(client, job)
    monkeypatch.setattr(jobs_module, "_result", lambda *_: served.root / "gone")
    answer = httpx.get(f"{served.url}/api/v1/jobs/{job}/model")
    assert (answer.status_code, answer.json()) == (404, {"error": "the job was deleted", "code": "not_found"})


@pytest.mark.slow
def test_a_stored_report_is_served_with_a_strict_content_security_policy(client: Client, served: Service) -> None:
    job = client.submit_job({"steps": 1}, "digits").id
    wait_until_ended(client, job)
    answer = httpx.get(f"{served.url}/api/v1/jobs/{job}/report")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert json.loads(httpx.get(f"{served.url}/api/v1/jobs/{job}").text)["id"] == job
