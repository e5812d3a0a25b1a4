"""PyTorch on the same GPU: eager, as a CUDA graph, or compiled as one graph for the measured shape.

Images are channels-last, and cuDNN runs in benchmark mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from loadtest.gpu.models import LARGE

_WARM_UPS = 3
_REPLAYS = 20


@dataclass(frozen=True)
class Engine:
    """One model at one batch size, run by one engine.

    `whole` runs from an array in ordinary (pageable) host memory to another one. `resident` runs from device memory to
    device memory and waits for the end. `seconds` is the time of the kernels alone, run back to back.
    """

    whole: Callable[[], NDArray[Any]]
    resident: Callable[[], object]
    seconds: Callable[[], float]


@lru_cache
def torch_is_usable(device: str) -> bool:
    """True if PyTorch is installed and runs on the GPU.

    PyTorch is imported before Lathe looks for cuBLASLt, because PyTorch brings its own copy: users do not have two
    copies of the library in one process.
    """
    if not device.startswith("cuda") or find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def vendor_product(size: int, precision: str) -> float:
    """Seconds of PyTorch's product of two square matrices of normal random numbers."""
    import torch

    dtype = set_precision(precision)
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return _seconds(lambda: a @ b, 10)


def set_precision(precision: str) -> Any:
    """Make PyTorch compute in this precision as Lathe does. Returns the dtype of its tensors."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return getattr(torch, precision) if precision in ("bfloat16", "float16") else torch.float32


def eager(name: str, model: onnx.ModelProto, x: NDArray[Any], precision: str) -> Engine:
    """PyTorch in eager mode, operator by operator."""
    return _engine(network_of(name, model, precision, x.ndim), x, precision)


def graphed(name: str, model: onnx.ModelProto, x: NDArray[Any], precision: str) -> Engine:
    """The operators of `eager`, captured as a CUDA graph for this batch size, so without host work between kernels."""
    import torch

    network = network_of(name, model, precision, x.ndim)
    given = _to_device(x, set_precision(precision))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            network(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        result = network(given)

    captured = (graph, network)  # the graph reads the weights of the network, and does not hold them

    def replayed(x: Any) -> Any:
        if x is not given:
            given.copy_(x)
        captured[0].replay()
        return result

    return _engine(replayed, x, precision, given)


def compiled(name: str, model: onnx.ModelProto, x: NDArray[Any], precision: str, mode: str) -> Engine:
    """PyTorch compiled as one graph for exactly this shape, BatchNorm folded, with CUDA graphs (in both modes).

    RuntimeError if PyTorch made several graphs or none, since that would be eager code.
    """
    import torch

    reset_compiler()
    torch._inductor.config.freezing = True
    network = network_of(name, model, precision, x.ndim)
    made = torch.compile(network, mode=mode, dynamic=False, fullgraph=True)
    given = _to_device(x, set_precision(precision))
    with torch.inference_mode():
        for _ in range(_WARM_UPS):
            made(given)
    check_one_graph()
    return _engine(made, x, precision, given)


def reset_compiler() -> None:
    """Reset PyTorch's compiler.

    Earlier compilations count against its cache limit, make dimensions dynamic, and stay in its counters.
    """
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def check_one_graph() -> None:
    """RuntimeError unless PyTorch compiled exactly one graph since `reset_compiler`."""
    from torch._dynamo.utils import counters

    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    if graphs != 1 or breaks:
        raise RuntimeError(f"PyTorch compiled {graphs} graphs with {breaks} breaks, expected one without")


def network_of(name: str, model: onnx.ModelProto, precision: str, rank: int, device: str = "cuda") -> Any:
    """The PyTorch model with the weights of its ONNX file, in inference mode."""
    import torch

    format_ = torch.channels_last if rank == 4 else torch.contiguous_format
    made = _module()(name, model).to(device=device, dtype=set_precision(precision), memory_format=format_)
    return made.eval()


def _engine(network: Callable[[Any], Any], x: NDArray[Any], precision: str, resident: Any = None) -> Engine:
    import torch

    dtype = set_precision(precision)
    here = _to_device(x, dtype) if resident is None else resident

    def whole() -> NDArray[Any]:
        set_precision(precision)
        with torch.inference_mode():
            result: NDArray[Any] = network(_to_device(x, dtype)).float().cpu().numpy()
            return result

    def once() -> None:
        with torch.inference_mode():
            network(here)

    def on_device() -> None:
        set_precision(precision)
        once()
        torch.cuda.synchronize()

    return Engine(whole, on_device, lambda: _seconds(once, _REPLAYS))


def _to_device(x: NDArray[Any], dtype: Any) -> Any:
    import torch

    format_ = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    return torch.from_numpy(x).to("cuda").to(dtype, memory_format=format_)


def _seconds(work: Callable[[], object], times: int) -> float:
    """Seconds per call, from `times` calls back to back between two CUDA events."""
    import torch

    for _ in range(_WARM_UPS):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


@lru_cache
def _module() -> Any:
    """The module class, created when PyTorch is first needed."""
    import torch
    import torch.nn.functional as F

    class Network(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not there when types are checked
        """Weights in the order in which the ONNX writer made them, without its scalars, shapes and axes."""

        def __init__(self, name: str, model: onnx.ModelProto) -> None:
            super().__init__()
            arrays = [numpy_helper.to_array(initializer) for initializer in model.graph.initializer]
            given = [torch.from_numpy(array.copy()) for array in arrays if array.ndim and array.dtype == np.float32]
            self._write = LARGE[name].write
            self.weights = torch.nn.ParameterList([torch.nn.Parameter(each, requires_grad=False) for each in given])

        def forward(self, x: Any) -> Any:
            return self._write(Writer(list(self.weights)), x)

    class Writer:
        """A writer (gpu/models.py) that computes with PyTorch; each operator takes the next weights."""

        def __init__(self, weights: Sequence[Any]) -> None:
            self._weights, self._at = weights, 0

        def _take(self, count: int) -> Sequence[Any]:
            self._at += count
            return self._weights[self._at - count : self._at]

        def conv(self, x: Any, inputs: int, outputs: int, k: int, stride: int = 1) -> Any:
            (weight,) = self._take(1)
            return F.conv2d(x, weight, stride=stride, padding=k // 2)

        def batchnorm(self, x: Any, channels: int) -> Any:
            scale, bias, mean, variance = self._take(4)
            return F.batch_norm(x, mean, variance, scale, bias)

        def relu(self, x: Any) -> Any:
            return F.relu(x)

        def add(self, x: Any, y: Any) -> Any:
            return x + y

        def pool(self, x: Any) -> Any:
            return F.max_pool2d(x, 3, 2, 1)

        def pool_and_classify(self, x: Any, channels: int, classes: int) -> Any:
            weight, bias = self._take(2)
            return F.linear(x.mean((2, 3)), weight, bias)

        def linear(self, x: Any, inputs: int, outputs: int) -> Any:
            weight, bias = self._take(2)
            return F.linear(x, weight.t(), bias)

        def layernorm(self, x: Any, width: int) -> Any:
            scale, bias = self._take(2)
            return F.layer_norm(x, (width,), scale, bias)

        def gelu(self, x: Any) -> Any:
            return F.gelu(x)

        def attend(self, query: Any, key: Any, value: Any, heads: int) -> Any:
            rows, length, width = query.shape

            def split(x: Any) -> Any:
                return x.view(rows, length, heads, width // heads).transpose(1, 2)

            mixed = F.scaled_dot_product_attention(split(query), split(key), split(value))
            return mixed.transpose(1, 2).reshape(rows, length, width)

    return Network
