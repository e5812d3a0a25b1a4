"""Exports models of Paddle with paddle2onnx. Run it with an interpreter that has both, not with Lathe's.

python make_paddle.py FOLDER     FOLDER/<module>/{model.onnx, inputs.npz, outputs.npz}
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn


class Residual(nn.Layer):
    """Convolutions with a shortcut, upsampling and a channel attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2D(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2D(8)
        self.deep = nn.Conv2D(8, 8, 3, padding=1, groups=8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2D(1), nn.Conv2D(8, 8, 1), nn.Hardsigmoid())
        self.head = nn.Conv2DTranspose(8, 2, 2, stride=2)

    def forward(self, x: Any) -> Any:
        x = nn.functional.hardswish(self.norm(self.conv(x)))
        x = x + self.deep(x) * self.gate(x)
        return self.head(nn.functional.interpolate(nn.functional.max_pool2d(x, 2), size=(8, 8), mode="bilinear"))


class Text(nn.Layer):
    """Embedding, a recurrent net and attention over its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.cell = nn.LSTM(8, 8, direction="bidirect")
        self.score = nn.Linear(16, 1)

    def forward(self, ids: Any) -> Any:
        steps, _ = self.cell(self.words(ids))
        return (nn.functional.softmax(self.score(steps), axis=1) * steps).sum(axis=1)


def modules() -> dict[str, tuple[Any, Any, Any]]:
    """Name -> module, declared input, input to compare on."""
    random = np.random.default_rng(0)
    image = paddle.static.InputSpec([None, 3, 8, 8], "float32", "x")
    dense = nn.Sequential(
        nn.Conv2D(3, 8, 3), nn.ReLU6(), nn.MaxPool2D(2), nn.Flatten(), nn.Linear(72, 16), nn.LayerNorm(16), nn.GELU(),
        nn.Linear(16, 5), nn.Softmax(),
    )  # fmt: skip
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, activation="gelu"), 1)
    pictures = random.normal(size=(3, 3, 8, 8)).astype("float32")
    return {
        "dense": (dense, image, pictures),
        "residual": (Residual(), image, pictures),
        "text": (Text(), paddle.static.InputSpec([None, 6], "int64", "ids"), random.integers(0, 40, (3, 6))),
        "encoder": (
            encoder,
            paddle.static.InputSpec([None, 5, 16], "float32", "x"),
            random.normal(size=(3, 5, 16)).astype("float32"),
        ),
    }


def main(folder: Path) -> None:
    paddle.seed(7)
    for name, (net, declared, given) in modules().items():
        net.eval()
        target = folder / name
        target.mkdir(parents=True)
        paddle.onnx.export(net, str(target / "model"), input_spec=[declared], opset_version=17)
        np.savez(target / "inputs.npz", given)
        np.savez(target / "outputs.npz", net(paddle.to_tensor(given)).numpy())


if __name__ == "__main__":
    os.chdir(sys.argv[1])  # the exporter leaves temporary files in the working folder
    main(Path(sys.argv[1]))
