"""The `tokenize` step: texts become numbers in a process of its own, which costs nobody more than its limits."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from server.children import Limits
from server.errors import BadRequest, Internal
from server.pipelines import helper
from server.pipelines.builtins import text
from server.pipelines.builtins.base import Request
from server.pipelines.builtins.text import Tokenize
from server.pipelines.definition import BadPipeline
from tests.server.pipelines.test_builtins import column

VOCABULARY = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "<pad>": 4}


def written(folder: Path, splitter: pre_tokenizers.PreTokenizer) -> Path:
    """A folder with a tokenizer of four words."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = splitter
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


def tokenize(folder: Path, **options: object) -> Tokenize:
    return text.tokenize(Request(options, {}, folder))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("words"), pre_tokenizers.Whitespace())


@pytest.fixture(scope="module")
def step(words: Path) -> Iterator[Tokenize]:
    with closing(tokenize(words, multiple=4, max_length=8, max_bytes=100)) as made:
        yield made


def process_of(step: Tokenize) -> int:
    child = step._helper._child
    assert child is not None
    return child.pid


def test_texts_become_numbers_padded_to_a_multiple(step: Tokenize) -> None:
    out = step.execute({"text": column(b"one two", b"three four one two one")})
    np.testing.assert_array_equal(out["input_ids"], [[1, 2, 4, 4, 4, 4, 4, 4], [3, 0, 1, 2, 1, 4, 4, 4]])
    np.testing.assert_array_equal(out["attention_mask"], [[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]])
    assert not out["token_type_ids"].any()
    assert {array.dtype for array in out.values()} == {np.dtype(np.int64)}
    assert step.execute({"text": column()})["input_ids"].shape == (0, 4)


def test_a_long_text_is_cut_and_padding_stops_there(words: Path) -> None:
    with closing(tokenize(words, multiple=4, max_length=6)) as step:
        out = step.execute({"text": column(b"one " * 9, b"")})
    np.testing.assert_array_equal(out["attention_mask"], [[1] * 6, [0] * 6])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"\xff\xfe", "text 0: not UTF-8: invalid start byte at byte 0"),
        (b"x" * 101, "expected at most 100 bytes, got 101"),
    ],
)
def test_what_is_no_text_is_the_callers_fault(step: Tokenize, given: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        step.execute({"text": column(given)})


@pytest.mark.parametrize("content", ["{", '{"version": "1.0", "model": {"type": "Magic"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BadPipeline, match=r"file 'tokenizer.json': it does not read as a tokenizer"):
        tokenize(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_file_that_takes_too_long_is_refused(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PARSING", Limits(seconds=-1, memory=1 << 30))
    monkeypatch.setattr(helper, "_LOOK", 0)  # or the file is read before the first look
    with pytest.raises(BadPipeline, match=r"file 'tokenizer.json': cannot be read: it takes longer than"):
        tokenize(words)


def test_callers_at_once_get_their_own_texts_answers(step: Tokenize) -> None:
    rows = [column(*[word.encode()] * count) for count, word in enumerate(VOCABULARY, 1)] * 10
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda row: step.execute({"text": row})["input_ids"][:, 0].tolist(), rows)]
    expected = [[0, 1, 2, 3, 0][index % 5] for index in range(50)]
    assert answers == [[expected[index]] * (index % 5 + 1) for index in range(50)]


def test_a_process_that_dies_begins_anew_whatever_became_of_its_folder(tmp_path: Path) -> None:
    folder = written(tmp_path, pre_tokenizers.Whitespace())
    with closing(tokenize(folder)) as step:
        (folder / "tokenizer.json").unlink()
        before = process_of(step)
        os.kill(before, 9)
        assert step.execute({"text": column(b"two")})["input_ids"][0, 0] == 2
        assert process_of(step) != before
        assert step.memory_bytes > 1 << 20


def test_a_process_that_cannot_begin_anew_is_not_the_callers_fault(tmp_path: Path) -> None:
    folder = written(tmp_path, pre_tokenizers.Whitespace())
    with closing(tokenize(folder)) as step:
        (folder / "tokenizer.json").write_text("{")
        os.kill(process_of(step), 9)
        with pytest.raises(Internal, match="did not begin anew: "):
            step.execute({"text": column(b"two")})


def test_a_text_that_takes_too_long_is_refused_and_the_next_one_answered(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_ENCODING", Limits(seconds=0.01, memory=1 << 30, patience=1e9))
    with closing(tokenize(words, max_bytes=1 << 24)) as step:
        with pytest.raises(BadRequest, match=r"text: it takes longer than 0.01 s to tokenize"):
            step.execute({"text": column(b"one " * 1_000_000)})
        assert step.execute({"text": column(b"one")})["input_ids"][0, 0] == 1


def test_a_text_that_the_library_panics_at_harms_no_other(tmp_path: Path) -> None:
    """A pattern that goes back and forth for ever is given up."""
    splitter = pre_tokenizers.Split(Regex(r"(x+x+)+y"), behavior="isolated")
    with closing(tokenize(written(tmp_path, splitter))) as step:
        with pytest.raises(Internal, match=r"the step failed \(PanicException\)"):
            step.execute({"text": column(b"x" * 60)})
        assert step.execute({"text": column(b"one")})["input_ids"][0, 0] == 1


def test_closing_leaves_nothing_and_wakes_nobody_anew(words: Path) -> None:
    open_before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    step = tokenize(words)
    pid = process_of(step)
    step.close()
    step.close()
    assert not Path(f"/proc/{pid}").exists()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (open_before, threads)
    assert step.memory_bytes == 0
    with pytest.raises(Internal):
        step.execute({"text": column(b"one")})
