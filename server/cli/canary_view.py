"""How the command line shows a canary: its plan, its progress, its evidence and its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from lathe.server.canary.guard import MAX_REQUESTS
from lathe.server.cli.terminal import local_time, make_table

if TYPE_CHECKING:
    from lathe.server.api.management.canary_schemas import CanaryState, StepState
    from lathe.server.api.management.schemas import AuditEntry

_UNITS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}  # seconds of each
_VERDICTS = {"promote": "passed", "roll_back": "failed"}
_ENDINGS = {"promoted": "promoted", "rolled_back": "rolled back", "cancelled": "cancelled"}  # of the API -> in words
_DIFFERING = "differing"  # the test whose requests are comparisons


def plan_facts(state: CanaryState) -> Iterator[tuple[str, str]]:
    """Yield title and text of each line about a new canary: its start, shares, comparisons, and what ends it."""
    if state.step < 0:
        yield "begins", local_time(state.start_at)
    yield "shares", ", then ".join(map(step_text, state.steps)) or f"{percent(state.weight)} of the requests"
    answers = f"the answers of {percent(state.shadow)} of the live version's requests" if state.shadow else ""
    yield "compares", "failures, NaN and infinity, latency" + (f", {answers}" if answers else "; not the answers")
    if not answers:
        yield "", "--shadow compares answers too"
    end = "it goes live" if state.promote else "it stays a candidate until `lathe promote` or `lathe canary cancel`"
    yield "passes", f"when it is no worse in enough requests{_least_requests(state)}: {end}"
    yield "fails", f"when it is worse, or undecided after {MAX_REQUESTS:,} requests: it is rolled back"


def step_text(step: StepState) -> str:
    """Return a step as a phrase: `1% of the requests for 10 min`."""
    time = f" for {duration(step.seconds)}" if step.seconds else ""
    requests = f" until the candidate has answered {step.requests:,}" if step.requests else ""
    return f"{percent(step.weight)} of the requests{time}{' and' if time and requests else ''}{requests}"


def progress_line(name: str, state: CanaryState) -> str:
    """Return one line about a running canary: its step, its requests, and how many more it needs."""
    place = f"step {state.step + 1} of {len(state.steps)}, " if len(state.steps) > 1 else ""
    if state.step < 0:
        return f"{name} version {state.version}: begins at {local_time(state.start_at)}"
    requests = f"{state.requests:,} requests answered" if state.requests else "waits for requests"
    return (
        f"{name} version {state.version}: {place}{percent(state.weight)} of the requests; {requests}; {_needs(state)}"
    )


def progress_key(state: CanaryState) -> tuple[object, ...]:
    """Return a value that changes when a new `progress_line` is worth printing.

    That is at a new step or verdict, at the first request, and at each tenth of the evidence.
    """
    tenths = [int(10 * max(each.in_favour, 0.0)) for each in state.evidence]
    return state.step, state.verdict, state.requests > 0, min(tenths, default=0)


def canary_view(name: str, state: CanaryState, *, is_last: bool = False) -> Group:
    """Return the tables of a running canary; `is_last`: it has ended since."""
    schedule = [_schedule_table(state)] if state.steps else []
    return Group(*schedule, _evidence_table(name, state, is_last=is_last))


def outcome(name: str, generation: int, changes: list[AuditEntry]) -> str:
    """Return the candidate of the canary that began with the change of this generation, and its end or `running`."""
    began = next(entry for entry in changes if entry.generation == generation)
    ended = next((entry for entry in changes if _ends(began, entry)), None)
    return f"{name} version {began.version}: {'running' if ended is None else _ending(ended)}"


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{share * 100:.3g}%"


def duration(seconds: float) -> str:
    """Return a duration as text: `90 s`, `1.5 h`."""
    unit = next((unit for unit, length in _UNITS.items() if seconds >= 2 * length), "s")
    return f"{seconds / _UNITS[unit]:.3g} {unit}"


def _ends(began: AuditEntry, entry: AuditEntry) -> bool:
    """Whether a change ended a canary: its verdict, its cancellation, or a move of the live alias."""
    moves_live = entry.aliases.get("live") != began.aliases.get("live")
    return entry.generation > began.generation and (entry.action in _ENDINGS or moves_live)


def _ending(entry: AuditEntry) -> str:
    if entry.action in _ENDINGS:
        return _ENDINGS[entry.action] + (f": {entry.reason}" if entry.reason else "")
    live = entry.aliases.get("live")
    by_hand = {"alias": "was promoted by hand", "rollback": "was made live by a rollback"}
    return f"ended: version {live} {by_hand.get(entry.action, 'went live')}"


def _least_requests(state: CanaryState) -> str:
    """Return after how many requests the candidate can pass, in brackets; empty if the server has not said so."""
    counts = [each.needed for each in state.evidence if each.needed is not None and each.question != _DIFFERING]
    return f" ({max(counts)} at least)" if counts else ""


def _needs(state: CanaryState) -> str:
    """Return what a canary still needs to pass, or its verdict."""
    if state.verdict in _VERDICTS:
        return _VERDICTS[state.verdict] + (f", {_waiting(state)}" if state.verdict == "promote" else "")
    return f"undecided, {_more_requests(state)}" if _more_requests(state) else "undecided"


def _more_requests(state: CanaryState) -> str:
    needed = {each.question: each.needed for each in state.evidence if each.needed}
    comparisons = needed.pop(_DIFFERING, 0)
    parts = [f"{max(needed.values()):,} more requests"] if needed else []
    parts += [f"{comparisons:,} more comparisons"] if comparisons else []
    return f"passes after at least {' and '.join(parts)}" if parts else ""


def _waiting(state: CanaryState) -> str:
    return "goes live after its last step" if state.promote else "waits for `lathe promote` or `lathe canary cancel`"


def _schedule_table(state: CanaryState) -> Table:
    """Return the steps of a canary's schedule, with the current step and its remaining time."""
    begins = f"begins at {local_time(state.start_at)}, in {duration(state.remaining or 0.0)}" if state.step < 0 else ""
    title = begins or f"step {state.step + 1} of {len(state.steps)} since {local_time(state.since)}"
    table = make_table("step", "share", "for", "requests", "state", title=title)
    for number, step in enumerate(state.steps):
        word = "done" if number < state.step else _current_step(state) if number == state.step else "to come"
        time, requests = duration(step.seconds) if step.seconds else "", str(step.requests or "")
        table.add_row(str(number + 1), percent(step.weight), time, requests, word)
    return table


