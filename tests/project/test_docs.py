"""The documentation keeps up with the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.train.recipe import from_toml
from loadtest.scenarios import SCENARIOS
from server.errors import ServerError
from server.settings import Settings
from tools.make_docs import CONFIGURATION, configuration
from tools.make_walkthrough import WALKTHROUGH, walkthrough
from tools.recipe_docs import RECIPES, recipes

PAGES = sorted(
    str(path.relative_to(Path(__file__).parents[2]))
    for folder in (".", "docs", "core", "server")
    for path in (Path(__file__).parents[2] / folder).glob("*.md")
)


def test_every_setting_is_documented_as_it_is(project: Path) -> None:
    assert (project / CONFIGURATION).read_text() == configuration(), "run `make docs`"


def test_the_walkthrough_shows_what_the_compiler_does(project: Path) -> None:
    assert (project / WALKTHROUGH).read_text() == walkthrough(), "run `make docs`"


def test_every_key_of_recipes_is_documented_as_it_is(project: Path) -> None:
    assert (project / RECIPES).read_text() == recipes(), "run `make docs`"


@pytest.mark.parametrize("page", ["docs/training.md", "docs/recipes.md"])
def test_recipes_in_pages_read(project: Path, page: str) -> None:
    found = re.findall(r"^```toml\n(.*?)^```", (project / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found
    for text in found:
        from_toml(text.encode())


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_says_what_it_does(name: str) -> None:
    description = Settings.model_fields[name].description
    assert description
    assert description.endswith(".")
    assert f"LATHE_{name.upper()}" in configuration()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(project: Path, page: str) -> None:
    text = re.sub(r"```.*?```", "", (project / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (project / page).parent.joinpath(target).exists(), f"{page}: {target}"


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
    """Return a class of errors, and those below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from errors_of(below)


def statuses_in_the_source(project: Path) -> set[int]:
    """Every status of an error that the server's code names, in a class or by itself."""
    found = {kind.http_status for kind in errors_of(ServerError)}
    for path in (project / "server").rglob("*.py"):
        named = re.findall(r"(?:status_code=|Response\([^()]*, |HTTP/1\.1 )([45]\d\d)\b", path.read_text())
        found |= {int(status) for status in named}
    return found


def test_every_status_that_the_server_answers_with_is_in_the_table_of_errors(project: Path) -> None:
    section = (project / "docs/http-api.md").read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([45][^|]*) \|", section, re.MULTILINE)
    listed = {int(status) for cell in cells for status in re.findall(r"\b[45]\d\d\b", cell)}
    assert listed == statuses_in_the_source(project)


def test_every_load_scenario_has_its_row(project: Path) -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \|", (project / "docs/load-tests.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(SCENARIOS)


@pytest.mark.parametrize("page", PAGES)
def test_models_and_recipes_of_commands_are_files_of_the_checkout(project: Path, page: str) -> None:
    """Or the page says how to make them: `mine.onnx` is the reader's own; what a command writes lies in its folder."""
    text = (project / page).read_text()
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        made = tuple(f"{folder}/" for folder in re.findall(r"--out (\S+)", block))
        for name in re.findall(r"[\w./-]+\.(?:onnx|toml)\b", block):
            known = (project / name).is_file() or name == "mine.onnx" or name.startswith(made)
            assert known, f"{page}: {name} is no file of the checkout"
