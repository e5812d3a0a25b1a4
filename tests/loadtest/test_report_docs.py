"""The generated parts of docs/performance.md."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from lathe.core.drawing.charts import Bar, horizontal_bars
from loadtest import report_docs
from loadtest.__main__ import main
from loadtest.engine import Row

ROWS = [
    Row("lenet", 1, 1, {"lathe": 1.0, "onnxruntime": 4.0}, {"lathe": 0.0, "onnxruntime": 0.0}, 4.0),
    Row("lenet", 8, 1, {"lathe": 2.0, "onnxruntime": 2.0}, {"lathe": 0.0, "onnxruntime": 0.0}, 1.0),
    Row("vit", 1, 1, {"onnxruntime": 3.0}, {"lathe": 1.0, "onnxruntime": 0.0}, None),
]


def test_only_the_text_between_the_marks_changes() -> None:
    page = "before\n<!-- a -->\nold\nlines\n<!-- /a -->\nafter\n<!-- b -->\n<!-- /b -->\n"
    changed = report_docs.replace_part(report_docs.replace_part(page, "a", r"new \1"), "b", "more")
    assert changed == "before\n<!-- a -->\nnew \\1\n<!-- /a -->\nafter\n<!-- b -->\nmore\n<!-- /b -->\n"
    with pytest.raises(ValueError, match="no part between <!-- c -->"):
        report_docs.replace_part(page, "c", "x")


def test_the_table_has_a_line_per_case() -> None:
    lines = report_docs.engine_table(ROWS, ["lathe", "onnxruntime"]).splitlines()
    assert lines[2:] == [
        "| lenet | 1 | 1.000 | 4.000 | 4.00 |",
        "|  | 8 | 2.000 | 2.000 | 1.00 |",
        "| vit | 1 | wrong | 3.000 | - |",
    ]


def test_the_ratio_of_a_model_is_the_mean_over_its_batches() -> None:
    chart = report_docs.ratio_chart(ROWS)
    words = [element.text for element in ElementTree.fromstring(chart).iter() if element.tag.endswith("text")]
    assert words[1:] == ["lenet", "2.00"]


def test_bar_lengths_are_proportional_to_their_values() -> None:
    chart = ElementTree.fromstring(
        horizontal_bars([Bar("a < b", 0.5, "50%"), Bar("c", 2.0, "200%")], "title", mark=1.0)
    )
    widths = [float(element.attrib["width"]) for element in chart.iter() if element.tag.endswith("rect")]
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.01)


@pytest.mark.slow
def test_one_command_writes_the_page(tmp_path: Path) -> None:
    marks = ("engines", "layers", "footprint")
    page = tmp_path / "performance.md"
    page.write_text("".join(f"# {name}\n<!-- {name} -->\n<!-- /{name} -->\n" for name in marks))
    arguments = ["--models", "lenet", "--footprints", "lenet", "--engines", "lathe,onnxruntime", "--batches", "1,3"]
    assert main(["docs", *arguments, "--rounds", "2", "--slice", "0.01", "--docs", str(tmp_path)]) == 0
    text = page.read_text()
    assert text.count("| lenet |") == 2 and "Ahead by x" in text and "![share of the peak" in text
    assert "Conv" in (tmp_path / "layers.svg").read_text()
    assert ElementTree.parse(tmp_path / "ratios.svg").getroot().tag.endswith("svg")


def test_the_page_of_the_project_has_all_parts(project: Path) -> None:
    text = (project / "docs" / "performance.md").read_text()
    for name in ("engines", "layers", "footprint"):
        report_docs.replace_part(text, name, "")
