"""llama.cpp as a peer of `python -m loadtest generate`: a process that needs only NumPy and llama-cpp-python.

Usage: python llama_cpp_peer.py MODEL.gguf THREADS. It reads one request per line, JSON `[prompts, count]`, and answers
with a line of JSON: seconds to the first and to the last token, by the wall clock and of the processor, the tokens, and
memory.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

Row = tuple[int, int, int, bool]  # token, position, sequence, whether its next token is wanted
CHUNK = 512  # most tokens of a run


def greedy(
    step: Callable[[Sequence[Row]], list[int]], prompts: Sequence[Sequence[int]], count: int
) -> dict[str, list[Any]]:
    """Decode `count` tokens for each prompt.

    `wall` and `cpu`: seconds to the first token of all prompts, and to the last, by the clock and of the processor.
    """
    start = _now()
    rows = [
        (token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    last = [token for at in range(0, len(rows), CHUNK) for token in step(rows[at : at + CHUNK])]
    first = _now()
    found = [[token] for token in last]
    for i in range(count - 1):
        last = step([(token, len(prompts[s]) + i, s, True) for s, token in enumerate(last)])
        for tokens, token in zip(found, last, strict=True):
            tokens.append(token)
    wall, cpu = ([later[i] - start[i] for later in (first, _now())] for i in range(2))
    return {"wall": wall, "cpu": cpu, "tokens": found}


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def serve(step: Callable[[Sequence[Row]], list[int]], clear: Callable[[], None], vocabulary: int, context: int) -> None:
    """Answer requests until the input ends. The first line of output has the limits of the model."""
    print(json.dumps({"vocabulary": vocabulary, "context": context}), flush=True)
    for line in sys.stdin:
        prompts, count = json.loads(line)
        clear()
        print(json.dumps({**greedy(step, prompts, count), "rss": rss_mib()}), flush=True)


def rss_mib() -> int:
    """The resident memory of this process in MiB (Linux)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmRSS"))


def _main(path: str, threads: int) -> None:
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

    memory, positions = api.llama_get_memory(context), api.llama_model_n_ctx_train(model)
    serve(step, lambda: api.llama_memory_clear(memory, True), size, positions)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
