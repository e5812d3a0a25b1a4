"""The version of Lathe in the record of a training."""

from __future__ import annotations

from importlib.metadata import version

from lathe.core.train.run.result import code_version


def test_a_result_names_the_version_of_the_distribution() -> None:
    assert code_version() == version("lathe-server")
