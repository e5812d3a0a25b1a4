"""Makes `chats.json`: the texts that Transformers makes of the conversations of `chat_cases.py`.

    python make_chats.py [FOLDER]

in an environment with Transformers and jinja2. The value is null where the template refuses a conversation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from chat_cases import CONVERSATIONS, SPECIAL, TEMPLATES, TOOLS
from transformers.utils.chat_template_utils import render_jinja_template


def main(folder: Path) -> None:
    found = {
        f"{name}/{index}/{bool(tools)}/{prompt}": rendered(template, conversation, tools, prompt)
        for name, template in TEMPLATES.items()
        for index, conversation in enumerate(CONVERSATIONS)
        for tools in (None, TOOLS)
        for prompt in (False, True)
    }
    (folder / "chats.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def rendered(template: str, conversation: Any, tools: Any, prompt: bool) -> str | None:
    try:
        texts, _ = render_jinja_template(
            conversations=[conversation], tools=tools, chat_template=template, add_generation_prompt=prompt, **SPECIAL
        )
    except Exception:  # the exceptions of templates
        return None
    return str(texts[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
