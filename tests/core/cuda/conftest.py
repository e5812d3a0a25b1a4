"""Kernels for GPUs are compiled and interpreted by Triton, which only `make test-cuda` installs."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("triton") is None:
    collect_ignore_glob = ["test_kernels*.py", "test_bindings.py"]  # tests/conftest.py says so at the end of the run