def _current_step(state: CanaryState) -> str:
    """Return the remaining time of the current step, afterwards the condition that it still waits for."""
    if state.remaining:
        return f"{duration(state.remaining)} left"
    last = state.step == len(state.steps) - 1
    return "until it has passed" if last else f"{state.requests} requests so far"


def _evidence_table(name: str, state: CanaryState, *, is_last: bool) -> Table:
    """Return the tests of a candidate: rates of bad answers, and the evidence by which it fails or passes."""
    so_far = f"before its end: {state.requests:,} requests" if is_last else f"{state.requests:,} requests"
    verdict = "" if is_last else f", {_needs(state)}"
    title = f"{name}: version {state.version} against {state.live}, {so_far}{verdict}"
    table = make_table(
        "test", "live", "candidate", "requests", "fails\nat 100%", "passes\nat 100%", "still\nneeded", title=title
    )
    for found in state.evidence:
        live = "" if found.stable is None else f"{found.stable:.2%}"
        table.add_row(
            found.question,
            live,
            f"{found.candidate:.2%}",
            str(found.requests),
            _progress(found.against),
            _progress(found.in_favour),
            str(found.needed if found.needed is not None else ""),
        )
    return table


def _progress(evidence: float) -> str:
    return f"{min(max(evidence, 0.0), 1.0):.0%}"


def canary_of(changes: Iterable[AuditEntry]) -> int | None:
    """Return the generation of the last canary in a model's changes; None if it has had none."""
    return max((entry.generation for entry in changes if entry.action == "canary"), default=None)
