"""`token_text`: how log-probabilities name a token."""

from __future__ import annotations


def token_text(content: bytes) -> str:
    r"""The text of a token; for bytes that are no whole characters `bytes:\xf0\x9f`, as in OpenAI's completions."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
