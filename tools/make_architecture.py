"""Writes the tables of imports in docs/architecture.md: which part of Lathe imports which, from the source files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tools.module_imports import imported, is_generator, module_name

ARCHITECTURE = Path("docs/architecture.md")
ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- Imports: written by `make docs` (tools/make_architecture.py); a test compares them with the code. -->\n"
END = "<!-- End of imports. -->\n"
GENERATORS = "kernels (generators)"
PUBLIC = {"lathe.nn": "lathe.core.nn", "lathe.train": "lathe.core.train", "lathe.client": "lathe.server.client"}

Part: TypeAlias = tuple[str, str]  # ("core", "plan"): a folder or a single module of core/ or server/

CORE_HEAD = """\
### core

A part is a folder, or a module directly in `core/`. Imports at load time lead to rows above, except in import cycles.
`kernels (generators)` are the files `cpu.py`, `cuda.py`, `*_cpu.py` and `*_cuda.py` of `core/kernels`.

| Part | Imports | Imports inside functions or for types |
|---|---|---|
"""
SERVER_HEAD = """
### server

| Part | Imports from server | Imports from core | Imports inside functions or for types |
|---|---|---|---|
"""
CIRCLE = """
Folders that import each other, directly or by way of others: {names}.
"""


@dataclass
class Uses:
    """The parts that one part imports."""

    loading: set[Part] = field(default_factory=set)  # with the module itself
    later: set[Part] = field(default_factory=set)  # inside functions, or for type checkers only


def sections(root: Path = ROOT) -> str:
    """The text between the marks of the page."""
    uses = imports(root)
    core = {part: each for part, each in uses.items() if part[0] == "core"}
    server = {part: each for part, each in uses.items() if part[0] == "server"}
    rows = "".join(core_row(part, core[part]) for part in in_order(core))
    rest = "".join(server_row(part, server[part]) for part in in_order(server))
    return CORE_HEAD + rows + circle(core) + SERVER_HEAD + rest + circle(server)


def in_order(uses: Mapping[Part, Uses]) -> list[Part]:
    """The parts, each after all parts that it imports when it is loaded, except within an import cycle.

    Sorted by the number of parts reached: a part reaches its imports and all that they reach, so it reaches more.
    """
    reached = closures(uses)
    return sorted(uses, key=lambda part: (len(reached[part]), part))


def circle(uses: Mapping[Part, Uses]) -> str:
    """A sentence that names the parts in import cycles; empty if there are none."""
    reached = closures(uses)
    names = [f"`{part[1]}`" for part in sorted(reached) if part in reached[part]]
    return CIRCLE.format(names=f"{', '.join(names[:-1])} and {names[-1]}") if names else ""


def with_tables(text: str) -> str:
    """The page with new tables; ValueError if the marks around the tables are missing."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{ARCHITECTURE}: the marks of the tables are missing")
    return before + BEGIN + "\n" + sections() + "\n" + END + after


def imports(root: Path) -> dict[Part, Uses]:
    """The imports of every part."""
    uses: dict[Part, Uses] = {}
    for top in ("core", "server"):
        for path in sorted((root / top).rglob("*.py")):
            own = part_of(module_name(path, root))
            if own is None:
                continue
            each = uses.setdefault(own, Uses())
            for module, loading in imported(path):
                part = part_of(module)
                if part is not None and part != own:
                    (each.loading if loading else each.later).add(part)
    for each in uses.values():
        each.later -= each.loading
    return uses


def part_of(module: str) -> Part | None:
    """The part that a module belongs to; None for packages outside core and server."""
    for public, inner in PUBLIC.items():
        module = re.sub(rf"^{re.escape(public)}\b", inner, module)
    _, *names = module.split(".")
    if not module.startswith(("lathe.core.", "lathe.server.")):
        return None
    return names[0], GENERATORS if is_generator(module) else names[1]


def closures(uses: Mapping[Part, Uses]) -> dict[Part, set[Part]]:
    """For each part, all parts that it imports when it is loaded, directly or through others."""
    reached = {part: each.loading & uses.keys() for part, each in uses.items()}
    for _ in uses:
        for part in reached:
            reached[part] = reached[part].union(*(reached[near] for near in reached[part]))
    return reached


def core_row(part: Part, uses: Uses) -> str:
    return f"| `{part[1]}` | {names_in(uses.loading)} | {names_in(uses.later)} |\n"


def server_row(part: Part, uses: Uses) -> str:
    own = {each for each in uses.loading if each[0] == "server"}
    later = " ".join(filter(None, (names_in({e for e in uses.later if e[0] == "server"}, ""), core_names(uses.later))))
    return f"| `{part[1]}` | {names_in(own)} | {names_in(uses.loading - own)} | {later or '-'} |\n"


def core_names(parts: set[Part]) -> str:
    found = names_in({part for part in parts if part[0] == "core"}, "")
    return f"(core: {found})" if found else ""


def names_in(parts: set[Part], nothing: str = "-") -> str:
    return ", ".join(name for _, name in sorted(parts)) or nothing


def main() -> None:
    ARCHITECTURE.write_text(with_tables(ARCHITECTURE.read_text()))


if __name__ == "__main__":
    main()
