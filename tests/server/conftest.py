"""What all tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.repository import builder
from server.repository.artifacts import compiler_at_start


@pytest.fixture(autouse=True, scope="session")
def _sources_lie_still() -> Iterator[None]:
    """Whoever edits the compiler while the tests run does not upgrade servers, those of whole modules included."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builder, "compiler_now", compiler_at_start)
        yield
