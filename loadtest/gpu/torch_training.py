"""PyTorch's training step on a GPU: eager, or one CUDA graph of forward, backward and update, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from loadtest import training
from loadtest.gpu.pytorch_peers import check_one_graph, reset_compiler

_WARM_UPS = 5


def eager(name: str, narrow: bool) -> training.Step:
    return training.pytorch(name, 1, False, narrow, "cuda")


def graphed(name: str, narrow: bool) -> training.Step:
    """The operators of `eager`, captured as a CUDA graph, so without host work between them."""
    return _captured(name, narrow, compiled=False)


def compiled(name: str, narrow: bool) -> training.Step:
    """Forward and backward compiled as one graph. RuntimeError unless PyTorch made exactly one."""
    return _captured(name, narrow, compiled=True)


PEERS: dict[str, Callable[[str, bool], training.Step]] = {"eager": eager, "graphed": graphed, "compiled": compiled}


def _captured(name: str, narrow: bool, compiled: bool) -> training.Step:
    """A captured step: each call copies the batch from host memory and returns the loss to the host."""
    import torch
    import torch.nn.functional as F

    reset_compiler()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = training.module(name).train().to("cuda")
    host = torch.from_numpy(training.sample(name)), torch.from_numpy(training.targets())
    x, target = (each.to("cuda") for each in host)
    optimizer = torch.optim.Adam(model.parameters(), training.RATE, fused=True, capturable=True)

    def loss_of(x: Any, target: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16) if narrow else nullcontext():
            return F.cross_entropy(model(x).float(), target)

    forward = torch.compile(loss_of, dynamic=False, fullgraph=True) if compiled else loss_of

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x, target)
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    if compiled:
        check_one_graph()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def run() -> float:
        x.copy_(host[0])
        target.copy_(host[1])
        graph.replay()
        return float(loss.detach())

    return run
