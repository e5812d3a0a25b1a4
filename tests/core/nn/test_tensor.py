"""Tensors against NumPy, eagerly and with a symbolic dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lathe
from lathe import nn
from lathe.core.errors import ModelError, TraceError

X = np.random.default_rng(0).normal(0, 1, (4, 3, 6)).astype(np.float32)
INDICES = np.array([[2, 0], [1, 1]])

# Expressions for tensors, and the same for arrays.
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "arithmetic": (lambda x: 2 - x * 3 + 1 / (x * x + 1) - x / 2, lambda x: 2 - x * 3 + 1 / (x * x + 1) - x / 2),
    "an array beside it": (lambda x: np.arange(6.0) * x + np.ones(6), lambda x: np.arange(6.0) * x + np.ones(6)),
    "powers": (lambda x: (x.abs() + 1) ** 2.5 + (-x).pow(2), lambda x: (abs(x) + 1) ** 2.5 + x**2),
    "comparisons": (
        lambda x: nn.where((x > 0) & ~(x >= 1) | (x < -1), x, 0.0),
        lambda x: np.where((x > 0) & ~(x >= 1) | (x < -1), x, 0),
    ),
    "equality": (lambda x: ((x == x) | (x != 1)).to("float32"), np.ones_like),
    "iteration": (
        lambda x: nn.cat([each * i for i, each in enumerate(x[0])]),
        lambda x: np.concatenate([each * i for i, each in enumerate(x[0])]),
    ),
    "clamp": (lambda x: x.clamp(-0.5, 0.5) + x.clamp(max=0.0), lambda x: x.clip(-0.5, 0.5) + np.minimum(x, 0)),
    "masked_fill": (lambda x: x.masked_fill(x < 0, 9.0), lambda x: np.where(x < 0, 9, x)),
    "functions": (lambda x: x.exp().log() + x.abs().sqrt(), lambda x: x + np.sqrt(abs(x))),
    "reductions": (
        lambda x: x.sum((0, 1)) + x.mean(0)[0] + x.amax((0, 1)) - x.amin(dim=(0, 1)),
        lambda x: x.sum((0, 1)) + x.mean(0)[0] + x.max((0, 1)) - x.min((0, 1)),
    ),
    "reduced but kept": (lambda x: x - x.mean(-1, keepdim=True), lambda x: x - x.mean(-1, keepdims=True)),
    "the whole sum": (lambda x: x.sum(), lambda x: x.sum()),
    "argmax": (lambda x: x.argmax(-1), lambda x: x.argmax(-1)),
    "reshape": (lambda x: x.reshape(-1, 9).view(x.shape[0], 3, -1), lambda x: x),
    "flatten": (lambda x: x.flatten(1), lambda x: x.reshape(4, 18)),
    "axes": (lambda x: x.transpose(-1, 1).permute(2, 0, 1), lambda x: x.transpose(1, 0, 2)),
    "T": (lambda x: x[0].T @ x[0], lambda x: x[0].T @ x[0]),
    "squeeze": (lambda x: x.unsqueeze(-1).unsqueeze(1).squeeze(1).squeeze(-1), lambda x: x),
    "expand": (lambda x: x[:, :1].expand(-1, 3, 6), lambda x: np.broadcast_to(x[:, :1], (4, 3, 6))),
    "split": (lambda x: nn.cat(x.split(4, -1)[::-1], -1), lambda x: np.concatenate([x[..., 4:], x[..., :4]], -1)),
    "chunk": (lambda x: nn.stack(x.chunk(2, 2), 1), lambda x: np.stack(np.split(x, 2, 2), 1)),
    "numbers": (lambda x: x[1] + x[-1, 2] + x[0, ..., -1:], lambda x: x[1] + x[-1, 2] + x[0, ..., -1:]),
    "slices": (lambda x: x[1:, ::2, -4:5], lambda x: x[1:, ::2, -4:5]),
    "None": (lambda x: x[:, None, ..., None], lambda x: x[:, None, ..., None]),
    "a tensor of integers": (lambda x: x[:, INDICES], lambda x: x[:, INDICES]),
    "stepping over the last": (lambda x: x[:-1, 1], lambda x: x[:-1, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_agree_with_numpy(name: str) -> None:
    ours, theirs = CASES[name]
    expected = theirs(X)
    eager = ours(nn.tensor(X)).numpy()
    np.testing.assert_allclose(eager, expected, 1e-5, 1e-5)
    assert eager.shape == expected.shape
    graph = nn.trace(ours, {"x": "float32[n,3,6]"}, ["y"])
    np.testing.assert_array_equal(lathe.interpret(graph, {"x": X})["y"], eager)


def test_a_tensor_of_elements_is_like_an_array() -> None:
    x = nn.tensor([[1.5, 2.5]])
    assert (x.shape, x.ndim, len(x), x.size(1), str(x.dtype)) == ((1, 2), 2, 1, 2, "float32")
    assert repr(x) == "Tensor([[1.5, 2.5]], float32[1,2])"
    assert float(x[0, 1]) == 2.5
    assert int(nn.tensor(3)) == 3
    np.testing.assert_array_equal(np.asarray(x), [[1.5, 2.5]])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda x: x[4], IndexError, "index 4 is out of range for an axis of 4"),
        (lambda x: x[::-1], ValueError, "step of a slice: expected at least 1, got -1"),
        (lambda x: x[1.0], TypeError, "index: expected an integer, slice"),
        (lambda x: nn.where(x > 0, 1.0, 0.0), TypeError, "expected at least one of `yes` and `no` to be a tensor"),
    ],
)
def test_invalid_operations_are_refused(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong(nn.tensor(X))


@pytest.mark.parametrize("ask", [bool, float, int, np.asarray, lambda x: x.numpy(), lambda x: x.item()])
def test_elements_are_not_known_while_tracing(ask: Any) -> None:
    with pytest.raises(TraceError, match=r"tensor %reducesum: float32\[\]: Python code needs"):
        nn.trace(lambda x: x * ask(x.sum()), {"x": "float32[n]"})


def test_a_symbolic_dimension_cannot_be_iterated() -> None:
    with pytest.raises(ModelError, match=r"dimension 0 of float32\[n\] is not known, expected a number"):
        nn.trace(lambda x: nn.stack(list(x)), {"x": "float32[n]"})


def test_a_tensor_of_a_trace_does_not_outlive_it() -> None:
    kept: list[nn.Tensor] = []

    def leaking(x: nn.Tensor) -> nn.Tensor:
        kept.append(x)
        return x + 1

    nn.trace(leaking, {"x": "float32[2]"})
    with pytest.raises(TraceError, match=r"%x: is a tensor .* of a trace that has ended"):
        kept[0].numpy()
    with pytest.raises(TraceError, match=r"%x: is a tensor .* of a trace that has ended"):
        nn.trace(lambda x: x + kept[0], {"x": "float32[2]"})
