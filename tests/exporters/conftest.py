"""Frameworks too heavy for `make test` have environments of their own, which `make test-exporters` sets up."""

from __future__ import annotations

import os

if "LATHE_EXPORTERS" not in os.environ:
    # tests/conftest.py says so at the end of the run
    collect_ignore = ["test_frameworks.py", "test_push.py", "test_transformers.py"]
