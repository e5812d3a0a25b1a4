"""``kill -9`` before every change to the disk, of every operation; and 200 publishes racing from two processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from server.canary.plan import CanaryPlan
from server.canary.schedule import Step
from server.errors import ServerError
from server.repository.aliases import Aliases
from server.repository.fs import Fs
from server.repository.manifest import Manifest, verify_files
from server.repository.store import Origin, Outcome, Store
from tests.server.repository.disk import CountingFs, KillingFs, killed_in_a_process

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
    staging = store.stage()  # only for the digest of what was copied
    staging.create("model.onnx").write(b"copied")
    manifest = Manifest(staging.entries)
    staging.discard()
    return store.adopt(MODEL, 9, manifest, lambda state: state)


OPERATIONS: dict[str, Operation] = {
    "publish": lambda store: publish(store, b"new", key="key"),
    "publish and promote": lambda store: publish(store, b"new", live=True, key="key"),
    "alias": lambda store: store.move(MODEL, "alias", "live", lambda s: s.moved("live", 1), Origin()),
    "new alias": lambda store: store.move(MODEL, "alias", "canary", lambda s: s.moved("canary", 1), Origin()),
    "rollback": lambda store: store.move(MODEL, "rollback", "live", lambda s: s.rolled_back("live", None), Origin()),
    "delete": lambda store: store.delete(MODEL, 1, Origin()),
    "adopt": adopt,
    "trial": lambda store: store.try_out(MODEL, "canary", 1, lambda s: s.trying(PLAN.at(0, SINCE)), Origin()),
    "step of a trial": lambda store: store.try_out(MODEL, "step", 1, lambda s: s.stepped(PLAN.at(1, SINCE)), Origin()),
}


def opened(root: Path, fs: Fs | None = None) -> Store:
    store = Store(root, fs)
    store.open()
    return store


def prepared(root: Path) -> Path:
    """Make a repository of two versions, each live in its turn."""
    root.mkdir()
    store = opened(root)
    publish(store, b"one", live=True)
    publish(store, b"two", live=True)
    store.close()
    return root


def seen(store: Store) -> tuple[object, ...]:
    """Return what a user can see; of a folder copied in, only whether the repository has taken it."""
    state = store.state(MODEL)
    taken = [version for version in store.versions(MODEL) if store.manifest(MODEL, version) is not None]
    known = store.find_key(MODEL, Origin("", "key", "f")) is not None
    return tuple(taken), dict(state.aliases), state.canary, known, [(r.action, r.version) for r in store.audit(MODEL)]


def steps_and_ends(operation: Operation, root: Path) -> tuple[int, tuple[object, ...], tuple[object, ...]]:
    """Return how many changes to the disk an operation makes, from opening on, and what is seen before and after."""
    before = seen(store := opened(prepared(root)))
    store.close()
    fs = CountingFs()
    operation(store := opened(root, fs))
    steps, after = fs.step, seen(store)
    store.close()
    return steps, before, after


def in_a_process_killed_at(step: int, root: Path, operation: Operation) -> bool:
    """Run an operation in a process of its own; say whether it was killed."""
    return killed_in_a_process(lambda: operation(opened(root, KillingFs(step))))


@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_any_step_it_is_done_whole_or_not_at_all(name: str, tmp_path: Path) -> None:
    operation = OPERATIONS[name]
    steps, before, after = steps_and_ends(operation, tmp_path / "whole")
    found = set()
    for step in range(1, steps + 1):
        root = prepared(tmp_path / str(step))
        assert in_a_process_killed_at(step, root, operation)

        started = time.monotonic()
        store = opened(root)
        ready_after = time.monotonic() - started

        now = seen(store)
        assert now in (before, after) or adopted_but_not_noted(name, now, before)
        found.add(now == after)
        check_sound(store)
        assert ready_after < 5
        store.close()
    assert found == {False, True}


def adopted_but_not_noted(name: str, now: tuple[object, ...], before: tuple[object, ...]) -> bool:
    """A copied folder may have its manifest, but not its record yet: the next look at the folder makes it."""
    return name == "adopt" and now[1:] == before[1:]


def check_sound(store: Store) -> None:
    """Check digests, that nothing of a dead process is left, and that numbers go on."""
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
from tests.server.repository.test_crash import opened, publish
store = opened(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(*(publish(store, f"{sys.argv[2]} {n}".encode(), live=True).version for n in range(100)))
store.close()
"""


def test_two_hundred_racing_publishes_make_two_hundred_versions(tmp_path: Path) -> None:
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

    store = opened(tmp_path)
    assert sorted(int(version) for answer in answers for version in answer) == list(range(1, 201))
    assert store.versions(MODEL) == list(range(1, 201))
    contents = {(store.folder(MODEL, version) / "model.onnx").read_text() for version in range(1, 201)}
    assert contents == {f"{name} {n}" for name in "ab" for n in range(100)}
    assert [record.generation for record in store.audit(MODEL)] == list(range(1, 201))
    store.close()


def test_a_stopped_process_does_not_stop_the_others_for_ever(tmp_path: Path) -> None:
    holder = opened(prepared(tmp_path / "repo"))
    waiter = Store(tmp_path / "repo", lock_timeout=0.05)
    with holder._lock.held(), pytest.raises(ServerError, match="locked by another process"):
        waiter.open()
    waiter.open()
    waiter.close()
    holder.close()
