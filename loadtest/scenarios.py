"""The scenarios by name. Each fills a Report, whose promises decide the exit status."""

from __future__ import annotations

from loadtest import arrivals
from loadtest.flood import flood
from loadtest.interference import loading, slow
from loadtest.jobs import training
from loadtest.json_bodies import json
from loadtest.overload import overload, standing
from loadtest.publishing import publishing
from loadtest.rollback import rollback
from loadtest.scenario import Options, Report, Scenario, Traffic
from loadtest.soak import soak
from loadtest.stalls import stalls
from loadtest.wrk import peak

WARM_UP = 1.0  # seconds of traffic that is not reported
RAMP_STEPS = 6


async def steady(options: Options, report: Report) -> None:
    """Independent clients (Poisson arrivals) at a fixed mean rate."""
    rate, seconds = options.rate or 1000.0, options.seconds or 10.0
    traffic = await Traffic.of(options, options.model)
    await traffic.loop(arrivals.poisson(rate, WARM_UP)).run()
    report.phases.append(await traffic.phase(f"{rate:g}/s", arrivals.poisson(rate, seconds), seconds))
    report.promise_no_failures()


async def ramp(options: Options, report: Report) -> None:
    """A rate that rises in steps to `--rate`, then a linear ramp over the same range."""
    top, seconds = options.rate or 6000.0, options.seconds or 5.0
    traffic = await Traffic.of(options, options.model)
    await traffic.loop(arrivals.poisson(top / RAMP_STEPS, WARM_UP)).run()
    for step in range(1, RAMP_STEPS + 1):
        rate = top * step / RAMP_STEPS
        report.phases.append(await traffic.phase(f"{rate:g}/s", arrivals.poisson(rate, seconds), seconds))
    climb = arrivals.ramp(top / RAMP_STEPS, top, seconds)
    report.phases.append(await traffic.phase(f"climb to {top:g}/s", climb, seconds))
    report.promise_no_failures()


_ALL = (
    steady,
    ramp,
    overload,
    standing,
    publishing,
    rollback,
    soak,
    slow,
    flood,
    loading,
    training,
    json,
    stalls,
    peak,
)
SCENARIOS: dict[str, Scenario] = {function.__name__: function for function in _ALL}
