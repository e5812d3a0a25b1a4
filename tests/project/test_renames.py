"""docs/renames.md is true: what it calls the new names exists, and the old names are gone."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "renames.md").read_text()
FILES, _, IDENTIFIERS = PAGE.partition("## Identifiers\n")
MOVED = re.findall(r"^\| (\S+\.py) \| (\S+\.py) \|$", FILES, re.MULTILINE)
RENAMED = re.findall(r"^\| (\S+\.py) \| `(\S+)` \| `(\S+)` \|$", IDENTIFIERS, re.MULTILINE)


@cache
def names_in(path: str) -> frozenset[str]:
    """The names that a file defines: of the module, and of its classes as `Class.name`."""
    tree = ast.parse((PROJECT / path).read_text())
    found = set(defined(tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for name in defined(node.body)}
    return frozenset(found)


def defined(body: list[ast.stmt]) -> list[str]:
    names = []
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                names += [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return names


def test_the_page_has_tables_of_files_and_of_identifiers() -> None:
    assert len(MOVED) > 300 and len(RENAMED) > 800


def test_moved_files_are_at_their_new_places_only() -> None:
    new_places = {now for _, now in MOVED}
    assert [now for now in new_places if not (PROJECT / now).exists()] == []
    assert [before for before, _ in MOVED if (PROJECT / before).exists() and before not in new_places] == []


def test_renamed_identifiers_have_their_new_names_only() -> None:
    now = {(path, new) for path, _, new in RENAMED}
    for path, old, new in RENAMED:
        assert new in names_in(path), f"{path}: {new} is not defined"
        assert old not in names_in(path) or (path, old) in now, f"{path}: {old} is still defined"


def test_no_import_uses_an_old_path() -> None:
    """`core` and `server` are no packages; the folders are `lathe.core` and `lathe.server`."""
    for path in (
        file
        for folder in ("lathe", "core", "server", "loadtest", "tools", "tests")
        for file in (PROJECT / folder).rglob("*.py")
    ):
        assert not re.search(r"^\s*(from|import) (core|server)(\.|\s|$)", path.read_text(), re.MULTILINE), path
