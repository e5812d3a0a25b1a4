"""Scenarios: overload by an open loop, and load shedding of a queue that stays full (a standing queue).

The model is a stack of convolutions, as deep as it takes for a full batch to last about 20 ms on this machine. Each
request has several rows, so a batch holds few requests. The generator and the refusals then use little of the machine,
which they share with the server, compared with the model.

The capacity is the rate of a closed loop on the same model, from the same generator on the same processors: every
connection sends its next request when it has a response, and there are more connections than requests in a batch.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from loadtest import arrivals, zoo
from loadtest.admin import Admin, difference
from loadtest.openloop import capacity
from loadtest.scenario import Options, Report, Traffic
from loadtest.stats import Phase, percentile, summarise

OVERLOADED, STANDING = "loadtest-heavy", "loadtest-standing"  # models
BATCH_MS, NEAR = 20.0, 0.15  # target time of a full batch, and its relative tolerance
DEPTH, FITTINGS, FIT = 12, 4, 1.5  # initial number of layers, attempts, seconds per attempt
ROWS = 8  # per request
FACTOR = 10.0
DEADLINE = 0.5  # seconds that a client waits under overload
GOODPUT = 0.9  # smallest share of the capacity that is answered under overload
REJECTION_MS = 50.0
RECOVERY = 5.0  # seconds of light traffic afterwards
STORM, STORMS = 5.0, 3  # seconds of each, and their number; between them the capacity is measured, as machines drift
COARSE = 0.002  # pacer's tick in seconds: waking for each request would take the server's processor; counts as latency

TARGET_MS, INTERVAL_MS = 100.0, 100.0  # CoDel settings of the standing queue
CONFIG = f"[queue]\ndelay_target_ms = {TARGET_MS:g}\ndelay_interval_ms = {INTERVAL_MS:g}\n"
FOLLOWED = 5.0  # seconds within which the server reads a changed config.toml
FEW = 8  # connections: so few that their requests wait for less than the target
EXCESS = 1.5  # times the capacity
IN_FLIGHT = 4  # batches by which latency may exceed the target: staged, running, the request's own, and one spare
BURST, BURSTS, BETWEEN = 12, 5, 0.5  # requests per burst (a few batches), number of bursts, seconds between two


async def overload(options: Options, report: Report) -> None:
    """Ten times the capacity, then a tenth of it: refusals are quick, goodput stays high, the server recovers."""
    seconds = options.seconds or STORM
    options = replace(options, rows=ROWS)
    patient = await _calibrated_traffic(options, OVERLOADED, report)
    hurried = await Traffic.of(options, OVERLOADED, timeout_us=round(DEADLINE * 1e6))
    hurried.connections, hurried.tick = max(options.connections, 512), COARSE

    full, storms = [await _capacity(patient, seconds / 2)], []
    rate = options.rate or FACTOR * full[0]
    for number in range(STORMS):
        due = arrivals.poisson(rate, seconds, number)
        storms.append(await hurried.phase(f"overload {rate / full[0]:.1f}x", due, seconds))
        if number == STORMS - 1:
            calm = await patient.phase("afterwards 0.1x", arrivals.poisson(full[0] / 10, RECOVERY), RECOVERY)
        full.append(await _capacity(patient, seconds / 2))
    report.phases += [*storms, calm]

    _promise_goodput(report, storms, full)
    worst = statistics.median(storm.latency.p99 for storm in storms)
    report.promise(f"accepted p99 within {DEADLINE * 1e3:g} ms", worst <= DEADLINE * 1e3, f"{worst:.1f} ms")
    refused = statistics.median(storm.rejection.p99 for storm in storms)
    report.promise(f"refusal p99 within {REJECTION_MS:g} ms", refused <= REJECTION_MS, f"{refused:.1f} ms")
    report.promise("nothing is refused afterwards", calm.accepted == calm.sent, f"{calm.accepted} of {calm.sent}")
    report.promise_no_failures()


async def standing(options: Options, report: Report) -> None:
    """A model with a delay target: bursts are served whole, a standing queue sheds requests that waited too long.

    Clients set no deadline. Needs `--repository`, where this scenario writes the model's config.toml.
    """
    if not options.repository:
        raise RuntimeError("the standing scenario needs --repository, the server's model repository")
    seconds = options.seconds or 10.0
    options = replace(options, rows=ROWS)
    traffic = await _calibrated_traffic(options, STANDING, report)
    Path(options.repository, STANDING, "config.toml").write_text(CONFIG)
    await asyncio.sleep(FOLLOWED)
    full = [await capacity(traffic.admin.target, traffic.requests, FEW, seconds / 2)]
    traffic.connections = max(options.connections, 512)

    due = np.repeat(np.arange(BURSTS) * BETWEEN, BURST)
    bursts = await traffic.phase(f"bursts of {BURST}", due, BURSTS * BETWEEN)
    due = arrivals.poisson(EXCESS * full[0], seconds)
    log = await traffic.loop(due).run()
    crowd = summarise(f"standing {EXCESS:g}x", log, seconds)
    calm = await traffic.phase("afterwards 0.1x", arrivals.poisson(full[0] / 10, RECOVERY), RECOVERY)
    full.append(await capacity(traffic.admin.target, traffic.requests, FEW, seconds / 2))
    report.phases += [bursts, crowd, calm]

    limit = TARGET_MS + IN_FLIGHT * BATCH_MS
    worst, waited = crowd.latency.p99, log.latency_ms[log.rejected]
    begun = float(log.done[log.rejected].min(initial=np.inf))
    least = percentile(waited, 1) if len(waited) else np.nan
    report.promise("a burst that works off is answered whole", bursts.accepted == bursts.sent, f"of {bursts.sent}")
    report.promise(f"accepted p99 within {limit:g} ms", worst <= limit, f"{worst:.1f} ms")
    report.promise(
        "nothing is shed before the interval has passed", begun * 1e3 >= INTERVAL_MS, f"{begun * 1e3:.0f} ms"
    )
    report.promise("only requests that waited for the target are shed", least >= TARGET_MS, f"{least:.0f} ms (p1)")
    report.promise(f"shed p99 within {limit:g} ms", crowd.rejection.p99 <= limit, f"{crowd.rejection.p99:.1f} ms")
    _promise_goodput(report, [crowd], full)
    report.promise("nothing is refused afterwards", calm.accepted == calm.sent, f"{calm.accepted} of {calm.sent}")
    report.promise_no_failures()


def _promise_goodput(report: Report, phases: Sequence[Phase], full: Sequence[float]) -> None:
    """Promise the goodput: the median over phases of throughput / mean of the capacities before and after the phase."""
    around = [(before + after) / 2 for before, after in pairwise(full)]
    shares = [phase.throughput / capacity for phase, capacity in zip(phases, around, strict=True)]
    goodput = statistics.median(shares)
    measured = f"{goodput:.0%} ({', '.join(f'{share:.0%}' for share in shares)}) of {statistics.median(full):.0f}/s"
    report.promise(f"goodput at least {GOODPUT:.0%} of capacity", goodput >= GOODPUT, measured)


async def _calibrated_traffic(options: Options, model: str, report: Report) -> Traffic:
    """Upload a model whose full batches take about `BATCH_MS`, and return the traffic for it.

    After `FITTINGS` attempts the last model stays; the report has its time and its depth.
    """
    admin, fitting = Admin.at(options.url, model), DEPTH
    for _ in range(FITTINGS):
        depth = fitting
        await admin.upload(zoo.convolution_stack(depth).SerializeToString())
        traffic = await Traffic.of(options, model)
        took = await _batch_ms(traffic)
        if abs(took / BATCH_MS - 1) <= NEAR:
            break
        fitting = max(1, round(depth * BATCH_MS / took))
    report.promise(
        f"a batch takes about {BATCH_MS:g} ms", 0.5 <= took / BATCH_MS <= 2.0, f"{took:.1f} ms, {depth} layers"
    )
    return traffic


async def _batch_ms(traffic: Traffic) -> float:
    """The mean milliseconds of the largest batch size while the model is busy."""
    admin = traffic.admin
    counts, ns = await admin.batches(), await admin.batch_ns()
    await _capacity(traffic, FIT)
    counts, ns = difference(await admin.batches(), counts), difference(await admin.batch_ns(), ns)
    largest = max(counts)
    return ns[largest] / counts[largest] / 1e6


async def _capacity(traffic: Traffic, seconds: float) -> float:
    return await capacity(traffic.admin.target, traffic.requests, traffic.connections, seconds)
