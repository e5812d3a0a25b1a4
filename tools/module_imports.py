"""Reads from source files which modules a module imports, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """The absolute names that a file imports, each with whether loading the file imports it.

    `import a` gives `a`, and `from a import b` gives `a.b`. Imports inside functions, and imports for type checkers
    alone, are not part of loading the file.
    """
    yield from _imported(ast.parse(path.read_text()), loading=True)


def imported_at_loading(path: Path, package: str) -> list[str]:
    """The names below a package that loading the file imports."""
    return [name for name, loading in imported(path) if loading and name.startswith(f"{package}.")]


def module_name(path: Path, root: Path) -> str:
    """The name of the module in a file; `root` holds core/ and server/, which are packages of `lathe`."""
    return ".".join(("lathe", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


def is_generator(module: str) -> bool:
    """Whether a module writes the code of kernels; the planner imports only the others of `lathe.core.kernels`."""
    names = module.split(".")
    if names[:3] != ["lathe", "core", "kernels"]:
        return False
    return any(re.fullmatch(r"(\w+_)?(cpu|cuda)", name) for name in names[3:])


def _imported(tree: ast.AST, loading: bool) -> Iterator[tuple[str, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # expressions are most of a file, and none imports anything
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", loading) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, loading) for alias in node.names)
        is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_later |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        yield from _imported(node, loading and not is_later)
