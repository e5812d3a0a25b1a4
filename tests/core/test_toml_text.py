"""Every text that is no TOML is refused with a reason, by the parser and by the readers of TOML files."""

from __future__ import annotations

import pytest

from lathe.core.toml_text import NotToml, parse_toml
from lathe.core.validation_errors import short_repr
from lathe.server.pipelines.definition import BadPipeline, parse_definition

REFUSED = [
    (b"a = ", "Invalid value"),
    (b"\xff", "can't decode"),
    (b"a = " + b"[" * 5000, "nested too deeply"),
    (b"a = " + b"{a = " * 5000, "nested too deeply"),
    (b"a = " + b"9" * 5000, "Exceeds the limit"),
    (b"a = 0000-00-00", "Expected newline"),
]


@pytest.mark.parametrize(("content", "reason"), REFUSED)
def test_text_that_is_no_toml_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(NotToml, match=reason):
        parse_toml(content)
    with pytest.raises(BadPipeline, match=f"pipeline.toml: not TOML: .*{reason}"):
        parse_definition(content)


def test_a_document_is_parsed() -> None:
    assert parse_toml("a.b = 'ö'".encode()) == {"a": {"b": "ö"}}


def test_a_number_that_cannot_be_formatted_is_described() -> None:
    assert short_repr(parse_toml(b"a = 0x" + b"f" * 5000)) == "{'a': a number of 20000 bits}"
    assert short_repr(10**30) == str(10**30)
