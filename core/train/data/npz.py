"""NumPy's .npz: a zip of arrays. Pickles are refused. Uncompressed arrays are memory-mapped."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.lib import format as npy

from lathe.core.train.data.dataset import ArraySource, Dataset, LazySource, Source, Values, column_of, join_parts
from lathe.core.train.data.location import Location
from lathe.core.train.data.members import DAMAGE_ERRORS, read_into

_SUFFIXES = {
    "_train": "train",
    "_val": "validation",
    "_valid": "validation",
    "_validation": "validation",
    "_test": "test",
}
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def open_npz(location: Location) -> Dataset:
    """A dataset whose columns are the arrays. `x_train` and `x_test` are the parts `train` and `test` of column `x`.

    If only one part occurs, the dataset has no parts, but its columns are named without the suffix all the same. NaN
    values stay. DataError for files that are no arrays, arrays of rank 0, pickles, damage, two arrays of the same
    column and part, parts with different columns, or if only some names name a part.
    """
    with zipfile.ZipFile(location.path) as archive:
        members = [_member(location, archive, info) for info in archive.infolist()]
    if not members:
        raise location.error("the archive has no arrays")
    parts: dict[str, dict[str, Source]] = {}
    places: dict[tuple[str, str], str] = {}
    for member in members:
        name, part = place = _part(member.name)
        if place in places:
            column = f"column '{name}' of part '{part}'" if part else f"column '{name}'"
            raise location.error(f"arrays '{places[place]}' and '{member.name}' are both {column}")
        places[place] = member.name
        parts.setdefault(part, {})[name] = member.source(name)
    datasets = {part: Dataset(location.name, sources, location.digest, "npz") for part, sources in parts.items()}
    if len(datasets) > 1 and "" in datasets:
        odd = ", ".join(f"'{name}'" for name in parts[""])
        raise location.error(f"arrays {odd} name no part, but others are named .._train or .._test")
    return join_parts(location.name, datasets, location.digest)


def _part(name: str) -> tuple[str, str]:
    """The column and the part of an array by its name: `x_train` is column `x` of part `train`; "" without a part."""
    found = next((suffix for suffix in _SUFFIXES if name.endswith(suffix) and name != suffix), "")
    return name.removesuffix(found), _SUFFIXES.get(found, "")


@dataclass(frozen=True)
class _Member:
    """One array of the archive. `start` is the offset of its data in the member, after the header."""

    location: Location
    info: zipfile.ZipInfo
    name: str
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[np.generic]
    start: int

    def source(self, column: str) -> Source:
        can_map = self.info.compress_type == zipfile.ZIP_STORED and self.dtype.itemsize and 0 not in self.shape
        kind = column_of(column, np.broadcast_to(np.empty((), self.dtype), self.shape), self.location.name)
        if can_map:
            offset = _data_offset(self.location, self.info) + self.start
            flat = np.memmap(self.location.path, np.uint8, "r", offset, self.nbytes)
            return ArraySource(kind, self._reshape(flat))
        return LazySource(kind, self.shape[0], self._read)

    def _read(self) -> Values:
        """The array, decompressed into memory; at most as many bytes are read as its header says."""
        self.location.spend(self.nbytes, self.name)
        flat = np.empty(self.nbytes, np.uint8)
        try:
            with zipfile.ZipFile(self.location.path) as archive, archive.open(self.info) as file:
                file.read(self.start)
                read_into(file, flat)
        except DAMAGE_ERRORS as error:
            raise self.location.error(f"cannot be read: {error}", self.name) from None
        return self._reshape(flat)

    def _reshape(self, flat: Values) -> Values:
        return flat.view(self.dtype).reshape(self.shape, order="F" if self.fortran else "C")

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


def _member(location: Location, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    name = info.filename.removesuffix(".npy")
    if name == info.filename:
        raise location.error(f"expected file names that end in .npy, got '{info.filename}'")
    try:
        with archive.open(info) as file:
            shape, fortran, dtype = _header(file)
            member = _Member(location, info, name, shape, fortran, dtype, file.tell())
    except (*DAMAGE_ERRORS, ValueError) as error:
        raise location.error(f"invalid .npy file: {error}", name) from None
    if dtype.hasobject:
        raise location.error("Python objects (pickles) are not allowed", name)
    if member.start + member.nbytes != info.file_size:
        size = f"{list(shape)} of {dtype} takes {member.nbytes} bytes"
        size_in_file = info.file_size - member.start
        raise location.error(f"the header says {size}, but {size_in_file} follow", name)
    return member


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"expected version 1.0 or 2.0, got {version}")
    shape, fortran, dtype = readers[version](file)
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {list(shape)} has a negative size")
    return shape, fortran, dtype


def _data_offset(location: Location, info: zipfile.ZipInfo) -> int:
    """The offset of a stored member's data in the archive, from its local header (ZIP APPNOTE.TXT 4.3.7)."""
    with location.path.open("rb") as file:
        file.seek(info.header_offset)
        signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    offset = info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)
    if signature != b"PK\x03\x04" or offset + info.file_size > location.path.stat().st_size:
        raise location.error(f"'{info.filename}': damaged archive, its offset or size is wrong")
    return offset
