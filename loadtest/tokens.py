"""Compares token-by-token decoding with ONNX Runtime, on a decoder with a key-value cache (past inputs).

    python -m loadtest tokens MODEL.onnx [--tokens 500] [--batch 1] [--prompt 8] [--clock processor] [--json FILE]

Each engine gets the keys and values of its own last run, and the token that ONNX Runtime finds most likely. Both run on
one thread and take turns. Lathe's compile cache is empty at first. Exit status 1 if tokens differ, or if code is
compiled after the first SETTLING tokens.

Inputs are recognised by name: `input_ids`, `attention_mask`, `position_ids`, `cache_position`; names of past inputs
contain "past". The first output is the logits, the others are the keys and values in the order of the past inputs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.clock import CLOCKS, Clock, add_clock
from loadtest.onnx_runtime_peer import onnx_runtime

Feeds = dict[str, NDArray[Any]]

SETTLING = 8  # first tokens of a new session, which may wait for compilation
SETTLE_S = 240.0
LATE = 2.0  # times ONNX Runtime's time


@dataclass(frozen=True)
class Decoder:
    """The inputs of a decoder. `past` maps the past inputs to their shapes for one row and no past tokens."""

    names: frozenset[str]
    past: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> Decoder:
        """Make it from ONNX Runtime's input descriptions. ValueError for unknown inputs, or if there is no past."""
        past = {each.name: _empty_past_shape(each.name, each.shape) for each in inputs if "past" in each.name}
        names = frozenset(each.name for each in inputs) - past.keys()
        known = {"input_ids", "attention_mask", "position_ids", "cache_position"}
        if unknown := sorted(names - known):
            expected = ", ".join(sorted(known))
            raise ValueError(f"inputs {', '.join(unknown)} are not known, expected {expected} or a past")
        if not past or "input_ids" not in names:
            raise ValueError(f"no decoder with a past: it has the inputs {', '.join(sorted(names | past.keys()))}")
        return cls(names, past)

    def start(self, batch: int) -> Feeds:
        """The past inputs before the first token, which have length 0."""
        return {name: np.zeros((batch, *shape[1:]), np.float32) for name, shape in self.past.items()}

    def feeds(self, ids: NDArray[np.int64], past: Feeds, seen: int) -> Feeds:
        """The inputs of a run that continues with `ids` [rows, tokens] after `seen` tokens."""
        rows, new = ids.shape
        places = np.arange(seen, seen + new, dtype=np.int64)
        given = {
            "input_ids": ids,
            "attention_mask": np.ones((rows, seen + new), np.int64),
            "position_ids": np.tile(places, (rows, 1)),
            "cache_position": places,
        }
        return {**{name: array for name, array in given.items() if name in self.names}, **past}

    def next_past(self, outputs: Sequence[Any]) -> Feeds:
        """The past inputs of the next run, taken from the outputs of this one."""
        return dict(zip(self.past, outputs[1:], strict=True))


def _empty_past_shape(name: str, shape: Sequence[Any]) -> tuple[int, ...]:
    """The shape for one row and no past tokens. ValueError unless exactly rows and past tokens are dynamic."""
    free = [place for place, size in enumerate(shape) if not isinstance(size, int)]
    if len(free) != 2 or free[0] != 0:
        expected = "two free dimensions: the rows, and the tokens of the past"
        raise ValueError(f"input '{name}' is {shape}, expected {expected}")
    return tuple(1 if place == 0 else 0 if place in free else int(size) for place, size in enumerate(shape))


