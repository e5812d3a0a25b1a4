"""The optimizers of ONNX's preview training domain: new parameters and optimizer states from gradients.

The inputs are the learning rate R and the number of previous updates T, then all parameters, all gradients and all
states. The outputs are the new parameters and states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import ValueType
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, OpDef, Required, register
from lathe.core.ops.opdef.type_rules import expect_shape


class Optimizer(OpDef):
    """Family base: updates all parameters, each by `step`, which subclasses define.

    The inputs are the learning rate, the number of previous updates, the parameters, their gradients and their states;
    the outputs are the new parameters and states.
    """

    agreeing = True
    domain = "ai.onnx.preview.training"
    inputs = "R, T, *inputs"
    outputs = "*outputs"
    states: ClassVar[int]  # per parameter
    no_gradient = "gradients through an optimizer step are not implemented"

    def step(self, c: NodeView, rate: Any, count: Any, x: Any, gradient: Any, *states: Any) -> tuple[Any, ...]:
        """The new parameter and its new states, from the learning rate and the number `count` of previous updates."""
        raise NotImplementedError

    def infer(self, c: Infer) -> Sequence[ValueType]:
        given, width = len(c.node.inputs) - 2, 2 + self.states
        if given < width or given % width:
            c.fail(f"has {given} inputs after R and T, expected a multiple of {width}")
        count = given // width
        for index in range(2 + count, 2 + given):
            expected = c.shape(2 + (index - 2) % count)
            if expected is not None:
                expect_shape(c, index, expected)
        kept = [*range(2, 2 + count), *range(2 + 2 * count, 2 + given)]
        return [c.tensor(index) for index in kept]

    def reference(self, c: Call, rate: Array, count: Array, *inputs: Array) -> tuple[Array, ...]:
        groups = np.split(np.arange(len(inputs)), 2 + self.states)
        results = []
        for columns in zip(*groups, strict=True):
            mine = [inputs[i] for i in columns]
            results.append([
                np.asarray(new).astype(mine[0].dtype)
                for new in self.step(c, rate.reshape(()), count.reshape(()), *mine)
            ])  # fmt: skip
        return tuple(array for column in zip(*results, strict=True) for array in column)


@register
class Adagrad(Optimizer):
    """Adagrad; the state of a parameter is the sum of squared gradients."""

    attrs = {"decay_factor": 0.0, "epsilon": 1e-6, "norm_coefficient": 0.0}
    states = 1

    def step(self, c: NodeView, rate: Any, count: Any, x: Any, gradient: Any, *states: Any) -> tuple[Any, ...]:
        decayed = rate / (1 + count * c.attr("decay_factor"))
        slope = c.attr("norm_coefficient") * x + gradient
        squares = states[0] + slope * slope
        return x - decayed * slope / (np.sqrt(squares) + c.attr("epsilon")), squares


@register
class Adam(Optimizer):
    """Adam; the states of a parameter are moving averages of the gradient and of its square."""

    attrs = {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-6, "norm_coefficient": 0.0, "norm_coefficient_post": 0.0}
    states = 2

    def step(self, c: NodeView, rate: Any, count: Any, x: Any, gradient: Any, *states: Any) -> tuple[Any, ...]:
        alpha, beta = c.attr("alpha"), c.attr("beta")
        slope = c.attr("norm_coefficient") * x + gradient
        mean = alpha * states[0] + (1 - alpha) * slope
        square = beta * states[1] + (1 - beta) * slope * slope
        corrected = rate * np.sqrt(1 - beta**count) / (1 - alpha**count) if count > 0 else rate
        moved = x - corrected * mean / (np.sqrt(square) + c.attr("epsilon"))
        return (1 - c.attr("norm_coefficient_post")) * moved, mean, square


@register
class Momentum(Optimizer):
    """Gradient descent with momentum, the state of a parameter; mode "nesterov" is Nesterov's accelerated gradient."""

    attrs = {"alpha": Required("float"), "beta": Required("float"), "mode": Required("standard or nesterov"),
             "norm_coefficient": Required("float")}  # fmt: skip
    states = 1

    def infer(self, c: Infer) -> Sequence[ValueType]:
        if c.attr("mode") not in ("standard", "nesterov"):
            c.fail(f"mode is {c.attr('mode')!r}, expected standard or nesterov")
        return super().infer(c)

    def step(self, c: NodeView, rate: Any, count: Any, x: Any, gradient: Any, *states: Any) -> tuple[Any, ...]:
        slope = c.attr("norm_coefficient") * x + gradient
        momentum = c.attr("alpha") * states[0] + (c.attr("beta") if count > 0 else 1) * slope
        ahead = slope + c.attr("alpha") * momentum if c.attr("mode") == "nesterov" else momentum
        return x - rate * ahead, momentum
