"""Compression of models: calibration and quantization. The results are graphs of standard ONNX operators."""
