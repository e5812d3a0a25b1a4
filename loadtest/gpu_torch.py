"""The models of gpu_models.py in PyTorch, with the weights of their ONNX files: eager, or compiled with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import numpy_helper

from loadtest.gpu_models import LARGE

Run = Callable[[], Any]


class TorchModel(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not there when types are checked
    """A writer that computes. Weights come in the order in which the ONNX writer made them; its scalars, shapes and
    axes are no weights of PyTorch's."""

    def __init__(self, name: str, model: onnx.ModelProto) -> None:
        super().__init__()
        arrays = [numpy_helper.to_array(initializer) for initializer in model.graph.initializer]
        given = [torch.from_numpy(array.copy()) for array in arrays if array.ndim and array.dtype == np.float32]
        self._write = LARGE[name].write
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(each, requires_grad=False) for each in given])
        self._next: Iterator[torch.Tensor] = iter(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._next = iter(list(self.weights))
        return self._write(self, x)

    def _take(self, count: int) -> Sequence[torch.Tensor]:
        return [next(self._next) for _ in range(count)]

    def conv(self, x: torch.Tensor, inputs: int, outputs: int, k: int, stride: int = 1) -> torch.Tensor:
        return F.conv2d(x, next(self._next), stride=stride, padding=k // 2)

    def batchnorm(self, x: torch.Tensor, channels: int) -> torch.Tensor:
        scale, bias, mean, variance = self._take(4)
        return F.batch_norm(x, mean, variance, scale, bias)

    def relu(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, 3, 2, 1)

    def pool_and_classify(self, x: torch.Tensor, channels: int, classes: int) -> torch.Tensor:
        weight, bias = self._take(2)
        return F.linear(x.mean((2, 3)), weight, bias)

    def linear(self, x: torch.Tensor, inputs: int, outputs: int) -> torch.Tensor:
        weight, bias = self._take(2)
        return F.linear(x, weight.t(), bias)

    def layernorm(self, x: torch.Tensor, width: int) -> torch.Tensor:
        scale, bias = self._take(2)
        return F.layer_norm(x, (width,), scale, bias)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int) -> torch.Tensor:
        rows, length, width = query.shape

        def split(x: torch.Tensor) -> torch.Tensor:
            return x.view(rows, length, heads, width // heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(query), split(key), split(value))
        return mixed.transpose(1, 2).reshape(rows, length, width)


def peers(name: str, model: onnx.ModelProto, x: NDArray[Any], precision: str, device: str = "cuda") -> dict[str, Run]:
    """Calls that take `x` from the host and give the result back to it, as Lathe's do. Images are channels-last, the
    layout in which PyTorch is fastest."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = getattr(torch, precision) if precision in ("bfloat16", "float16") else torch.float32
    format_ = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    network = TorchModel(name, model).to(device=device, dtype=dtype, memory_format=format_).eval()
    compiled = torch.compile(network, mode="max-autotune")  # which captures CUDA graphs, too
    pinned = torch.from_numpy(x)
    pinned = pinned.pin_memory() if device == "cuda" else pinned

    def run_of(network: Any) -> Run:
        def run() -> NDArray[Any]:
            with torch.inference_mode():
                given = pinned.to(device, dtype, non_blocking=True, memory_format=format_)
                result: NDArray[Any] = network(given).float().cpu().numpy()
                return result

        return run

    return {"eager": run_of(network), "compiled": run_of(compiled)}
