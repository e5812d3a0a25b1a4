"""Datasets over a real connection, by the client and by raw requests; the real child process checks the files."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.cli.app import app
from lathe.server.client import ApiError, Client
from lathe.server.datasets.records import DatasetName
from lathe.server.datasets.service import Datasets
from lathe.server.datasets.store import DatasetStore
from lathe.server.errors import Conflict, StorageFull, Unavailable, Unprocessable
from lathe.server.repository.file_lock import FileLock
from tests.server.repository.fake_fs import CountingFs, FailingFs, ReadOnlyFs
from tests.server.service import Service, service

RECIPE = {"epochs": 1, "batch": 2, "model": {"architecture": "mlp"}, "optimizer": {"kind": "adam"}}


def npz(rows: int = 6, **more: Any) -> bytes:
    """A small dataset: two numbers per row, and its class."""
    buffer = io.BytesIO()
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    np.savez(buffer, **{"x": x, "y": np.arange(rows) % 2, **more})
    return buffer.getvalue()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("datasets") / "repo", max_dataset=1 << 16) as running:
        yield running


@pytest.fixture
def client(served: Service) -> Iterator[Client]:
    with served.client() as connected:
        yield connected


def test_a_dataset_is_uploaded_described_and_deleted(client: Client, served: Service) -> None:
    data, more = npz(), npz(8)
    made = client.upload_dataset("two", data)
    assert (made.name, made.rows, made.bytes, made.format) == ("two", 6, len(data), "npz")
    assert made.digest == hashlib.sha256(data).hexdigest()
    assert [(column["name"], column["dtype"], column["shape"]) for column in made.columns] == [
        *[("x", "float32", [2]), ("y", "int64", [])]
    ]
    again = client.upload_dataset("two", more)
    assert (again.rows, [naming.digest for naming in again.history]) == (8, [made.digest, again.digest])
    assert client.upload_dataset("two", more).history == again.history
    assert client.dataset("two") == again
    assert [dataset.name for dataset in client.datasets()] == ["two"]
    assert client.delete_dataset("two", digest=made.digest).digests == [made.digest]
    assert client.delete_dataset("two").digests == [again.digest]
    assert client.datasets() == []
    assert not list(served.root.glob(".lathe/datasets/content/*"))


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (b"", 400, "empty"),
        (b"\x00\x01\x02 nothing that is known", 422, "bad"),
        (npz(y=np.arange(5)), 422, "'x' 6, 'y' 5"),
        (npz(10_000), 413, "the most that may be uploaded is 65536"),
    ],
    ids=["nothing", "foreign", "columns that differ", "too large"],
)
def test_invalid_data_leave_nothing(data: bytes, status: int, says: str, client: Client, served: Service) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        client.upload_dataset("bad", data)
    assert refused.value.status == status
    assert "/" not in str(refused.value)
    assert client.datasets() == []
    assert not list(served.root.glob(".lathe/datasets/staging/*/*/*"))


def test_a_body_must_match_its_headers(served: Service) -> None:
    with httpx.Client(base_url=served.url) as http:
        at, digest = "/api/v1/datasets/two", "sha-256=:" + "A" * 43 + "=:"
        refused = http.post(at, content=npz(), headers={"content-digest": digest})
        assert (refused.status_code, "the body received has" in refused.json()["error"]) == (400, True)
        chunked = http.post(at, content=iter([b"x" * 40_000] * 2))
        assert (chunked.status_code, chunked.json()["error"]) == (413, "the dataset is larger than 65536 bytes")
        multipart = http.post(at, files={"file": npz()})
        assert multipart.status_code == 415
        for name in ("-x", "0" * 64, "a%2Fb"):
            assert http.post(f"/api/v1/datasets/{name}", content=npz()).status_code in (400, 404)
        assert http.get("/api/v1/datasets/two").status_code == 404
        assert http.delete("/api/v1/datasets/two").status_code == 404
        assert http.delete("/api/v1/datasets/two?digest=x").status_code == 400


def test_only_keys_that_may_train_upload_and_delete(tmp_path: Path) -> None:
    made = {scope: make_key("bot", [scope], ["*"], 0, None) for scope in (Scope.READ, Scope.TRAIN, Scope.WRITE)}
    write_keys(tmp_path / "keys.json", [key for key, _ in made.values()])
    (check := Slow()).go.set()
    with service(tmp_path / "repo", keys_file=tmp_path / "keys.json", held=True, check=check) as running:
        reader, trainer, writer = (Client(running.url, api_key=shown) for _, shown in made.values())
        with reader, trainer, writer:
            assert trainer.upload_dataset("two", npz()).history[0].actor == "bot"
            assert reader.dataset("two").rows == 1
            for refused in (reader, writer):
                with pytest.raises(ApiError, match="does not have scope 'train'"):
                    refused.delete_dataset("two")


def test_a_repository_that_cannot_be_written_serves_models_without_datasets(tmp_path: Path) -> None:
    with service(tmp_path / "repo", ReadOnlyFs(), held=True) as running, running.client() as client:
        assert client.models() == []
        with pytest.raises(ApiError, match="datasets: opening") as refused:
            client.upload_dataset("two", npz())
        assert refused.value.status == 503


@pytest.mark.slow
def test_a_folder_is_uploaded_as_one_reproducible_file(tmp_path: Path, served: Service, client: Client) -> None:
    for place in ("one", "two"):
        folder = tmp_path / place / "digits"
        folder.mkdir(parents=True)
        for name in ("b.npy", "a.npy") if place == "one" else ("a.npy", "b.npy"):
            np.save(folder / name, np.arange(3) + len(name))
        (folder / ".hidden").write_text(place)
    digests = {
        run_lathe(served, "push", "packed", str(tmp_path / place / "digits")).split()[-1] for place in ("one", "two")
    }
    assert len(digests) == 1
    assert client.dataset("packed").rows == 3
    assert run_lathe(served, "list").count("packed") == 1
    assert "a: int64" in run_lathe(served, "push", "packed", str(tmp_path / "one" / "digits"))
    assert run_lathe(served, "show", "packed").count(digests.pop()) == 2  # unchanged, with the time of upload
    assert "1 file(s)" in run_lathe(served, "delete", "packed")


def run_lathe(served: Service, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["datasets", *arguments], env={"COLUMNS": "200", "LATHE_URL": served.url})
    assert result.exit_code == 0, result.output
    return result.output


class Slow:
    """A fake check of datasets that lasts until `go` is set."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def run(self, task: str, *arguments: str | Path) -> bytes:
        self.begun.set()
        await self.go.wait()
        if b"bad" in await asyncio.to_thread(Path(arguments[0]).read_bytes):
            raise Unprocessable("row 3, column 'y': expected a number, got 'bad'")
        return b'{"rows": 1}\n'


