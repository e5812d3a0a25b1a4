"""The checks of a model: Lathe agrees with the oracles for every batch size, and batchable rows are independent."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

import lathe
from lathe.core.errors import LatheError
from tests.fuzz.graphs.batching import Differs, check_batching
from tests.fuzz.graphs.config import Config, applied
from tests.fuzz.graphs.evaluate import REFUSALS, ort_session
from tests.fuzz.graphs.exclusions import exclusion
from tests.fuzz.graphs.generate import Case
from tests.fuzz.graphs.values import BF16, F16, F32, F64, FLOATS, STRING, Array

# Relative to the largest number of an output: errors of another summation order, or of narrower tables.
_TOLERANCES = {F32: 1e-4, F64: 1e-9, F16: 1e-2, BF16: 6e-2}
_SHADOWS = 30  # times the effect of small changes of every rounded number
_LEAST_SCALE = 0.02


@dataclass(frozen=True)
class Outcome:
    """`kind`: "agrees", "excluded" or a symptom that stays the same while a model is made smaller."""

    kind: str
    text: str = ""

    @property
    def wrong(self) -> bool:
        return self.kind not in ("agrees", "excluded")


def check(model: onnx.ModelProto, cases: Sequence[Case], config: Config, doubt: str = "") -> Outcome:
    """Compile and run a model in its configuration, and compare it with the oracles' results: see `confirmed`."""
    if doubt:
        return Outcome("excluded", doubt)
    try:
        with applied(config):
            return _compiled(model, cases, config)
    except Differs as error:
        return _unless_excluded(f"rows: {error.kind}", str(error), model)
    except Exception as error:
        return _unless_excluded(symptom(error), str(error), model)


def symptom(error: Exception) -> str:
    """An error and where in Lathe it was raised: the same for the same fault."""
    inside = [frame for frame in traceback.extract_tb(error.__traceback__) if "/core/" in frame.filename]
    place = f"{Path(inside[-1].filename).name} {inside[-1].name}" if inside else "outside"
    refused = isinstance(error, LatheError) and type(error).__name__ != "PlanError"
    message = re.sub(r"'[^']*'|%\S+|\d+|\([^()]*\)", "_", str(error).splitlines()[0] if str(error) else "")
    words = re.sub(r"^[^:]*: ", "", message)[:60]
    return f"{'refused' if refused else 'raises'}: {type(error).__name__} at {place}: {words}"


def _unless_excluded(kind: str, text: str, model: onnx.ModelProto) -> Outcome:
    reason = exclusion(kind, text, model)
    return Outcome("excluded", reason) if reason else Outcome(kind, text[:1500])


def confirmed(model: onnx.ModelProto, cases: Sequence[Case]) -> tuple[list[Case], str]:
    """The cases with ONNX Runtime's results for the whole model, or, if it refuses the model, for each node.

    Also the reason not to trust the oracles, if they contradict themselves.
    """
    try:
        session = ort_session(model)
        names = [port.name for port in session.get_outputs()]
        fed = {port.name for port in (*session.get_inputs(), *session.get_overridable_initializers())}
        whole = [
            dict(zip(names, session.run(None, {k: v for k, v in case.feeds.items() if k in fed}), strict=True))
            for case in cases
        ]
    except REFUSALS:
        return list(cases), ""
    made = []
    for case, results in zip(cases, whole, strict=True):
        for name, array in results.items():
            problem = difference(np.asarray(array), case.expected[name], case.shadows[name])
            if problem:
                return [], f"ONNX Runtime contradicts itself: {problem.partition(':')[0]}"
        arrays = {name: np.asarray(array) for name, array in results.items()}
        made.append(Case(case.rows, case.feeds, arrays, case.shadows))
    return made, ""


def _compiled(model: onnx.ModelProto, cases: Sequence[Case], config: Config) -> Outcome:
    graph = lathe.load(model.SerializeToString())
    with lathe.compile(
        graph, threads=config.threads, max_batch=config.max_batch, optimize=config.optimize, tune="off",
        winograd=config.winograd, new_shapes="wait", packing=config.packing,
    ) as session:  # fmt: skip
        for case in cases:
            got = session.run(
                {name: case.feeds[name] for name in (*session.inputs, *session.defaults) if name in case.feeds}
            )
            for name, want in case.expected.items():
                problem = difference(np.asarray(got[name]), want, case.shadows[name])
                if problem:
                    return _unless_excluded(
                        f"differs: {problem.partition(':')[0]}", f"{name} of {case.rows} rows: {problem}", model
                    )
        if session.batching.batchable:
            check_batching(session, [case for case in cases if case.rows > 1], tolerance)
        if session.packing is not None and session.packing.packable:
            _packed(session, cases)
    return Outcome("agrees", "batchable" if session.batching.batchable else "")


def _packed(session: lathe.Session, cases: Sequence[Case]) -> None:
    """Check that sequences of several lengths in one packed run give the same results as alone."""
    feeds = [{name: case.feeds[name] for name in session.inputs} for case in cases]
    for case, got in zip(cases, session.run_packed(feeds), strict=True):
        for name, want in case.expected.items():
            problem = difference(np.asarray(got[name]), want, case.shadows[name])
            if problem:
                raise Differs("packed", f"{name} of {case.rows} rows: {problem}")


def tolerance(want: Array, shadow: Array) -> Array | float:
    """The largest allowed absolute error of any element."""
    if want.dtype not in FLOATS or want.size == 0:
        return 0.0
    wide = want.astype(np.float64)
    finite = np.isfinite(wide)
    scale = max(float(np.abs(wide[finite]).max(initial=0.0)), _LEAST_SCALE)
    moved = np.abs(wide - shadow.astype(np.float64)).max(initial=0.0, where=finite) if shadow.shape == want.shape else 0
    return max(_TOLERANCES[want.dtype] * scale, _SHADOWS * moved)


def difference(got: Array, want: Array, shadow: Array) -> str:
    """A description of what is wrong with a result; "" if it is right."""
    if got.shape != want.shape:
        return f"shape: {got.shape}, expected {want.shape}"
    if got.dtype != want.dtype and not (want.dtype == STRING and got.dtype.kind in "OU"):
        return f"type: {got.dtype}, expected {want.dtype}"
    if want.dtype not in FLOATS:
        wrong = np.asarray(got != want)
        return f"values: {int(wrong.sum())} of {want.size}, {_first(got, want, wrong)}" if wrong.any() else ""
    near = tolerance(want, shadow)
    wrong = ~np.isclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=near, equal_nan=True)
    return f"values: {int(wrong.sum())} of {want.size}, {_first(got, want, wrong)}" if wrong.any() else ""


def _first(got: Array, want: Array, wrong: Array) -> str:
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"first at {place}: {got[place]!r}, expected {want[place]!r}"
