"""Sizes that models compute in floating point, or clamp, are known before a run.

EnCodec pads its input by such sizes; DeBERTa cuts its table of positions.
"""

from __future__ import annotations

import onnx
import pytest

from tests.core import small_models
from tests.core.decoders import Feeds
from tests.core.sessions import agree, opened

TOLERANCE = 1e-5


def model(signature: str, body: str, constants: str) -> onnx.ModelProto:
    return onnx.load_from_string(small_models.model(signature, body, constants, opset=17))


def weights(name: str, *shape: int) -> str:
    """Random numbers, as the text of an initializer."""
    numbers = ", ".join(f"{value:.6f}" for value in small_models.normal(*shape).ravel())
    return f"float[{','.join(map(str, shape))}] {name} = {{{numbers}}}"


def padded_to_a_stride(stride: int) -> onnx.ModelProto:
    """A convolution of x [n, 3, l], padded at the end so that windows of 5 with this stride cover all of it."""
    return model(
        "float[n,3,l] x => float[n,4,m] y",
        f"""
        shape = Shape(x)
        length = Gather(shape, two)
        apart = Sub(length, five)
        number = Cast<to=1>(apart)
        quotient = Div(number, stride)
        windows = Add(quotient, one)
        above = Ceil(windows)
        count = Cast<to=7>(above)
        steps = Sub(count, one_i)
        moved = Mul(steps, stride_i)
        ideal = Add(moved, five)
        missing = Sub(ideal, length)
        missing_1 = Unsqueeze(missing, axis)
        pads = Concat<axis=0>(zeros, missing_1)
        longer = Pad(x, pads)
        z = Conv<strides=[{stride}]>(longer, w)
        y = Relu(z)""",
        f"float one = {{1}}, float stride = {{{stride}}}, int64 one_i = {{1}}, int64 two = {{2}}, int64 five = {{5}},"
        f"int64 stride_i = {{{stride}}}, int64[1] axis = {{0}}, int64[5] zeros = {{0, 0, 0, 0, 0}},"
        f"{weights('w', 4, 3, 5)}",
    )


def cut_around_the_middle() -> onnx.ModelProto:
    """x [n, l] times sums of table[16 - m : 16 + m], where m = min(l, 16) and the table has 32 rows."""
    return model(
        "float[n,l] x => float[n,l,4] y",
        """
        shape = Shape(x)
        length = Gather(shape, one)
        m = Min(length, sixteen)
        begin = Sub(sixteen, m)
        end = Add(sixteen, m)
        begins = Unsqueeze(begin, axis)
        ends = Unsqueeze(end, axis)
        rows = Slice(table, begins, ends, axis)
        sums = ReduceSum<keepdims=0>(rows, axis)
        x_1 = Unsqueeze(x, last)
        y = Mul(x_1, sums)""",
        "int64 one = {1}, int64 sixteen = {16}, int64[1] axis = {0}, int64[1] last = {-1},"
        f"{weights('table', 32, 4)}",
    )


def over_the_number_of_rows() -> onnx.ModelProto:
    """x [n, l] divided by n, converted to floating point: rows are not independent."""
    return model(
        "float[n,l] x => float[n,l] y",
        """
        shape = Shape(x)
        rows = Gather(shape, zero)
        number = Cast<to=1>(rows)
        y = Div(x, number)""",
        "int64 zero = {0}",
    )


def feeds(*shape: int) -> Feeds:
    return {"x": small_models.normal(*shape, seed=sum(shape))}


@pytest.mark.sample(3)
@pytest.mark.parametrize("stride", [1, 2, 3, 8])
def test_padding_computed_in_floating_point(stride: int) -> None:
    made = padded_to_a_stride(stride)
    with opened(made) as session:
        assert session.batching.batchable
        for rows, length in ((1, 5), (2, 6), (1, 7), (3, 19), (2, 40), (1, 101)):
            agree(made, session, feeds(rows, 3, length), TOLERANCE)
            assert session.settle(60)
        assert "FALLBACK" not in session.explain()


def test_a_clamped_size_cuts_a_table() -> None:
    made = cut_around_the_middle()
    with opened(made) as session:
        assert session.batching.batchable
        for length in (1, 5, 15, 16, 17, 40):
            agree(made, session, feeds(2, length), TOLERANCE)
            assert session.settle(60)
        assert "FALLBACK" not in session.explain()
        assert "in parts" not in session.explain() and "parts, and references" not in session.explain()


def test_a_batch_size_cast_to_float_makes_rows_dependent() -> None:
    made = over_the_number_of_rows()
    with opened(made) as session:
        assert not session.batching.batchable
        for rows in (1, 3, 8):
            agree(made, session, feeds(rows, 4), TOLERANCE)
