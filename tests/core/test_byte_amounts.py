"""Amounts of bytes in messages, and that all messages format them the same way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lathe.core.byte_sizes import format_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1000, "1000 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (20 << 20, "20 MiB"),
        (3 << 30, "3 GiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_the_unit_suits_the_size(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize("folder", ["core", "server"])
def test_no_message_turns_bytes_into_mebibytes_by_itself(folder: str) -> None:
    """Small amounts would read as 0 MiB."""
    own = re.compile(r"\{[^{}]*(2\*\*20|>> ?20|2\*\*10|>> ?10)[^{}]*\}")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if own.search(line)
    ]
    assert found == []
