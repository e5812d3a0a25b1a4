"""Recipes that prune, quantize or distil: the files that they write, and the formulas that they follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import lathe
from lathe import nn, train
from lathe.core.compress.masked import MaskedTraining, Masks, add_masks, fold_masks
from lathe.core.errors import LatheError, ModelError, UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.reference import interpret
from lathe.core.train import losses, optimizers
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.run import work_folder
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.training_step.distillation import Distillation
from tests.core.train.small_trainings import asked, final_state, fit, model_bytes, quadrants
from tests.random_numbers import RNG

F = np.float32
LAST = {"keep": "last", "data": {"validation": 0.25}}


def perceptron(outputs: int = 4, hidden: int = 16) -> Graph:
    module = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
    return nn.trace(module, {"x": "float32[n,2]"}, ["logits"])


def weights_of(model: bytes) -> list[np.ndarray]:
    arrays = [onnx.numpy_helper.to_array(each) for each in onnx.load_model_from_string(model).graph.initializer]
    return [array for array in arrays if array.ndim == 2]


# -- pruning ----------------------------------------------------------------------------------------------------------


def test_the_sparsity_follows_the_cubic_schedule() -> None:
    """Zhu and Gupta, equation 1, with s_i = 0, t_0 = 100 and n * dt = 500 updates."""
    options = MaskedTraining(0.8, start=0.1, end=0.6, changes=50)
    changes = {
        update: found for update in range(1, 1001) if (found := options.sparsity_after(update, 1000)) is not None
    }
    assert list(changes) == list(range(110, 601, 10))
    for update, sparsity in changes.items():
        assert sparsity == pytest.approx(0.8 - 0.8 * (1 - (update - 100) / 500) ** 3)


@pytest.mark.parametrize("updates", [1, 2, 7, 40])
@pytest.mark.parametrize("end", [0.3, 1.0])
def test_the_last_change_has_the_whole_sparsity(updates: int, end: float) -> None:
    options = MaskedTraining(0.75, end=end)
    found = [options.sparsity_after(update, updates) for update in range(1, updates + 1)]
    assert [each for each in found if each is not None][-1] == pytest.approx(0.75)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("prune", "share"),
    [
        ({"sparsity": 0.75}, 0.75),
        ({"sparsity": 0.75, "method": "movement"}, 0.75),
        ({"sparsity": 0.5, "pattern": "1:2"}, 0.5),
        ({"sparsity": 0.5, "pattern": "2x2", "together": True}, 0.5),
    ],
)
def test_a_recipe_prunes(tmp_path: Path, prune: dict[str, Any], share: float) -> None:
    training = fit(tmp_path, asked(prune=prune, **LAST), quadrants(tmp_path / "q.npz"))
    assert training.run() is Outcome.DONE
    weights = weights_of(model_bytes(tmp_path))
    zeros = sum(int((array == 0).sum()) for array in weights) / sum(array.size for array in weights)
    assert zeros == pytest.approx(share, abs=0.02)
    assert b"mask" not in model_bytes(tmp_path)
    x = RNG.uniform(-1, 1, (50, 2)).astype(F)
    session = ort.InferenceSession(model_bytes(tmp_path))
    with lathe.compile(model_bytes(tmp_path), threads=1, tune="off") as mine:
        np.testing.assert_allclose(mine.run({"x": x})["logits"], session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["magnitude", "movement"])
def test_a_resumed_pruning_ends_with_the_same_bits(tmp_path: Path, method: str) -> None:
    """Stopped in the middle of the schedule: masks are part of the checkpoint."""
    what, data = asked(prune={"sparsity": 0.8, "method": method}, **LAST), quadrants(tmp_path / "q.npz")
    fit(tmp_path / "whole", what, data).run()
    left = iter([False] * 9 + [True] * 100)
    assert fit(tmp_path / "parts", what, data, stop=lambda: next(left)).run() is Outcome.STOPPED
    masks = [array for name, array in final_state(tmp_path / "parts").items() if name.endswith(".mask")]
    assert masks and all(0.2 < mask.mean() < 1 for mask in masks)
    assert fit(tmp_path / "parts", what, data).run() is Outcome.DONE
    assert model_bytes(tmp_path / "whole") == model_bytes(tmp_path / "parts")


def test_scores_move_by_the_weight_times_its_gradient() -> None:
    """Movement pruning, equation 4, with SGD of rate 1: S = 1 - sum of dL/dW * W, where W is the masked weight's."""
    graph = perceptron()
    masked = add_masks(graph, MaskedTraining(method="movement"))
    x, y = RNG.standard_normal((30, 2)).astype(F), RNG.integers(0, 4, 30)
    masks = Masks(masked, MaskedTraining(method="movement"))
    step = train.step(masked, losses.CrossEntropy(), optimizers.SGD(1.0), held=masks.names, threads=1)
    names = [value.name for value, array in graph.constants.items() if array.ndim == 2]
    before = {name: array for name, array in step.parameters.items() if name in names}
    step.run({"x": x, "target": y})
    for name in names:
        found = step.parameters
        slope = before[name] - found[name]  # of the weight itself, whose mask is 1 everywhere
        np.testing.assert_allclose(found[f"{name}.scores"], 1 - slope * before[name], rtol=1e-4, atol=1e-7)
        np.testing.assert_array_equal(found[f"{name}.mask"], 1)


