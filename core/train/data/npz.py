"""NumPy's .npz: a zip of arrays. Pickles are refused; arrays that are stored uncompressed are mapped, not read."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.lib import format as npy

from core.train.data.dataset import ArraySource, Dataset, LazySource, Source, Values, column_of, joined
from core.train.data.given import Given
from core.train.data.members import DAMAGE, fill

_SUFFIXES = {
    "_train": "train",
    "_val": "validation",
    "_valid": "validation",
    "_validation": "validation",
    "_test": "test",
}
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def open_npz(given: Given) -> Dataset:
    """Columns are the arrays. `x_train` and `x_test` (and so on) are one column `x` in parts."""
    with zipfile.ZipFile(given.path) as archive:
        members = [_member(given, archive, info) for info in archive.infolist()]
    if not members:
        raise given.error("holds no arrays")
    parts: dict[str, dict[str, Source]] = {}
    for member in members:
        name, part = _part(member.name)
        parts.setdefault(part, {})[name] = member.source(name)
    datasets = {part: Dataset(given.name, sources, given.digest, "npz") for part, sources in parts.items()}
    if len(datasets) > 1 and "" in datasets:
        odd = ", ".join(f"'{name}'" for name in parts[""])
        raise given.error(f"arrays {odd} belong to no part, but others are named .._train or .._test")
    return joined(given.name, datasets, given.digest)


def _part(name: str) -> tuple[str, str]:
    """Name of the column and of the part: x_train is column x of part train."""
    found = next((suffix for suffix in _SUFFIXES if name.endswith(suffix) and name != suffix), "")
    return name.removesuffix(found), _SUFFIXES.get(found, "")


@dataclass(frozen=True)
class _Member:
    """One array of the archive: `start` is where its data lie in the member, after the header."""

    given: Given
    info: zipfile.ZipInfo
    name: str
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[np.generic]
    start: int

    def source(self, column: str) -> Source:
        mapped = self.info.compress_type == zipfile.ZIP_STORED and self.dtype.itemsize and 0 not in self.shape
        kind = column_of(column, np.broadcast_to(np.empty((), self.dtype), self.shape), self.given.name)
        if mapped:
            offset = _data_offset(self.given, self.info) + self.start
            flat = np.memmap(self.given.path, np.uint8, "r", offset, self.nbytes)
            return ArraySource(kind, self._shaped(flat))
        return LazySource(kind, self.shape[0], self._read)

    def _read(self) -> Values:
        """Decompress into memory, never more than the header says."""
        self.given.spend(self.nbytes, self.name)
        flat = np.empty(self.nbytes, np.uint8)
        try:
            with zipfile.ZipFile(self.given.path) as archive, archive.open(self.info) as file:
                file.read(self.start)
                fill(file, flat)
        except DAMAGE as error:
            raise self.given.error(f"cannot be read: {error}", self.name) from None
        return self._shaped(flat)

    def _shaped(self, flat: Values) -> Values:
        return flat.view(self.dtype).reshape(self.shape, order="F" if self.fortran else "C")

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


def _member(given: Given, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    name = info.filename.removesuffix(".npy")
    if name == info.filename:
        raise given.error(f"'{info.filename}' is no array, expected names that end in .npy")
    try:
        with archive.open(info) as file:
            shape, fortran, dtype = _header(file)
            member = _Member(given, info, name, shape, fortran, dtype, file.tell())
    except (*DAMAGE, ValueError) as error:
        raise given.error(f"no array in NumPy's format: {error}", name) from None
    if dtype.hasobject:
        raise given.error("holds Python objects, which only pickle could read: refused", name)
    if member.start + member.nbytes != info.file_size:
        size = f"{list(shape)} of {dtype} takes {member.nbytes} bytes"
        there = info.file_size - member.start
        raise given.error(f"the header says {size}, but {there} follow", name)
    return member


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version}, expected 1.0 or 2.0")
    shape, fortran, dtype = readers[version](file)
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {list(shape)}")
    return shape, fortran, dtype


def _data_offset(given: Given, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member begin in the archive, as its local header says (APPNOTE.TXT 4.3.7)."""
    with given.path.open("rb") as file:
        file.seek(info.header_offset)
        signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    offset = info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)
    if signature != b"PK\x03\x04" or offset + info.file_size > given.path.stat().st_size:
        raise given.error(f"'{info.filename}' does not lie where the archive says")
    return offset
