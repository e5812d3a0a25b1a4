"""Chat templates in the manner of published ones, and conversations."""

from __future__ import annotations

from typing import Any

TEMPLATES = {
    "chatml": """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You help.<|im_end|>
{% endif %}
<|im_start|>{{ message['role'] }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}""",
    "tools": """{{- bos_token }}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '</tools>\\n' }}
{%- endif %}
{%- set ns = namespace(last = '') %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.last = message.role %}
    {{- '[' + message.role | upper + '] ' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function | tojson(indent=1) + '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt and ns.last == 'user' %}{{ '[ASSISTANT]' }}{% endif %}{{ eos_token }}""",
    "strict": """{% if messages[0].role != 'user' %}
{{ raise_exception('The first message must be of a user.') }}{% endif %}
{% for message in messages %}{% if loop.index0 % 2 == 1 %}{{ ' -> ' }}{% endif %}{{ message.content }}{% endfor %}""",
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "note": "<ü> & 'x'"}}}
]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Hello <b>&amp; "}],
    [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What's 1 + 1?"},
        {"role": "assistant", "content": "2"}, {"role": "user", "content": "日本\n\n"},
    ],
    [
        {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
    ],
]  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
