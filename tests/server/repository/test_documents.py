"""The documents of a repository are read strictly, and its log survives crashes and disk errors."""

from __future__ import annotations

import errno
import hashlib
import json
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe.server.errors import BadRequest, Conflict
from lathe.server.repository import names, policy
from lathe.server.repository.aliases import HISTORY_LIMIT, Alias, Aliases, DamagedDocument
from lathe.server.repository.fs import Fs
from lathe.server.repository.journal import MAX_REMEMBERED, Journal, Record, last_record
from lathe.server.repository.lifecycle import IllegalTransition, State, Status
from lathe.server.repository.manifest import (
    CorruptVersion,
    FileEntry,
    Manifest,
    Signature,
    describe_folder,
    verify_files,
)
from lathe.server.types import TensorSpec
from tests.server.repository.fake_fs import FailingFs

PLAIN: dict[str, Any] = {"schema": 1, "files": {"model.onnx": {"sha256": "a" * 64, "size": 3}}}


def test_a_manifest_reads_as_it_was_written() -> None:
    signature = Signature.of((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "INT64", ()),))
    manifest = Manifest({"model.onnx": FileEntry("a" * 64, 3)}, "2026-01-01T00:00:00Z", signature, {"accuracy": 0.9})
    assert Manifest.from_json(json.loads(manifest.dump())) == manifest


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"files": {}},
        {"files": {"other.onnx": PLAIN["files"]["model.onnx"]}},
        {"files": {"model.onnx": {"sha256": "A" * 64, "size": 3}}},
        {"files": {"model.onnx": {"sha256": "a" * 64, "size": -1}}},
        {"files": {**PLAIN["files"], "../x": PLAIN["files"]["model.onnx"]}},
        {"files": {**PLAIN["files"], "manifest.json": PLAIN["files"]["model.onnx"]}},
        {"created": 5},
        {"metadata": []},
        {"inputs": [{"name": "x"}], "outputs": []},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": ["n"]}], "outputs": []},
        {"inputs": []},
        {"surprise": 1},
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(change: dict[str, Any]) -> None:
    Manifest.from_json(PLAIN)
    with pytest.raises(DamagedDocument, match=r"manifest"):
        Manifest.from_json({**PLAIN, **change})


def test_signatures_differ_in_everything_visible_except_order() -> None:
    a, b = TensorSpec("a", "FP32", (-1, 4)), TensorSpec("b", "FP32", (-1, 4))
    assert Signature.of((a, b), ()) == Signature.of((b, a), ())
    others = [TensorSpec("c", "FP32", (-1, 4)), TensorSpec("a", "FP64", (-1, 4)), TensorSpec("a", "FP32", (-1, 5))]
    assert all(Signature.of((a,), ()) != Signature.of((other,), ()) for other in others)


def test_every_flipped_byte_of_a_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(bytes(range(40)))
    manifest = Manifest(describe_folder(tmp_path))
    verify_files(tmp_path, manifest)
    for position in range(40):
        content = bytearray(range(40))
        content[position] ^= 1
        file.write_bytes(content)
        with pytest.raises(CorruptVersion, match=r"'model\.onnx' has sha256"):
            verify_files(tmp_path, manifest)
    file.unlink()
    with pytest.raises(CorruptVersion, match="cannot be read"):
        verify_files(tmp_path, manifest)


def document(name: str = "live", **alias: object) -> dict[str, object]:
    """An aliases document of one alias that names version 1, with these fields replaced."""
    return {
        "schema": 1,
        "generation": 1,
        "high_water": 1,
        "aliases": {name: {"version": 1, "history": [1], "position": 0, **alias}},
    }


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {**document(), "schema": 2},
        {**document(), "generation": -1},
        {**document(), "high_water": "1"},
        document("../x"),
        document(history=[]),
        document(position=1),
        document(position=-1),
        document(version=2),
        document(version=0, history=[0]),
        document(version=True, history=[True]),
    ],
)
def test_aliases_that_break_a_rule_are_refused(broken: object) -> None:
    assert Aliases.from_json(document()).version("live") == 1
    with pytest.raises(DamagedDocument):
        Aliases.from_json(broken)


