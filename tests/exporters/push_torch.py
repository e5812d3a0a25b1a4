"""Pushes models of PyTorch from Python, as a user would. Run it with an interpreter that has torch, not with Lathe's.

    python push_torch.py URL FOLDER PACKAGES...

PACKAGES are folders that hold Lathe and what its client imports. Writes FOLDER/<model>.npz: inputs, and PyTorch's own
outputs, for another number of rows than that of the example; FOLDER/program.pt2, an exported program; and
FOLDER/refused.json, the error messages of refused pushes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

FOLDER = Path(sys.argv[2])
sys.path += sys.argv[3:]

from lathe.server.client import AsyncClient, Client, ClientError  # noqa: E402


class Joined(nn.Module):
    """A model with one positional and one named input, and with dropout and a norm, which differ in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x) * scale
        return {"scores": y, "best": y.argmax(1)}


class Fixed(nn.Module):
    """A model whose code fixes the batch size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(2.0)[:, None]


class Words(nn.Module):
    """A model of any number of texts of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids).mean(1)


def keep(name: str, inputs: dict[str, torch.Tensor], outputs: Any) -> None:
    """Write the inputs and the expected outputs of a model."""
    leaves = [leaf.detach().numpy() for leaf in torch.utils._pytree.tree_leaves(outputs)]
    given = {f"in_{key}": value.numpy() for key, value in inputs.items()}
    np.savez(FOLDER / f"{name}.npz", **given, **{f"out_{i}": leaf for i, leaf in enumerate(leaves)})


def refused(client: Client, *pushed: Any, **options: Any) -> str:
    """The error message of a failing push."""
    try:
        client.push("refused", *pushed, **options)
    except ClientError as error:
        return str(error)
    return "nothing was refused"


def main(url: str) -> None:
    torch.manual_seed(0)
    net, x, scale = Joined(), torch.randn(5, 4), torch.rand(5, 1)
    net(x, scale=scale)  # updates the running statistics
    net.body[0].eval()
    with Client(url) as client:
        client.push("module", net, {"x": x[:1], "scale": scale[:1]}, output_names=["scores", "best"])
        assert net.training and net.body.training and not net.body[0].training, "a push leaves the module as it was"
        net.eval()
        keep("module", {"x": x, "scale": scale}, net(x, scale=scale))

        line = nn.Linear(4, 2)
        program = torch.export.export(line, (x,), dynamic_shapes={"input": {0: torch.export.Dim("rows")}})
        torch.export.save(program, FOLDER / "program.pt2")
        client.push("program", program, key="once")
        assert client.push("program", program, key="once").replayed, "the same program is the same file"
        client.push("onnx", torch.onnx.export(program, dynamo=True, verbose=False))
        for name in ("program", "onnx", "file"):
            keep(name, {"input": x}, line(x))

        words, ids = Words(), torch.randint(0, 20, (3, 7))
        free = {"ids": {0: "texts", 1: "length"}}
        for _ in range(2):
            client.push("words", words, ids[:2, :5].numpy(), dynamic_shapes=free, key="again")
        keep("words", {"ids": ids}, words(ids))

        said = {
            "fixed": refused(client, Fixed(), torch.randn(2, 4)),
            "no example": refused(client, line),
            "other arguments": refused(client, line, (x, x)),
            "a class": refused(client, nn.Linear, x),
            "an option": refused(client, program, x),
        }
        (FOLDER / "refused.json").write_text(json.dumps(said))

    async def push() -> None:
        async with AsyncClient(url) as client:
            await client.push("asyncio", nn.Sequential(line, nn.Tanh()), x[:1])

    asyncio.run(push())
    keep("asyncio", {"input": x}, torch.tanh(line(x)))


if __name__ == "__main__":
    main(sys.argv[1])
