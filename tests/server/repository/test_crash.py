"""`kill -9` before every change to the disk, of every operation; and 200 concurrent publications from two processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lathe.server.canary.plan import CanaryPlan
from lathe.server.canary.steps import Step
from lathe.server.errors import ServerError
from lathe.server.repository.aliases import Aliases
from lathe.server.repository.fs import Fs
from lathe.server.repository.manifest import Manifest, verify_files
from lathe.server.repository.store import Origin, Outcome, Store
from tests.server.repository.fake_fs import CountingFs, KillingFs, killed_in_a_process

MODEL = "m"
PLAN, SINCE = CanaryPlan(1, steps=(Step(0.1, 60.0), Step(0.5, 60.0))), "2026-01-31T02:00:00.000Z"
Operation = Callable[[Store], Outcome]


def publish(store: Store, content: bytes, *, live: bool = False, key: str | None = None) -> Outcome:
    def change(state: Aliases) -> Aliases:
        return state.moved("live", state.high_water) if live else state

    staging = store.stage()
    staging.create("model.onnx").write(content)
    try:
        return store.publish(MODEL, staging, Manifest(staging.entries), change, Origin("", key, "f" if key else None))
    finally:
        staging.discard()


def adopt(store: Store) -> Outcome:
    folder = store.root / MODEL / "9"
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(b"copied")
    staging = store.stage()  # only to compute the digest of the copied file
    staging.create("model.onnx").write(b"copied")
    manifest = Manifest(staging.entries)
    staging.discard()
    return store.adopt(MODEL, 9, manifest, lambda state: state)


OPERATIONS: dict[str, Operation] = {
    "publish": lambda store: publish(store, b"new", key="key"),
    "publish and promote": lambda store: publish(store, b"new", live=True, key="key"),
    "alias": lambda store: store.move(MODEL, "alias", "live", lambda s: s.moved("live", 1), Origin()),
    "new alias": lambda store: store.move(MODEL, "alias", "canary", lambda s: s.moved("canary", 1), Origin()),
    "rollback": lambda store: store.move(MODEL, "rollback", "live", lambda s: s.with_rollback("live", None), Origin()),
    "delete": lambda store: store.delete(MODEL, 1, Origin()),
    "adopt": adopt,
    "trial": lambda store: store.change_trial(MODEL, "canary", 1, lambda s: s.with_canary(PLAN.at(0, SINCE)), Origin()),
    "step of a trial": lambda store: store.change_trial(
        MODEL, "step", 1, lambda s: s.stepped(PLAN.at(1, SINCE)), Origin()
    ),
}


def open_store(root: Path, fs: Fs | None = None) -> Store:
    store = Store(root, fs)
    store.open()
    return store


def prepare(root: Path) -> Path:
    """Make a repository of two versions, each of which was live in turn."""
    root.mkdir()
    store = open_store(root)
    publish(store, b"one", live=True)
    publish(store, b"two", live=True)
    store.close()
    return root


def visible_state(store: Store) -> tuple[object, ...]:
    """The state that a user can see; of a copied folder, only whether the repository has adopted it."""
    state = store.state(MODEL)
    taken = [version for version in store.versions(MODEL) if store.manifest(MODEL, version) is not None]
    known = store.find_key(MODEL, Origin("", "key", "f")) is not None
    return tuple(taken), dict(state.aliases), state.canary, known, [(r.action, r.version) for r in store.audit(MODEL)]


def steps_and_states(operation: Operation, root: Path) -> tuple[int, tuple[object, ...], tuple[object, ...]]:
    """The number of changes to the disk of an operation (including opening), and the visible state before and after."""
    before = visible_state(store := open_store(prepare(root)))
    store.close()
    fs = CountingFs()
    operation(store := open_store(root, fs))
    steps, after = fs.step, visible_state(store)
    store.close()
    return steps, before, after


def in_a_process_killed_at(step: int, root: Path, operation: Operation) -> bool:
    """Run an operation in a child process; return whether it was killed."""
    return killed_in_a_process(lambda: operation(open_store(root, KillingFs(step))))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_killed_at_any_step_is_complete_or_absent(name: str, tmp_path: Path) -> None:
    operation = OPERATIONS[name]
    steps, before, after = steps_and_states(operation, tmp_path / "whole")
    found = set()
    for step in range(1, steps + 1):
        root = prepare(tmp_path / str(step))
        assert in_a_process_killed_at(step, root, operation)

        started = time.monotonic()
        store = open_store(root)
        ready_after = time.monotonic() - started

        now = visible_state(store)
        assert now in (before, after) or is_adopted_without_record(name, now, before)
        found.add(now == after)
        check_consistent(store)
        assert ready_after < 5
        store.close()
    assert found == {False, True}


def is_adopted_without_record(name: str, now: tuple[object, ...], before: tuple[object, ...]) -> bool:
    """A copied folder may have its manifest before its record: the next poll of the folder writes the record."""
    return name == "adopt" and now[1:] == before[1:]


def check_consistent(store: Store) -> None:
    """Check digests, that nothing of a dead process is left, and that version numbers continue."""
    for version in store.versions(MODEL):
        if (manifest := store.manifest(MODEL, version)) is not None:
            verify_files(store.folder(MODEL, version), manifest)
    for alias in store.state(MODEL).aliases.values():
        store.folder(MODEL, alias.version)
    (own,) = (store.root / ".lathe" / "staging").iterdir()
    assert [path.name for path in own.iterdir()] == ["lock"]
    assert list((store.root / ".lathe" / "trash").iterdir()) == []
    highest = max(record.version for record in store.audit(MODEL))
    assert publish(store, b"next").version > highest


RACER = """
import sys
from pathlib import Path
from tests.server.repository.test_crash import open_store, publish
store = open_store(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(*(publish(store, f"{sys.argv[2]} {n}".encode(), live=True).version for n in range(100)))
store.close()
"""


def test_two_hundred_concurrent_publishes_make_two_hundred_versions(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for name in ("a", "b")
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate()[0].split() for racer in racers]

    store = open_store(tmp_path)
    assert sorted(int(version) for answer in answers for version in answer) == list(range(1, 201))
    assert store.versions(MODEL) == list(range(1, 201))
    contents = {(store.folder(MODEL, version) / "model.onnx").read_text() for version in range(1, 201)}
    assert contents == {f"{name} {n}" for name in "ab" for n in range(100)}
    assert [record.generation for record in store.audit(MODEL)] == list(range(1, 201))
    store.close()


def test_a_stopped_process_does_not_block_the_others_for_ever(tmp_path: Path) -> None:
    holder = open_store(prepare(tmp_path / "repo"))
    waiter = Store(tmp_path / "repo", lock_timeout=0.05)
    with holder._lock.hold(), pytest.raises(ServerError, match="locked by another process"):
        waiter.open()
    waiter.open()
    waiter.close()
    holder.close()