MOVES = st.lists(st.one_of(st.integers(1, 5), st.just("back")), max_size=30)


@given(MOVES)
def test_an_alias_has_a_history_like_a_browser(moves: list[int | str]) -> None:
    """Compared with two stacks, the textbook's way."""
    state, behind, now = Aliases(), list[int](), 0
    for move in moves:
        if isinstance(move, int):
            state = state.moved("live", move)
            if now and move != now:
                behind.append(now)
            now = move
        elif behind:
            state, now = state.with_rollback("live", None), behind.pop()
        elif now:
            with pytest.raises(Conflict):
                state.with_rollback("live", None)
        assert (state.version("live") or 0) == now
        assert Aliases.from_json(json.loads(json.dumps(state.to_json()))) == state


@given(MOVES, st.integers(1, 5))
def test_a_deleted_version_leaves_the_history_and_nothing_else_changes(moves: list[int | str], gone: int) -> None:
    state = Aliases()
    for move in moves:
        if isinstance(move, int):
            state = state.moved("live", move)
    if state.version("live") in (None, gone):
        return
    alias = state.without_version(gone).get("live")
    assert alias.version == state.version("live")
    assert gone not in alias.history
    assert all(a != b for a, b in zip(alias.history, alias.history[1:], strict=False))


def test_a_history_is_bounded() -> None:
    state = Aliases()
    for turn in range(3 * HISTORY_LIMIT):
        state = state.moved("live", 1 + turn % 2)
    assert len(state.get("live").history) == HISTORY_LIMIT
    assert state.with_rollback("live", None).version("live") == 1


@pytest.mark.parametrize("name", ["m", "M-1", "a.b_c", "1", "x" * 128])
def test_valid_names(name: str) -> None:
    assert names.check_model(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".m", "-m", "_m", "a/b", "a\\b", "a b", "a\n", "a\0", "é", "x" * 129])
def test_invalid_names_are_refused(name: str) -> None:
    for check in (names.check_model, names.check_file, names.check_alias):
        with pytest.raises(BadRequest, match="expected"):
            check(name)


@pytest.mark.parametrize("text", ["", "0", "01", "-1", "1.0", "1e3", "９", "9" * 10, "1\n", "live"])
def test_invalid_version_numbers_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="version"):
        names.check_version(text)


def record(generation: int, **more: Any) -> Record:
    return Record("2026-01-01T00:00:00Z", "publish", Aliases(generation), generation, **more)


def write_log(path: Path, count: int) -> Journal:
    journal = Journal(Fs(), path)
    for generation in range(1, count + 1):
        journal.append(record(generation, key=f"k{generation}", fingerprint="f"))
    return journal


def test_a_log_can_be_read_back_and_followed_by_another_reader(tmp_path: Path) -> None:
    writer = write_log(tmp_path / "log", 2)
    reader = Journal(Fs(), tmp_path / "log")
    assert [r.generation for r in reader.snapshot()] == [1, 2]
    writer.append(record(3))
    assert reader.snapshot() == writer.snapshot()
    assert reader.find_key("k2") == writer.snapshot()[1]
    assert last_record(tmp_path / "log") == writer.last


def test_a_log_cut_anywhere_loses_only_its_last_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path, 3)
    content = path.read_bytes()
    start = content.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start, len(content)):
        path.write_bytes(content[:end])
        journal = Journal(Fs(), path)
        assert [r.generation for r in journal.snapshot()] == [1, 2]
        assert (last_record(path) or record(0)).generation == 2
        journal.append(record(7))
        assert [r.generation for r in Journal(Fs(), path).snapshot()] == [1, 2, 7]


