"""llama.cpp, by llama-cpp-python: arguments MODEL.gguf THREADS. Streams advance together, one call a token."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from loadtest.generation_peers.peer_protocol import CHUNK, Prompts, Row, greedy, serve


def main(path: str, threads: int) -> None:
    api: Any = import_module("llama_cpp")

    api.llama_backend_init()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    api.llama_log_set(quiet, None)
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 16384, CHUNK, CHUNK, 16
    settings.n_threads = settings.n_threads_batch = threads
    context = api.llama_init_from_model(model, settings)
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
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
