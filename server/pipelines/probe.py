"""Makes a built-in step in a child process, before the server does: a file that is made to hurt whoever parses it costs
the child its limits, and the server nothing.

    python -m server.pipelines.probe read FOLDER REQUEST     REQUEST: what `arguments` gives, for a version's folder

Exit status 0, or 2 with {"error": ...} on standard output when the step is at fault.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import orjson

from server.children import Children, Limits
from server.pipelines.builtins.base import Request
from server.pipelines.builtins.registry import find
from server.pipelines.definition import BadPipeline

# The library that parses holds the interpreter's lock meanwhile: these are also what the event loop can be held up.
_LIMITS = Limits(seconds=6.0, memory=1 << 30)
_AT_FAULT = 2


def prober() -> Children:
    """What runs this module."""
    return Children(_LIMITS, (__name__,), "step's file")


def arguments(name: str, request: Request) -> tuple[str, Path, str]:
    """Return the task and its arguments for :meth:`server.children.Children.run`.

    Steps that have files know their inputs: the types of these stay behind.
    """
    return "read", request.folder, orjson.dumps([name, dict(request.options)]).decode()


def main(argv: Sequence[str]) -> int:
    """Make the step, and let it go; returns the exit status."""
    _, folder, text = argv
    name, options = orjson.loads(text)
    try:
        find(name)(Request(options, {}, Path(folder)))
    except BadPipeline as error:
        print(orjson.dumps({"error": str(error)}).decode())
        return _AT_FAULT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
