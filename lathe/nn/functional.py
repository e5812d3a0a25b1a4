"""`lathe.core.nn.functional` under its public name: the same module object."""

import sys
from typing import TYPE_CHECKING

import lathe.core.nn.functional as _module

if TYPE_CHECKING:
    from lathe.core.nn.functional import *  # noqa: F403
else:
    sys.modules[__name__] = _module
