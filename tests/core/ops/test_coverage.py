"""The table of operators is what the code has."""

from __future__ import annotations

from pathlib import Path

from core.ops import registry
from tools.make_coverage import COVERAGE, coverage

PAGE = coverage()


def test_the_page_is_up_to_date() -> None:
    assert (Path(__file__).parents[3] / COVERAGE).read_text() == PAGE, "run `make docs`"


def test_every_operator_of_the_standard_is_in_it_as_it_is() -> None:
    for name in registry.names():
        if registry.get(name).domain not in ("lathe", "com.microsoft"):
            assert f"\n| {name} | " in PAGE
    assert "| Add | 1, 6, 7, 13, 14 |" in PAGE
    assert "| Reshape | " in PAGE and PAGE.split("\n| Reshape | ")[1].split("\n")[0].endswith("| own | view | yes |")
    assert PAGE.split("\n| Gemm | ")[1].split("\n")[0].endswith("| own | amx, strassen, gemm | yes |")
