"""llama.cpp as a peer of `python -m loadtest generation llama`: needs NumPy and llama-cpp-python, not Lathe.

    python llama_cpp_logits.py FILE.gguf THREADS

Reads a line of JSON, `[tokens, from, OUT.npy]`, computes the logits of the places `from` and after in one text, writes
them to OUT.npy, float32 [places, vocabulary], and answers with an empty line.
"""

from __future__ import annotations

import ctypes
import json
import sys
from importlib import import_module
from typing import Any

import numpy as np

_TOKENS = 2048  # of a text


def _main(path: str, threads: int) -> None:
    api: Any = import_module("llama_cpp")
    api.llama_backend_init()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    api.llama_log_set(quiet, None)
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = _TOKENS
    settings.n_threads = settings.n_threads_batch = threads
    settings.type_k = settings.type_v = 0  # keys and values in float32, as Lathe's
    context = api.llama_init_from_model(model, settings)
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
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
