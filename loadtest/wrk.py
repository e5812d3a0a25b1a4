"""Scenario: peak throughput with wrk, a closed loop in C that is faster than a Python generator."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import tempfile
from pathlib import Path

from loadtest.admin import difference
from loadtest.scenario import Options, Report, Traffic
from loadtest.stats import Latency, Phase

SCRIPT = """
local file = io.open("{body}", "rb")
wrk.method = "POST"
wrk.body = file:read("*all")
file:close()
{headers}
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    'RESULT {{"requests": %d, "us": %d, "broken": %d, "refused": %d, "p50": %f, "p90": %f, "p99": %f, "p999": %f, ' ..
    '"mean": %f, "worst": %f}}\\n',
    summary.requests, summary.duration, e.connect + e.read + e.write + e.timeout, e.status,
    latency:percentile(50), latency:percentile(90), latency:percentile(99), latency:percentile(99.9),
    latency.mean, latency.max))
end
"""


async def peak(options: Options, report: Report) -> None:
    """The highest throughput of 1, 8 and 32 connections; needs wrk."""
    if shutil.which("wrk") is None:
        raise RuntimeError("the peak scenario needs wrk (https://github.com/wg/wrk): install the package 'wrk'")
    traffic = await Traffic.of(options, options.model)
    for connections in (1, 8, 32):
        before = await traffic.admin.batches()
        measured = await run_wrk(options, traffic.requests[0], connections)
        report.phases.append(as_phase(measured, connections, difference(await traffic.admin.batches(), before)))
    report.promise_no_failures()


async def run_wrk(options: Options, request: bytes, connections: int) -> dict[str, float]:
    head, _, body = request.partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    with tempfile.TemporaryDirectory() as folder:
        payload, script = Path(folder, "body"), Path(folder, "script.lua")
        payload.write_bytes(body)
        script.write_text(SCRIPT.format(body=payload, headers=lua_headers(fields)))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{options.seconds or 5:g}s", "-s", str(script)]
        process = await asyncio.create_subprocess_exec(
            *command, options.url + first.split()[1], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output = (await process.communicate())[0].decode()
    return parse_wrk(output)


def lua_headers(fields: list[str]) -> str:
    """Lua lines that set the headers, except Host and Content-Length, which wrk sets itself."""
    pairs = (field.split(": ", 1) for field in fields)
    wanted = ((name, value) for name, value in pairs if name not in ("Host", "Content-Length"))
    return "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in wanted)


def parse_wrk(output: str) -> dict[str, float]:
    """The figures on the line that SCRIPT prints. RuntimeError with wrk's output if there is no such line."""
    for line in output.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    raise RuntimeError(f"wrk: {output.strip()[-500:]}")


def as_phase(measured: dict[str, float], connections: int, batches: dict[int, int]) -> Phase:
    seconds = measured["us"] / 1e6
    sent, failed = int(measured["requests"]), int(measured["broken"] + measured["refused"])
    latency = Latency(*(measured[key] / 1e3 for key in ("p50", "p90", "p99", "p999", "mean", "worst")))
    return Phase(
        name=f"wrk, {connections} connections",
        offered=math.nan,
        seconds=seconds,
        sent=sent,
        accepted=sent - failed,
        rejected=0,
        failed=failed,
        throughput=(sent - failed) / seconds,
        latency=latency,
        rejection=Latency.none(),
        lateness_p99_ms=math.nan,
        unconnected_p99_ms=math.nan,
        batches=batches,
        curve=[],
        timeline=[],
        complaints={"refused or broken": failed} if failed else {},
    )
