"""Compares ResNet-50 and MiniLM with torch.compile.

A case takes minutes, so this part comes next to last, with the cheaper mode first.
"""

from __future__ import annotations

from functools import partial

from loadtest.gpu import pytorch_peers as peers
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.comparison import compare
from loadtest.gpu.pytorch_peers import torch_is_usable

SHARE = 0.14
_MODES = {"reduce-overhead": 120.0, "max-autotune": 300.0}  # time limit of a case in seconds


def cases(options: Options) -> list[Case]:
    return [
        Case("compiled", f"{model}/{precision}/{batch}/{mode}", limit)
        for mode, limit in _MODES.items() for precision in options.precisions
        for batch in reversed(options.batches) for model in options.models
    ]  # fmt: skip


def measure(case: Case, bench: Bench) -> Finding:
    model, precision, batch, mode = case.words
    if not torch_is_usable(bench.options.device):
        return Finding("no PyTorch on this GPU to compare with")
    return compare(model, precision, int(batch), {mode: partial(peers.compiled, mode=mode)}, bench)