@dataclass
class Decoded:
    """The result of decoding: milliseconds of each run, of which the first is the prompt's."""

    ours_ms: list[float] = field(default_factory=list)
    theirs_ms: list[float] = field(default_factory=list)
    differ: list[int] = field(default_factory=list)  # indices of tokens that differ from ONNX Runtime's
    code: list[int] = field(default_factory=list)  # runs that added compiled code to the cache
    compiling_s: float = 0.0  # processor time outside the calling thread, after the first SETTLING tokens

    @property
    def steady(self) -> tuple[list[float], list[float]]:
        return self.ours_ms[1 + SETTLING :], self.theirs_ms[1 + SETTLING :]

    @property
    def late_code(self) -> list[int]:
        return [run for run in self.code if run > SETTLING]

    @property
    def has_passed(self) -> bool:
        return not self.differ and not self.late_code

    def lines(self) -> list[str]:
        ours, theirs = self.steady
        median, other_median = statistics.median(ours), statistics.median(theirs)
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        early = [mine / other for mine, other in zip(self.ours_ms, self.theirs_ms, strict=True)][: 1 + SETTLING]
        return [
            f"{len(self.ours_ms)} runs, {len(self.differ)} other tokens than ONNX Runtime's {self.differ[:5] or ''}",
            f"code was compiled after runs {self.code}: {len(self.late_code)} times after the first {SETTLING} tokens, "
            f"when {self.compiling_s:.1f} s of processor time went to other threads and processes",
            f"a token takes {median:.3f} ms in the median, ONNX Runtime {other_median:.3f} ms: "
            f"ahead x{other_median / median:.2f}, in total x{sum(theirs) / sum(ours):.2f}; "
            f"{sum(ratio > LATE for ratio in ratios)} of {len(ratios)} take more than "
            f"x{LATE:g} of its time",
            f"the first runs take of ONNX Runtime's time {' '.join(f'x{ratio:.1f}' for ratio in early)}",
        ]


def decode(path: Path, tokens: int, batch: int = 1, prompt: int = 8, clock: str = "wall") -> Decoded:
    """Decode `tokens` tokens after a prompt. ValueError if the model is no such decoder, or `tokens` is too small."""
    import lathe

    if tokens <= 1 + SETTLING:
        raise ValueError(f"{tokens} tokens are too few: the first {SETTLING} are not measured")
    theirs = onnx_runtime(path)
    decoder, found, now = Decoder.of(theirs.get_inputs()), Decoded(), CLOCKS[clock]
    ids = np.random.default_rng(0).integers(3, 50, (batch, prompt))
    ours_past = theirs_past = decoder.start(batch)
    seen, others = 0, 0.0
    with tempfile.TemporaryDirectory() as cache, lathe.compile(path, threads=1, cache_dir=cache) as ours:
        for run in range(tokens):
            with _timed(now, found.theirs_ms):
                other = theirs.run(None, decoder.feeds(ids, theirs_past, seen))
            with _timed(now, found.ours_ms):
                mine = list(ours.run(decoder.feeds(ids, ours_past, seen)).values())
            seen += ids.shape[1]
            ours_past, theirs_past = decoder.next_past(mine), decoder.next_past(other)
            ids = other[0][:, -1:].argmax(-1).astype(np.int64)
            if not np.array_equal(ids, mine[0][:, -1:].argmax(-1)):
                found.differ.append(run)
            if _count(Path(cache)) > len(found.code):
                found.code += [run] * (_count(Path(cache)) - len(found.code))
            if run <= SETTLING:
                ours.settle(SETTLE_S)
                others = _other_processor_seconds()
        found.compiling_s = _other_processor_seconds() - others
    return found


@contextmanager
def _timed(now: Clock, times: list[float]) -> Iterator[None]:
    begin = now()
    yield
    times.append((now() - begin) * 1e3)


def _count(cache: Path) -> int:
    """The number of compiled models in the cache."""
    return sum(1 for _ in (cache / "models").glob("*.lathe"))


def _other_processor_seconds() -> float:
    """Processor seconds of the other threads of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() - time.thread_time() + children.ru_utime + children.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest tokens", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of the first run")
    add_clock(parser)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args(arguments)
    try:
        found = decode(chosen.model, chosen.tokens, chosen.batch, chosen.prompt, chosen.clock)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(found.lines()))
    if chosen.json:
        chosen.json.write_text(json.dumps(asdict(found)) + "\n")
    return 0 if found.has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
