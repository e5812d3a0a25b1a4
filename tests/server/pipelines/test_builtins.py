"""Each built-in step does what its documentation says."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from lathe.core.train.data import open_dataset
from lathe.server.errors import BadRequest
from lathe.server.pipelines import builtins
from lathe.server.pipelines.builtins.base import HostStep, Options, StepModel, StepRequest
from lathe.server.pipelines.builtins.registry import find_maker
from lathe.server.pipelines.definition import DEFAULT_FILES, BadPipeline
from lathe.server.types import Tensors, TensorSpec


def make(name: str, folder: Path = Path("/nowhere"), types: tuple[TensorSpec, ...] = (), **options: Any) -> StepModel:
    return find_maker(name)(StepRequest(options, {spec.name: spec for spec in types}, folder))


def host(name: str, folder: Path = Path("/nowhere"), **options: Any) -> HostStep:
    step = make(name, folder, **options)
    assert isinstance(step, HostStep)
    return step


def compiled(name: str, *types: TensorSpec, **options: Any) -> Callable[[Tensors], list[np.ndarray]]:
    """Run a step's graph with ONNX Runtime."""
    content = make(name, types=types, **options)
    assert isinstance(content, bytes)
    session = onnxruntime.InferenceSession(content)
    return lambda feeds: session.run(None, feeds)


def column(*items: bytes) -> np.ndarray:
    array = np.empty((len(items), 1), np.object_)
    array[:, 0] = items
    return array


def file_of(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


COLORS = np.random.default_rng(0).integers(0, 256, (10, 20, 3), np.uint8)


def test_pixels_are_decoded_as_stored() -> None:
    out = host("decode_image").execute({"image": column(file_of(COLORS), file_of(255 - COLORS, "BMP"))})
    np.testing.assert_array_equal(out["pixels"], [COLORS, 255 - COLORS])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"color": "L"}, lambda image: image.convert("L")),
        ({"resize": [5, 7]}, lambda image: image.resize((7, 5), Image.Resampling.BILINEAR)),
        ({"resize": 5, "filter": "bicubic"}, lambda image: image.resize((10, 5), Image.Resampling.BICUBIC)),
        ({"crop": [4, 6]}, lambda image: image.crop((7, 3, 13, 7))),
        ({"resize": 20, "crop": [20, 20]}, lambda image: image.resize((40, 20), 2).crop((10, 0, 30, 20))),
    ],
)
def test_images_are_resized_as_by_pillow(options: dict[str, Any], expected: Callable[[Any], Any]) -> None:
    step = host("decode_image", **options)
    pixels = step.execute({"image": column(file_of(COLORS))})["pixels"]
    wanted = np.asarray(expected(Image.fromarray(COLORS)))
    np.testing.assert_array_equal(pixels[0].squeeze(), wanted)
    assert all(said in (-1, got) for said, got in zip(step.outputs[0].shape, pixels.shape, strict=True))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_by_their_exif_orientation_as_in_training(
    kind: str, orientation: int, tmp_path: Path
) -> None:
    file, exif = tmp_path / "class" / f"image.{kind}", Image.Exif()
    exif[274] = orientation
    file.parent.mkdir()
    Image.fromarray(COLORS).save(file, kind, exif=exif)
    served = host("decode_image", resize=[6, 8]).execute({"image": column(file.read_bytes())})["pixels"]
    if kind != "JPEG":  # training decodes large JPEG files at a fraction of their size
        trained = open_dataset(tmp_path, image_size=(6, 8)).take(np.array([0]))["image"]
        np.testing.assert_array_equal(served, trained)
    served = host("decode_image").execute({"image": column(file.read_bytes())})["pixels"]
    np.testing.assert_array_equal(served, open_dataset(tmp_path).take(np.array([0]))["image"])
    assert served.shape[1:3] == ((20, 10) if orientation in range(5, 9) else (10, 20))


THIN = np.zeros((20_000, 1, 3), np.uint8)  # 150 bytes as a PNG file

