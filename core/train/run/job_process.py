"""The command line, signal and exit statuses of a job's child process.

    python -m lathe.core.train.run.training_process FOLDER --dataset PATH [--parent MODEL.onnx] [--threads K]
                                                    [--cache DIR] [--workers N] [--owner PID] [--keep-free BYTES]

The other kinds of jobs have the same arguments: see sweep_process.py and evaluation_process.py. FOLDER/recipe.json says
what to do: see work_folder.py. The process may be killed at any time; a new process resumes the work. On SIGTERM a
training or search writes checkpoints, and the process ends. Exit status:

    0    FOLDER/result exists
    1    unexpected error: standard error has the traceback
    2    recipe, data or model are invalid, the training diverged, or the arguments are wrong
    3    out of memory
    4    the disk is full, or a file would exceed its limit
    73   another process works in FOLDER
    75   stopped by SIGTERM

With the statuses 2 (except for wrong arguments), 3, 4 and 73 it prints {"error": ...} on standard output. Standard
error is the job's log: see log_lines.py.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from lathe.core.exit_status import ExitStatus, is_out_of_space
from lathe.core.parent_process import die_with_parent

if TYPE_CHECKING:
    from lathe.core.train.recipe.training_setup import Resources
    from lathe.core.train.run.events import Watcher
    from lathe.core.train.run.training_loop import Outcome
    from lathe.core.train.run.work_folder import Sources


Work: TypeAlias = "Callable[[Path, Sources, Resources, StopRequest, Watcher], Outcome]"


class StopRequest:
    """Whether this process has received SIGTERM. Creating the object installs the signal handler."""

    def __init__(self) -> None:
        self.made = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.made = True

    def __call__(self) -> bool:
        return self.made


def run_child(description: str, load: Callable[[], Work], argv: Sequence[str] | None = None) -> int:
    """Run the function that `load` returns with the arguments of the command line; returns the exit status.

    `load` does the slow imports. It is called after the handler of SIGTERM is installed. Errors with an exit status of
    their own are printed; others are raised.
    """
    stop = StopRequest()
    arguments = _parser(description).parse_args(argv)
    if arguments.owner is not None:
        die_with_parent(arguments.owner)
    from lathe.core.errors import LatheError
    from lathe.core.train.recipe.training_setup import Resources
    from lathe.core.train.run.durable_files import reserve_disk_space
    from lathe.core.train.run.log_lines import LogLines
    from lathe.core.train.run.training_loop import Outcome
    from lathe.core.train.run.work_folder import Occupied, Sources

    reserve_disk_space(arguments.keep_free)
    sources = Sources(arguments.dataset, arguments.parent)
    resources = Resources(arguments.threads, arguments.cache, arguments.workers, arguments.keep_free)
    try:
        outcome = load()(arguments.folder, sources, resources, stop, LogLines())
    except Occupied as error:
        return _print_error(error, ExitStatus.OCCUPIED)
    except LatheError as error:
        return _print_error(error, ExitStatus.INPUT_REFUSED)
    except MemoryError as error:
        return _print_error(error, ExitStatus.OUT_OF_MEMORY)
    except OSError as error:
        if not is_out_of_space(error):
            raise
        return _print_error(error, ExitStatus.OUT_OF_SPACE)
    return ExitStatus.DONE if outcome is Outcome.DONE else ExitStatus.STOPPED


def _print_error(error: Exception, status: int) -> int:
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
    parser.add_argument("--keep-free", type=int, default=0, help="bytes of the disk to leave free")
    parser.add_argument("--owner", type=int, help="id of the parent process; end when it ends")
    return parser
