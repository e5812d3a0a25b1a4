"""The files that `push` accepts. A .pt2 file of PyTorch is exported to ONNX in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from lathe.server.archive import PIPELINE, foreign_format, is_language_model
from lathe.server.client.errors import ClientError
from lathe.server.client.exporting.error_text import one_line

if TYPE_CHECKING:
    from lathe.server.client.exporting import Options

_SCRIPT = Path(__file__).with_name("pytorch.py")
_PROGRAM = ("archive_format", "serialized_exported_program.json")  # of torch.export.save; the second up to 2.7
_PICKLE = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))


def exported_file(path: Path, options: Options, folder: Path) -> Path:
    """Return the file to upload: `path` itself, or for a .pt2 file the ONNX file exported into `folder`.

    Raises ClientError for pickles of any library, since reading a pickle runs code, for files of other known formats,
    for options that do not apply to the file, and if the export fails. Raises OSError if the file cannot be read.
    """
    if is_language_model(path):  # `body_of` checks it
        options.refuse("a language model", "adapters", "draft")
        return path
    members = _members(path)
    if any(member in _PROGRAM for member in members):
        options.refuse("a .pt2 file", "python")
        return _convert(path, options.python or sys.executable, folder)
    if "data.pkl" in members:
        raise ClientError(
            f"{path}: holds pickled objects (torch.save); write the model with torch.export.save(torch.export.export("
            "model, (x,)), 'model.pt2'), or push the module from Python: push(name, model, (x,))"
        )
    if _head(path).startswith(_PICKLE):
        raise ClientError(f"{path}: is a pickle; load it in Python, and push the model: push(name, model)")
    options.refuse("a file that is no .pt2 file")
    _check_format(path, members)
    return path


def _check_format(path: Path, members: list[str]) -> None:
    """Raise ClientError for a file that is no model, before it is uploaded."""
    is_numpy = members and all(member.endswith(".npy") for member in members)
    what = "a NumPy archive (.npz)" if is_numpy else foreign_format(_head(path, 8))
    if path.suffix == ".toml" and path.name != PIPELINE:
        what = "a TOML file of another name"
    if what:
        raise ClientError(
            f"{path}: is {what}; expected an ONNX file, an exported program of PyTorch (.pt2), or a {PIPELINE}"
        )


def _members(path: Path) -> list[str]:
    """Return the file names in a zip archive's top level and top folders, without the folder; [] for other files."""
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        return [name.rpartition("/")[2] for name in archive.namelist() if name.count("/") <= 1]


def _head(path: Path, size: int = 2) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _convert(path: Path, python: Path | str, folder: Path) -> Path:
    """Convert a .pt2 file to an ONNX file in `folder`, and return its path; raises ClientError.

    The interpreter `python` runs `pytorch.py` as a script, which imports no module from the working directory.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [str(python), str(_SCRIPT), str(path.resolve()), str(folder)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ClientError(f"python {python}: {error.strerror}") from error
    if done.returncode:
        raise ClientError(f"{path}: {_reason(done)}")
    return folder / "model.onnx"


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return why the script failed: its JSON error, otherwise the last line on stderr."""
    try:
        return one_line(json.loads(done.stdout.splitlines()[-1])["error"])
    except (ValueError, KeyError, TypeError, IndexError):
        lines = done.stderr.strip().splitlines()
        return one_line(lines[-1] if lines else f"its Python ended with {done.returncode}")
