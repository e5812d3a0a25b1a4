"""Errors that reach clients."""

from __future__ import annotations

from lathe.server.errors import BadRequest, drop_frames


def test_an_error_and_its_causes_lose_their_frames() -> None:
    try:
        try:
            try:
                raise KeyError("a")
            except KeyError:
                raise ValueError("b") from OSError("c")
        except ValueError as error:
            raise BadRequest("d") from error
    except BadRequest as error:
        found = error
    drop_frames(found)
    causes = [found, found.__cause__, found.__cause__ and found.__cause__.__context__]
    assert [type(each) for each in causes] == [BadRequest, ValueError, KeyError]
    assert [each and each.__traceback__ for each in causes] == [None] * 3


def test_errors_that_cause_each_other_lose_their_frames() -> None:
    first, second = BadRequest("a"), BadRequest("b")
    first.__cause__, second.__context__ = second, first
    drop_frames(first)
    assert (first.__traceback__, second.__traceback__) == (None, None)
