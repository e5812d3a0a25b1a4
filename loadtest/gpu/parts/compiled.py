"""ResNet-50 and MiniLM beside torch.compile, which takes minutes for a case: last but for the sanitizer, the cheaper
mode first."""

from __future__ import annotations

from functools import partial

from loadtest.gpu import peers
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.peers import torch_is_usable
from loadtest.gpu.versus import compare

SHARE = 0.14
_MODES = {"reduce-overhead": 120.0, "max-autotune": 300.0}  # seconds that a case may take


def cases(options: Options) -> list[Case]:
    return [
        Case("compiled", f"{model}/{precision}/{batch}/{mode}", limit)
        for mode, limit in _MODES.items() for precision in options.precisions
        for batch in reversed(options.batches) for model in options.models
    ]  # fmt: skip


def measure(case: Case, bench: Bench) -> Finding:
    model, precision, batch, mode = case.words
    if not torch_is_usable(bench.options.device):
        return Finding("PyTorch does not run here: nothing to compare with")
    return compare(model, precision, int(batch), {mode: partial(peers.compiled, mode=mode)}, bench)
