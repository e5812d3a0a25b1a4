"""The checks by name: `python -m loadtest generation CHECK ...`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from loadtest.generation import callers, greedy, lengths, llama, openai_npm

CHECKS: dict[str, Callable[[Sequence[str]], int]] = {
    "callers": callers.main,
    "greedy": greedy.main,
    "lengths": lengths.main,
    "llama": llama.main,
    "openai-npm": openai_npm.main,
}


def main(arguments: Sequence[str]) -> int:
    """Run a check; returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m loadtest generation", description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    return CHECKS[parser.parse_args(arguments[:1]).check](arguments[1:])
