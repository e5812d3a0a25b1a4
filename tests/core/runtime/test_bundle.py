"""Bundles read back what was written; damaged ones, and those writable by other users, are refused."""

from __future__ import annotations

import hashlib
import os
import stat
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from lathe.core.errors import ArtifactError
from lathe.core.runtime.artifact.bundle import LARGE, Bundle, FileIdentity, Span, is_trusted, write_bundle

PARTS = {"first": [b"abc", memoryview(b"def")], "none": [], "second": [bytes(range(256)) * 40]}


def made(folder: Path) -> Path:
    path = folder / "some.lathe"
    write_bundle(path, {"answer": 42}, PARTS)
    return path


def read(path: Path) -> dict[str, bytes]:
    with Bundle(path) as bundle:
        assert bundle.facts == {"answer": 42}
        return {name: bytes(bundle.section(name)) for name in PARTS}


def test_sections_read_back_and_outlive_the_bundle(tmp_path: Path) -> None:
    assert read(made(tmp_path)) == {name: b"".join(chunks) for name, chunks in PARTS.items()}
    with Bundle(tmp_path / "some.lathe") as bundle:
        section = bundle.section("second")
    assert section.ctypes.data % 64 == 0 and not section.flags.writeable
    assert np.array_equal(section[:256], np.arange(256))


def test_equal_contents_give_equal_files_and_no_temporary_ones(tmp_path: Path) -> None:
    content = made(tmp_path).read_bytes()
    assert made(tmp_path).read_bytes() == content  # the second replaces the first
    assert [path.name for path in tmp_path.iterdir()] == ["some.lathe"]


def test_sections_longer_than_a_huge_page_read_back(tmp_path: Path) -> None:
    pieces = [np.random.default_rng(size).bytes(size) for size in ((1 << 21) - 4099, 3 << 21, 5)]
    write_bundle(tmp_path / "some.lathe", {}, {"long": pieces})
    with Bundle(tmp_path / "some.lathe") as bundle:
        assert bytes(bundle.section("long")) == b"".join(pieces)


def test_a_large_chunk_has_a_digest_of_its_own(tmp_path: Path) -> None:
    large = [np.random.default_rng(size).bytes(size) for size in (LARGE, LARGE + 1)]
    write_bundle(tmp_path / "some.lathe", {}, {"mixed": [b"a", b"", b"bc", *large, b"", b"end"], "none": [b""]})
    parts = [b"abc", *large, b"end"]
    starts = accumulate(map(len, parts), initial=0)
    expected = [Span(at, len(part), hashlib.sha256(part).hexdigest()) for at, part in zip(starts, parts, strict=False)]
    with Bundle(tmp_path / "some.lathe") as bundle:
        assert bundle.spans("mixed") == expected and bundle.spans("none") == []
        assert bytes(bundle.section("mixed")) == b"".join(parts) and bundle.size("mixed") == len(b"".join(parts))


def test_only_untouched_files_of_this_process_skip_the_check(tmp_path: Path) -> None:
    path = tmp_path / "some.lathe"
    written = write_bundle(path, {"answer": 42}, PARTS)
    good, status = path.read_bytes(), path.stat()
    damaged = good.replace(b"abcdef", b"abcdeg")

    def seen(known: FileIdentity | None) -> bytes:
        with Bundle(path, known) as bundle:
            return bytes(bundle.section("first"))

    path.write_bytes(damaged)  # the modification time has changed
    with pytest.raises(ArtifactError, match="is damaged: the digest of bytes 0 to 6 of its section 'first'"):
        seen(written)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert seen(written) == b"abcdeg"  # the digest was not computed
    with pytest.raises(ArtifactError, match="is damaged"):
        seen(None)
    (tmp_path / "other").write_bytes(damaged)
    os.utime(tmp_path / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(tmp_path / "other", path)  # another file in its place
    with pytest.raises(ArtifactError, match="is damaged"):
        seen(written)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = made(tmp_path)
    with pytest.raises(TypeError):
        write_bundle(path, {}, {"first": [b"new", 3]})  # type: ignore[list-item]
    assert read(path) and [each.name for each in tmp_path.iterdir()] == ["some.lathe"]


def test_any_flipped_or_missing_byte_that_matters_is_found(tmp_path: Path) -> None:
    path = made(tmp_path)
    content = path.read_bytes()
    used = [*range(8), *range(4096, 4102), *range(8192, 8192 + 10240, 97), *range(len(content) - 300, len(content))]
    for at in used:
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"some\.lathe"):
            read(path)
    for size in (0, 7, 48, 5000, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ArtifactError, match=r"some\.lathe"):
            read(path)


def test_files_that_others_could_have_written_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path)
    os.chmod(path, 0o664)
    with pytest.raises(ArtifactError, match="written by others"):
        Bundle(path)
    os.chmod(path, 0o644)
    (tmp_path / "link.lathe").symlink_to(path)
    for name, complaint in (("link.lathe", "is a link"), ("nowhere.lathe", "is missing"), (".", "is no file")):
        with pytest.raises(ArtifactError, match=complaint):
            Bundle(tmp_path / name)


@pytest.mark.parametrize(
    ("owner", "mode", "trusted"),
    [(1000, 0o600, True), (1000, 0o644, True), (0, 0o644, True), (1001, 0o644, False), (1000, 0o646, False)],
)
def test_only_files_of_the_user_and_of_root_are_trusted(owner: int, mode: int, trusted: bool) -> None:
    status = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, 1000, 0, 0, 0, 0))
    assert is_trusted(status, 1000) is trusted
