"""The exceptions of Lathe. A message names the object, what was expected and what was given."""

from __future__ import annotations

from collections.abc import Sequence


class LatheError(Exception):
    """The base class of all errors that a user of Lathe can cause or act upon."""


class ModelError(LatheError):
    """A model that cannot be accepted: malformed, ill-typed or using something unsupported.

    `where` names the node, operator, opset or value, so that the author of the model can find it. `notes` are further
    lines of the message, such as the types of the node's inputs and the nodes that produced them. `reason` is the
    message without `where` and `notes`.
    """

    def __init__(self, message: str, *, where: str = "", notes: Sequence[str] = ()) -> None:
        super().__init__("\n".join([f"{where}: {message}" if where else message, *notes]))
        self.where = where
        self.reason = message
        self.notes = tuple(notes)


class ShapeWarning(UserWarning):
    """A model declares another shape for an output than its nodes produce. Lathe uses the shape that they produce."""


class UnsupportedError(ModelError):
    """A valid model or option that needs an operator, dtype, device or feature that Lathe or this machine lacks."""


class UnknownRankError(UnsupportedError, ValueError):
    """The shape of a tensor was asked for, but its rank is unknown before a run."""


class TraceError(ModelError):
    """Python code that cannot be traced into a graph, because it needs a number that is only known in a run."""


class VerifyError(ModelError):
    """A graph that breaks an invariant of the IR; from inside the compiler this is a bug of a pass."""


class PlanError(LatheError):
    """A plan that breaks an invariant, such as a step that reads what another step has overwritten.

    From inside the compiler this is a bug of the planner.
    """


class FeedError(LatheError):
    """Inputs of a run that the model does not accept: missing, unknown, ill-typed, too large, or refused by a node."""


class ArtifactError(LatheError):
    """A compiled artifact or cached file that is missing, damaged, writable by others, or made for another machine."""


class TargetError(LatheError):
    """A CPU named in `LATHE_TARGET` that is unknown, or has instructions that this machine lacks."""


class DeviceError(LatheError):
    """Work on a device, or a call of its driver or library, has failed. The message names the call and its error."""


class DeviceMemoryError(DeviceError):
    """A device has too little free memory for an allocation."""


class DeviceLost(DeviceError):
    """A fault has made a device unusable for the whole process.

    When all sessions on the device are closed, the next session tries to make it usable again (`Device.renew`). If that
    fails, the process must be restarted.
    """


class Interrupted(LatheError):
    """A run was broken off by `Session.interrupt`."""


class SessionClosed(LatheError):
    """A session or its code was used after `close`."""


class GrammarError(LatheError):
    """A grammar of constrained output that is damaged, too large or has no texts, or a token that it forbids."""


class DataError(LatheError):
    """A dataset that cannot be read or does not fit: file, row and column, and what was expected.

    Rows count from 0. `line` is the line of a text file, counted from 1; the message names it instead of the row.
    `reason` is the message without file, row, line and column.
    """

    def __init__(
        self, message: str, *, file: str = "", row: int | None = None, column: str = "", line: int | None = None
    ) -> None:
        place = f"line {line}" if line is not None else f"row {row}" if row is not None else ""
        parts = [file, place, f"column '{column}'" if column else ""]
        super().__init__(": ".join([part for part in parts if part] + [message]))
        self.file, self.row, self.column, self.line = file, row, column, line
        self.reason = message
