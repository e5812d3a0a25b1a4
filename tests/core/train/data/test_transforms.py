"""Augmentation against SciPy and plain loops; every row's changes are its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from scipy.ndimage import affine_transform

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data import Loader, from_arrays, select
from lathe.core.train.data.image_sampling import Grid, bilinear
from lathe.core.train.data.philox import RowRandoms
from lathe.core.train.data.transforms import (
    Affine,
    Augment,
    Crop,
    Cutout,
    Flip,
    Light,
    Noise,
    Transform,
    inverse_matrices,
)

EVERY = [
    Flip(), Flip(axis="vertical", probability=0.3), Crop(padding=2, fill=-1.0), Noise(sigma=0.5), Cutout(size=3),
    Affine(degrees=30, shift=0.2, scale=(0.7, 1.4), shear=20, fill=0.5), Light(brightness=0.3, contrast=(0.5, 2.0)),
]  # fmt: skip
NAMES = [f"{transform.kind}-{i}" for i, transform in enumerate(EVERY)]


def images(n: int, channels: int = 2, height: int = 7, width: int = 9) -> Any:
    return np.random.default_rng(n).random((n, channels, height, width), np.float32)


@pytest.mark.parametrize("transform", EVERY, ids=NAMES)
def test_changes_of_a_row_do_not_depend_on_other_rows(transform: Augment) -> None:
    x, some = images(40), np.array([31, 4, 17])
    whole = transform.apply(x, RowRandoms(3, 1, np.arange(40)), 5)
    assert whole.dtype == np.float32 and whole.shape == x.shape and not np.array_equal(whole, x)
    np.testing.assert_array_equal(transform.apply(x[some], RowRandoms(3, 1, some), 5), whole[some])
    for others in (RowRandoms(4, 1, np.arange(40)), RowRandoms(3, 2, np.arange(40))):
        assert not np.array_equal(transform.apply(x, others, 5), whole)
    assert not np.array_equal(transform.apply(x, RowRandoms(3, 1, np.arange(40)), 6), whole)


@pytest.mark.parametrize("shape", [(5, 3, 7, 9), (3, 1, 1, 1), (2, 1, 400, 300)])
def test_bilinear_as_scipy(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x = images(*shape)
    matrix = rng.normal(np.eye(2), 0.4, (len(x), 2, 2)).astype(np.float32)
    offset = rng.normal(0, 2, (len(x), 2)).astype(np.float32)
    found = bilinear(x, Grid(matrix, offset), np.float32(0.25))
    middle = (np.array(shape[2:]) - 1) / 2
    for i, channel in np.ndindex(shape[:2]):
        shift = middle - matrix[i] @ (middle + offset[i])
        expected = affine_transform(x[i, channel], matrix[i], shift, order=1, mode="grid-constant", cval=0.25)
        np.testing.assert_allclose(found[i, channel], expected, atol=3e-6 * max(shape))


def test_inverse_undoes_shear_then_scale_then_turn() -> None:
    angle, shear, factor = (np.random.default_rng(2).uniform(0.3, 1, (3, 6))).astype(np.float32)
    for i, found in enumerate(inverse_matrices(angle, shear, factor)):
        cos, sin = np.cos(angle[i]), np.sin(angle[i])
        turn, slant = np.array([[cos, -sin], [sin, cos]]), np.array([[1, 0], [np.tan(shear[i]), 1]])
        np.testing.assert_allclose(turn @ (factor[i] * slant) @ found, np.eye(2), atol=1e-6)


def test_affine_moves_as_far_as_it_may() -> None:
    x = np.zeros((2000, 1, 11, 11), np.float32)
    x[:, 0, 5, 5] = 1
    moved = Affine(shift=0.2).apply(x, RowRandoms(0, 0, np.arange(2000)), 0)[:, 0]
    down = (moved.sum(axis=2) * np.arange(11)).sum(axis=1) - 5
    right = (moved.sum(axis=1) * np.arange(11)).sum(axis=1) - 5
    for way in (down, right):
        assert 2.1 < way.max() <= 2.2 and -2.2 <= way.min() < -2.1 and abs(way.mean()) < 0.1
    assert abs(np.corrcoef(down, right)[0, 1]) < 0.1


def test_crop_takes_windows_of_the_padded_image() -> None:
    x = images(200)
    padded = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)), constant_values=-1)
    windows = [(i, j) for i in range(5) for j in range(5)]
    seen = set()
    for i, row in enumerate(Crop(padding=2, fill=-1.0).apply(x, RowRandoms(1, 0, np.arange(200)), 0)):
        places = [(a, b) for a, b in windows if np.array_equal(padded[i, :, a : a + 7, b : b + 9], row)]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 25


def test_flips_mirror_their_share() -> None:
    x = images(4000, 1, 3, 4)
    for axis, index in (("horizontal", 3), ("vertical", 2)):
        flipped = Flip(axis=axis, probability=0.25).apply(x, RowRandoms(1, 0, np.arange(4000)), 0)
        changed = np.any(flipped != x, axis=(1, 2, 3))
        np.testing.assert_array_equal(flipped[changed], np.flip(x[changed], index))
        assert 900 < changed.sum() < 1100


def test_cutout_covers_a_square_anywhere() -> None:
    cut = Cutout(size=3, fill=9.0).apply(images(500, 2, 6, 6), RowRandoms(1, 0, np.arange(500)), 0) == 9
    assert (cut[:, 0] == cut[:, 1]).all()
    heights, widths = cut[:, 0].any(axis=2).sum(axis=1), cut[:, 0].any(axis=1).sum(axis=1)
    np.testing.assert_array_equal(cut[:, 0].sum(axis=(1, 2)), heights * widths)
    assert set(heights) == {2, 3} and cut[:, 0].any(axis=0).all()
    some = Cutout(size=3, fill=9.0, probability=0.5).apply(images(500), RowRandoms(1, 0, np.arange(500)), 0) == 9
    assert 200 < some.any(axis=(1, 2, 3)).sum() < 300


def test_noise_and_light() -> None:
    x = np.full((400, 1, 10, 10), 2.0, np.float32)
    noise = Noise(sigma=0.5).apply(x, RowRandoms(1, 0, np.arange(400)), 0) - x
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 0.5) < 0.01
    lit = Light(brightness=0.5, contrast=(0.5, 1.5)).apply(x, RowRandoms(1, 0, np.arange(400)), 0)
    assert (lit == lit[:, :, :1, :1]).all() and lit.min() >= 0.5 and lit.max() <= 3.5 and lit.std() > 0.5


@pytest.mark.parametrize(
    "table",
    [{"kind": "turn"}, {"kind": "crop"}, {"kind": "affine", "scale": [0.0, 1.0]}, {"kind": "flip", "probability": 2}],
)
def test_tables_are_checked(table: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter[Augment](Transform).validate_python(table)


@pytest.mark.parametrize(("shape", "across"), [((5, 6), 2), ((3, 5, 6), 3), ((5, 6, 3), 2)])
def test_the_loader_keeps_layout_and_range(shape: tuple[int, ...], across: int) -> None:
    x = np.random.default_rng(0).integers(0, 255, (600, *shape), np.uint8)
    examples = select(from_arrays({"x": x, "y": np.arange(600) % 3}))
    with Loader(examples, np.arange(600), 7, seed=2, transforms=[Flip(probability=1.0)]) as loader:
        assert loader.inputs["x"].dtype is DType.FLOAT32 and loader.inputs["x"].shape == shape
        batches = list(loader.epoch(3))
    with Loader(examples, np.arange(600), 7, seed=2) as plain:
        for batch, given in zip(batches, plain.epoch(3), strict=True):
            np.testing.assert_array_equal(batch["x"], np.flip(given["x"], across).astype(np.float32))
            np.testing.assert_array_equal(batch["target"], given["target"])


def test_augmented_batches_do_not_depend_on_workers_or_resuming() -> None:
    examples = select(from_arrays({"x": images(1100, 1), "y": np.arange(1100) % 3}))
    results = []
    for workers, skip in ((0, 0), (3, 0), (2, 5)):
        with Loader(examples, np.arange(1100), 32, seed=2, transforms=EVERY, workers=workers) as loader:
            results.append(np.concatenate([batch["x"] for batch in loader.epoch(1, skip)]))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0][5 * 32 :], results[2])


def test_there_must_be_one_image() -> None:
    examples = select(from_arrays({"x": np.zeros((5, 4)), "y": np.arange(5) % 3}))
    with pytest.raises(DataError, match=r"expected exactly one input of images, got 0; inputs are 'x' float32\[4\]"):
        Loader(examples, np.arange(5), 2, transforms=[Flip()])
