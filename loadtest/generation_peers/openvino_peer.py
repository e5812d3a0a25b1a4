"""OpenVINO GenAI: arguments FOLDER THREADS. Continuous batching with a paged cache, in float32."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from itertools import count as numbers
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.generation_peers.peer_protocol import Prompts, Stopwatch, serve

_CACHE_GB, _TOKENS_OF_A_STEP = 1, 2048


def main(path: str, threads: int) -> None:
    openvino: Any = import_module("openvino")
    genai: Any = import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens = _CACHE_GB, _TOKENS_OF_A_STEP
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", options)
    settings = json.loads((Path(path) / "config.json").read_text())
    names = numbers()

    def generate(prompts: Prompts, count: int) -> dict[str, list[Any]]:
        config = genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        watch = Stopwatch(len(prompts))
        arrays = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        handles = [pipeline.add_request(next(names), array, config) for array in arrays]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for sequence, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        watch.add(sequence, list(output.generated_ids))
        return watch.answer()

    serve(generate, settings["vocab_size"], settings["max_position_embeddings"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
