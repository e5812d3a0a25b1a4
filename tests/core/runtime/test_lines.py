"""Decoders with past inputs: one code for all lengths of the past, where there is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import core
from core import compiler
from core.errors import FeedError
from core.ir.dim import symbol
from core.ir.types import parse_type
from core.runtime.lines import Lines, Past, Sizes, line_through, pasts_of, place_on
from tests.core.decoders import Decoder, Feeds
from tests.onnx_runtime import plain_session

LENGTHS = (0, 1, 2, 7, 31, 32, 33, 100)
# Keys whose elements are no neighbours have no code for any sizes.
DECODERS = {
    "added": Decoder(turned=True),
    "rotary": Decoder(rotary=True, turned=True),
    "shared": Decoder(rotary=True, shared=2, turned=True),
}
N = symbol("n")

each_decoder = pytest.mark.parametrize("decoder", DECODERS.values(), ids=list(DECODERS))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Sizes]:
    """What this process compiles, in order."""
    found: list[Sizes] = []
    original = compiler.build

    def build(graph: core.Graph, options: object, batching: object, binding: Sizes) -> object:
        found.append(binding)
        return original(graph, options, batching, binding)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "build", build)
    return found


def agree(decoder: Decoder, session: core.Session, feeds: Feeds) -> dict[str, np.ndarray]:
    """The session's answers, which are ONNX Runtime's."""
    oracle = plain_session(decoder.model().SerializeToString())
    names, answers = [each.name for each in oracle.get_outputs()], session.run(feeds)
    for name, want in zip(names, oracle.run(None, feeds), strict=True):
        np.testing.assert_allclose(answers[name], want, rtol=2e-5, atol=2e-5, err_msg=name)
    return answers


@each_decoder
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (2, 1), (2, 3)])
def test_all_lengths_of_a_past(decoder: Decoder, rows: int, length: int, builds: list[Sizes]) -> None:
    graph = core.load(decoder.model().SerializeToString())
    with core.compile(graph, threads=2, new_shapes="wait", tune="off") as session:
        for past in (*LENGTHS, 3000, *reversed(LENGTHS)):
            agree(decoder, session, decoder.feeds(rows, length, past))
        assert len(builds) == 2, "for no past, and for all others"
        assert "FALLBACK" not in session.explain()
        assert "past=n" in session.explain()


@each_decoder
def test_token_by_token(decoder: Decoder, builds: list[Sizes]) -> None:
    graph = core.load(decoder.model().SerializeToString())
    with core.compile(graph, threads=1, new_shapes="wait", tune="off") as session:
        feeds = decoder.feeds(2, 12, 0)
        for _ in range(50):
            feeds = decoder.after(feeds, agree(decoder, session, feeds))
    assert len(builds) == 2, "for the prompt, and for all tokens"


def test_meanwhile_the_general_version_answers(builds: list[Sizes]) -> None:
    decoder = Decoder(turned=True)
    with core.compile(core.load(decoder.model().SerializeToString()), threads=1, tune="off") as session:
        feeds = decoder.feeds(1, 5, 0)
        for _ in range(10):
            feeds = decoder.after(feeds, agree(decoder, session, feeds))
        assert session.settle(60)
        done = len(builds)
        for _ in range(10):
            feeds = decoder.after(feeds, agree(decoder, session, feeds))
        assert len(builds) == done <= 2


@pytest.mark.slow
def test_children_compile_lines_and_later_sessions_find_them(tmp_path: Path, builds: list[Sizes]) -> None:
    decoder, path, cache = Decoder(rotary=True, turned=True), tmp_path / "decoder.onnx", tmp_path / "cache"
    path.write_bytes(decoder.model().SerializeToString())
    for count in (1, 0):
        with core.compile(path, threads=1, cache_dir=cache, tune="off") as session:
            feeds = decoder.feeds(1, 5, 0)
            for _ in range(5):
                feeds = decoder.after(feeds, agree(decoder, session, feeds))
            assert session.settle(120)
            assert "past=n" in session.explain()
            agree(decoder, session, feeds)
        assert len(builds) == count, "only the prompt is compiled in this process"
        builds.clear()


def test_what_has_no_kernel_for_all_lengths_goes_on_as_before(builds: list[Sizes]) -> None:
    decoder = Decoder(turned=True)
    graph = core.load(decoder.model().SerializeToString())
    with core.compile(graph, threads=1, new_shapes="wait", tune="off") as session:
        for past in (1, 2, 7, 2):
            agree(decoder, session, decoder.feeds(1, 40, past))
        assert "past=n" not in session.explain()
        assert "past=7" in session.explain()


def test_a_mask_that_does_not_fit() -> None:
    decoder = Decoder(turned=True)
    graph = core.load(decoder.model().SerializeToString())
    with core.compile(graph, threads=1, new_shapes="wait", tune="off") as session:
        for past in (5, 6):
            agree(decoder, session, decoder.feeds(1, 1, past))
        feeds = decoder.feeds(1, 1, 7)
        with pytest.raises(FeedError):
            session.run(feeds | {"mask": feeds["mask"][:, 1:]})
        agree(decoder, session, feeds)


def test_profiles_and_records_are_those_of_the_line(builds: list[Sizes]) -> None:
    decoder, names = Decoder(turned=True), []
    graph = core.load(decoder.model().SerializeToString())
    with core.compile(graph, threads=1, new_shapes="wait", tune="off") as session:
        session.run(decoder.feeds(1, 9, 0))
        feeds = decoder.feeds(1, 1, 9)
        session.run(feeds, record=lambda run: names.append(run))
        assert names and session.profile(feeds, runs=2).table()
    assert sum(dict(sizes).get("batch") == 1 for sizes in builds) == 1


# -- which shapes lie on a line ----------------------------------------------------------------------------------------


def values(**sizes: int) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes.items()))


def lines(**more: str) -> Lines:
    given = {"ids": "int64[batch,length]", "past": "float32[batch,4,past,8]", **more}
    made = {"logits": "float32[batch,length,50]", "present": "float32[batch,4,past+length,8]"}
    return Lines(*({name: parse_type(text) for name, text in types.items()} for types in (given, made)))


def test_lines_through_two_shapes() -> None:
    line = line_through(values(batch=1, past=3, total=5), values(batch=1, past=7, total=9))
    assert line == (("batch", 1), ("past", N), ("total", N + 2))
    assert line_through(values(past=3, total=5), values(past=4, total=7)) is None
    assert line_through(values(past=3, total=5), values(past=3, total=5)) is None
    assert line_through(values(past=3), values(past=0)) is None
    assert line is not None
    assert place_on(line, values(batch=1, past=100, total=102)) == 100
    for other in (values(batch=2, past=3, total=5), values(batch=1, past=3, total=6), values(batch=1, past=0, total=2)):
        assert place_on(line, other) is None


def test_the_first_shape_with_a_past_tells_what_grows() -> None:
    known = lines(mask="int64[batch,total]")
    assert known.find(values(batch=1, length=4, past=0, total=4)) is None
    found = known.find(values(batch=1, length=1, past=4, total=5))
    assert found == ((("batch", 1), ("length", 1), ("past", N), ("total", N + 1)), 4)


def test_a_wrong_guess_is_put_right_by_the_second_shape() -> None:
    known = lines(mask="int64[batch,total]", encoded="float32[batch,encoded,8]")
    known.find(values(batch=1, length=4, past=0, total=4, encoded=5))
    first = known.find(values(batch=1, length=1, past=4, total=5, encoded=5))
    assert first is not None and dict(first[0])["encoded"] == N + 1
    second = known.find(values(batch=1, length=1, past=5, total=6, encoded=5))
    assert second is not None and dict(second[0])["encoded"] == 5
    assert known.find(values(batch=1, length=1, past=6, total=7, encoded=5)) == (second[0], 6)


def test_a_past_that_is_always_the_same_makes_no_line() -> None:
    """One code has the batch for `n`, and serves all numbers of rows."""
    known = lines()
    for rows in (1, 2, 3, 1):
        assert known.find(values(batch=rows, length=1, past=40)) is None
    assert known.find(values(batch=2, length=1, past=41)) == ((("batch", 2), ("length", 1), ("past", N)), 41)


def test_numbers_of_rows_and_new_tokens_do_not_grow() -> None:
    known = lines()
    assert known.find(values(batch=1, length=2, past=0)) is None
    assert known.find(values(batch=2, length=3, past=1)) == ((("batch", 2), ("length", 3), ("past", N)), 1)


def test_refused_lines_are_given_up() -> None:
    known = lines()
    assert known.find(values(batch=1, length=9, past=0)) is None
    for rows in (1, 2, 3):
        found = known.find(values(batch=rows, length=1, past=4))
        assert found is not None
        known.refuse(found[0])
        assert known.find(values(batch=rows, length=1, past=5)) is None
    assert known.find(values(batch=4, length=1, past=4)) is None


def test_new_tokens_are_no_past() -> None:
    """Attention by itself: keys that are new, and as many answers."""
    given = {"q": "float32[b,4,l,8]", "k": "float32[b,4,l,8]", "past": "float32[b,4,p,8]"}
    made = {"y": "float32[b,4,l,8]", "present": "float32[b,4,l+p,8]"}
    found = pasts_of(*({name: parse_type(text) for name, text in types.items()} for types in (given, made)))
    assert found == (Past("p", symbol("l") + symbol("p")),)


def test_what_stands_for_a_past() -> None:
    def of(given: str, made: str) -> tuple[Past, ...]:
        return pasts_of({"x": parse_type(given), "more": parse_type("float32[length]")}, {"y": parse_type(made)})

    assert of("float32[b,4,past,8]", "float32[b,4,past+length,8]") == (
        Past("past", N * 0 + symbol("past") + symbol("length")),
    )
    assert of("float32[b,4,past,8]", "float32[b,4,past+1,8]") == (Past("past", symbol("past") + 1),)
    for given, made in (
        ("float32[b,past]", "float32[b,past]"),
        ("float32[past,8]", "float32[past+1,8]"),
        ("float32[b,4,past,8]", "float32[b,5,past+1,8]"),
        ("float32[b,past]", "float32[b,past-1]"),
        ("float32[b,past]", "float16[b,past+1]"),
        ("float32[b,past]", "float32[b,_open]"),
        ("float32[b,2*past]", "float32[b,3*past]"),
    ):
        assert of(given, made) == ()
