"""Makes `sampling.npz`: what the logits processors of Transformers make of random logits.

    python make_sampling.py [FOLDER]

in an environment with torch and Transformers. Presence and frequency penalties are not in Transformers; their formula
is in the test.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as lp

VOCABULARY = 300
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 20},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_k": 1},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.02},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "temperature": 0.9, "top_k": 10, "top_p": 0.7, "min_p": 0.05},
    {"bias": {"3": 5.0, "17": -100.0, "250": 2.5}, "repetition_penalty": 1.2, "top_p": 0.99},
)


def main(folder: Path) -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(0, 3, (len(CASES), VOCABULARY)).astype(np.float32)
    prompt = rng.integers(0, VOCABULARY, 30)
    expected = [distribution(torch.from_numpy(row)[None], case, prompt) for row, case in zip(rows, CASES, strict=True)]
    np.savez_compressed(
        folder / "sampling.npz", logits=rows, prompt=prompt, probabilities=np.concatenate(expected),
        cases=np.array(json.dumps(CASES)),
    )  # fmt: skip


def distribution(scores: torch.Tensor, case: dict[str, Any], prompt: Any) -> Any:
    ids = torch.from_numpy(prompt)[None]
    processors: list[Any] = []
    if "bias" in case:
        processors.append(lp.SequenceBiasLogitsProcessor([[[int(key)], value] for key, value in case["bias"].items()]))
    if "repetition_penalty" in case:
        processors.append(lp.RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    for name, kind in (
        ("temperature", lp.TemperatureLogitsWarper), ("top_k", lp.TopKLogitsWarper),
        ("top_p", lp.TopPLogitsWarper), ("min_p", lp.MinPLogitsWarper),
    ):  # fmt: skip
        if name in case:
            processors.append(kind(case[name]))
    return torch.softmax(lp.LogitsProcessorList(processors)(ids, scores).double(), -1).numpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
