"""ONNX Runtime GenAI: arguments FOLDER THREADS. Streams are one batch of equal lengths, its only way."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.generation_peers.peer_protocol import Prompts, Stopwatch, serve


def main(path: str, threads: int) -> None:
    genai: Any = import_module("onnxruntime_genai")
    settings = json.loads((Path(path) / "genai_config.json").read_text())["model"]
    config = genai.Config(path)
    session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    # No token of the vocabulary ends a text: all engines generate the same number of tokens.
    overlay = {"model": {"eos_token_id": [settings["vocab_size"] - 1], "decoder": {"session_options": session}}}
    config.overlay(json.dumps(overlay))
    model = genai.Model(config)

    def generate(prompts: Prompts, count: int) -> dict[str, list[Any]]:
        options = genai.GeneratorParams(model)
        options.set_search_options(max_length=len(prompts[0]) + count, batch_size=len(prompts), do_sample=False)
        watch = Stopwatch(len(prompts))
        generator = genai.Generator(model, options)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(count):
            generator.generate_next_token()
            for sequence, token in enumerate(generator.get_next_tokens()):
                watch.add(sequence, [int(token)])
        return watch.answer()

    serve(generate, settings["vocab_size"] - 1, settings["context_length"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
