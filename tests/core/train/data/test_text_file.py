"""Documents: text files and JSON Lines."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lathe.core.errors import DataError
from lathe.core.train.data import open_dataset
from lathe.core.train.data.describe import describe


def documents(path: Path, format: str | None = None) -> list[str]:
    dataset = open_dataset(path, format)  # type: ignore[arg-type]
    (column,) = dataset.columns
    return list(dataset.take(np.arange(len(dataset)))[column])


def lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in rows))
    return path


def test_each_file_of_a_folder_or_zip_is_a_document(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("two\n\nparagraphs")
    (folder / "a.md").write_text("äöü")
    (folder / "empty.txt").write_text("\n")
    with zipfile.ZipFile(tmp_path / "zipped", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, file.name)
    assert documents(folder) == documents(tmp_path / "zipped") == ["äöü", "two\n\nparagraphs"]
    assert open_dataset(folder).format == "text"


def test_the_paragraphs_of_one_file_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("one\nmore\n\n \n\ntwo")
    assert documents(file, "text") == ["one\nmore\n", "two"]
    assert open_dataset(file, "text").place(1) == "line 6"


def test_rows_in_any_order_and_twice(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {"text": "a"}, "", {"text": "b\n", "other": 1}, {"text": "c"})
    dataset = open_dataset(path)
    assert list(dataset.take(np.array([2, 0, 1, 2]))["text"]) == ["c", "a", "b\n", "c"]


def test_an_upload_without_a_suffix_is_recognised(tmp_path: Path) -> None:
    path = lines(tmp_path / "data", {"messages": [{"role": "user", "content": "hi"}]})
    described = describe(path)
    assert (described["format"], described["rows"], described["classes"]) == ("jsonl", 1, None)
    assert json.loads(documents(path)[0]) == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "JSON"),
        ("[1]", "`text`"),
        ({"text": 5}, "expected a text, got 5"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "`text`"),
        ({"other": "x"}, "`text`"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, bad: object, message: str) -> None:
    with pytest.raises(DataError, match=f"line 3.*{message}"):
        open_dataset(lines(tmp_path / "t.jsonl", {"text": "a"}, "", bad))


@pytest.mark.parametrize("messages", [[], "x", [{"role": "robot", "content": ""}], [{"role": "user", "content": None}]])
def test_bad_conversations_are_refused(tmp_path: Path, messages: object) -> None:
    with pytest.raises(DataError, match=r"line 1.*role"):
        open_dataset(lines(tmp_path / "t.jsonl", {"messages": messages}))


def test_text_must_be_utf_8(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(DataError, match=r"line 2.*UTF-8"):
        open_dataset(tmp_path / "t.txt", "text")
