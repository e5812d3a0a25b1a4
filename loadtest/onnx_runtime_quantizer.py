"""ONNX Runtime's own quantizer as a peer: static in QDQ form, or dynamic, with a scale for each output channel.

And its quantizer of weights alone, with 4 bits.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

Feeds = dict[str, NDArray[Any]]


def quantize_file(
    model: Path, small: Path, calibration: Iterable[Feeds] | None, activations: Literal["QUInt8", "QInt8"] = "QUInt8"
) -> None:
    """Write the int8 form of the file `model` to `small`: static with batches for calibration, dynamic without."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(model, prepared, skip_symbolic_shape=True)
        if calibration is None:
            quantize_dynamic(prepared, small, per_channel=True, weight_type=QuantType.QInt8)
            return
        types = {"activation_type": QuantType[activations], "weight_type": QuantType.QInt8}
        reader = calibration_reader(calibration)
        quantize_static(prepared, small, reader, quant_format=QuantFormat.QDQ, per_channel=True, **types)


def calibration_reader(batches: Iterable[Feeds]) -> Any:
    """A CalibrationDataReader, which gives ONNX Runtime's quantizer one batch (inputs by name) after the other."""
    from onnxruntime.quantization import CalibrationDataReader

    left = iter(batches)

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # the package has no types
        def get_next(self) -> Feeds | None:
            return next(left, None)

    return Reader()


def quantize_weights_file(model: Path, small: Path, block: int = 32) -> None:
    """Write the form of the file `model` with weights of 4 bits to `small`: MatMulNBits, blocks with zero points.

    It reads products of MatMul only, so each Gemm is written as MatMul and Add first, by the package's own function.
    """
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)  # it logs each node
    prepared = ONNXModel(onnx.load(model))
    prepared.replace_gemm_with_matmul()
    quantizer = MatMulNBitsQuantizer(prepared.model, bits=4, block_size=block, is_symmetric=False)
    quantizer.process()
    quantizer.model.save_model_to_file(str(small))
