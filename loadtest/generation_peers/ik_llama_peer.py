"""ik_llama.cpp, by ik-llama-cpp-python: arguments MODEL.gguf THREADS. Streams advance together, one call a token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from loadtest.generation_peers.peer_protocol import CHUNK, Prompts, Row, greedy, serve

_CONTEXT = 8192  # tokens of all streams; the model's own context is unknown to the wheel


def main(path: str, threads: int) -> None:
    api: Any = import_module("ik_llama_cpp._ctypes_api")
    internals: Any = import_module("ik_llama_cpp._internals")
    model = internals.IkModel(path)
    context = internals.IkContext(model, n_ctx=_CONTEXT, n_threads=threads, n_seq_max=16, flash_attn=False)
    batch = api.llama_batch_init(CHUNK, 0, 1)

    def step(rows: Sequence[Row]) -> list[int]:
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        batch.n_tokens = len(rows)
        if context.decode(batch):
            raise RuntimeError("llama_decode failed")
        logits = (api.llama_get_logits_ith(context.ctx, i) for i, row in enumerate(rows) if row[3])
        return [int(np.ctypeslib.as_array(each, (model.n_vocab,)).argmax()) for each in logits]

    def generate(prompts: Prompts, count: int) -> dict[str, list[Any]]:
        context.kv_cache_clear()
        return greedy(step, prompts, count)

    serve(generate, model.n_vocab, _CONTEXT)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
