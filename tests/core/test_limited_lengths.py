"""Lengths clamped to the rows of a table, where the clamped length must equal the full length."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.compiler.specialise import NewShapes
from lathe.core.errors import FeedError
from tests.core.small_models import model, normal, theirs, untyped

SIZES = "length = Shape <start = 1, end = 2> (x) rows = Shape <end = 1> (x) least = Min(length, limit)"
CONSTANTS = "int64[1] zero = {0}, int64[1] two = {2}, float[8,4] table = {%s}, int64[1] limit = {%d}"
TABLE = ", ".join(str(value / 7) for value in range(32))
BODIES = {
    "added": "t = Slice(table, zero, least, zero) y = Add(x, t)",
    "reshaped": "s = Concat <axis = 0> (rows, least, two, two) r = Reshape(x, s) y = Softmax(r)",
    "chosen": "t = Slice(table, zero, least, zero) c = Less(t, x) y = Where(c, x, t)",
}


def limited(body: str, limit: int = 8) -> bytes:
    return untyped(model("float[b,s,4] x => float[a] y", f"{SIZES} {body}", CONSTANTS % (TABLE, limit)))


@pytest.mark.parametrize("new_shapes", ["default", "wait"])
@pytest.mark.parametrize("kind", BODIES)
def test_one_code_serves_all_lengths_up_to_the_limit(kind: str, new_shapes: NewShapes) -> None:
    data = limited(BODIES[kind])
    with lathe.compile(lathe.load(data), tune="off", threads=1, new_shapes=new_shapes) as session:
        assert session.description.any_size and not session.description.in_parts
        assert session.description.batching.batchable
        for rows, length in ((2, 3), (1, 1), (3, 7), (2, 8), (2, 2)):
            x = normal(rows, length, 4)
            np.testing.assert_allclose(session.run({"x": x})["y"], theirs(data, {"x": x})["y"], 1e-6, 1e-6)
        assert "dynamic-shape code serves" in session.explain() and "FALLBACK" not in session.explain()
        with pytest.raises(FeedError):
            session.run({"x": normal(1, 9, 4)})


@pytest.mark.parametrize("kind", ["added", "chosen"])
def test_a_limit_of_one_broadcasts(kind: str) -> None:
    data = limited(BODIES[kind], 1)
    with lathe.compile(lathe.load(data), tune="off", threads=1) as session:
        assert session.description.any_size and not session.description.in_parts
        for length in (3, 1, 9, 20):
            x = normal(2, length, 4)
            np.testing.assert_allclose(session.run({"x": x})["y"], theirs(data, {"x": x})["y"], 1e-6, 1e-6)
        assert "dynamic-shape code serves" in session.explain()


@pytest.mark.parametrize("new_shapes", ["default", "wait"])
def test_rows_that_fewer_tokens_leave_out_are_not_read(new_shapes: NewShapes) -> None:
    """`x[:, :3] + table`, a table of three rows: one token broadcasts, two are refused."""
    body = "t = Slice(x, zero, three, one) y = Add(t, table)"
    rows = ", ".join(str(value / 7) for value in range(12))
    constants = f"int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] three = {{3}}, float[3,4] table = {{{rows}}}"
    data = untyped(model("float[b,s,4] x => float[a] y", body, constants))
    with lathe.compile(lathe.load(data), tune="off", threads=1, new_shapes=new_shapes) as session:
        assert session.description.any_size and not session.description.in_parts
        for length in (5, 3, 1, 70):
            x = normal(2, length, 4)
            np.testing.assert_allclose(session.run({"x": x})["y"], theirs(data, {"x": x})["y"], 1e-6, 1e-6)
        with pytest.raises(FeedError):
            session.run({"x": normal(2, 2, 4)})
