"""Transformers as a peer of `python -m loadtest generation greedy`: needs torch, Transformers and gguf, not Lathe.

    python transformers_peer.py FILE.gguf PROMPTS.json NEW OUT.npz

PROMPTS.json has a list of lists of token ids. OUT.npz has `tokens` int64 [prompts, NEW], the greedy tokens after each
prompt without an early end, and `gaps` float32 of the same shape, the differences of the two best logits. Transformers
reads the file itself, and makes its weights float32.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np


def _main(file: str, prompts: str, new: int, out: str) -> None:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    path, kind = Path(file).absolute(), transformers.AutoModelForCausalLM
    model = kind.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokens: list[list[int]] = []
    gaps: list[list[float]] = []
    with torch.inference_mode():
        for prompt in json.loads(Path(prompts).read_text()):
            tokens.append([])
            gaps.append([])
            fed, past = torch.tensor([prompt]), None
            for _ in range(new):
                result = model(fed, past_key_values=past, use_cache=True)
                best = result.logits[0, -1].topk(2)
                tokens[-1].append(int(best.indices[0]))
                gaps[-1].append(float(best.values[0] - best.values[1]))
                fed, past = best.indices[None, :1], result.past_key_values
    np.savez(out, tokens=np.array(tokens, np.int64), gaps=np.array(gaps, np.float32))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
