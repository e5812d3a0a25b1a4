"""Skips tests of frameworks that are too heavy for `make test`; `make test-exporters` sets up their environments."""

from __future__ import annotations

import os

if "LATHE_EXPORTERS" not in os.environ:
    # tests/conftest.py reports the skipped files at the end of the run
    collect_ignore = ["test_frameworks.py", "test_language_models.py", "test_push.py", "test_transformers.py"]
