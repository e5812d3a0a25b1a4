"""Ownership: two callers of the same name share nothing, and jobs of old releases belong to nobody else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.jobs.database import MIGRATIONS
from lathe.server.jobs.folders import DATABASE, JobFolders
from lathe.server.jobs.job import Job, JobState
from lathe.server.jobs.register import Register
from tests.server.access.test_tokens import CLAIMS, NOW, signed, write_key_set
from tests.server.jobs.world import fake_jobs, order, run
from tests.server.repository.world import toy
from tests.server.service import service, until

ALL = " ".join(f"lathe:{scope.value}" for scope in Scope if scope is not Scope.ADMIN)
OTHERS = ("a key of the same name", "a subject of that name", "a subject of that id", "a subject of that identity")
JOB = {"kind": "train", "recipe": {"steps": 100_000, "seconds": 0.01}, "dataset": "digits"}
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@dataclass
class Callers:
    """Ann, other callers named ann, and an administrator, each with their bearer token."""

    url: str
    shown: dict[str, str]

    def call(self, caller: str, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.shown[caller]}", **options.pop("headers", {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=30, **options)

    def submit(self, caller: str, key: str | None = None) -> httpx.Response:
        return self.call(caller, "POST", "/api/v1/jobs", json=JOB, headers={"idempotency-key": key} if key else {})

    def jobs(self, caller: str) -> set[str]:
        return {job["id"] for job in self.call(caller, "GET", "/api/v1/jobs").json()}


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    folder, usual = tmp_path_factory.mktemp("identity"), [scope for scope in Scope if scope is not Scope.ADMIN]
    ann, shown = make_key("ann", usual, ["*"], NOW, None, (0.001, 3))
    twin, of_twin = make_key("ann", usual, ["*"], NOW, None)
    root, of_root = make_key("root", Scope, ["*"], NOW, None)
    write_keys(folder / "keys.json", [ann, twin, root])
    files = {"keys_file": folder / "keys.json", "jwt_keys": write_key_set(folder / "jwks.json")}
    subjects = ("ann", ann.id, f"key:{ann.id}")
    tokens = [signed(sub=subject, scope=ALL, lathe_models=["*"]) for subject in subjects]
    with service(folder / "repo", make_jobs=fake_jobs, jwt_issuer=CLAIMS["iss"], max_jobs=2, **files) as running:
        named = dict(zip(OTHERS, (of_twin, *tokens), strict=True))
        yield Callers(running.url, {"ann": shown, "root": of_root, **named})


@pytest.fixture(autouse=True)
def no_jobs(callers: Callers) -> Iterator[None]:
    yield
    for job in callers.jobs("root"):
        callers.call("root", "POST", f"/api/v1/jobs/{job}/cancel")
    until(lambda: all(job["finished"] for job in callers.call("root", "GET", "/api/v1/jobs").json()))


@pytest.mark.sample(3)
@pytest.mark.parametrize("other", OTHERS)
def test_other_callers_of_the_same_name_cannot_see_or_end_a_job(callers: Callers, other: str) -> None:
    job = callers.submit("ann").json()["id"]
    assert job in callers.jobs("ann") & callers.jobs("root")
    assert job not in callers.jobs(other)
    for method, tail in (
        *(("GET", tail) for tail in ("", "/logs", "/events", "/report", "/model")),
        ("POST", "/cancel"),
        ("DELETE", ""),
    ):
        answer = callers.call(other, method, f"/api/v1/jobs/{job}{tail}")
        assert (answer.status_code, "there is no job" in answer.text) == (404, True), (method, tail)
    assert callers.call("ann", "POST", f"/api/v1/jobs/{job}/cancel").status_code == 202


@pytest.mark.sample(3)
@pytest.mark.parametrize("other", OTHERS)
def test_other_callers_of_the_same_name_do_not_use_up_the_limit_of_jobs(callers: Callers, other: str) -> None:
    assert [callers.submit("ann").status_code for _ in range(3)] == [202, 202, 429]
    assert callers.submit(other).status_code == 202


@pytest.mark.sample(4)
@pytest.mark.parametrize("other", OTHERS)
def test_idempotency_keys_of_jobs_are_separate_for_callers_of_one_name(callers: Callers, other: str) -> None:
    key = f"same {other}".replace(" ", "-")
    mine = callers.submit("ann", key).json()
    theirs = callers.submit(other, key).json()
    assert not theirs["replayed"]
    assert mine["id"] != theirs["id"]
    again = callers.submit("ann", key).json()
    assert (again["id"], again["replayed"]) == (mine["id"], True)
    assert mine["owner"] == "ann" and mine["owner_id"].startswith("key:") and mine["owner_id"] != theirs["owner_id"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("other", OTHERS)
def test_idempotency_keys_of_uploads_are_separate_for_callers_of_one_name(callers: Callers, other: str) -> None:
    path, model = "/api/v1/models/m-{}/versions", OTHERS.index(other)
    key = {"idempotency-key": "one"}

    def push(caller: str, content: bytes) -> httpx.Response:
        return callers.call(caller, "POST", path.format(model), content=content, headers=key)

    first, second = push("ann", toy(2.0)), push(other, toy(3.0))
    assert [answer.status_code for answer in (first, second)] == [201, 201]
    assert [answer.json()["version"] for answer in (first, second, push("ann", toy(2.0)))] == [1, 2, 1]
    assert push("ann", toy(3.0)).status_code == 422


@pytest.mark.sample(4)
@pytest.mark.parametrize("other", OTHERS)
def test_rate_limits_are_separate_for_callers_of_one_name(callers: Callers, other: str) -> None:
    callers.call("root", "POST", "/api/v1/models/rated/versions", content=toy(2.0))

    def statuses(caller: str, count: int) -> list[int]:
        return [callers.call(caller, "POST", "/v2/models/rated/infer", json=BODY).status_code for _ in range(count)]

    assert statuses("ann", 5)[-1] == 429
    assert statuses(other, 8) == [200] * 8


def test_idempotency_keys_of_jobs_cannot_be_used_by_callers(callers: Callers) -> None:
    for key in (f"job-{'0' * 20}", f"job-{'0' * 20}-alias"):
        answer = callers.call(
            "ann", "POST", "/api/v1/models/m/versions", content=toy(2.0), headers={"idempotency-key": key}
        )
        assert (answer.status_code, "reserved for jobs" in answer.text) == (400, True)


# jobs of releases that stored only the names of owners


def at_schema_1(root: Path, *jobs: Job) -> None:
    """Write a folder of jobs as an earlier release did."""

    async def scenario() -> None:
        register = Register(JobFolders(root))
        await register.open(200.0)
        for job in jobs:
            await register.add(job)
        await register.close()

    run(scenario())
    with closing(sqlite3.connect(root / DATABASE)) as database, database:
        database.execute("UPDATE jobs SET owner = substr(owner, 6) WHERE owner LIKE 'name:%'")
        database.execute("UPDATE jobs SET document = json_remove(document, '$.order.owner_id')")
        database.execute("PRAGMA user_version=1")


def owners(root: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(root / DATABASE)) as database:
        return database.execute("SELECT id, owner FROM jobs ORDER BY id").fetchall()


def old_job(number: int, owner: str, **changes: Any) -> Job:
    return Job(order(f"{number:020x}", owner=owner, submitted=NOW - 50.0, **changes), queued=NOW - 50.0)


def test_the_database_of_an_earlier_release_is_migrated(tmp_path: Path) -> None:
    at_schema_1(tmp_path, old_job(1, "ann", key="k"), old_job(2, "key:00", key="k"), old_job(3, ""))
    assert [owner for _, owner in owners(tmp_path)] == ["ann", "key:00", ""]

    async def scenario() -> None:
        register = Register(JobFolders(tmp_path))
        await register.open(200.0)
        assert register.down_reason is None
        assert [job.order.account for job in register.all()] == ["name:ann", "name:key:00", ""]
        mine = old_job(4, "ann", key="k")
        await register.add(replace(mine, order=replace(mine.order, owner_id="key:00")))
        await register.change(f"{1:020x}", lambda job: job.end(JobState.CANCELLED, 300.0))
        await register.close()

    run(scenario())
    assert [owner for _, owner in owners(tmp_path)] == ["name:ann", "name:key:00", "", "key:00"]
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)


def test_an_old_job_is_visible_to_the_only_key_of_its_name(tmp_path: Path) -> None:
    names = {"ann": NOW - 100, "bob": NOW - 100, "late": NOW - 10, "root": NOW - 100}  # when each key was made
    scopes = {"root": Scope}
    keys = {name: make_key(name, scopes.get(name, [Scope.TRAIN]), ["*"], at, None) for name, at in names.items()}
    twin, of_twin = make_key("bob", [Scope.TRAIN], ["*"], NOW - 100, None)
    write_keys(tmp_path / "keys.json", [*(key for key, _ in keys.values()), twin])
    (tmp_path / "repo").mkdir()
    old = {name: old_job(number, name) for number, name in enumerate((*names, "gone"), 1)}
    at_schema_1(tmp_path / "repo" / ".lathe" / "jobs", *(job.end(JobState.CANCELLED, NOW) for job in old.values()))
    files = {"keys_file": tmp_path / "keys.json", "jwt_keys": write_key_set(tmp_path / "jwks.json")}
    with service(tmp_path / "repo", make_jobs=fake_jobs, jwt_issuer=CLAIMS["iss"], **files) as running:
        tokens = {f"subject {name}": signed(sub=name, scope="lathe:train") for name in ("ann", "gone")}
        shown = {name: shown for name, (_, shown) in keys.items()}
        callers = Callers(running.url, {**shown, "twin": of_twin, **tokens})
        seen = {caller: callers.jobs(caller) for caller in callers.shown}
    everything = {job.id for job in old.values()}
    nothing: set[str] = set()
    assert seen == {
        "ann": {old["ann"].id},
        "bob": nothing,
        "twin": nothing,
        "late": nothing,  # made after the job of that name
        "root": everything,
        "subject ann": nothing,
        "subject gone": nothing,
    }