async def body(data: bytes) -> Any:
    yield data


def test_a_dataset_in_use_is_not_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        check = Slow()
        check.go.set()
        datasets = Datasets(DatasetStore(tmp_path, 1 << 20), check, 1 << 20)
        async with datasets.running():
            await datasets.receive("a", body(b"one"), None, "")
            with pytest.raises(Unprocessable, match="row 3, column 'y'"):
                await datasets.receive("a", body(b"bad"), None, "")
            async with datasets.hold("a") as held:
                assert await datasets.name_of(held.digest) == await datasets.name_of("a") == "a"
                await datasets.receive("b", body(b"one"), None, "")
                assert await datasets.name_of(held.digest) == "b"  # the last name that it was given
                assert await datasets.name_of("f" * 64) == "f" * 64
                await datasets.remove("b")
                await datasets.receive("a", body(b"two"), None, "")  # the name may be used again
                for removal in (datasets.remove("a"), datasets.remove("a", held.content.digest)):
                    with pytest.raises(Conflict, match=f"needs sha256 {held.content.digest}"):
                        await removal
                assert held.path.read_bytes() == b"one"

            async def needed() -> list[str]:
                return [held.content.digest]

            datasets.needed_digests = needed
            async with datasets.hold(held.content.digest) as again:
                assert again.path == held.path
            with pytest.raises(Conflict):
                await datasets.remove("a")
            datasets.needed_digests = nothing
            assert held.content.digest in await datasets.remove("a")

    asyncio.run(scenario())


async def nothing() -> list[str]:
    return []


def test_an_upload_cancelled_during_its_check_is_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        check = Slow()
        datasets = Datasets(DatasetStore(tmp_path, 1 << 20), check, 1 << 20)
        async with datasets.running():
            upload = asyncio.create_task(datasets.receive("a", body(b"one"), None, ""))
            await check.begun.wait()
            upload.cancel()
            check.go.set()
            while not await datasets.list():  # noqa: ASYNC110 (nobody tells whoever left)
                await asyncio.sleep(0.01)
            assert (await datasets.find("a")).content.size == 3

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert not list(tmp_path.glob("staging/*"))


