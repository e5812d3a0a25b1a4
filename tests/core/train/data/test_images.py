"""Folders and archives of images against Pillow."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lathe.core.errors import DataError
from lathe.core.train.data import images, open_dataset, select
from lathe.core.train.data.members import ZipMembers, members_of
from lathe.core.train.data.orientation import orientation_of


def pixels(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(0, 255, shape, np.uint8)


def png(array: Any, format: str = "png") -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, format)
    return file.getvalue()


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path / "data", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path / "data"


def pets(**extra: bytes) -> dict[str, bytes]:
    names = ["dog/1.png", "cat/a.png", "cat/b.png", "__MACOSX/cat/._a.png", "cat/.DS_Store"]
    return {name: png(pixels(i, 5, 6, 3)) for i, name in enumerate(names)} | extra


def test_an_archive_is_closed_with_its_reader(tmp_path: Path) -> None:
    members = members_of(zipped(tmp_path, pets()))
    assert isinstance(members, ZipMembers)
    archive = members.archive
    assert archive.fp is not None
    del members
    assert archive.fp is None


@pytest.mark.parametrize("top", ["", "pets/"])
@pytest.mark.parametrize("folder", [True, False])
def test_classes_are_folders(tmp_path: Path, folder: bool, top: str) -> None:
    path = zipped(tmp_path, {top + name: data for name, data in pets().items()})
    if folder:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(tmp_path / "pets")
        path = tmp_path / "pets"
    dataset = open_dataset(path)
    assert dataset.classes == ("cat", "dog") and dataset.format == "images"
    taken = dataset.take(np.array([2, 0]))
    assert taken["label"].tolist() == [1, 0]
    np.testing.assert_array_equal(taken["image"], [pixels(0, 5, 6, 3), pixels(1, 5, 6, 3)])
    assert select(dataset).inputs["x"].layout == "HWC"


def test_parts_and_classes_of_a_parent(tmp_path: Path) -> None:
    members = {f"train/{name}": data for name, data in pets().items()} | {"test/dog/9.png": png(pixels(9, 5, 6, 3))}
    dataset = open_dataset(zipped(tmp_path, members))
    assert dataset.parts == {"train": range(3), "test": range(3, 4)}
    assert select(dataset, classes=["bird", "dog", "cat"]).targets.tolist() == [2, 2, 1, 1]
    with pytest.raises(DataError, match="row 0: column 'label': class 'cat' is not one of the model's classes: 'dog'"):
        select(dataset, classes=["dog"])


def test_gray_and_color(tmp_path: Path) -> None:
    gray, color = pixels(1, 4, 4), pixels(2, 4, 4, 3)
    dataset = open_dataset(zipped(tmp_path, {"a/1.png": png(gray), "b/2.png": png(color)}))
    taken = dataset.take(np.arange(2))["image"]
    np.testing.assert_array_equal(taken[0, :, :, 0], gray)
    np.testing.assert_array_equal(taken[1, :, :, 0], np.asarray(Image.fromarray(color).convert("L")))


def test_images_are_resized_to_one_size(tmp_path: Path) -> None:
    color = pixels(3, 40, 30, 3)
    path = zipped(tmp_path, {"a/1.png": png(pixels(0, 8, 8, 3)), "a/2.png": png(color), "a/3.jpg": png(color, "jpeg")})
    with pytest.raises(
        DataError, match=r"'a/2.png' cannot be read: 40 x 30 pixels, the first image has 8 x 8; `image_size`"
    ):
        open_dataset(path).take(np.arange(3))
    taken = open_dataset(path, image_size=(10, 12)).take(np.arange(3))["image"]
    assert taken.shape == (3, 10, 12, 3)
    expected = np.asarray(Image.fromarray(color).resize((12, 10), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(taken[1], expected)


# Where the viewer sees the pixels [height, width] of each orientation (TIFF 6.0, tag 274).
SEEN: Mapping[int, Callable[[Any], Any]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].swapaxes(0, 1),
    8: lambda stored: np.rot90(stored),
    9: lambda stored: stored,  # no orientation
}


def turned(color: Any, kind: str, orientation: int) -> bytes:
    """The file of an image with this EXIF orientation; JPEG loses nothing of one color."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[274] = orientation
    Image.fromarray(color).save(file, kind, exif=exif, **({"lossless": True} if kind == "webp" else {}))
    return file.getvalue()


@pytest.mark.parametrize("orientation", SEEN)
@pytest.mark.parametrize("kind", ["png", "webp", "tiff", "jpeg"])
def test_images_are_rotated_by_their_exif_orientation(tmp_path: Path, kind: str, orientation: int) -> None:
    color = pixels(3, 6, 4, 3)
    file = turned(color, kind, orientation)
    taken = open_dataset(zipped(tmp_path, {f"a/1.{kind}": file})).take(np.array([0]))["image"]
    stored = np.asarray(Image.open(io.BytesIO(turned(color, kind, 1)))) if kind == "jpeg" else color
    np.testing.assert_array_equal(taken[0], SEEN[orientation](stored))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["png", "webp", "jpeg"])
def test_damaged_exif_data_are_ignored(tmp_path: Path, kind: str) -> None:
    color, rng, found = pixels(3, 6, 4, 3), np.random.default_rng(0), set()
    exif = Image.Exif()
    exif[274] = 6
    data = exif.tobytes()
    for _ in range(200):
        damaged, file = bytearray(data), io.BytesIO()
        for place in rng.integers(6, len(data), 3):
            damaged[place] = rng.integers(256)
        Image.fromarray(color).save(file, kind, exif=bytes(damaged))
        with Image.open(io.BytesIO(file.getvalue())) as image:
            found.add(orientation_of(image))
    assert 1 in found and found <= SEEN.keys()


BAD = {
    "no image": ({"cat/bad.png": b"hello"}, "'cat/bad.png' cannot be read: "),
    "cut": ({"cat/bad.png": png(pixels(1, 5, 6, 3))[:-40]}, "'cat/bad.png' cannot be read: "),
    "no folder": ({"bad.png": png(pixels(1, 5, 6, 3))}, "'bad.png': expected a folder with the name of its class"),
    "depth": (
        {"zoo/cat/bad.png": png(pixels(1, 5, 6, 3))},
        "expected class/image for all images, or part/class/image for all",
    ),
    "half a part": (
        {"test/cat/bad.png": png(pixels(1, 5, 6, 3))},
        "expected class/image for all images, or part/class/image",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_named(tmp_path: Path, name: str) -> None:
    members, message = BAD[name]
    with pytest.raises(DataError, match=message):
        open_dataset(zipped(tmp_path, pets() | members)).take(np.arange(4))


def test_image_bombs_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = int(images.MAX_PIXELS**0.5) + 1
    bomb = png(np.zeros((side, side), np.uint8))
    path = zipped(tmp_path, {"a/bomb.png": bomb})
    with pytest.raises(DataError, match=rf"'a/bomb.png' cannot be read: {side} x {side} pixels, expected at most"):
        open_dataset(path)
