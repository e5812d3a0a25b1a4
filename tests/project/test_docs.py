"""The documentation keeps up with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.train.recipe import from_toml
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
