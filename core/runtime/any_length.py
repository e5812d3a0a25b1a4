"""One code for sequences of all lengths: it answers for each shape of a model that packs until that has its own code.

Packed code takes any length, see packed.py. It is about as fast as code for one length, but for small models, where the
code of one length spares what it takes to lay out sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from core.errors import SessionClosed
from core.ir.types import TensorType
from core.runtime.background import Background
from core.runtime.executable import Executable
from core.runtime.given import Given
from core.runtime.packed import Feed, LazyPacked, MakePacked, PackedRuns
from core.runtime.shapes import StandIn


class AnyLength:
    """Packed code once it is prepared; before that, and for what it does not take, the general version."""

    def __init__(
        self,
        make: MakePacked,
        inputs: Sequence[str],
        outputs: Sequence[str],
        general: StandIn,
        at_hand: Callable[[], bool] = lambda: False,
        compile_beside: Callable[[Background], None] = lambda background: None,
    ) -> None:
        """`at_hand`: whether `make` only has to load. `compile_beside` lets a child process of the background do most
        of what `make` has to do."""
        self._packed = LazyPacked(make)
        self._code: PackedRuns | None = None  # once it is prepared, and as fast as it should be
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._general = general
        self._at_hand, self._compile_beside = at_hand, compile_beside
        self._failed = False

    @property
    def prepared(self) -> bool:
        return self._failed or self.quick

    @property
    def at_hand(self) -> bool:
        return self.prepared or self._at_hand()

    @property
    def quick(self) -> bool:
        return self._code is not None

    @property
    def lasting(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return "packed code" if self.quick else self._general.name

    @property
    def runners(self) -> tuple[Executable, ...]:
        return self._code.runners if self._code is not None else ()

    def prepare(self, background: Background | None = None) -> None:
        """Compile what is not in the store, in a child process of the background where there is one."""
        try:
            if background is not None and not self.at_hand:
                self._compile_beside(background)
            code = self._packed.get()
            if any(map(_is_slow, code.runners)):
                self._failed = True
            else:
                self._code = code
        except SessionClosed:
            return
        except Exception:  # whatever it is: a model is not refused by what only stands in
            self._failed = True

    def run(self, given: Given, enough: Callable[[], bool]) -> list[Any] | None:
        packed = self._code
        # Packing knows one dimension besides the batch, which may not be bound, and an empty feed is nothing to pack.
        if packed is None or len(given.binding) != 1 or given.rows * given.binding[0][1] == 0:
            return self._general.run(given, enough)
        feed = Feed(dict(zip(self._inputs, given.arrays, strict=True)), given.rows, given.binding[0][1])
        with suppress(SessionClosed):
            [found] = packed.run([feed], given.record)
            return [np.ascontiguousarray(found[name]) for name in self._outputs]
        return None

    def close(self) -> None:
        self._packed.close()


def _is_slow(code: Executable) -> bool:
    """Whether references compute more than integers in it, such as positions."""
    outputs = [value for node in code.plan.fallbacks.nodes for value in node.outputs]
    return any(not isinstance(value.type, TensorType) or not value.type.dtype.is_integer for value in outputs)
