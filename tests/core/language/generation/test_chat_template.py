"""Chat templates give the texts of Transformers, and cannot leave the sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lathe.core.errors import FeedError, ModelError
from lathe.core.language.generation.chat_template import ChatTemplate
from tests.core.language.generation.chat_cases import CONVERSATIONS, SPECIAL, TEMPLATES, TOOLS

RECORDED = json.loads(Path(__file__).with_name("chats.json").read_text())


@pytest.mark.parametrize("case", RECORDED)
def test_texts_are_those_of_transformers(case: str) -> None:
    name, index, tools, prompt = case.split("/")
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    arguments = CONVERSATIONS[int(index)], TOOLS if tools == "True" else None
    if RECORDED[case] is None:
        with pytest.raises(FeedError, match="must be of a user"):
            template.render(*arguments, prompt=prompt == "True")
    else:
        assert template.render(*arguments, prompt=prompt == "True") == RECORDED[case]


HARMFUL = (
    "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}",
    "{{ strftime_now.__globals__['json'] }}", "{{ 1 // 0 }}", "{{ nothing.there }}",
    "{% for i in range(1000000000) %}{% endfor %}",
)  # fmt: skip


@pytest.mark.parametrize("source", HARMFUL)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(FeedError, match="chat template fails"):
        ChatTemplate(source, {}).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_internals_of_functions_are_undefined() -> None:
    assert ChatTemplate("{{ raise_exception.__globals__ }}", {}).render([]) == ""


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}", "{{ x | no_filter }}", "x" * (1 << 19)])
def test_broken_templates_are_refused(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source, {})
