"""Compares ResNet-50 and MiniLM with PyTorch, eager and as a CUDA graph, without PyTorch's compiler."""

from __future__ import annotations

from loadtest.gpu import pytorch_peers as peers
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.comparison import compare

SHARE = 0.22
_PEERS = {"eager": peers.eager, "graphed": peers.graphed}


def cases(options: Options) -> list[Case]:
    return [
        Case("speed", f"{model}/{precision}/{batch}", 60.0)
        for precision in options.precisions for model in options.models for batch in options.batches
    ]  # fmt: skip


def measure(case: Case, bench: Bench) -> Finding:
    model, precision, batch = case.words
    return compare(model, precision, int(batch), _PEERS, bench)
