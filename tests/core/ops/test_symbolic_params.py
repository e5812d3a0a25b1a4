"""Parameters computed from the batch size: symbolic at compile time, numbers at run time.

Every parameter of every operator is tested with such a value.
"""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.ops.opdef import registry
from tests.core.small_models import assert_like_onnx_runtime, model, normal, untyped

# s [1] and q [] are n, the rows of x [n, 4]; f [] is n as a float.
SIZES = "s = Shape <start = 0, end = 1> (x) q = Squeeze(s) f = Cast <to = 1> (q)"
CONSTANTS = """
    int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[1] far = {99},
    int64[2] pair = {3, 7}, int64[2] both = {1, 2}, int64 c2 = {2}, int64 c8 = {8}, int64 c16 = {16}, float low = {0.0},
    float high = {8.0}, float[1] half = {0.5}, float[8] roi = {0, 0, 0, 0, 1, 1, 1, 1}, bool no = {0},
    int64[1,1,2,2] places = {0, 2, 8, 10}, float[1,1,2,2] pooled = {1, 2, 3, 4},
    int64[2] block = {1, 1}, int64[2] front = {0, 1}
"""
ONE_ROW, SOME_ROWS = (1,), (1, 2, 5)
MEL = "MelWeightMatrix({}, {}, {}, {}, {})"

