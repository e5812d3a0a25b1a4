"""`python -m loadtest generate`: every cell that fits the model's context gets a rate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest import generate
from loadtest.generation_peers.peer_protocol import Row, greedy
from tests.core.language.families import write_folder


@pytest.mark.slow
def test_all_cells_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, "llama")  # a context of 128
    assert generate.main([str(folder), "--threads", "1", "--rounds", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    cells = {"prefill32", "decode32", "c4", "c8", "c16"}
    assert row.keys() == {"threads", "engine", "rss_mib"} | cells
    assert all(row[cell] > 0 for cell in cells)


def test_streams_advance_together() -> None:
    """A prompt's last token gives the first new one; then each step has the newest token of every stream."""
    seen: list[list[Row]] = []

    def step(rows: Sequence[Row]) -> list[int]:
        seen.append(list(rows))
        return [row[0] + 1 for row in rows if row[3]]

    found = greedy(step, [[5, 7], [1, 2, 3]], 3)
    assert found["tokens"] == [[8, 9, 10], [4, 5, 6]]
    assert seen[0] == [(5, 0, 0, False), (7, 1, 0, True), (1, 0, 1, False), (2, 1, 1, False), (3, 2, 1, True)]
    assert seen[1:] == [[(8, 2, 0, True), (4, 3, 1, True)], [(9, 3, 0, True), (5, 4, 1, True)]]
