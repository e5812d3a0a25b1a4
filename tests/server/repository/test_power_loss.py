"""The possible contents of the disk after a power failure, at every step, with and without unsynced changes.

`kill -9` does not test this, because the page cache survives it. Each state is written to a folder, and a store is
opened on it as after a reboot. Acknowledged changes must be there, and others must be complete or absent."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

import lathe.server.repository
from lathe.server.repository import journal
from lathe.server.repository.aliases import Alias, Aliases, DamagedDocument
from lathe.server.repository.fs import Fs
from lathe.server.repository.journal import Record, _is_record
from lathe.server.repository.manifest import CorruptVersion, Manifest, describe_folder, verify_files
from lathe.server.repository.store import Origin, Outcome, Store
from tests.server.repository.fake_fs import Killed, RecordingFs, Site, Tree, lay_out

MODEL = "m"


@dataclass(frozen=True)
class Seen:
    """The state of a repository that a user can see."""

    versions: tuple[int, ...]
    aliases: Mapping[str, Alias]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, store: Store) -> Seen:
        keys = [f"k{n}" for n in range(9) if store.find_key(MODEL, Origin("", f"k{n}", "f")) is not None]
        return cls(tuple(store.versions(MODEL)), dict(store.state(MODEL).aliases), tuple(keys))


def logged_generations(store: Store) -> set[int]:
    """The generations in the log and its archives."""
    logs = (store.root / ".lathe" / "log").glob(f"{MODEL}.log*")
    lines = {line for path in logs for line in path.read_bytes().split(b"\n") if _is_record(line)}
    return {Record.parse(line).generation for line in lines}


class World:
    """A repository, its acknowledged states, and every possible content of the disk."""

    def __init__(self, folder: Path, deaf: Site | None, copied: dict[int, bytes] | None = None) -> None:
        self.root = folder / "repo"
        self.root.mkdir()
        self.read_cost = copied or {}
        for version, content in self.read_cost.items():
            (self.root / MODEL / str(version)).mkdir(parents=True)
            (self.root / MODEL / str(version) / "model.onnx").write_bytes(content)
        self.acknowledged = [Seen.of(Store(self.root))]
        self.high_water = [0]
        self.generations = [0]
        self.states: dict[tuple[Tree, int], None] = {}  # and the number of acknowledged changes at that time
        self.fs = RecordingFs(self.root, deaf)
        self.fs.observers.append(self.observe)

    def observe(self) -> None:
        for _, tree in self.fs.states():
            self.states.setdefault((tree, len(self.acknowledged) - 1))

    def open(self) -> Store:
        store = Store(self.root, self.fs)
        store.open()
        return store

    def acknowledge(self, store: Store) -> None:
        self.acknowledged.append(Seen.of(store))
        self.high_water.append(store.state(MODEL).high_water)
        self.generations.append(store.state(MODEL).generation)
        self.observe()

    def violation(self, tree: Tree, step: int, folder: Path) -> str | None:
        """Reboot into `tree`; return what is wrong."""
        root = folder / "rebooted"
        shutil.rmtree(root, ignore_errors=True)
        lay_out(tree, root)
        store = Store(root)
        store.open()
        try:
            return self._compare(store, step)
        finally:
            store.close()

    def _compare(self, store: Store, step: int) -> str | None:
        seen, allowed = Seen.of(store), self.acknowledged[step : step + 2]
        if seen not in allowed:
            return f"after {step} acknowledgements: {seen}, expected one of {allowed}"
        for version in seen.versions:
            manifest = store.manifest(MODEL, version)
            if manifest is None and version not in self.read_cost:
                return f"version {version} has no manifest"
            if manifest is not None:
                verify_files(store.folder(MODEL, version), manifest)
        if missing := set(range(1, self.generations[step] + 1)) - logged_generations(store):
            return f"no log tells of the changes {missing}"
        number = publish(store, b"next", stays).record.version
        return None if number and number > self.high_water[step] else f"version number {number} is used again"


def publish(store: Store, content: bytes, change: Callable[[Aliases], Aliases], key: str | None = None) -> Outcome:
    staging = store.stage()
    staging.create("model.onnx").write(content)
    return store.publish(MODEL, staging, Manifest(staging.entries), change, Origin("", key, "f" if key else None))


def goes_live(state: Aliases) -> Aliases:
    return state.moved("live", state.high_water)


def stays(state: Aliases) -> Aliases:
    return state


def everyday(folder: Path, deaf: Site | None = None) -> World:
    """Versions are published, aliases move, a version is deleted."""
    world = World(folder, deaf)
    store = world.open()
    operations: list[Callable[[], Outcome]] = [
        lambda: publish(store, b"first", goes_live, "k1"),
        lambda: publish(store, b"second", goes_live),
        lambda: publish(store, b"third", stays, "k3"),
        lambda: store.move(MODEL, "alias", "canary", lambda s: s.moved("canary", 3), Origin()),
        lambda: store.move(MODEL, "rollback", "live", lambda s: s.with_rollback("live", None), Origin("", "k4", "f")),
        lambda: store.move(MODEL, "alias", "live", lambda s: s.moved("live", 3), Origin()),
        lambda: store.delete(MODEL, 2, Origin()),
        lambda: store.move(MODEL, "alias", "live", lambda s: s.moved("live", 1), Origin()),
    ]
    for operation in operations:
        operation()
        world.acknowledge(store)
    return world


def copied_by_hand(folder: Path, deaf: Site | None = None) -> World:
    """A version that was copied without a manifest is adopted."""
    world = World(folder, deaf, {4: b"copied"})
    store = world.open()
    store.adopt(MODEL, 4, Manifest(describe_folder(store.folder(MODEL, 4))), goes_live)
    world.acknowledge(store)
    return world


def killed_and_asked_again(folder: Path, deaf: Site | None = None) -> World:
    """The process dies between a record's write and its sync; the next one finds the record, and the client retries."""
    world = World(folder, deaf)
    world.fs.die_after = ("write", ".log")
    with pytest.raises(Killed):
        publish(world.open(), b"first", goes_live, "k1")
    world.fs.die_after = None
    store = world.open()
    assert publish(store, b"first", goes_live, "k1").replayed
    world.acknowledge(store)
    store.move(MODEL, "alias", "canary", lambda s: s.moved("canary", 1), Origin())
    world.acknowledge(store)
    return world