# Operator and parameter -> nodes that compute y, and numbers of rows for which the parameter is valid.
PARAMETERS: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {
    ("Clip", "min"): ("y = Clip(v, q)", SOME_ROWS),
    ("Clip", "max"): ("y = Clip(v, , q)", SOME_ROWS),
    ("Col2Im", "image_shape"): ("t = Concat <axis = 0> (s, one) y = Col2Im(e, t, block)", (1, 3)),
    ("Col2Im", "block_shape"): ("t = Concat <axis = 0> (s, one) y = Col2Im(e, block, t)", ONE_ROW),
    ("ConstantOfShape", "shape"): ("y = ConstantOfShape(s)", SOME_ROWS),
    ("CumSum", "axis"): ("y = CumSum(x, q)", ONE_ROW),
    ("DFT", "dft_length"): ("y = DFT(w, q)", SOME_ROWS),
    ("DFT", "axis"): ("y = DFT(w, , q)", ONE_ROW),
    ("Dropout", "ratio"): ("r = Div(f, high) y = Dropout(x, r, no)", SOME_ROWS),
    ("Dropout", "training_mode"): ("t = Greater(f, high) y = Dropout(x, low, t)", SOME_ROWS),
    ("Expand", "shape"): ("t = Concat <axis = 0> (s, s, four) y = Expand(x, t)", SOME_ROWS),
    ("MaxUnpool", "output_shape"): (
        "t = Concat <axis = 0> (one, one, four, s) y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> "
        "(pooled, places, t)",
        (4,),
    ),
    ("MelWeightMatrix", "num_mel_bins"): (f"y = {MEL.format('q', 'c16', 'c16', 'low', 'high')}", SOME_ROWS),
    ("MelWeightMatrix", "dft_length"): (f"y = {MEL.format('c8', 'q', 'c16', 'low', 'high')}", (16, 20)),
    ("MelWeightMatrix", "sample_rate"): (f"y = {MEL.format('c8', 'c16', 'q', 'low', 'high')}", (16, 20)),
    ("MelWeightMatrix", "lower_edge_hertz"): (f"y = {MEL.format('c8', 'c16', 'c16', 'f', 'high')}", SOME_ROWS),
    ("MelWeightMatrix", "upper_edge_hertz"): (f"y = {MEL.format('c8', 'c16', 'c16', 'low', 'f')}", SOME_ROWS),
    ("OneHot", "depth"): ("y = OneHot(v, q, pair)", SOME_ROWS),
    ("Pad", "pads"): ("t = Concat <axis = 0> (s, zero, one, s) y = Pad(x, t)", SOME_ROWS),
    ("Pad", "constant_value"): ("y = Pad(v, both, q)", SOME_ROWS),
    ("Pad", "axes"): ("y = Pad(x, both, , s)", ONE_ROW),
    ("Reshape", "shape"): ("t = Concat <axis = 0> (four, s) y = Reshape(x, t)", SOME_ROWS),
    ("Resize", "roi"): (
        "i = Unsqueeze(x, front) a = Expand(f, two) r = Concat <axis = 0> (roi, a) r8 = Slice(r, two, far) "
        'k = Concat <axis = 0> (s, one, one, one) g = Cast <to = 1> (k) y = Resize <mode = "nearest"> (i, r8, g)',
        ONE_ROW,
    ),
    ("Resize", "scales"): (
        "i = Unsqueeze(x, front) t = Concat <axis = 0> (one, one, one, s) g = Cast <to = 1> (t) "
        'y = Resize <mode = "nearest"> (i, , g)',
        SOME_ROWS,
    ),
    ("Resize", "sizes"): (
        'i = Unsqueeze(x, front) t = Concat <axis = 0> (s, one, one, s) y = Resize <mode = "nearest"> (i, , , t)',
        SOME_ROWS,
    ),
    ("STFT", "frame_step"): ("y = STFT(w, q, , four)", SOME_ROWS),
    ("STFT", "frame_length"): ("y = STFT(w, c2, , q)", (2, 4)),
    ("Slice", "starts"): ("t = Sub(s, one) y = Slice(x, t, far, zero)", SOME_ROWS),
    ("Slice", "ends"): ("t = Sub(s, one) y = Slice(x, zero, t, zero)", SOME_ROWS),
    ("Slice", "axes"): ("y = Slice(x, one, far, s)", ONE_ROW),
    ("Slice", "steps"): ("y = Slice(x, zero, far, one, s)", SOME_ROWS),
    ("Split", "split"): ("t = Sub(s, one) u = Concat <axis = 0> (t, one) g, y = Split <axis = 0> (x, u)", SOME_ROWS),
    ("Squeeze", "axes"): ("i = Unsqueeze(x, one) y = Squeeze(i, s)", ONE_ROW),
    ("Tile", "repeats"): ("t = Concat <axis = 0> (s, one) y = Tile(x, t)", SOME_ROWS),
    ("TopK", "K"): ("y, j = TopK <axis = 0> (x, s)", SOME_ROWS),
    ("Trilu", "k"): ("y = Trilu(x, q)", SOME_ROWS),
    ("Unsqueeze", "axes"): ("y = Unsqueeze(x, s)", (1, 2)),
}
REDUCTIONS = [op for op in registry.names() if op.startswith("Reduce")]
PARAMETERS |= {(op, "axes"): (f"y = {op}(x, s)", ONE_ROW) for op in REDUCTIONS}


def test_there_is_a_case_for_every_parameter() -> None:
    assert {*PARAMETERS, ("CumProd", "axis")} == {
        (op, name) for op in registry.names() for name in registry.get(op).params
    }


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", PARAMETERS, ids="-".join)
def test_a_value_that_depends_on_the_batch(case: tuple[str, str]) -> None:
    body, rows = PARAMETERS[case]
    signature = "float[n,4] x, int64[5] v, float[1,8,1] w, float[1,b,c] e => float[a] y"
    data = untyped(model(signature, f"{SIZES} {body}", CONSTANTS, opset=20))
    feeds = [
        {
            "x": abs(normal(n, 4)) + 1,
            "v": np.array([-3, 0, 1, 2, 40]),
            "w": normal(1, 8, 1),
            "e": normal(1, 1, n),  # columns of an image of n pixels
        }
        for n in rows
    ]
    assert_like_onnx_runtime(data, *feeds)


def test_a_cumulative_product() -> None:
    """ONNX Runtime has none."""
    data = untyped(model("float[n,4] x => float[a] y", f"{SIZES} y = CumProd(x, q)", CONSTANTS, opset=26))
    x = normal(1, 4)
    with lathe.compile(data, tune="off") as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], np.cumprod(x, 1), 1e-6)
