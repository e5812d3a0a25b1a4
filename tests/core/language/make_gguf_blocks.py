"""Makes `gguf_blocks.npz`: random blocks of each type of GGUF tensors, and what the package `gguf` makes of them.

python make_gguf_blocks.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
BLOCKS = 24


def main(folder: Path) -> None:
    rng = np.random.default_rng(11)
    arrays: dict[str, Any] = {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        count = BLOCKS if elements > 1 else 256
        # Real numbers, whose quantization exists in the package for some types only, and random bytes for all.
        blocks = [rng.integers(0, 256, (count, size), np.uint8)]
        if name in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
            blocks.append(gguf.quants.quantize(rng.normal(0, 1, (count, elements)).astype(np.float32), kind))
        data = np.concatenate([each.view(np.uint8).reshape(-1, size) for each in blocks])
        with np.errstate(all="ignore"):
            found = gguf.quants.dequantize(data if name != "F32" else data.view(np.float32), kind)
        arrays[f"{name}/blocks"] = data
        arrays[f"{name}/elements"] = np.asarray(found, np.float32).reshape(len(data), elements)
    np.savez_compressed(folder / "gguf_blocks.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
