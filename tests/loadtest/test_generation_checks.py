"""`python -m loadtest generation`: what counts as equal, which lengths run, what counts as a compilation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import lathe
from loadtest.generation.callers import Outcome, Text, _break_template, _compare, _compare_beginning, requests
from loadtest.generation.lengths import counted, main, prompt_lengths
from loadtest.generation.llama import Pair
from tests.core.language.families import write_folder
from tests.server.generation.tiny_model import gguf_content

ALONE = Text("a b", ("a", " b"), (-0.1, -0.5), (-3.0, -0.50004), "stop")


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        (ALONE, 0),
        (replace(ALONE, text="a c", tokens=("a", " c")), 0),  # a tie
        (replace(ALONE, text="a c", tokens=("a", " c"), seconds=(-3.0, -0.7)), 1),  # a tie only for one of both
        (replace(ALONE, text="x b", tokens=("x", " b")), 1),
        (replace(ALONE, reason="length"), 1),
        (replace(ALONE, text="a", tokens=("a",)), 1),
    ],
)
def test_texts_differ_only_after_a_tie(other: Text, wrong: int) -> None:
    outcome = Outcome()
    _compare(other, ALONE, "here", outcome)
    assert len(outcome.wrong) == wrong


@pytest.mark.parametrize(
    ("text", "tokens", "wrong"),
    [("a", ("a",), 0), ("", (), 0), ("a c", ("a", " c"), 0), ("x", ("x",), 1), ("b", (), 1)],
)
def test_a_stream_that_is_left_began_like_the_text(text: str, tokens: tuple[str, ...], wrong: int) -> None:
    """The second token of ALONE is a tie."""
    outcome = Outcome()
    begun = Text(text, tokens, ALONE.logprobs[: len(tokens)], ALONE.seconds[: len(tokens)], None)
    _compare_beginning(begun, ALONE, "here", outcome)
    assert len(outcome.wrong) == wrong


def test_requests_are_the_same_at_every_call() -> None:
    assert requests() == requests()


def test_a_broken_template_is_still_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_content())
    _break_template(path)
    template = lathe.load_language_model(path).chat_template
    assert template is not None
    assert template.startswith("{% if %}")


def test_best_tokens_and_logits_are_compared() -> None:
    """At the first place both agree, at the second an engine has a tie, at the third both are sure."""
    one = np.array([[3, 1, 0], [1, 0.98, 0], [5, 0, 0]], np.float32)
    other = np.array([[2, 1, 0], [0, 2, 0], [0, 5, 0]], np.float32)
    pair = Pair()
    pair.add(one, other)
    assert (pair.same, pair.places, pair.far, pair.difference) == (1, 3, 1, 5)


def test_all_lengths_of_a_run_and_some_longer_ones() -> None:
    assert prompt_lengths(100, 8) == [*range(1, 9), 32, 64, 96, 100]
    assert prompt_lengths(5, 8) == [1, 2, 3, 4, 5]


def test_compilations_are_counted(tmp_path: Path) -> None:
    with (
        counted() as counts,
        lathe.compile(lathe.load_language_model(write_folder(tmp_path, "llama")).graph) as session,
    ):
        session.run({"input_ids": np.array([[1, 2]])})
    assert counts["create_lljit_compiler"] > 0


@pytest.mark.slow
def test_no_length_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_folder(tmp_path, "llama")), "--threads", "1"]) == 0
    assert "127 prompts of 1 to 127 tokens: 0 compilations" in capsys.readouterr().out