def test_movement_prunes_by_magnitude_times_score() -> None:
    """At first by magnitude alone; later a small weight with a large score stays."""
    graph = perceptron()
    options = MaskedTraining(0.5, method="movement", is_global=True)
    masked = add_masks(graph, options)
    masks = Masks(masked, options)
    constants = {value.name: array for value, array in masked.constants.items()}
    plain = add_masks(graph, MaskedTraining(0.5, is_global=True))
    expected = Masks(plain, MaskedTraining(0.5, is_global=True)).of(constants, 0.5)
    found = masks.of(constants, 0.5)
    assert found.keys() == expected.keys() == masks.names
    for name, mask in found.items():
        np.testing.assert_array_equal(mask, expected[name])
    name = min(masks.names).removesuffix(".mask")
    least = np.unravel_index(np.abs(constants[name]).argmin(), constants[name].shape)
    scores = np.ones_like(constants[name])
    scores[least] = 1e6
    assert found[f"{name}.mask"][least] == 0
    assert masks.of({**constants, f"{name}.scores": scores}, 0.5)[f"{name}.mask"][least] == 1


def test_pruned_weights_neither_count_nor_move() -> None:
    graph = perceptron()
    options = MaskedTraining(0.5)
    masked = add_masks(graph, options)
    masks = Masks(masked, options)
    step = train.step(masked, losses.CrossEntropy(), optimizers.SGD(0.1), held=masks.names, threads=1)
    for name, mask in masks.of(step.weights(), 0.5).items():
        step.write(name, mask)
    before, feeds = step.parameters, {"x": RNG.standard_normal((30, 2)).astype(F), "target": RNG.integers(0, 4, 30)}
    step.run(feeds)
    for name in [name for name in before if name + ".mask" in before]:
        mask = before[name + ".mask"]
        assert mask.mean() == 0.5
        moved = step.parameters[name] != before[name]
        assert not moved[mask == 0].any()
        assert moved[mask == 1].any()
    final = fold_masks(step.graph())
    assert sum(node.op == "MaskedWeight" for node in final.nodes) == 0
    expected = interpret(step.graph(), {"x": feeds["x"]})["logits"]
    np.testing.assert_allclose(interpret(final, {"x": feeds["x"]})["logits"], expected, rtol=1e-5)
    assert {value.name for value in final.constants} == {value.name for value in graph.constants}


def test_states_of_other_types_are_refused() -> None:
    step = train.step(perceptron(), losses.CrossEntropy(), optimizers.SGD(0.1), threads=1)
    name = next(iter(step.parameters))
    with pytest.raises(LatheError, match=rf"state '{name}': expected float32.*, got float64"):
        step.write(name, np.zeros(3))
    with pytest.raises(LatheError, match="state 'none': expected nothing, got float32"):
        step.write("none", np.zeros(3, F))


# -- quantization -----------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("quantize", [{}, {"weights": "int4", "activations": "float32"}, {"weights": "ternary"}])
def test_a_recipe_quantizes(tmp_path: Path, quantize: dict[str, Any]) -> None:
    what = asked(quantize=quantize, model={"architecture": "mlp", "hidden": [16]}, average=0.9)
    assert fit(tmp_path, what, quadrants(tmp_path / "q.npz")).run() is Outcome.DONE
    proto = onnx.load_model_from_string(model_bytes(tmp_path))
    operators = [node.op_type for node in proto.graph.node]
    assert operators.count("QuantizeLinear") == (0 if quantize.get("activations") == "float32" else 2)
    assert "DequantizeLinear" in operators
    x = RNG.uniform(-1, 1, (50, 2)).astype(F)
    expected = ort.InferenceSession(model_bytes(tmp_path)).run(None, {"x": x})[0]
    with lathe.compile(model_bytes(tmp_path), threads=1, tune="off") as mine:
        assert np.abs(mine.run({"x": x})["logits"] - expected).max() < 0.02 * np.abs(expected).max()


