"""`python -m loadtest.gpu`: reports missing packages before it imports any."""

from __future__ import annotations

import sys
from importlib.util import find_spec

# Module -> package. Everything else that this package imports is in Python's standard library.
NEEDED = {
    "numpy": "numpy",
    "onnx": "onnx",
    "google.protobuf": "protobuf",
    "llvmlite": "llvmlite",
    "ml_dtypes": "ml-dtypes",
}


def missing() -> list[str]:
    """The required packages that are not installed."""
    return [package for module, package in NEEDED.items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # raised for a missing parent package
        return False


def main() -> int:
    lacking = missing()
    if lacking:
        print(
            f"python -m loadtest.gpu needs {', '.join(NEEDED.values())}; missing: {', '.join(lacking)}", file=sys.stderr
        )
        return 2
    from loadtest.gpu.run import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
