"""How child processes of Lathe end: one table of exit statuses for every kind of child."""

import errno
from enum import IntEnum

_OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ExitStatus(IntEnum):
    """The exit statuses of child processes. 73 and 75 are EX_CANTCREAT and EX_TEMPFAIL of sysexits.h."""

    DONE = 0
    FAILED = 1  # an unexpected error: standard error has the traceback
    INPUT_REFUSED = 2  # the model, the recipe or the data are at fault; standard output has {"error": ...}
    OUT_OF_MEMORY = 3  # the process would need more memory than its limit
    OUT_OF_SPACE = 4  # the disk is full, or a file would exceed its limit
    DEVICE_TOO_SMALL = 5  # the model does not fit the memory of its device; standard output has {"error": ...}
    OCCUPIED = 73  # another process works in this folder
    STOPPED = 75  # stopped on request, after a checkpoint


def is_out_of_space(error: OSError) -> bool:
    """Whether the disk or the user's quota is full, or a file would exceed its limit (ENOSPC, EDQUOT, EFBIG)."""
    return error.errno in _OUT_OF_SPACE