# -- distillation -----------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("weight", [0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("has_softmax", [False, True])
def test_the_loss_is_that_of_the_paper(weight: float, temperature: float, has_softmax: bool) -> None:
    """In float64 by its definition; the teacher's weights get no gradient, and a final softmax is left out."""
    student, teacher = perceptron(), perceptron(hidden=32)
    x, y = RNG.standard_normal((20, 2)).astype(F), RNG.integers(0, 4, 20)
    z, v = (np.float64(interpret(graph, {"x": x})["logits"]) for graph in (student, teacher))
    if has_softmax:
        teacher = nn.trace(_WithSoftmax(teacher), {"x": "float32[n,2]"}, ["p"])

    def log_softmax(numbers: np.ndarray) -> np.ndarray:
        return numbers - np.log(np.exp(numbers).sum(axis=1, keepdims=True))

    p = np.exp(log_softmax(v / temperature))
    divergence = (p * (np.log(p) - log_softmax(z / temperature))).sum(axis=1).mean()
    hard = -log_softmax(z)[np.arange(20), y].mean()
    loss = Distillation(losses.CrossEntropy(), teacher, temperature, weight)
    step = train.step(student, loss, optimizers.SGD(0.1), threads=1)
    found = step.run({"x": x, "target": y})["loss"]
    assert found == pytest.approx((1 - weight) * hard + weight * temperature**2 * divergence, rel=1e-4)
    assert {name.split(".")[0] for name in step.parameters} == {value.name.split(".")[0] for value in student.constants}


class _WithSoftmax(nn.Module):
    def __init__(self, graph: Graph) -> None:
        arrays = {value.name: array for value, array in graph.constants.items()}
        self.first, self.second = nn.Linear(2, 32), nn.Linear(32, 4)
        for layer, place in ((self.first, "0"), (self.second, "2")):
            layer.load_state_dict({name: arrays[f"{place}.{name}"] for name in ("weight", "bias")})

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return nn.functional.softmax(self.second(nn.functional.relu(self.first(x))), -1)


def test_gradients_of_a_distilled_student_are_differences() -> None:
    student, teacher = perceptron(), perceptron(hidden=32)
    x, y = RNG.standard_normal((8, 2)).astype(F), RNG.integers(0, 4, 8)
    loss = Distillation(losses.CrossEntropy(), teacher, 3.0, 0.6)
    rate = 1e-2

    def run(graph: Graph) -> tuple[float, dict[str, np.ndarray]]:
        step = train.step(graph, loss, optimizers.SGD(rate), threads=1)
        before = step.parameters
        value = float(step.run({"x": x, "target": y})["loss"])
        return value, {name: (before[name] - step.parameters[name]) / rate for name in before}

    _, slopes = run(student)
    value = next(value for value in student.constants if value.name.endswith("2.bias"))
    for place in range(4):
        ends = []
        for shift in (-1e-2, 1e-2):
            other = student.clone()
            copy = next(each for each in other.constants if each.name == value.name)
            other.constants[copy] = student.constants[value] + F(shift) * np.eye(4, dtype=F)[place]
            ends.append(run(other)[0])
        assert slopes[value.name][place] == pytest.approx((ends[1] - ends[0]) / 2e-2, rel=0.02, abs=1e-3)


