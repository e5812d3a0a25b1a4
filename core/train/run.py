"""A training as a process of its own.

    python -m core.train.run FOLDER --dataset PATH [--parent MODEL.onnx] [--threads K] [--cache DIR] [--workers N]
                             [--owner PID] [--keep-free BYTES]

What to train stands in FOLDER/recipe.json: see work.py. It may be killed at any moment, and goes on when started again.
SIGTERM makes it write a checkpoint and end. Exit status:

    0    FOLDER/result is there
    2    recipe, data or model are at fault: {"error": ...} on standard output
    3    memory did not suffice
    4    the disk is full: likewise {"error": ...}
    73   another process works in FOLDER
    75   stopped
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from core.train.assembly import Means
    from core.train.fitting import Outcome
    from core.train.work import Sources

DONE, AT_FAULT, OUT_OF_MEMORY, OUT_OF_SPACE, OCCUPIED, STOPPED = 0, 2, 3, 4, 73, 75
_PR_SET_PDEATHSIG = 1
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


Work: TypeAlias = "Callable[[Path, Sources, Means, Request], Outcome]"


class Request:
    """Whether somebody has asked this process to end."""

    def __init__(self) -> None:
        self.made = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True

    def __call__(self) -> bool:
        return self.made


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit status."""

    def load() -> Work:
        from core.train.work import work

        return work

    return child("Train what a folder's recipe says.", load, argv)


def child(description: str, load: Callable[[], Work], argv: Sequence[str] | None = None) -> int:
    """Do what `load` returns in the folder named by the command line, until it is done or SIGTERM comes.

    Returns the exit status. What takes long to import is imported by `load`, when SIGTERM is heard already.
    """
    stop = Request()
    arguments = _parser(description).parse_args(argv)
    if arguments.owner is not None:
        _end_with(arguments.owner)
    from core.errors import LatheError
    from core.train.assembly import Means
    from core.train.durable import keep_free
    from core.train.fitting import Outcome
    from core.train.work import Occupied, Sources

    keep_free(arguments.keep_free)
    sources = Sources(arguments.dataset, arguments.parent)
    means = Means(arguments.threads, arguments.cache, arguments.workers, arguments.keep_free)
    try:
        outcome = load()(arguments.folder, sources, means, stop)
    except Occupied as error:
        return _refused(error, OCCUPIED)
    except LatheError as error:
        return _refused(error, AT_FAULT)
    except MemoryError as error:
        return _refused(error, OUT_OF_MEMORY)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        return _refused(error, OUT_OF_SPACE)
    return DONE if outcome is Outcome.DONE else STOPPED


def _end_with(owner: int) -> None:
    """Be killed when the process that started this one ends, however it does; where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def _refused(error: Exception, status: int) -> int:
    print(json.dumps({"error": str(error) or type(error).__name__}), flush=True)
    return status


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--parent", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep-free", type=int, default=0, help="bytes of the disk that are left to others")
    parser.add_argument("--owner", type=int, help="process with which to end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
