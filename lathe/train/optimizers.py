"""`lathe.core.train.training_step.optimizers` under its public name: the same module object."""

import sys
from typing import TYPE_CHECKING

import lathe.core.train.training_step.optimizers as _module

if TYPE_CHECKING:
    from lathe.core.train.training_step.optimizers import *  # noqa: F403
else:
    sys.modules[__name__] = _module
