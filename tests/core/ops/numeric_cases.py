"""More operator cases, for `cases.CASES`: quantized and recurrent operators, signals, sampling, detection."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto

from tests.core.ops.cases import F16, F32, F64, I8, I32, I64, U8, Case, case, floats, ints, scalar, vector
from tests.onnx_runtime import SEVEN_BITS


def _quantized() -> list[Case]:
    x, image = floats(3, 4, low=-40, high=40), ints(1, 2, 5, 5, dtype=U8, low=0, high=255)
    a, b = ints(3, 4, dtype=U8, low=0, high=255), ints(4, 5, dtype=I8, low=-SEVEN_BITS, high=SEVEN_BITS)
    kernel, points = ints(4, 2, 3, 3, dtype=I8, low=-SEVEN_BITS, high=SEVEN_BITS), vector(3, 1, 4, 1, dtype=I8)
    scales = vector(0.5, 0.25, 2.0, 1.5, dtype=F32)
    halves = vector(0.5, 1.5, 2.5, -0.5, -1.5, 1e9, -1e9, dtype=F32)
    return [
        case("DynamicQuantizeLinear", x, outputs=3),
        case("DynamicQuantizeLinear", floats(3, 4, low=0.5), outputs=3),
        case("QuantizeLinear", x, scalar(0.4)),
        case("QuantizeLinear", x, scalar(0.4), scalar(7, I8)),
        case("QuantizeLinear", halves, scalar(1.0), scalar(1, U8)),
        case("QuantizeLinear", x, scales, points, axis=1),
        case("QuantizeLinear", x, scales[:3], axis=-2),
        case("QuantizeLinear", x, floats(3, 2, low=0.1), ints(3, 2, dtype=U8, low=0), axis=1, block_size=2),
        case("QuantizeLinear", floats(5, dtype=F16), scalar(0.1, F16), scalar(3, I8)),
        case("QuantizeLinear", x, scalar(0.4), output_dtype=TensorProto.INT8, oracle="onnx"),
        case("QuantizeLinear", x, scalar(2.0), scalar(1, ml_dtypes.int4), oracle="onnx"),
        case("QuantizeLinear", x, scalar(20.0), scalar(0, ml_dtypes.int2), oracle="onnx"),
        case("QuantizeLinear", x, scalar(0.01), scalar(0, ml_dtypes.float8_e4m3fn), oracle="onnx"),
        case("QuantizeLinear", x, scalar(10.0), scalar(0, ml_dtypes.float4_e2m1fn), oracle="onnx"),
        case("DequantizeLinear", a, scalar(0.4)),
        case("DequantizeLinear", a, scalar(0.4), scalar(7, U8)),
        case("DequantizeLinear", b.T.copy(), scales, points, axis=1),
        case("DequantizeLinear", ints(2, 3, dtype=I32), scalar(0.5)),
        case("DequantizeLinear", a, floats(3, 2), axis=1, block_size=2),
        case("DequantizeLinear", ints(2, 3, low=-8, high=7).astype(ml_dtypes.int4), scalar(0.5, F16), oracle="onnx"),
        case("DequantizeLinear", x.astype(ml_dtypes.float8_e5m2), scalar(0.5), oracle="onnx"),
        case("MatMulInteger", a, b),
        case("MatMulInteger", a, b, scalar(3, U8), scalar(-2, I8)),
        case("MatMulInteger", a, b, scalar(3, U8), ints(5, dtype=I8)),
        case("MatMulInteger", ints(2, 3, 4, dtype=U8, low=0), b, scalar(1, U8)),
        case("QLinearMatMul", a, scalar(0.1), scalar(9, U8), b, scalar(0.2), scalar(-3, I8), scalar(5.0),
             scalar(11, U8)),
        case("ConvInteger", image, kernel, scalar(9, U8), oracle="onnx", pads=[1, 1, 1, 1]),
        case("ConvInteger", image, kernel, scalar(9, U8), scalar(-3, I8), pads=[1, 0, 2, 1], strides=[2, 1]),
        case("ConvInteger", image, kernel[:, :1].copy(), group=2),
        case(
            "QLinearConv", image, scalar(0.1), scalar(9, U8), kernel, scales, 0 * points, scalar(9.0), scalar(100, U8),
            ints(4, dtype=I32, low=-900, high=900), pads=[1, 1, 1, 1],
        ),
    ]  # fmt: skip


def _recurrent() -> list[Case]:
    cases = []
    for op, gates, states in (("RNN", 1, 1), ("GRU", 3, 1), ("LSTM", 4, 2)):
        outputs = 1 + states
        for direction, count in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
            w, r, b = (floats(count, gates * 3, width, low=-1, high=1) for width in (2, 3, 1))
            bias = np.concatenate([b[..., 0], -b[..., 0] / 2], axis=1)
            common = {"hidden_size": 3, "direction": direction, "outputs": outputs, "tolerance": 1e-5}
            lengths = vector(5, 2, 3, 1, dtype=I32)
            starts = [floats(count, 4, 3, low=-1, high=1) / (i + 1) for i in range(states)]
            cases += [
                case(op, floats(5, 4, 2), w, r, **common),
                case(op, floats(5, 4, 2), w, r, bias, None, *starts, **common),
                case(op, floats(5, 4, 2), w, r, bias, lengths, *starts, **common),
                case(op, floats(5, 4, 2), w, r, bias, clip=2.0, **common),
            ]
        cases += _variants(op, gates, states)
    return cases


def _variants(op: str, gates: int, states: int) -> list[Case]:
    x, w, r = floats(5, 4, 2), floats(1, gates * 3, 2, low=-1), floats(1, gates * 3, 3, low=-1)
    common: dict[str, Any] = {"hidden_size": 3, "outputs": 1 + states, "tolerance": 1e-5}
    batched = case(op, x.swapaxes(0, 1).copy(), w, r, layout=1, **{**common, "oracle": "onnx"})
    if op == "RNN":
        functions = (
            ("Relu", None, None), ("LeakyRelu", 0.3, None), ("ScaledTanh", 0.5, 1.5), ("HardSigmoid", 0.3, 0.4),
            ("Elu", 0.5, None), ("Softsign", None, None), ("Softplus", None, None), ("Affine", 0.5, 0.1),
            ("ThresholdedRelu", 0.4, None), ("Sigmoid", None, None),
        )  # fmt: skip
        return [
            case(op, x, w, r, activations=[name], **_scaled(alpha, beta), **common) for name, alpha, beta in functions
        ] + [batched]
    if op == "GRU":
        return [case(op, x, w, r, floats(1, 18), linear_before_reset=1, **common), batched]
    peepholes = floats(1, 9, low=-1, high=1)
    return [
        case(op, x, w, r, None, None, None, None, peepholes, **common),
        case(op, x, w, r, input_forget=1, **common),
        case(op, x, w, r, activations=["HardSigmoid", "Tanh", "Softsign"], **_scaled(0.3, 0.4), **common),
        batched,
    ]


def _scaled(alpha: float | None, beta: float | None) -> dict[str, list[float]]:
    pairs = (("activation_alpha", alpha), ("activation_beta", beta))
    return {name: [value] for name, value in pairs if value is not None}


def _signals() -> list[Case]:
    real, spectrum = floats(2, 8, 1), floats(2, 3, 5, 2)
    return [
        case("DFT", real, tolerance=1e-4),
        case("DFT", real, None, scalar(1, I64), onesided=1, tolerance=1e-4),
        case("DFT", real, scalar(6, I64), scalar(-2, I64), tolerance=1e-4),
        case("DFT", real, scalar(11, I64), scalar(1, I64), tolerance=1e-4),
        case("DFT", spectrum, None, scalar(1, I64), tolerance=1e-4),
        case("DFT", spectrum, None, scalar(2, I64), inverse=1, tolerance=1e-4),
        case("DFT", spectrum, None, scalar(2, I64), inverse=1, onesided=1, oracle="onnx", tolerance=1e-4),
        case("DFT", floats(1, 4, 1, dtype=F64)),
        case("STFT", floats(2, 20, 1), scalar(3, I64), floats(8), tolerance=1e-4),
        case("STFT", floats(2, 20, 1), scalar(4, I64), None, scalar(6, I64), onesided=0, tolerance=1e-4),
        case("STFT", floats(1, 12, 1, dtype=F64), scalar(4, I64), floats(4, dtype=F64), scalar(4, I64)),
        case("MelWeightMatrix", *(scalar(n, I64) for n in (8, 16, 8192)), scalar(0.0), scalar(4096.0), tolerance=1e-5),
        case("MelWeightMatrix", *(scalar(n, I64) for n in (4, 64, 8192)), scalar(99.0), scalar(3000.0), tolerance=1e-5),
    ]


def _sampled() -> list[Case]:
    image, grid = floats(2, 3, 4, 5), floats(2, 3, 6, 2, low=-1.6, high=1.6)
    volume, cells = floats(1, 2, 3, 4, 5), floats(1, 2, 3, 2, 3, low=-1.3, high=1.3)
    rois, owners = vector([0, 0, 3, 2], [1, 1, 4, 3], [-1, 0.5, 2.5, 9], dtype=F32), vector(0, 1, 1)
    return [
        *(
            case("GridSample", image, grid, mode=mode, padding_mode=padding, align_corners=align, tolerance=1e-4)
            for mode in ("linear", "nearest", "cubic")
            for padding in ("zeros", "border", "reflection")
            for align in (0, 1)
        ),
        *(
            case("GridSample", volume, cells, mode=mode, padding_mode=padding, tolerance=1e-4)
            for mode in ("linear", "nearest")
            for padding in ("zeros", "border", "reflection")
        ),
        *(
            case("RoiAlign", image, rois, owners, output_height=2, output_width=3, tolerance=1e-5, **attrs)
            for attrs in (
                {}, {"sampling_ratio": 2}, {"spatial_scale": 0.5},
                {"coordinate_transformation_mode": "output_half_pixel"},
            )
        ),
        case("RoiAlign", image, rois, owners, output_height=2, output_width=2, mode="max", oracle="onnx"),
        case("MaxRoiPool", image, vector([0, 0, 0, 3, 2], [1, 1, 1, 4, 3], [1, 0, 0, 0, 0], dtype=F32),
             pooled_shape=[2, 2]),
        case("DeformConv", floats(2, 4, 5, 6), floats(6, 2, 3, 3), floats(2, 36, 5, 6, low=-2, high=2), floats(6),
             floats(2, 18, 5, 6, low=0), group=2, offset_group=2, pads=[1, 1, 1, 1], tolerance=1e-4),
        case("DeformConv", floats(1, 2, 6, 6), floats(2, 2, 2, 2), floats(1, 8, 2, 3), strides=[2, 2],
             dilations=[2, 1], pads=[0, 0, 0, 1], tolerance=1e-4),
        case("Col2Im", floats(2, 12, 6), vector(4, 4), vector(2, 3), tolerance=1e-5),
        case("Col2Im", floats(1, 8, 16), vector(5, 5), vector(2, 2), pads=[1, 1, 0, 0], strides=[1, 1],
             dilations=[2, 2], tolerance=1e-5),
        case("MaxUnpool", vector([[[1, 2], [3, 4]]], dtype=F32), vector([[[5, 7], [13, 15]]]), kernel_shape=[2, 2],
             strides=[2, 2]),
        case("Det", floats(3, 4, 4), tolerance=1e-4),
        case("Det", floats(2, 2)),
    ]  # fmt: skip


def _chosen() -> list[Case]:
    corners = floats(2, 12, 4, low=0, high=1)
    scores = floats(2, 3, 12, low=0, high=1)
    half = (scalar(4, I64), scalar(0.3), scalar(0.2))
    return [
        case("NonMaxSuppression", corners, scores, *half),
        case("NonMaxSuppression", corners, scores, *half, center_point_box=1),
        case("NonMaxSuppression", corners, scores, scalar(2, I64)),
        case("NonMaxSuppression", corners, np.round(scores, 1), *half[:2]),
        case("NonMaxSuppression", corners, scores, scalar(0, I64)),
        case("TensorScatter", floats(2, 3, 5, 4), floats(2, 3, 2, 4), vector(1, 3), oracle="onnx"),
        case("TensorScatter", floats(2, 3, 5, 4), floats(2, 3, 2, 4), vector(4, 0), mode="circular", oracle="onnx"),
        case("TensorScatter", floats(2, 5, 4), floats(2, 2, 4), axis=1, oracle="onnx"),
        case("BitCast", floats(3, 4), to=TensorProto.INT32, oracle="onnx"),
        case("BitCast", ints(3, dtype=I8), to=TensorProto.UINT8, oracle="onnx"),
        case("BitCast", scalar(1.5, F64), to=TensorProto.INT64, oracle="onnx"),
    ]


def _narrow() -> list[Case]:
    x, edges = floats(4, 5, low=-9, high=9), vector(0, 0.3, 1, 1.5, 3, 3e38, 2.0**-130, np.inf, np.nan, dtype=F32)
    twos = ints(7, low=-2, high=1).astype(ml_dtypes.int2)
    return [
        *(
            case("Cast", x, to=code, oracle="onnx")
            for code in (
                TensorProto.INT2, TensorProto.UINT2, TensorProto.FLOAT4E2M1, TensorProto.FLOAT6E2M3,
                TensorProto.FLOAT6E3M2,
            )
        ),
        *(
            case("Cast", edges, to=TensorProto.FLOAT8E8M0, round_mode=mode, saturate=1, oracle="onnx")
            for mode in ("up", "down", "nearest")
        ),
        case("Cast", twos, to=TensorProto.FLOAT, oracle="onnx"),
        case("Cast", x.astype(ml_dtypes.float4_e2m1fn), to=TensorProto.FLOAT16, oracle="onnx"),
    ]  # fmt: skip


NUMERIC_CASES = [case for family in (_narrow, _quantized, _recurrent, _signals, _sampled, _chosen) for case in family()]