def test_numbers_are_distilled_by_their_own_loss() -> None:
    student, teacher = perceptron(1), perceptron(1, 32)
    x, y = RNG.standard_normal((20, 2)).astype(F), RNG.standard_normal((20, 1)).astype(F)
    z, v = (interpret(graph, {"x": x})["logits"] for graph in (student, teacher))
    step = train.step(
        student, Distillation(losses.MeanSquaredError(), teacher, weight=0.25), optimizers.SGD(0.1), threads=1
    )
    expected = 0.75 * ((z - y) ** 2).mean() + 0.25 * ((z - v) ** 2).mean()
    assert step.run({"x": x, "target": y})["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_recipe_distils_from_a_file_or_the_parent(tmp_path: Path) -> None:
    """The student learns more from the teacher's outputs than from wrong targets."""
    data = quadrants(tmp_path / "q.npz", 400)
    big = fit(tmp_path / "big", asked(epochs=30), data)
    assert big.run() is Outcome.DONE
    (tmp_path / "teacher.onnx").write_bytes(model_bytes(tmp_path / "big"))
    with np.load(data) as arrays:
        x, y = arrays["x"], arrays["y"]
    np.savez(tmp_path / "wrong.npz", x=x, y=np.random.default_rng(1).permutation(y))
    table = {"teacher": "teacher.onnx", "weight": 1.0, "temperature": 2.0}
    model = {"architecture": "mlp", "hidden": [12]}
    found = {}
    for name, choice in (("file", table), ("parent", {**table, "teacher": "parent"})):
        what = asked(model=model, epochs=30, distil=choice, keep="last")
        folder = tmp_path / name
        teacher, first = (tmp_path / "teacher.onnx").read_bytes(), None
        if name == "parent":
            teacher, first = None, teacher  # type: ignore[assignment]
        work_folder.prepare(folder, what, first, teacher)
        work_folder.run_training(folder, work_folder.Sources(tmp_path / "wrong.npz"))
        with lathe.compile(model_bytes(folder), threads=1, tune="off") as session:
            found[name] = session.run({"x": x})["logits"].argmax(axis=1)
        assert (found[name] == y).mean() > 0.85
    np.testing.assert_array_equal(found["file"], found["parent"])


def test_teachers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    student = perceptron()
    feeds = nn.trace(
        nn.Linear(3, 4),
        {
            "z": "float32[n,3]",
        },
        ["y"],
    )
    with pytest.raises(ModelError, match=r"its output is .*, expected .* as the student's"):
        train.step(student, Distillation(losses.CrossEntropy(), perceptron(5)), optimizers.SGD(0.1))
    with pytest.raises(ModelError):
        train.step(student, Distillation(losses.CrossEntropy(), feeds), optimizers.SGD(0.1))
    for change, complaint in (
        ({"temperature": 0.0}, "temperature: expected more than 0, got 0.0"),
        ({"weight": 0.0}, "weight: expected more than 0, at most 1, got 0.0"),
    ):
        with pytest.raises(UnsupportedError, match=complaint):
            Distillation(losses.CrossEntropy(), student, **change)
    with pytest.raises(
        UnsupportedError, match="loss: expected cross entropy, mse, l1 or huber for distillation, got Kull"
    ):
        Distillation(losses.KullbackLeibler(), student)
    data = quadrants(tmp_path / "q.npz")
    with pytest.raises(RecipeError, match=r"distil.teacher: expected a model as 'parent', and none was given"):
        fit(tmp_path, asked(distil={"teacher": "parent"}), data)
    with pytest.raises(RecipeError, match=r"distil: loss: expected cross entropy"):
        fit(tmp_path, asked(distil={"teacher": "t"}, loss={"kind": "nll"}), data, teacher=student)
    with pytest.raises(RecipeError, match=r"distil.teacher: there is no file '.*none.onnx'"):
        train.fit(
            None, str(data), asked(distil={"teacher": str(tmp_path / "none.onnx")}), out=tmp_path / "o", progress=False
        )


# -- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prune": {"sparsity": 1.0}}, "prune.sparsity: expected less than 1, got 1.0"),
        ({"prune": {}}, "prune.sparsity: is missing"),
        ({"prune": {"sparsity": 0.5, "pattern": "4:2"}, **LAST}, "prune: .*pattern: expected N:M with N below M"),
        ({"prune": {"sparsity": 0.5, "start": 0.8}, **LAST}, "expected 0 <= start < end <= 1, got 0.8 and 0.7"),
        ({"prune": {"sparsity": 0.5}}, "`prune` needs `keep` = `last` and no `stop`"),
        ({"prune": {"sparsity": 0.5}, "quantize": {}, **LAST}, "expected either `prune` or `quantize`"),
        ({"quantize": {"weights": "int3"}}, "quantize.weights: expected 'int8', 'int4', .*, got 'int3'"),
        ({"distil": {"temperature": 2.0}}, "distil.teacher: is missing"),
        ({"distil": {"teacher": "t", "weight": 2.0}}, "distil.weight: expected at most 1, got 2.0"),
        ({"distill": {"teacher": "t"}}, "distill: there is no such key, did you mean `distil`"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        asked(**changes)


def test_a_module_object_cannot_hold_a_quantized_result(tmp_path: Path) -> None:
    data = {"x": RNG.uniform(-1, 1, (20, 2)).astype(F), "y": RNG.integers(0, 2, 20)}
    with pytest.raises(RecipeError, match="quantize: expected a class of modules, a graph or a file as model"):
        train.fit(nn.Linear(2, 2), data, {"epochs": 1, "quantize": {}}, out=tmp_path / "o", progress=False)
