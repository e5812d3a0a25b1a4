"""The scenarios, by name. Each fills a Report; the promises it checks decide the exit status."""

from __future__ import annotations

from loadtest import arrivals, zoo
from loadtest.admin import Admin
from loadtest.disturbed import loading, slow
from loadtest.jobs import training
from loadtest.openloop import capacity
from loadtest.rollback import rollback
from loadtest.scenario import Options, Report, Scenario, Traffic
from loadtest.soak import soak
from loadtest.wrk import peak

WARM_UP = 1.0  # seconds of traffic that is not reported
RAMP_STEPS = 6
OVERLOAD_MODEL = "loadtest-heavy"
OVERLOAD_FACTOR = 10.0
DEADLINE = 0.5  # seconds an overloaded caller waits
GOODPUT = 0.9  # of the capacity, under overload
REJECTION_MS = 50.0
RECOVERY = 5.0  # seconds


async def steady(options: Options, report: Report) -> None:
    """Independent callers at a fixed mean rate."""
    rate, seconds = options.rate or 1000.0, options.seconds or 10.0
    traffic = await Traffic.of(options, options.model)
    await traffic.loop(arrivals.poisson(rate, WARM_UP)).run()
    report.phases.append(await traffic.phase(f"{rate:g}/s", arrivals.poisson(rate, seconds), seconds))
    report.promise_no_failures()


async def ramp(options: Options, report: Report) -> None:
    """A rate that rises in steps to `--rate`, then one smooth climb over the same range."""
    top, seconds = options.rate or 6000.0, options.seconds or 5.0
    traffic = await Traffic.of(options, options.model)
    await traffic.loop(arrivals.poisson(top / RAMP_STEPS, WARM_UP)).run()
    for step in range(1, RAMP_STEPS + 1):
        rate = top * step / RAMP_STEPS
        report.phases.append(await traffic.phase(f"{rate:g}/s", arrivals.poisson(rate, seconds), seconds))
    climb = arrivals.ramp(top / RAMP_STEPS, top, seconds)
    report.phases.append(await traffic.phase(f"climb to {top:g}/s", climb, seconds))
    report.promise_no_failures()


async def overload(options: Options, report: Report) -> None:
    """Ten times what the server can do, then a tenth of it: refusals are quick, goodput stays, it recovers.

    Uses a model of its own, heavy enough that this generator can outrun the server on the same machine.
    """
    seconds = options.seconds or 10.0
    await Admin.at(options.url, OVERLOAD_MODEL).upload(zoo.model("heavy").SerializeToString())
    patient = await Traffic.of(options, OVERLOAD_MODEL)
    before = await _capacity(patient, seconds / 2)
    hurried = await Traffic.of(options, OVERLOAD_MODEL, timeout_us=round(DEADLINE * 1e6))
    hurried.connections = max(options.connections, 512)

    rate = options.rate or OVERLOAD_FACTOR * before
    storm = await hurried.phase(f"overload {rate / before:.1f}x", arrivals.poisson(rate, seconds), seconds)
    calm = await patient.phase("afterwards 0.1x", arrivals.poisson(before / 10, RECOVERY), RECOVERY)
    report.phases += [storm, calm]

    full = max(before, await _capacity(patient, seconds / 2))  # whoever else used the machine took from one of them
    goodput = storm.throughput / full
    report.promise(f"goodput at least {GOODPUT:.0%} of capacity", goodput >= GOODPUT, f"{goodput:.0%} of {full:.0f}/s")
    worst = storm.latency.p99
    report.promise(f"accepted p99 within {DEADLINE * 1e3:g} ms", worst <= DEADLINE * 1e3, f"{worst:.1f} ms")
    refused = storm.rejection.p99
    report.promise(f"refusal p99 within {REJECTION_MS:g} ms", refused <= REJECTION_MS, f"{refused:.1f} ms")
    report.promise("nothing is refused afterwards", calm.accepted == calm.sent, f"{calm.accepted} of {calm.sent}")
    report.promise_no_failures()


async def _capacity(traffic: Traffic, seconds: float) -> float:
    return await capacity(traffic.admin.target, traffic.requests, traffic.connections, seconds)


SCENARIOS: dict[str, Scenario] = {
    f.__name__: f for f in (steady, ramp, overload, rollback, soak, slow, loading, training, peak)
}
