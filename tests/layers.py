"""Layers of modules: a module may import modules of its own layer and of lower ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.module_imports import imported_at_loading, is_generator, module_name

ROOT = Path(__file__).resolve().parents[1]
GENERATORS = "generators of kernels"  # this name in a list of layers stands for all modules that generate kernels


class Layers:
    """The layers of a package, from the lowest to the highest, each a list of names of modules and packages."""

    def __init__(self, package: str, layers: Sequence[Sequence[str]]) -> None:
        self.package = package
        self._ranks = {name: rank for rank, names in enumerate(layers) for name in names}

    def rank(self, module: str) -> int | None:
        """The rank of a module's layer: that of the longest name that the module lies in; None if no layer has one."""
        if is_generator(module):
            return self._ranks.get(GENERATORS)
        while module not in self._ranks and "." in module:
            module = module.rpartition(".")[0]
        return self._ranks.get(module)

    def violations(self, paths: Iterable[Path]) -> dict[str, list[str]]:
        """By file, the modules of higher layers that it imports on loading; files without such imports are left out."""
        found = {str(path.relative_to(ROOT)): self.imports_from_higher(path) for path in paths}
        return {file: names for file, names in found.items() if names}

    def imports_from_higher(self, path: Path) -> list[str]:
        """The modules of higher layers that a file imports on loading. Every importing file must be in a layer."""
        imports = imported_at_loading(path, self.package)
        own = self.rank(module_name(path, ROOT))
        assert own is not None or (path.stem == "__init__" and not imports), f"{path} is in no layer: add it"
        ranks = {name: self.rank(name) for name in imports}
        return [name for name, rank in ranks.items() if own is None or rank is None or rank > own]
