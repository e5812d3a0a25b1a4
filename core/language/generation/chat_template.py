"""`ChatTemplate`: the prompt of a conversation, by the Jinja template of a tokenizer (the extra `text`)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lathe.core.errors import FeedError, ModelError, UnsupportedError

_LONGEST_TEMPLATE = 1 << 18  # characters; published templates have at most some 20,000
_SHOWN = 200  # characters of an error


class ChatTemplate:
    """A template as the library Transformers runs it, in Jinja's sandbox, whose values cannot be changed.

    It gets `messages`, `tools`, `add_generation_prompt`, and the special tokens by name, such as `bos_token`.
    ModelError for a template that cannot be parsed; UnsupportedError without the library jinja2.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        jinja = _jinja()
        if len(source) > _LONGEST_TEMPLATE:
            expected = f"expected at most {_LONGEST_TEMPLATE} characters, got {len(source)}"
            raise ModelError(f"chat template: {expected}")
        environment = jinja.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _time_text
        try:
            self._template = environment.from_string(source)
        except (jinja.TemplateError, RecursionError) as error:
            raise ModelError(f"chat template: {_shortened(error)}") from None
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: bool = True,
        **more: Any,
    ) -> str:
        """The text of a conversation. `prompt`: with the beginning of an answer. `more`: other names of the template.

        FeedError if the template refuses the messages, or fails with them.
        """
        values = {**self._special_tokens, **more}
        try:
            return str(
                self._template.render(
                    messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **values
                )
            )
        except Exception as error:  # a template can raise anything
            raise FeedError(f"messages: the model's chat template fails: {_shortened(error)}") from None


def _jinja() -> Any:
    try:
        import jinja2
        import jinja2.sandbox
    except ModuleNotFoundError:
        raise UnsupportedError("chat templates need the library jinja2: install the extra 'text'") from None
    return jinja2


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:_SHOWN] or type(error).__name__


def _refuse(message: object) -> None:
    raise ValueError(message)


def _time_text(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes of HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
