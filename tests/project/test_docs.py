"""The documentation agrees with the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe.core.toml_text import parse_toml
from lathe.core.train.recipe import compression
from lathe.core.train.recipe.recipe import from_toml
from lathe.server.errors import ServerError
from lathe.server.settings import Settings
from loadtest.scenarios import SCENARIOS
from tools.make_architecture import ARCHITECTURE, with_tables
from tools.make_docs import CONFIGURATION, configuration
from tools.make_walkthrough import WALKTHROUGH, walkthrough
from tools.recipe_docs import RECIPES, recipes

PAGES = sorted(
    str(path.relative_to(Path(__file__).parents[2]))
    for folder in (".", "docs", "core", "server")
    for path in (Path(__file__).parents[2] / folder).glob("*.md")
)


def test_the_page_of_settings_is_up_to_date(project: Path) -> None:
    assert (project / CONFIGURATION).read_text() == configuration(), "run `make docs`"


def test_the_walkthrough_is_up_to_date(project: Path) -> None:
    assert (project / WALKTHROUGH).read_text() == walkthrough(), "run `make docs`"


def test_the_tables_of_imports_are_up_to_date(project: Path) -> None:
    text = (project / ARCHITECTURE).read_text()
    assert text == with_tables(text), "run `make docs`"


def test_the_page_of_recipe_keys_is_up_to_date(project: Path) -> None:
    assert (project / RECIPES).read_text() == recipes(), "run `make docs`"


@pytest.mark.parametrize("page", ["docs/training.md", "docs/recipes.md"])
def test_recipes_in_pages_are_valid(project: Path, page: str) -> None:
    found = re.findall(r"^```toml\n(.*?)^```", (project / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found
    for text in found:
        if "[method]" in text:
            compression.from_json(json.dumps(parse_toml(text.encode())))
        else:
            from_toml(text.encode())


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_a_description(name: str) -> None:
    description = Settings.model_fields[name].description
    assert description
    assert description.endswith(".")
    assert f"LATHE_{name.upper()}" in configuration()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_that_exist(project: Path, page: str) -> None:
    text = re.sub(r"```.*?```", "", (project / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (project / page).parent.joinpath(target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "core/README.md", "server/README.md"])
def test_files_named_in_a_map_of_the_code_exist(project: Path, page: str) -> None:
    """Names are relative to the checkout, to core/ or to server/."""
    bases = [project, project / "core", project / "server"]
    named = re.findall(r"`([\w.]+/[\w./]*)`", (project / page).read_text())
    assert named
    assert [name for name in named if not any((base / name).exists() for base in bases)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_files_and_modules_named_in_a_page_exist(project: Path, page: str) -> None:
    """Whole paths of the checkout, and modules of `lathe.core` and `lathe.server` with or without a name in them."""
    text = (project / page).read_text()
    paths = re.findall(r"`((?:core|server|loadtest|tools|tests|deploy|docs)/[\w./-]+)`", text)
    assert [path for path in paths if not (project / path).exists()] == []
    for named in re.findall(r"\blathe\.((?:core|server)(?:\.\w+)+)", text):
        assert is_there(project, named.split(".")), f"lathe.{named}"


def is_there(project: Path, names: list[str]) -> bool:
    """Whether the names lead to a module, or to a name that occurs in a module's source."""
    place = project
    for count, name in enumerate(names):
        if (place / name).is_dir():
            place /= name
        elif (place / f"{name}.py").exists():
            source = (place / f"{name}.py").read_text()
            return count + 1 == len(names) or re.search(rf"\b{names[count + 1]}\b", source) is not None
        else:
            return re.search(rf"\b{name}\b", (place / "__init__.py").read_text()) is not None
    return True


def test_the_readme_names_only_make_targets_that_exist(project: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (project / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        used = set(re.findall(r"\bmake ([a-z-]+)`", (project / page).read_text()))
        used |= set(re.findall(r"^make ([a-z-]+)$", (project / page).read_text(), re.MULTILINE))
        assert used <= targets, page


def test_every_page_of_docs_can_be_reached_from_the_readme(project: Path) -> None:
    linked = set(re.findall(r"\]\(docs/([a-z_-]+\.md)\)", (project / "README.md").read_text()))
    assert linked == {path.name for path in (project / "docs").glob("*.md")}


def errors_of(kind: type[ServerError]) -> Iterator[type[ServerError]]:
    """A class of errors and its subclasses, all levels."""
    yield kind
    for below in kind.__subclasses__():
        yield from errors_of(below)


def statuses_in_source(project: Path) -> set[int]:
    """Every error status that the server's code names, in a class or on its own."""
    found = {kind.http_status for kind in errors_of(ServerError)}
    for path in (project / "server").rglob("*.py"):
        named = re.findall(r"(?:status_code=|Response\([^()]*, |HTTP/1\.1 )([45]\d\d)\b", path.read_text())
        found |= {int(status) for status in named}
    return found


def test_the_table_of_errors_has_every_status_of_the_server(project: Path) -> None:
    section = (project / "docs/http-api.md").read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([45][^|]*) \|", section, re.MULTILINE)
    listed = {int(status) for cell in cells for status in re.findall(r"\b[45]\d\d\b", cell)}
    assert listed == statuses_in_source(project)


def test_every_load_scenario_is_documented(project: Path) -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \|", (project / "docs/load-tests.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(SCENARIOS)


@pytest.mark.parametrize("page", PAGES)
def test_models_and_recipes_of_documented_commands_exist(project: Path, page: str) -> None:
    """Or the page says how to make them: `mine.onnx` is the reader's own, and a command's output is in its folder."""
    text = (project / page).read_text()
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        made = (*(f"{folder}/" for folder in re.findall(r"--out (\S+)", block)), *re.findall(r" -o (\S+)", block))
        for name in re.findall(r"[\w./-]+\.(?:onnx|toml)\b", block):
            known = (project / name).is_file() or name == "mine.onnx" or name.startswith(made)
            assert known, f"{page}: {name} is no file of the checkout"