BAD_IMAGES = {
    "nothing": (b"", {}, "image 0: expected one of JPEG, PNG, WEBP, BMP, got something else"),
    "another format": (file_of(COLORS, "GIF"), {}, "expected one of JPEG"),
    "half a file": (file_of(COLORS)[:200], {}, "image 0: it cannot be decoded"),
    "too many pixels": (file_of(COLORS), {"max_pixels": 199}, "expected at most 199 pixels, got 20 x 10"),
    "thin, by its shorter side": (file_of(THIN), {"resize": 256}, "1 x 20000 to become 256 x 5120000"),
    "thin, between two passes": (file_of(THIN), {"resize": [9, 9], "max_pixels": 30_000}, "1 x 20000 to become 9 x 9"),
    "too small": (file_of(COLORS), {"crop": [11, 5]}, "expected at least 5 x 11, got 20 x 10"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_an_invalid_image_is_the_clients_error(case: str) -> None:
    data, options, message = BAD_IMAGES[case]
    with pytest.raises(BadRequest, match=message):
        host("decode_image", **options).execute({"image": column(data)})


def test_images_of_different_sizes_need_a_size() -> None:
    images = column(file_of(COLORS), file_of(COLORS[:5]))
    with pytest.raises(BadRequest, match="expected rows of one size"):
        host("decode_image").execute({"image": images})
    assert host("decode_image", resize=[4, 4]).execute({"image": images})["pixels"].shape == (2, 4, 4, 3)


def test_an_empty_batch_has_no_rows() -> None:
    assert host("decode_image", resize=[4, 6]).execute({"image": column()})["pixels"].shape == (0, 4, 6, 3)


def test_the_total_number_of_pixels_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.server.pipelines.builtins.image._LARGEST", 2 * COLORS.nbytes)
    step, file = host("decode_image"), file_of(COLORS)
    assert len(step.execute({"image": column(file, file)})["pixels"]) == 2
    with pytest.raises(BadRequest, match="image 2: expected images of at most 1200 bytes of pixels together"):
        step.execute({"image": column(file, file, file)})


def test_a_crop_larger_than_the_resized_image_is_refused_at_once() -> None:
    with pytest.raises(BadPipeline, match=r"options.crop: expected at most the size after resizing"):
        make("decode_image", resize=[4, 4], crop=[5, 4])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
def test_normalizing_is_scale_then_mean_then_std(layout: str, datatype: str) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    pixels = TensorSpec("pixels", datatype, (-1, 10, 20, 3))
    step = compiled("normalize_image", pixels, mean=list(mean), std=list(std), layout=layout)
    kind = np.uint8 if datatype == "UINT8" else np.float32
    (got,) = step({"pixels": COLORS[None].astype(kind)})
    expected = (COLORS[None] / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(got, np.moveaxis(expected, 3, 1) if layout == "NCHW" else expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "types", "options", "message"),
    [
        ("normalize_image", ("pixels", "UINT8", (-1, 4, 4, 3)), {"mean": [0.5, 0.5]}, "options.mean: expected 1 or 3"),
        ("normalize_image", ("pixels", "UINT8", (-1, 4, 4, 3)), {"std": [0.0]}, "options.std: expected numbers other"),
        ("normalize_image", ("pixels", "UINT8", (-1, 4)), {}, r"expected numbers \[n, height, width, channels\]"),
        ("mean_pool", ("hidden", "FP32", (-1, 4)), {}, r"expected FP32 \[n, length, width\]"),
        ("softmax", ("logits", "INT64", (-1, 4)), {}, "expected FP32"),
        ("softmax", ("other", "FP32", (-1, 4)), {}, "declare the pipeline's input with datatype and shape"),
        ("softmax", ("logits", "FP32", (-1, 4)), {"axis": 1}, "options.axis: there is no such key"),
    ],
)
def test_invalid_graphs_are_refused(name: str, types: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadPipeline, match=message):
        make(name, types=(TensorSpec(*types),), **options)


def test_pooling_is_the_mean_of_the_unmasked_tokens() -> None:
    generator = np.random.default_rng(1)
    hidden = generator.standard_normal((3, 5, 4)).astype(np.float32)
    mask = np.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    types = (TensorSpec("hidden", "FP32", (-1, -1, 4)), TensorSpec("mask", "INT64", (-1, -1)))
    expected = np.stack([hidden[0, :2].mean(axis=0), hidden[1].mean(axis=0), np.zeros(4)])
    (plain,) = compiled("mean_pool", *types, normalize=False)({"hidden": hidden, "mask": mask})
    np.testing.assert_allclose(plain, expected, atol=1e-6)
    (unit,) = compiled("mean_pool", *types)({"hidden": hidden, "mask": mask})
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), [1, 1, 0], atol=1e-6)
    np.testing.assert_allclose(unit[:2], expected[:2] / np.linalg.norm(expected[:2], axis=1, keepdims=True), atol=1e-6)


def test_softmax_is_over_the_last_axis() -> None:
    logits = np.random.default_rng(2).standard_normal((2, 3, 4)).astype(np.float32)
    (got,) = compiled("softmax", TensorSpec("logits", "FP32", (-1, 3, 4)))({"logits": logits})
    np.testing.assert_allclose(got, np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True), rtol=1e-5)


def test_a_file_behind_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("one\n")
    (tmp_path / "linked.txt").symlink_to(tmp_path / "labels.txt")
    with pytest.raises(BadPipeline, match=r"file 'linked.txt': expected a regular file"):
        make("label", tmp_path, file="linked.txt")


def test_labels_are_those_of_the_highest_scores(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("zero\none\nzwölf\n")
    out = host("label", tmp_path, top=2).execute({"scores": np.array([[0.1, 0.2, 0.7], [0.4, 0.4, 0.2]], np.float32)})
    assert out["labels"].tolist() == [["zwölf".encode(), b"one"], [b"zero", b"one"]]
    np.testing.assert_array_equal(out["indices"], [[2, 1], [0, 1]])
    np.testing.assert_allclose(out["scores"], [[0.7, 0.2], [0.4, 0.4]])


def test_a_label_ends_at_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes("a\u2028b\r\nc\x0cd".encode())
    out = host("label", tmp_path, top=2).execute({"scores": np.array([[0.6, 0.4]], np.float32)})
    assert out["labels"].tolist() == [["a\u2028b".encode(), b"c\x0cd"]]


@pytest.mark.parametrize(
    ("content", "top", "message"),
    [
        (b"a\nb\n", 3, "options.top: expected at most the 2 labels"),
        (b"\xff", 1, "expected UTF-8, invalid start byte at byte 0"),
    ],
)
def test_invalid_label_files_are_refused(tmp_path: Path, content: bytes, top: int, message: str) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(BadPipeline, match=message):
        make("label", tmp_path, top=top)


def test_the_files_that_steps_read_by_default_are_known_to_clients() -> None:
    for module in Path(builtins.__file__).parent.glob("[a-z]*.py"):
        import_module(f"{builtins.__name__}.{module.stem}")
    kinds = [kind for kind in Options.__subclasses__() if kind.__module__.startswith(builtins.__name__)]
    defaults = {kind.model_fields["file"].default for kind in kinds if "file" in kind.model_fields}
    assert defaults == set(DEFAULT_FILES.values())
