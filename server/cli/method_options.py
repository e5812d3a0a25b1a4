"""The options that choose a method of compression, for `lathe quantize` and `lathe compress`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from lathe.server.cli.percentage import read_percentage
from lathe.server.cli.terminal import fail

Weights = Annotated[
    str | None,
    typer.Option(
        help="Store only weights in few bits, and compute with float32 inputs. Round them by: nearest, gptq or awq."
    ),
]
Dynamic = Annotated[
    bool, typer.Option("--dynamic", help="Find the range of each activation in each run, without data.")
]
Bits = Annotated[int, typer.Option(help="With --weights: use 2, 4 or 8 bits.")]
Block = Annotated[
    int, typer.Option(help="With --weights: use a scale for this many rows of a column; 0: for all rows.")
]
Rounding = Annotated[
    str,
    typer.Option(
        help="Round weights by: nearest, stochastic, floor, ceil, or adaround, which learns it from the data: not with "
        "--dynamic. --weights gptq takes only nearest."
    ),
]
Calibration = Annotated[
    str,
    typer.Option(help="Choose the range of each activation by: min-max, moving-average, percentile, entropy or mse."),
]
Percentile = Annotated[float, typer.Option(help="With percentile: the share of numbers within the range, in percent.")]
Activations = Annotated[
    str,
    typer.Option(
        help="Store activations as uint8 or int8. With --weights, int8 permits products to round their inputs in each "
        "run."
    ),
]
Symmetric = Annotated[bool, typer.Option("--symmetric", help="Use ranges with 0 in the middle.")]
PerTensor = Annotated[
    bool, typer.Option("--per-tensor", help="Use one scale for a tensor of weights, not one for each channel.")
]
Smoothing = Annotated[
    float,
    typer.Option(help="Move outliers of activations into the weights by SmoothQuant, with this strength; 0: off."),
]
CorrectBias = Annotated[
    bool, typer.Option("--correct-bias", help="Take the mean error of rounded weights out of the results.")
]
Equalize = Annotated[
    bool,
    typer.Option("--equalize", help="Give the channels between two products equal ranges in the weights of both."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        help="Use int8 only for products that are faster so on this machine, as many as keep the error of each "
        "output below this part of its root mean square.",
        metavar="PERCENT",
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(help="Leave the node of this name as it is. Repeat the option.", metavar="NODE"),
]


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """The options as they were given."""

    weights: str | None
    dynamic: bool
    bits: int
    block: int
    rounding: str
    calibration: str
    percentile: float
    activations: str
    symmetric: bool
    per_tensor: bool
    smoothing: float
    correct_bias: bool
    equalize: bool
    budget: str | None
    skip: list[str] | None

    def values(self) -> dict[str, Any]:
        """Return the table of the method, as `lathe.core.compress.recipe` reads it.

        Options that exclude each other end the command.
        """
        from lathe.core.compress.weight_only import METHODS

        if self.weights not in (None, *METHODS):
            raise fail(f"--weights: expected one of {', '.join(METHODS)}, got {self.weights!r}")
        if self.budget is not None and self.weights is not None:
            raise fail("--budget: expected int8 products, got --weights")
        if self.dynamic and (self.weights is not None or self.budget is not None):
            raise fail("--dynamic: expected neither --weights nor --budget")
        common = {"rounding": self.rounding, "skip": self.skip or []}
        if self.dynamic:
            return {"kind": "dynamic", "per_tensor": self.per_tensor, **common}
        if self.weights is not None:
            codes = {"weights": self.weights, "bits": self.bits, "block": self.block, "symmetric": self.symmetric}
            rows = {"activations": "int8"} if self.activations == "int8" else {}
            return {"kind": "weight-only", **codes, **rows, **common}
        budget = {"budget": read_percentage("--budget", self.budget)} if self.budget is not None else {}
        return {
            "kind": "mixed" if budget else "static",
            "calibration": self.calibration,
            "percentile": self.percentile,
            "activations": self.activations,
            "symmetric": self.symmetric,
            "per_tensor": self.per_tensor,
            "smoothing": self.smoothing,
            "correct_bias": self.correct_bias,
            "equalize": self.equalize,
            **common,
            **budget,
        }
