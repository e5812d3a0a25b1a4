"""llama.cpp as a peer of `python -m loadtest generation llama`: needs NumPy and llama-cpp-python, not Lathe.

    python -m loadtest.generation.llama_cpp_logits FILE.gguf THREADS

Reads a line of JSON, `[tokens, from, OUT.npy]`, computes the logits of the places `from` and after in one text, writes
them to OUT.npy, float32 [places, vocabulary], and answers with an empty line.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from loadtest.generation_peers.llama_model import load

_TOKENS = 2048  # of a text


def _main(path: str, threads: int) -> None:
    api, model, size = load(path)
    settings = api.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = _TOKENS
    settings.n_threads = settings.n_threads_batch = threads
    settings.type_k = settings.type_v = 0  # keys and values in float32, as Lathe's
    context = api.llama_init_from_model(model, settings)
    batch = api.llama_batch_init(_TOKENS, 0, 1)
    for line in sys.stdin:
        tokens, first, out = json.loads(line)
        api.llama_memory_clear(api.llama_get_memory(context), True)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, i >= first
            batch.seq_id[i][0] = 0
        batch.n_tokens = len(tokens)
        if api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        found = [api.llama_get_logits_ith(context, i) for i in range(first, len(tokens))]
        np.save(out, np.stack([np.ctypeslib.as_array(each, (size,)) for each in found]))
        print(flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
