"""Fixtures for all tests of the server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from lathe.server.repository import builder
from lathe.server.repository.artifacts import compiler_digest_at_start
from lathe.server.telemetry import logs


@pytest.fixture(autouse=True, scope="session")
def _ignore_source_changes() -> Iterator[None]:
    """Let changes to the compiler's sources during the run not count as upgrades, also for module-wide servers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builder, "compiler_digest", compiler_digest_at_start)
        yield


@pytest.fixture(autouse=True, scope="session")
def _trust_one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every HTTP client reads the public authorities, 20 ms of processor time, though no test talks to the internet."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(first[first.index("-----BEGIN") :] + end)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(autouse=True)
def _reset_log_streams() -> Iterator[None]:
    """`lathe serve` in this process logs to the current stderr, which a test runner of commands closes at its end."""
    levels = {name: logging.getLogger(name).level for name in logs.LOGGERS}
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, logs.JsonLines | logs.TextLines):
            root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
