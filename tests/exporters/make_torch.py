"""Exports models of PyTorch with both its exporters. Run it with an interpreter that has torch, not with Lathe's.

    python make_torch.py FOLDER     FOLDER/<module>-<exporter>/{model.onnx, inputs.npz, outputs.npz}

Outputs are PyTorch's own, for other sizes of the dynamic dimensions than those of the export.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as f

Made = tuple[nn.Module, Callable[[int], tuple[Any, ...]]]  # a module, and its inputs for a batch size
MODULES: dict[str, Callable[[], Made]] = {}


def module(build: Callable[[], Made]) -> Callable[[], Made]:
    """Decorator: one of the modules to export, under the function's name."""
    MODULES[build.__name__] = build
    return build


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


@module
def mlp() -> Made:
    net = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.5), nn.Linear(16, 4), nn.Softmax(-1)
    )
    return net, lambda n: (torch.randn(n, 8),)


@module
def convolutions() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=8),
        nn.GroupNorm(2, 8), nn.Hardswish(), nn.Conv2d(8, 16, 1, stride=2), nn.PReLU(16), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return net, lambda n: (torch.randn(n, 3, 16, 16),)


@module
def one_and_three_dimensions() -> Made:
    def run(self: Any, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.three(volume)

    net = Call(run, one=nn.Conv1d(3, 4, 5, dilation=2, padding=4), three=nn.ConvTranspose3d(2, 3, 3, stride=2))
    return net, lambda n: (torch.randn(n, 3, 12), torch.randn(n, 2, 3, 4, 5))


@module
def u_net() -> Made:
    def run(self: Any, x: Tensor) -> Tensor:
        down = f.relu(self.down_reason(x))
        up = f.interpolate(self.middle(f.max_pool2d(down, 2)), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.last(torch.cat([up, down], dim=1)) + self.up(f.avg_pool2d(down, 2))

    net = Call(
        run, down=nn.Conv2d(3, 8, 3, padding=1), middle=nn.Conv2d(8, 8, 3, padding=1), last=nn.Conv2d(16, 2, 1),
        up=nn.ConvTranspose2d(8, 2, 2, stride=2),
    )  # fmt: skip
    return net, lambda n: (torch.randn(n, 3, 8, 8),)


@module
def lstm() -> Made:
    net = Call(lambda self, x: self.cell(x)[0], cell=nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True))
    return net, lambda n: (torch.randn(n, 5, 6),)


@module
def gru() -> Made:
    net = Call(lambda self, x: self.cell(x), cell=nn.GRU(6, 8, batch_first=True))
    return net, lambda n: (torch.randn(n, 5, 6),)


@module
def rnn() -> Made:
    net = Call(lambda self, x: self.cell(x)[1], cell=nn.RNN(6, 8, nonlinearity="relu"))
    return net, lambda n: (torch.randn(5, n, 6),)


@module
def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu", norm_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return net, lambda n: (torch.randn(n, 7, 16),)


@module
def decoder() -> Made:
    layer = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    net = Call(lambda self, x, memory: self.layer(x, memory, tgt_mask=mask, tgt_is_causal=True), layer=layer)
    return net, lambda n: (torch.randn(n, 5, 16), torch.randn(n, 7, 16))


@module
def masked_attention() -> Made:
    def run(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask[:, None, None], float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def inputs(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 6, 16), torch.arange(6)[None] < torch.arange(n)[:, None] % 6 + 1

    return Call(run, qkv=nn.Linear(16, 48)), inputs


@module
def scaled_dot_product() -> Made:
    def run(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return f.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Call(run), lambda n: tuple(torch.randn(n, 2, 6, 8) for _ in range(3))


@module
def embeddings() -> Made:
    def run(self: Any, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))

    net = Call(run, words=nn.Embedding(50, 8, padding_idx=0), places=nn.Embedding(16, 8))
    return net, lambda n: (torch.randint(0, 50, (n, 9)),)


@module
def embedding_bag() -> Made:
    net = Call(lambda self, ids: self.words(ids).sum(1) / 3, words=nn.Embedding(30, 4))
    return net, lambda n: (torch.randint(0, 30, (n, 3)),)


@module
def einsums() -> Made:
    def run(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bij,bkj->bik", x, y) + torch.einsum("bii->b", x @ y.transpose(1, 2))[:, None, None]

    return Call(run), lambda n: (torch.randn(n, 4, 5), torch.randn(n, 4, 5))


@module
def choices() -> Made:
    def run(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        values, places = x.topk(3, dim=-1)
        spread = torch.zeros_like(x).scatter(1, places, values)
        return values, places, spread, torch.where(x > 0, x, -2 * x), x.argmax(1), x.cumsum(1), x.sort(1)[0]

    return Call(run), lambda n: (torch.randn(n, 7),)


@module
def indexing() -> Made:
    def run(self: Any, x: Tensor, picks: Tensor) -> tuple[Tensor, ...]:
        return x[:, 1:-1:2], x[..., None, 0], x.gather(1, picks), x.index_select(2, torch.tensor([2, 0])), x.flip(1)

    return Call(run), lambda n: (torch.randn(n, 5, 4), torch.randint(0, 5, (n, 2, 4)))


@module
def images() -> Made:
    def run(self: Any, x: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
        sampled = f.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
        return f.pixel_shuffle(x, 2), f.pad(x, (1, 2, 0, 1), mode="reflect"), sampled, f.interpolate(x, size=(5, 9))

    return Call(run), lambda n: (torch.randn(n, 4, 6, 6), torch.rand(n, 3, 3, 2) * 2 - 1)


@module
def reductions() -> Made:
    def run(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        return x.var(-1), x.std((1, 2)), x.norm(dim=1), x.logsumexp(-1), x.amax((1, 2)), x.prod(2), f.normalize(x)

    return Call(run), lambda n: (torch.randn(n, 3, 4),)


@module
def activations() -> Made:
    def run(self: Any, x: Tensor) -> Tensor:
        kinds = (f.elu, f.selu, f.mish, f.softplus, f.hardtanh, f.leaky_relu, f.celu, f.logsigmoid, f.softsign, f.relu6)
        return torch.stack([kind(x) for kind in kinds], dim=1)

    return Call(run), lambda n: (torch.randn(n, 6) * 3,)


@module
def free_sizes() -> Made:
    def run(self: Any, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.reshape(n, c, h * w).transpose(1, 2).expand(n, h * w, c) + torch.ones(c).expand(n, h * w, c)

    return Call(run), lambda n: (torch.randn(n, 3, 4, 5),)


@module
def numbers() -> Made:
    def run(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        floor = torch.div(x, y, rounding_mode="floor")  # for x // y the older exporter writes division towards zero
        return floor, x % y, (x / y).round(), x.float().clamp(-1, 2), x.to(torch.int32), x.ne(y)

    return Call(run), lambda n: (torch.randint(-9, 9, (n, 4)), torch.randint(1, 5, (n, 4)))


def write(folder: Path, name: str, exporter: str) -> None:
    """Export one module, and write inputs of a larger batch with PyTorch's outputs."""
    torch.manual_seed(7)
    net, inputs = MODULES[name]()
    net.eval()
    given, target = inputs(2), folder / f"{name}-{exporter}"
    target.mkdir(parents=True)
    names = [f"x{i}" for i in range(len(given))]
    axis = 1 if name == "rnn" else 0
    if exporter == "dynamo":
        batch = torch.export.Dim("n", min=1, max=64)
        shapes = tuple({axis: batch} for _ in names)
        dynamic = (shapes,) if isinstance(net, Call) else shapes
        torch.onnx.export(
            net, given, target / "model.onnx", dynamo=True, dynamic_shapes=dynamic, input_names=names,
            external_data=False, verbose=False,
        )  # fmt: skip
    else:
        axes = {each: {axis: "n"} for each in names}
        torch.onnx.export(
            net, given, str(target / "model.onnx"), dynamo=False, opset_version=17, input_names=names, dynamic_axes=axes
        )
    fresh = inputs(3)
    with torch.no_grad():
        outputs = net(*fresh)
    flat = torch.utils._pytree.tree_leaves(outputs)
    np.savez(target / "inputs.npz", *(each.numpy() for each in fresh))
    np.savez(target / "outputs.npz", *(each.numpy() for each in flat))


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for name in MODULES:
        for exporter in ("dynamo", "torchscript"):
            try:
                write(folder, name, exporter)
            except Exception as error:
                print(f"{name}-{exporter}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
