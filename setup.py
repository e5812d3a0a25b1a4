"""Which folders become which packages: `core/` and `server/` are installed as `lathe.core` and `lathe.server`.

All other facts are in pyproject.toml; a list of packages cannot be computed there.
"""

from setuptools import find_packages, setup

FOLDERS = {"lathe": "lathe", "lathe.core": "core", "lathe.server": "server"}

setup(
    package_dir=FOLDERS,
    packages=[*FOLDERS, *(f"{name}.{inner}" for name, folder in FOLDERS.items() for inner in find_packages(folder))],
)
