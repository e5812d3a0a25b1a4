"""llama.cpp, by llama-cpp-python: arguments MODEL.gguf THREADS. Streams advance together, one call a token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.generation_peers.llama_model import load
from loadtest.generation_peers.peer_protocol import CHUNK, Prompts, Row, greedy, serve


def main(path: str, threads: int) -> None:
    api, model, size = load(path)
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 16384, CHUNK, CHUNK, 16
    settings.n_threads = settings.n_threads_batch = threads
    context = api.llama_init_from_model(model, settings)
    batch = api.llama_batch_init(CHUNK, 0, 1)

    def step(rows: Sequence[Row]) -> list[int]:
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        batch.n_tokens = len(rows)
        if api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = (api.llama_get_logits_ith(context, i) for i, row in enumerate(rows) if row[3])
        return [int(np.ctypeslib.as_array(each, (size,)).argmax()) for each in logits]

    def generate(prompts: Prompts, count: int) -> dict[str, list[Any]]:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        return greedy(step, prompts, count)

    serve(generate, size, api.llama_model_n_ctx_train(model))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