def test_a_locked_folder_makes_datasets_alone_unavailable(tmp_path: Path) -> None:
    async def scenario() -> None:
        datasets = Datasets(DatasetStore(tmp_path, 1 << 20, lock_timeout=0.01), Slow(), 1 << 20)
        async with datasets.running():
            with pytest.raises(Unavailable, match="the folder of datasets has been locked by another"):
                await datasets.list()

    with FileLock(tmp_path / "lock", 1.0, "the folder").hold():
        asyncio.run(scenario())


@pytest.mark.parametrize("step", range(5))
def test_an_upload_to_a_full_disk_gets_507_and_leaves_nothing(step: int, tmp_path: Path) -> None:
    """At whatever change to the disk it fills up, the datasets are as before."""

    async def scenario() -> None:
        (check := Slow()).go.set()
        opening = CountingFs()
        DatasetStore(tmp_path, 1 << 20, opening).open()
        fs = FailingFs(opening.step + 1 + step, errno.ENOSPC, lasting=True)
        datasets = Datasets(DatasetStore(tmp_path, 1 << 20, fs), check, 1 << 20)
        await datasets.open()
        with pytest.raises(StorageFull, match="storage is full") as refused:
            await datasets.receive("a", body(b"one"), None, "")
        assert refused.value.http_status == 507
        assert await datasets.list() == []
        fs.at = None
        await datasets.receive("a", body(b"one"), None, "")
        assert (await datasets.find("a")).content.size == 3
        await datasets.close()

    asyncio.run(scenario())


def test_concurrent_uploads_together_stay_within_the_limit(tmp_path: Path) -> None:
    """Each of them alone would fit."""
    size, most = 3 << 20, 8 << 20

    class Described:
        async def run(self, task: str, *arguments: Any) -> bytes:
            return b"{}"

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def body(number: int) -> AsyncIterator[bytes]:
            yield bytes([number]) * size
            await go_on.wait()
            yield b"x"

        datasets = Datasets(DatasetStore(tmp_path, most), Described(), 1 << 30)
        async with datasets.running():
            sent = [asyncio.ensure_future(datasets.receive(f"d{n}", body(n), None, "me")) for n in range(3)]
            await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
            assert await asyncio.to_thread(lambda: sum(path.stat().st_size for path in tmp_path.rglob("data"))) <= most
            go_on.set()
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
            (refused,) = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            assert (
                isinstance(refused, StorageFull) and "bytes of uploads in progress leave less than" in refused.message
            )
            assert [dataset.content.size for dataset in await datasets.list()] == [size + 1] * 2

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_dataset_that_is_removed_while_datasets_are_read_is_left_out(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kept", "removed"):
        client.upload_dataset(name, npz(5 + len(name)))
    content, names = DatasetStore.content, DatasetStore.names

    def removes_after_names(self: DatasetStore) -> list[DatasetName]:
        found = names(self)
        self.remove("removed", None, ())
        return found

    monkeypatch.setattr(DatasetStore, "names", removes_after_names)
    assert [dataset.name for dataset in client.datasets()] == ["kept"]
    monkeypatch.undo()
    assert DatasetStore.content is content
    client.delete_dataset("kept")


@pytest.mark.sample(5)
@pytest.mark.parametrize("method", ["names", "named", "content", "path", "count_stored_bytes"])
def test_a_folder_that_cannot_be_read_is_unavailable(
    client: Client, served: Service, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    client.upload_dataset("two", npz())

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(DatasetStore, method, fails)
    job = {"kind": "train", "recipe": RECIPE, "dataset": "two"}
    with httpx.Client(base_url=f"{served.url}/api/v1", timeout=60) as http:
        answers = [
            http.get("/datasets"),
            http.get("/datasets/two"),
            http.post("/datasets/three", content=npz(7)),
            http.post("/jobs", json=job),
        ]
    assert {answer.status_code for answer in answers} <= {200, 201, 202, 503}
    assert 503 in {answer.status_code for answer in answers}
    monkeypatch.undo()
    for answer in answers:
        if answer.status_code == 202:
            client.cancel_job(answer.json()["id"])
        elif answer.status_code == 503:
            assert answer.json()["error"].endswith("storage failed (Input/output error)")
