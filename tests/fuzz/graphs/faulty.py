"""Replaces the real worker: seeds that agree, crash, exit, and raise."""

from __future__ import annotations

import os
import signal
import sys

from tests.fuzz.graphs.worker import say


def main(seeds: list[str]) -> None:
    for seed in map(int, seeds):
        say(seed=seed, phase="grows" if seed == 5 else "checks")
        if seed in (1, 5):
            os.kill(os.getpid(), signal.SIGSEGV)
        if seed == 2:
            raise KeyError("lost")
        if seed == 3:
            sys.exit(7)
        say(seed=seed, kind="agrees", text="", nodes=1, kinds={"Add:0:plain": 1})


if __name__ == "__main__":
    main(sys.argv[1:])
