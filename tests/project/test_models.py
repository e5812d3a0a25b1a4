"""The bundled models match their manifests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import orjson
import pytest

from lathe.server.repository.aliases import Aliases
from lathe.server.repository.manifest import read_manifest, verify_files
from tools.make_models import EXAMPLE, RECIPES, example_request, held_out, network, to_onnx
from tools.numpy_trainer import Adam, Layer, forward, softmax, train_step

VERSIONS = [recipe.version for recipe in RECIPES]


def session(folder: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stated_accuracy_is_the_measured_one(project: Path, version: int) -> None:
    folder = project / "model_repo" / "digits" / str(version)
    images, labels = held_out()
    probabilities = session(folder).run(None, {"image": images})[0]
    measured = (probabilities.argmax(axis=1) == labels).mean()
    assert measured == pytest.approx(read_manifest(folder).metadata["accuracy"], abs=1e-4)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_files_match_their_digests_and_are_small(project: Path, version: int) -> None:
    folder = project / "model_repo" / "digits" / str(version)
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    assert manifest.files["model.onnx"].size < 200_000


def test_the_manifest_has_the_signature_of_the_model(project: Path) -> None:
    folder = project / "model_repo" / "digits" / "2"
    signature, served = read_manifest(folder).signature, session(folder)
    assert signature is not None
    for spec, tensor in (
        (signature.inputs[0], served.get_inputs()[0]),
        (signature.outputs[0], served.get_outputs()[0]),
    ):
        assert spec.name == tensor.name
        assert spec.shape == tuple(-1 if isinstance(d, str) else d for d in tensor.shape)


def test_the_better_version_is_live_and_a_rollback_is_possible(project: Path) -> None:
    aliases = Aliases.from_json(orjson.loads((project / "model_repo/digits/aliases.json").read_bytes()))
    assert aliases.version("live") == 2
    assert aliases.with_rollback("live", None).version("live") == 1
    assert aliases.high_water == 2


def test_the_versions_classify_the_example_request_differently(project: Path) -> None:
    text = (project / "docs/digit.json").read_text()
    assert text == example_request(EXAMPLE)
    tensor = orjson.loads(text)["inputs"][0]
    image = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
    answers = [session(project / f"model_repo/digits/{v}").run(None, {"image": image})[0].argmax() for v in VERSIONS]
    assert answers == [6, 5]
    assert held_out()[1][EXAMPLE] == 5


def test_the_exported_graph_computes_what_the_trained_layers_compute() -> None:
    layers = network(np.random.RandomState(0), RECIPES[0])
    model = to_onnx(layers, RECIPES[0]).SerializeToString()
    images = held_out()[0][:5]
    got = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"image": images})[0]
    np.testing.assert_allclose(got, softmax(forward(layers, images / 16)), rtol=1e-4, atol=1e-6)


def loss(layers: list[Layer], x: np.ndarray, labels: np.ndarray) -> float:
    return float(-np.log(softmax(forward(layers, x))[np.arange(len(labels)), labels]).mean())


def test_the_trainers_gradients_agree_with_central_differences() -> None:
    rng = np.random.RandomState(1)
    layers = network(rng, RECIPES[0])
    for layer in layers:
        for value in layer.parameters().values():
            # move biases away from kinks, where central differences are wrong
            value += 0.05 * rng.standard_normal(value.shape).astype(np.float32)
    x, labels = rng.uniform(0.1, 1, (6, 1, 8, 8)).astype(np.float32), np.arange(6)
    train_step(layers, Adam(layers), x, labels, rate=0.0)  # fills the gradients, moves nothing
    for layer in layers:
        for name, value in layer.parameters().items():
            place = np.unravel_index(np.abs(layer.gradients()[name]).argmax(), value.shape)
            kept, step = value[place], np.float32(1e-2)
            value[place] = kept + step
            above = loss(layers, x, labels)
            value[place] = kept - step
            below = loss(layers, x, labels)
            value[place] = kept
            assert layer.gradients()[name][place] == pytest.approx((above - below) / (2 * step), rel=0.05)
