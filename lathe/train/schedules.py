"""`lathe.core.train.training_step.schedules` under its public name: the same module object."""

import sys
from typing import TYPE_CHECKING

import lathe.core.train.training_step.schedules as _module

if TYPE_CHECKING:
    from lathe.core.train.training_step.schedules import *  # noqa: F403
else:
    sys.modules[__name__] = _module
