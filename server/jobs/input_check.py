"""Checks before a job is kept whether its recipe, its dataset and its version fit together, in a child process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from lathe.server.errors import Internal
from lathe.server.processes.stage_children import Children


@dataclass(frozen=True, slots=True)
class MeasuredMetrics:
    """The names of the metrics that a job can measure."""

    of_result: Sequence[str]  # of the job's result: a gate may bound them
    of_version: Sequence[str]  # of any version on the same rows: a gate may compare them with the live version's


@dataclass(frozen=True, slots=True)
class InputCheck:
    """Runs the check modules of job kinds (`Kind.input_check`), each with its own bounded number of processes."""

    make_children: Callable[[str], Children]  # for a module
    children: dict[str, Children] = field(default_factory=dict)

    async def run(self, module: str, recipe: Path, dataset: Path, model: Path) -> MeasuredMetrics:
        """Return the metrics that the job can measure.

        Raises Unprocessable with the reason if the inputs do not fit together, TooLarge beyond a limit of child
        processes, Overloaded if too many checks wait, or another ServerError.
        """
        if module not in self.children:
            self.children[module] = self.make_children(module)
        output = await self.children[module].run("check", recipe, dataset, model)
        try:
            found = orjson.loads(output.splitlines()[-1])
            return MeasuredMetrics(found["metrics"], found["comparable"])
        except (orjson.JSONDecodeError, IndexError, KeyError, TypeError) as error:
            raise Internal("check: expected the names of metrics from the child process") from error