def test_a_flipped_byte_in_the_middle_keeps_the_rest_for_inspection(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    write_log(path, 3)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    journal = Journal(Fs(), path)
    journal.append(record(4))
    assert [r.generation for r in Journal(Fs(), path).snapshot()] == [4]
    (kept,) = tmp_path.glob("m.damaged-*")
    assert kept.read_bytes() == content


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_line_changed_together_with_its_checksum_is_damage(line: int, tmp_path: Path) -> None:
    """Changing history means changing all following lines, and then the newest digest differs."""
    path = tmp_path / "m.log"
    newest = write_log(path, 4).snapshot()[-1].chain_digest
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = replace(Record.parse(lines[line][:-1]), actor="nobody").dump()
    content = b"".join(lines)
    path.write_bytes(content)
    journal = Journal(Fs(), path)
    assert [r.generation for r in journal.snapshot()] == list(range(1, line + 2))
    assert newest not in {r.chain_digest for r in journal.snapshot()}
    journal.append(record(5))
    (kept,) = tmp_path.glob("m.damaged-*")
    assert kept.read_bytes() == content


def test_removed_or_inserted_lines_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    write_log(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    for forged, whole in (([0, 1, 3], [1, 2]), ([0, 1, 1, 2, 3], [1, 2]), ([0, 2, 1, 3], [1])):
        path.write_bytes(b"".join(lines[i] for i in forged))
        assert [r.generation for r in Journal(Fs(), path).snapshot()] == whole


def test_a_log_of_an_older_release_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(record(1).dump() + record(2).dump())
    Journal(Fs(), path).append(record(3))
    records = Journal(Fs(), path).snapshot()
    assert [(r.generation, r.previous) for r in records] == [(1, None), (2, None), (3, records[1].chain_digest)]


def test_the_digest_of_a_line_is_of_its_stored_bytes(tmp_path: Path) -> None:
    """Whatever order and spacing of fields the older release wrote; the chain of digests continues after it."""
    body = json.dumps(json.loads(record(1).dump().partition(b" ")[2]), sort_keys=True, indent=None).encode()
    assert body != record(1).dump().partition(b" ")[2][:-1]
    path = tmp_path / "m.log"
    path.write_bytes(b"%08x %s\n" % (zlib.crc32(body), body))
    Journal(Fs(), path).append(record(2))
    first, second = Journal(Fs(), path).snapshot()
    assert second.previous == first.chain_digest == hashlib.sha256(body).hexdigest()


def test_the_number_of_records_in_memory_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(record(n, key=f"k{n}", fingerprint="f").dump() for n in range(1, MAX_REMEMBERED + 3)))
    journal = Journal(Fs(), path)
    assert len(journal.snapshot()) == MAX_REMEMBERED
    assert (journal.find_key("k2"), journal.find_key("k3")) == (None, journal.snapshot()[0])


def test_memory_does_not_grow_with_the_records_of_a_log(tmp_path: Path) -> None:
    history = Aliases(aliases={"live": Alias(tuple(range(1_000, 1_050)), 49)})
    path = tmp_path / "log"
    path.write_bytes(b"".join(replace(record(n), state=replace(history, generation=n)).dump() for n in range(1, 1_001)))
    journal = Journal(Fs(), path)
    tracemalloc.start()
    try:
        journal.refresh()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < path.stat().st_size / 4  # it stores where lines begin; other threads may allocate a little meanwhile
    assert [r.generation for r in journal.snapshot()] == list(range(1, 1_001))


def test_a_log_replaced_during_a_query_is_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "log", tmp_path / "other"

    class Raced(Journal):
        def _refresh(self) -> None:
            super()._refresh()
            if other.exists():
                other.replace(path)

    write_log(path, 4)
    write_log(other, 2)
    assert [r.generation for r in Raced(Fs(), path).snapshot()] == [1, 2]


def test_a_long_log_is_shortened_without_losing_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start reads a bounded log; another process that read the long one continues with the short one."""
    monkeypatch.setattr("lathe.server.repository.journal.MAX_REMEMBERED", 3)
    path = tmp_path / "m.log"
    writer, reader = Journal(Fs(), path), Journal(Fs(), path)
    for generation in range(1, 21):
        writer.append(record(generation, key=f"k{generation}", fingerprint="f"))
        reader.refresh()
        assert reader.last == writer.last
        assert len(path.read_bytes().splitlines()) <= 6
    assert [r.generation for r in Journal(Fs(), path).snapshot()] == [18, 19, 20]
    assert (reader.find_key("k17"), reader.find_key("k18")) == (None, writer.snapshot()[0])
    files = sorted(tmp_path.iterdir())
    told = sorted(Record.parse(line).generation for file in files for line in file.read_bytes().splitlines())
    assert told == list(range(1, 21))


def test_a_log_that_cannot_be_shortened_still_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.server.repository.journal.MAX_REMEMBERED", 2)
    path = tmp_path / "m.log"
    for step in range(1, 5):  # opening, writing, syncing, naming the archive
        path.unlink(missing_ok=True)
        for generation in range(1, 5):
            Journal(Fs(), path).append(record(generation))
        fs = FailingFs(step, errno.ENOSPC)
        journal = Journal(fs, path)
        journal.append(record(5))
        assert fs.step > step
        assert [r.generation for r in Journal(Fs(), path).snapshot()] == [4, 5]
        assert len(path.read_bytes().splitlines()) == 5


def test_only_documented_state_transitions_are_allowed() -> None:
    status = Status()
    for state in (State.COMPILING, State.LOADING, State.READY, State.DRAINING, State.UNLOADED, State.COMPILING):
        status = status.to(state)
    assert status.to(State.FAILED, "why") == Status(State.FAILED, "why")
    with pytest.raises(IllegalTransition, match="compiling -> ready"):
        status.to(State.READY)


def aliases(**histories: tuple[int, ...]) -> Aliases:
    return Aliases(aliases={name: Alias(history, len(history) - 1) for name, history in histories.items()})


def test_policy_orders_live_then_aliases_then_rollbacks_then_the_newest() -> None:
    state = aliases(canary=(2, 4), live=(1, 3))
    assert policy.versions_to_load(state, {1, 2, 3, 4, 5, 9}) == [3, 4, 1, 2, 9]
    assert policy.versions_to_load(state, {1, 4}) == [4, 1]
    assert policy.versions_to_load(Aliases(), set()) == []


def test_policy_keeps_the_old_version_answering_until_the_new_is_loaded() -> None:
    state = aliases(live=(1, 2, 3))
    assert policy.answering_version(state, "live", {1, 2, 3}, 2) == 3
    assert policy.answering_version(state, "live", {1, 2}, 2) == 2
    assert policy.answering_version(state, "live", {1, 9}, 9) == 9
    assert policy.answering_version(state, "live", {1, 2}, None) == 2
    assert policy.answering_version(state, "live", {1, 2}, None, coming={1, 2}) == 2
    assert policy.answering_version(state, "live", {1, 2}, None, coming={1, 2, 3}) is None
    assert policy.answering_version(state, "live", {1, 2}, 1, coming={1, 2, 3}) == 1
    assert policy.answering_version(state, "live", set(), 2) is None


def test_policy_deletes_the_oldest_that_is_not_retained_or_needed() -> None:
    state = aliases(live=(1, 2, 5), canary=(3,))
    assert policy.versions_to_delete(state, {1, 2, 3, 4, 5, 6, 7}, keep=2) == [1, 4]
    assert policy.versions_to_delete(state, {2, 3, 5}, keep=1) == []


def test_policy_adopts_new_folders() -> None:
    state = aliases(live=(2,)).with_high_water(3)
    assert policy.unadopted_versions(state, {1: True, 2: True, 3: False, 4: True, 5: False}) == [5, 4, 3]
    assert policy.unadopted_versions(Aliases(), {1: True, 2: False}) == [2, 1]
