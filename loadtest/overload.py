"""Scenarios: an open loop asks for more than a model can answer; and what a queue that stays full does to who waits.

The model is a burden of convolutions, as deep as it takes for a full batch to last about 20 ms on this machine. Each
request brings several rows. So a batch holds few requests, and what the generator and the refusals take of the machine
they share with the server stays small beside what the model takes.

The capacity is what a closed loop gets answered by the same model, from the same generator on the same processors:
every connection sends its next request as soon as it has an answer, and there are more than fit into a batch.
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
BATCH_MS, NEAR = 20.0, 0.15  # what a full batch is to take, and the part of it by which it may miss that
DEPTH, FITTINGS, FIT = 12, 4, 1.5  # layers to begin with, attempts, seconds of each
ROWS = 8  # of a request
FACTOR = 10.0
DEADLINE = 0.5  # seconds an overloaded caller waits
GOODPUT = 0.9  # of the capacity, under overload
REJECTION_MS = 50.0
RECOVERY = 5.0  # seconds
STORM, STORMS = 5.0, 3  # seconds of each, and how many, with the capacity measured between them: machines drift
COARSE = 0.002  # seconds; to wake for each of so many requests would take the server's processor; it counts as latency

TARGET_MS, INTERVAL_MS = 100.0, 100.0  # of a queue that stands
CONFIG = f"[queue]\ndelay_target_ms = {TARGET_MS:g}\ndelay_interval_ms = {INTERVAL_MS:g}\n"
FOLLOWED = 5.0  # seconds within which the server follows a file beside a model
FEW = 8  # connections whose requests wait for less than the target
EXCESS = 1.5  # of the capacity
IN_FLIGHT = 4  # batches that may pass beyond the target: staged, running, its own, and one
BURST, BURSTS, BETWEEN = 12, 5, 0.5  # requests, of which a few make a batch; times; seconds


async def overload(options: Options, report: Report) -> None:
    """Ten times what the server can do, then a tenth of it: refusals are quick, goodput stays, it recovers."""
    seconds = options.seconds or STORM
    options = replace(options, rows=ROWS)
    patient = await _burdened(options, OVERLOADED, report)
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
    """A model with a delay target: bursts work off, a queue that stays full sheds who has waited too long.

    Callers set no deadline of their own. Needs `--repository`, to write the file beside the model.
    """
    if not options.repository:
        raise RuntimeError("the standing scenario needs --repository, the folder that the server serves")
    seconds = options.seconds or 10.0
    options = replace(options, rows=ROWS)
    traffic = await _burdened(options, STANDING, report)
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
    report.promise("only who has waited for the target is shed", least >= TARGET_MS, f"{least:.0f} ms (p1)")
    report.promise(f"shed p99 within {limit:g} ms", crowd.rejection.p99 <= limit, f"{crowd.rejection.p99:.1f} ms")
    _promise_goodput(report, [crowd], full)
    report.promise("nothing is refused afterwards", calm.accepted == calm.sent, f"{calm.accepted} of {calm.sent}")
    report.promise_no_failures()


def _promise_goodput(report: Report, phases: Sequence[Phase], full: Sequence[float]) -> None:
    """Compare each phase with the capacity as it was measured before and after it; the median counts."""
    around = [(before + after) / 2 for before, after in pairwise(full)]
    shares = [phase.throughput / capacity for phase, capacity in zip(phases, around, strict=True)]
    goodput = statistics.median(shares)
    measured = f"{goodput:.0%} ({', '.join(f'{share:.0%}' for share in shares)}) of {statistics.median(full):.0f}/s"
    report.promise(f"goodput at least {GOODPUT:.0%} of capacity", goodput >= GOODPUT, measured)


async def _burdened(options: Options, model: str, report: Report) -> Traffic:
    """Upload a model whose full batches take about `BATCH_MS`, and return traffic for it."""
    admin, depth = Admin.at(options.url, model), DEPTH
    for _ in range(FITTINGS):
        await admin.upload(zoo.burden(depth).SerializeToString())
        traffic = await Traffic.of(options, model)
        took = await _batch_ms(traffic)
        if abs(took / BATCH_MS - 1) <= NEAR:
            break
        depth = max(1, round(depth * BATCH_MS / took))
    report.promise(
        f"a batch takes about {BATCH_MS:g} ms", 0.5 <= took / BATCH_MS <= 2.0, f"{took:.1f} ms, {depth} layers"
    )
    return traffic


async def _batch_ms(traffic: Traffic) -> float:
    """Measure what a full batch takes while the model is busy."""
    admin = traffic.admin
    counts, ns = await admin.batches(), await admin.batch_ns()
    await _capacity(traffic, FIT)
    counts, ns = difference(await admin.batches(), counts), difference(await admin.batch_ns(), ns)
    largest = max(counts)
    return ns[largest] / counts[largest] / 1e6


async def _capacity(traffic: Traffic, seconds: float) -> float:
    return await capacity(traffic.admin.target, traffic.requests, traffic.connections, seconds)
