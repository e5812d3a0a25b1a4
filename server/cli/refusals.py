"""The error line for a call that the server refused: in the words of the command line, not of the HTTP API."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lathe.server.client import ApiError, Client

_PLACE = re.compile(r"(?:body(?:\.|: ))?([A-Za-z_]\w*(?:\.\w+|\[\d+\])*): ")
_PHRASES = {  # of the server -> of the command line
    "api_key=": "--api-key",
    "allow_signature_change=true permits it": "--allow-signature-change permits it",
    "cancel the canary first": "`lathe canary cancel {model}` cancels it",
}
_MOST_NAMES = 20  # of models that an error lists


def refusal_text(error: ApiError, client: Client, model: str | None, options: Mapping[str, str]) -> str:
    """Return the line for a refused call.

    `model` is the name of the command's model: if the server has none of this name, the line suggests others.
    `options` maps fields of the request's body, such as `publish.gate`, to the options that set them.
    """
    text = name_options(str(error), options)
    for phrase, ours in _PHRASES.items():
        text = text.replace(phrase, ours.format(model=model))
    return text + _other_models(client, model, error)


def name_options(text: str, options: Mapping[str, str]) -> str:
    """Return an error text that begins with an option instead of a field of the body, if an option sets that field.

    A position in a list, which the server counts from 0, follows the option counted from 1: `--step 2: `.
    """
    found = _PLACE.match(text)
    if found is None:
        return text
    parts = re.findall(r"\w+", found[1])
    for count in range(len(parts), 0, -1):
        option, below = options.get(".".join(parts[:count])), parts[count:]
        if option is not None:
            number = f" {int(below.pop(0)) + 1}" if below and below[0].isdecimal() else ""
            place = f"{'.'.join(below)}: " if below else ""
            return f"{option}{number}: {place}{text[found.end() :]}"
    return text


def _other_models(client: Client, model: str | None, error: ApiError) -> str:
    """Return the nearest model name, otherwise the first names, to append to a 404 about the model's name.

    Empty if the server has suggested a name, or if the API key may not list models.
    """
    from lathe.server.client import ClientError

    if model is None or error.status != 404 or "did you mean" in str(error):
        return ""
    try:
        names = sorted(state.name for state in client.models())
    except ClientError:
        return ""
    if model in names:
        return ""
    close = difflib.get_close_matches(model, names, n=1)
    if close:
        return f", did you mean {close[0]!r}?"
    return f"; models: {', '.join(names[:_MOST_NAMES])}" if names else "; there are no models yet"