def log_grown_long(folder: Path, deaf: Site | None = None) -> World:
    """The oldest changes move to an archive."""
    world = World(folder, deaf)
    with patch.object(journal, "MAX_REMEMBERED", 2):
        store = world.open()
        for content in (b"first", b"second"):
            publish(store, content, goes_live)
            world.acknowledge(store)
        for turn in range(6):
            store.move(MODEL, "alias", "live", lambda s, turn=turn: s.moved("live", 1 + turn % 2), Origin())
            world.acknowledge(store)
    assert len(list(world.root.glob(".lathe/log/*.log-0*"))) == 2
    return world


SCENARIOS = [everyday, copied_by_hand, killed_and_asked_again, log_grown_long]


def sync_sites() -> list[Site]:
    """Every line of the repository's code that syncs."""
    sites = []
    for file in sorted(Path(lathe.server.repository.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="_fs"), attr="sync" | "sync_dir")):
                    sites.append((file.name, node.lineno))
    return sites


@pytest.mark.sample(4)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_acknowledged_changes_are_durable_and_others_complete_or_absent(
    scenario: Callable[[Path], World], tmp_path: Path
) -> None:
    world = scenario(tmp_path)

    violations = {world.violation(tree, step, tmp_path) for tree, step in world.states}

    assert violations == {None}


@pytest.mark.slow
@pytest.mark.parametrize("site", sync_sites(), ids=lambda site: f"{site[0]}:{site[1]}")
def test_each_sync_is_necessary(site: Site, tmp_path: Path) -> None:
    assert any(_breaks(scenario, site, tmp_path / scenario.__name__) for scenario in SCENARIOS)


def _breaks(scenario: Callable[[Path, Site], World], site: Site, folder: Path) -> bool:
    folder.mkdir()
    world = scenario(folder, site)
    return any(_is_broken(world, tree, step, folder) for tree, step in reversed(world.states))


def _is_broken(world: World, tree: Tree, step: int, folder: Path) -> bool:
    try:
        return world.violation(tree, step, folder) is not None
    except (CorruptVersion, DamagedDocument, FileNotFoundError):
        return True


def test_durable_means_fsync_of_file_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append(os.fstat(descriptor).st_ino))
    fs, path = Fs(), tmp_path / "file"
    descriptor = fs.create(path)
    fs.sync(descriptor)
    fs.close(descriptor)
    fs.sync_dir(tmp_path)

    assert asked == [path.stat().st_ino, tmp_path.stat().st_ino]


def test_all_syncs_are_found_and_run(tmp_path: Path) -> None:
    run: set[Site] = set()
    for scenario in SCENARIOS:
        (tmp_path / scenario.__name__).mkdir()
        run |= scenario(tmp_path / scenario.__name__).fs.sites

    assert run == set(sync_sites())
