"""External data: tensors whose data lies in other files. Checks which files may be read, and maps them into memory.

A model that is given as bytes may have no external data (`proto.check_messages` refuses it). A model that is given as a
path may use the files of its folder: a location must stay inside the folder, contain no symbolic link, and lead to a
regular file. If the model itself is a link, as in the cache of Hugging Face's hub, its data files may be links to files
of the folder in which the target of the model's link lies. The data of each tensor must lie within its file, and the
tensors together may not claim more bytes than the file has, so that a small file cannot expand to a large graph.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import onnx

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Array

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block


class Extent(NamedTuple):
    """Where a tensor's external data lies: a file, and a range of bytes in it."""

    location: str  # relative to the model's folder
    offset: int
    length: int | None  # None: as many bytes as the tensor's type and shape need


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's data lies in another file: it is marked as external, or has an entry about external data."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data)


def extent_of(tensor: onnx.TensorProto, where: str) -> Extent:
    """The `Extent` in the tensor's entries.

    ModelError if they are malformed, contradict each other, or leave the model's folder.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if tensor.data_location != onnx.TensorProto.EXTERNAL or len(entries) < len(tensor.external_data):
        raise ModelError("has contradictory entries on where its data lies", where=where)
    if tensor.HasField("raw_data"):
        raise ModelError("has data inside the file and outside", where=where)
    location = entries.get("location", "")
    path = PurePosixPath(location)
    is_foreign = bool(set(location) & {"\\", "\0"}) or location[1:2] == ":"  # a path of Windows
    if not path.name or path.is_absolute() or ".." in path.parts or is_foreign:
        raise ModelError("its data lies outside the model's folder", where=where)
    length = entries.get("length")
    return Extent(
        path.as_posix(), _number(entries.get("offset", "0"), where), None if length is None else _number(length, where)
    )


def _number(text: str, where: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ModelError(f"offset or length of its data is {text[:40]!r}, expected a number of bytes", where=where)
    return int(text)


class ExternalFiles:
    """The files of one folder, each mapped when the first tensor needs it."""

    def __init__(self, folder: Path, linked: Path | None = None) -> None:
        """Links in `folder` may only lead to files directly in the folder `linked`; None: no link is followed."""
        self._folder, self._linked = folder, linked
        self._files: dict[str, Array] = {}
        self._claimed_bytes: dict[str, int] = {}

    @classmethod
    def beside(cls, model: Path) -> ExternalFiles:
        """The files that the model at this path may use: those below its folder.

        Symbolic links there are followed only if the model is a link itself, to files in the folder of its target.
        """
        return cls(model.parent, model.resolve().parent if model.is_symlink() else None)

    def read(self, tensor: onnx.TensorProto, nbytes: int, where: str) -> Array:
        """The `nbytes` bytes of an external tensor: a read-only uint8 view of its mapped file.

        ModelError if the file cannot be read or ends before, if the stated length differs from `nbytes`, or if all
        tensors read so far claim more bytes than the file has.
        """
        location, offset, length = extent_of(tensor, where)
        if length not in (None, nbytes):
            raise ModelError(f"has {length} bytes of data, expected {nbytes} for its type and shape", where=where)
        file = self._file(location, where)
        if offset + nbytes > len(file):
            message = f"its data ends at byte {offset + nbytes} of '{location}', which has {len(file)}"
            raise ModelError(message, where=where)
        self._claimed_bytes[location] = self._claimed_bytes.get(location, 0) + nbytes
        if self._claimed_bytes[location] > len(file):
            raise ModelError(f"with it, tensors claim more bytes of '{location}' than it has", where=where)
        return file[offset : offset + nbytes]

    def digest(self, location: str, where: str) -> str:
        """The SHA-256 digest of the file at `location`, in hexadecimal. ModelError if the file cannot be read.

        Later calls of `read` use the same mapping.
        """
        return hashlib.sha256(self._file(location, where).data).hexdigest()

    def _file(self, location: str, where: str) -> Array:
        if location not in self._files:
            try:
                self._files[location] = _map_file(self._folder, location, self._linked)
            except OSError as error:
                links = "symbolic links are not followed"
                reason = links if error.errno == errno.ELOOP else error.strerror or str(error)
                message = f"its data lies in '{location}', which cannot be read: {reason}"
                raise ModelError(message, where=where) from None
        return self._files[location]


def _map_file(folder: Path, location: str, linked: Path | None) -> Array:
    """The content of a file as a read-only uint8 array, mapped into memory; OSError as for `open_inside`."""
    with closing(_open(folder, location, linked)) as file:
        size = os.fstat(file.fd).st_size
        return np.frombuffer(mmap.mmap(file.fd, size, access=mmap.ACCESS_READ), np.uint8) if size else _NOTHING


_NOTHING: Array = np.zeros(0, np.uint8)


class OpenFile(NamedTuple):
    """A file descriptor that `contextlib.closing` closes."""

    fd: int

    def close(self) -> None:
        os.close(self.fd)


def _open(folder: Path, location: str, linked: Path | None) -> OpenFile:
    try:
        return open_inside(folder, location)
    except OSError as error:
        target = (folder / location).resolve()
        if error.errno != errno.ELOOP or target.parent != linked:
            raise
    return open_inside(linked, target.name)


def open_inside(folder: Path, location: str) -> OpenFile:
    """Open the regular file at `location`, a path relative to `folder`, for reading; the caller closes the file.

    OSError if a part of `location` is a symbolic link, or if it leads to anything but a regular file. `folder` itself
    may be a link.
    """
    *above, name = PurePosixPath(location).parts
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in above:
        with closing(OpenFile(fd)):
            fd = os.open(part, _DIRECTORY, dir_fd=fd)
    with closing(OpenFile(fd)):
        file = OpenFile(os.open(name, _FILE, dir_fd=fd))
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
        file.close()
        raise OSError(None, "not a plain file")
    return file
