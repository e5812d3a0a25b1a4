"""Datasets on disk: stored once, known by name, and complete or absent whatever happens during a change."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from lathe.server.datasets.records import Content, DatasetName, NameEntry
from lathe.server.datasets.store import DatasetStore
from lathe.server.errors import Conflict, NotFound, ServerError, StorageFull, Unavailable
from lathe.server.repository.fs import Fs
from lathe.server.repository.staging import Staging
from tests.server.repository.fake_fs import (
    CountingFs,
    FailingFs,
    KillingFs,
    RecordingFs,
    Tree,
    killed_in_a_process,
    lay_out,
)

BUDGET = 1 << 20


def open_store(root: Path, fs: Fs | None = None, budget: int = BUDGET) -> DatasetStore:
    store = DatasetStore(root, budget, fs)
    store.open()
    return store


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stage(store: DatasetStore, data: bytes) -> tuple[Staging, Content]:
    staging = store.stage()
    try:
        staging.create("data").write(data)
    except ServerError:
        staging.discard()
        raise
    return staging, Content(sha(data), len(data), {"rows": len(data)})


def put(store: DatasetStore, name: str, data: bytes) -> DatasetName:
    staging, content = stage(store, data)
    try:
        return store.keep(name, staging, content, NameEntry(content.digest, "now", "me"))
    finally:
        staging.discard()


def visible_state(store: DatasetStore) -> dict[str, list[bytes]]:
    """The current and earlier contents of each name, as bytes; checks that they match their digests."""
    found = {}
    for named in store.names():
        files = [store.path(naming.digest).read_bytes() for naming in named.history]
        assert [sha(data) for data in files] == [naming.digest for naming in named.history]
        assert all(store.content(naming.digest).size == len(d) for naming, d in zip(named.history, files, strict=True))
        found[named.name] = files
    return found


def contents(root: Path) -> set[str]:
    return {path.name for path in (root / "content").iterdir()}


def leftovers(root: Path) -> list[str]:
    return [str(p) for p in (*root.glob("staging/*/*/*"), *root.glob("trash/*"), *root.glob("names/.*"))]


def test_equal_bytes_are_stored_once_and_every_name_keeps_its_history(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new" / "datasets")
    put(store, "a", b"one")
    put(store, "b", b"one")
    put(store, "a", b"two")
    assert put(store, "a", b"two").history == store.named("a").history  # uploaded twice, written once
    assert visible_state(store) == {"a": [b"one", b"two"], "b": [b"one"]}
    assert store.named("a").digest == sha(b"two")
    assert store.count_stored_bytes() == 6

    again = DatasetStore(tmp_path / "new" / "datasets", BUDGET)
    again.open()
    assert visible_state(again) == {"a": [b"one", b"two"], "b": [b"one"]}
    again.close()
    store.close()


def test_contents_without_a_name_are_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for name, data in (("a", b"one"), ("a", b"two"), ("a", b"one"), ("b", b"two")):
        put(store, name, data)
    assert store.remove("a", sha(b"two"), ()) == frozenset()  # b still refers to it
    assert visible_state(store) == {"a": [b"one", b"one"], "b": [b"two"]}
    with pytest.raises(Conflict, match=f"dataset 'a': a job that has not ended needs sha256 {sha(b'one')}"):
        store.remove("a", None, {sha(b"one")})
    assert store.remove("b", sha(b"two"), {sha(b"one")}) == {sha(b"two")}  # nothing is left, so the name is deleted
    assert visible_state(store) == {"a": [b"one", b"one"]}
    assert contents(tmp_path) == {sha(b"one")}
    with pytest.raises(NotFound, match=f"dataset 'a' never had sha256 {sha(b'two')}"):
        store.remove("a", sha(b"two"), ())
    assert store.remove("a", None, ()) == {sha(b"one")}
    with pytest.raises(NotFound, match="unknown dataset 'a'"):
        store.named("a")
    with pytest.raises(NotFound, match="unknown dataset with sha256"):
        store.path(sha(b"one"))
    assert (contents(tmp_path), leftovers(tmp_path)) == (set(), [])


def test_all_contents_together_have_a_budget(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget=10)
    put(store, "a", b"x" * 6)
    with pytest.raises(StorageFull, match="6 stored bytes and 0 bytes of uploads in progress leave less than 5"):
        put(store, "b", b"y" * 5)
    put(store, "b", b"y" * 4)
    with pytest.raises(StorageFull, match="use all of the 10 bytes allowed"):
        store.stage()
    assert (contents(tmp_path), leftovers(tmp_path)) == ({sha(b"x" * 6), sha(b"y" * 4)}, [])


def test_running_uploads_count_until_they_end(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget=10)
    uploads = [store.stage() for _ in range(4)]
    files = [upload.create("data") for upload in uploads]
    refused = 0
    for _ in range(4):
        for file in files:
            try:
                file.write(b"xx")
            except StorageFull:
                refused += 1
            assert sum(path.stat().st_size for path in tmp_path.rglob("data")) <= 10
    assert refused == 11
    for upload in uploads:
        upload.discard()
        upload.discard()
    put(store, "a", b"y" * 10)
    assert store.remove("a", None, ()) == {sha(b"y" * 10)}
    put(store, "a", b"z" * 10)
    assert contents(tmp_path) == {sha(b"z" * 10)}


def test_a_damaged_name_is_left_out_and_its_content_is_retained(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "a", b"one")
    put(store, "b", b"two")
    (tmp_path / "names" / "a.json").write_bytes(b'{"schema": 1, "name": "a"')
    store.close()
    store = open_store(tmp_path)
    assert visible_state(store) == {"b": [b"two"]}
    with pytest.raises(Unavailable, match="dataset 'a': its record is damaged"):
        store.named("a")
    with pytest.raises(Unavailable, match="dataset 'a': its record is damaged"):
        store.remove("b", None, ())
    assert contents(tmp_path) == {sha(b"one"), sha(b"two")}


def prepare(root: Path) -> Path:
    store = open_store(root)
    put(store, "a", b"one")
    put(store, "b", b"old")
    store.close()
    return root


Operation = Callable[[DatasetStore], object]
OPERATIONS: dict[str, Operation] = {
    "a new name": lambda store: put(store, "new", b"two"),
    "a new content of a name": lambda store: put(store, "a", b"two"),
    "a known content": lambda store: put(store, "a", b"old"),
    "remove": lambda store: store.remove("a", None, ()),
    "forget": lambda store: store.remove("b", sha(b"old"), ()),
}
QUICK = ("a new name", "remove")
each_operation = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OPERATIONS]
)


def steps_and_states(operation: Operation, root: Path) -> tuple[int, object, object]:
    before = visible_state(store := open_store(prepare(root)))
    store.close()
    fs = CountingFs()
    operation(store := open_store(root, fs))
    steps, after = fs.step, visible_state(store)
    store.close()
    return steps, before, after


def in_a_process_killed_at(step: int, root: Path, operation: Operation) -> bool:
    return killed_in_a_process(lambda: operation(open_store(root, KillingFs(step))))


def check_consistent(root: Path, store: DatasetStore) -> None:
    """Every content has a name, and nothing is incomplete."""
    assert contents(root) == {sha(data) for files in visible_state(store).values() for data in files}
    assert leftovers(root) == []


@pytest.mark.sample(2)
@each_operation
def test_an_operation_killed_at_any_step_is_complete_or_absent(name: str, tmp_path: Path) -> None:
    operation = OPERATIONS[name]
    steps, before, after = steps_and_states(operation, tmp_path / "whole")
    found = []
    for step in range(1, steps + 1):
        root = prepare(tmp_path / str(step))
        assert in_a_process_killed_at(step, root, operation)
        store = open_store(root)
        found.append(visible_state(store))
        check_consistent(root, store)
        store.close()
    assert all(state in (before, after) for state in found)
    assert before in found and after in found


@each_operation
def test_a_disk_that_is_full_at_any_step_changes_nothing(name: str, tmp_path: Path) -> None:
    operation = OPERATIONS[name]
    steps, before, after = steps_and_states(operation, tmp_path / "whole")
    opening = CountingFs()
    store = open_store(prepare(tmp_path / "opening"), opening)
    first = opening.step + 1
    store.close()
    for step in range(first, steps + 1):
        root = prepare(tmp_path / str(step))
        store = open_store(root, FailingFs(step, errno.ENOSPC))
        try:
            operation(store)
            assert visible_state(store) == after
        except (OSError, ServerError):
            assert visible_state(store) in (before, after)  # `after`: the change succeeded, and only cleaning up failed
        store.close()
        store = open_store(root)
        check_consistent(root, store)
        store.close()


@each_operation
def test_acknowledged_changes_survive_a_power_failure(name: str, tmp_path: Path) -> None:
    root = prepare(tmp_path / "disk" / "datasets")
    fs = RecordingFs(tmp_path / "disk")
    operation = OPERATIONS[name]
    before = visible_state(store := open_store(root, fs))
    during: list[Tree] = []
    fs.observers.append(lambda: during.extend(tree for _, tree in fs.states()))
    operation(store)
    fs.observers.clear()
    after = visible_state(store)
    told = [tree for _, tree in fs.states()]
    for number, tree in enumerate(dict.fromkeys([*during, *told])):
        lay_out(tree, tmp_path / str(number))
        store = open_store(tmp_path / str(number) / "datasets")
        assert visible_state(store) in ((after,) if tree in told else (before, after))
        check_consistent(tmp_path / str(number) / "datasets", store)
        store.close()
