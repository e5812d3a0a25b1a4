"""Scenario: the server's processor time for requests in JSON, compared with binary tensors.

Windows of each kind alternate, with every connection always busy. The figure is the server's processor time per
response, from its own metric `process_cpu_seconds_total`, so a slow generator does not matter.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import orjson
from numpy.typing import NDArray

from loadtest import zoo
from loadtest.admin import Admin
from loadtest.openloop import MANY, OpenLoop
from loadtest.scenario import INPUT_SETS, Options, Report
from loadtest.stats import summarise
from loadtest.wire import http_request, infer_path, infer_request, read_inferred

MODEL, SHARE = "loadtest-json", 0.5
ROUNDS, SECONDS = 6, 2.0
CLOSE = 1e-3  # of the largest output: inputs are rounded to four decimals
_CPU = re.compile(rb"^process_cpu_seconds_total (\S+)", re.MULTILINE)

Numbers = NDArray[np.float32]


@dataclass
class Kind:
    """Requests of one encoding, and their cost."""

    requests: Sequence[bytes]
    seconds: list[float] = field(default_factory=list)  # processor time per response, one value per window


async def json(options: Options, report: Report) -> None:
    """A LeNet's requests in JSON and in binary, in turns: JSON costs at most twice the processor time."""
    admin = Admin.at(options.url, MODEL)
    await admin.upload(zoo.model("lenet").SerializeToString())
    kinds = requests_of_each_kind(admin.target.authority, (await admin.metadata())["inputs"][0])
    await _check(admin, kinds)
    for number in range(ROUNDS + 1):
        for name, kind in kinds.items():
            seconds = await _window(admin, options, report, f"{name} {number}", kind.requests)
            if number:  # the first round warms up
                kind.seconds.append(seconds)
    _report(report, kinds)


def requests_of_each_kind(host: str, tensor: Mapping[str, object]) -> dict[str, Kind]:
    """The same images as binary, as JSON with four decimals, as JSON with all digits, and as JSON with distinct ids."""
    shape = [1, 1, 28, 28]
    images = [np.random.default_rng(seed).random(shape, np.float32) for seed in range(INPUT_SETS)]
    name = str(tensor["name"])
    short = [[round(float(x), 4) for x in image.ravel()] for image in images]
    return {
        "binary": Kind([infer_request(host, MODEL, {name: image}) for image in images]),
        "JSON": Kind([_request(host, name, shape, data) for data in short]),
        "JSON, all digits": Kind([_request(host, name, shape, image.ravel().tolist()) for image in images]),
        "JSON, ids": Kind([_request(host, name, shape, short[i % INPUT_SETS], f"request {i}") for i in range(1000)]),
    }


def _request(host: str, name: str, shape: list[int], data: list[float], id: str = "") -> bytes:
    document = {"id": id} if id else {}
    tensor = {"name": name, "shape": shape, "datatype": "FP32", "data": data}
    body = orjson.dumps({**document, "inputs": [tensor]})
    return http_request("POST", infer_path(MODEL), host, body, {"Content-Type": "application/json"})


async def _check(admin: Admin, kinds: dict[str, Kind]) -> None:
    """RuntimeError if a kind's first request gets no answer, or another one than binary's, with the same image."""
    answers: dict[str, Numbers] = {}
    for name, kind in kinds.items():
        connection = await admin.target.connect()
        try:
            response = await connection.ask(kind.requests[0])
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{name}: HTTP {response.status}: {response.body[:200]!r}")
        (answers[name],) = read_inferred(response).outputs.values()
    for name, answer in answers.items():
        apart = float(np.abs(answer - answers["binary"]).max() / np.abs(answers["binary"]).max())
        if not apart < CLOSE:
            raise RuntimeError(f"{name}: the answer is {apart:g} of the largest output away from binary's")


async def _window(admin: Admin, options: Options, report: Report, name: str, requests: Sequence[bytes]) -> float:
    """Keep all connections busy for a while. Returns the server's processor seconds per accepted response.

    RuntimeError if no response is accepted.
    """
    loop = OpenLoop(admin.target, requests, np.zeros(MANY), options.connections)
    before = await _processor_seconds(admin)
    running = asyncio.create_task(loop.run())
    seconds = options.seconds or SECONDS
    await asyncio.sleep(seconds)
    loop.stop()
    log = await running
    taken = await _processor_seconds(admin) - before
    report.phases.append(summarise(name, replace(log, due=log.sent), seconds))
    answers = int(log.accepted.sum())
    if not answers:
        raise RuntimeError(f"{name}: no request was answered within {seconds:g} s")
    return taken / answers


async def _processor_seconds(admin: Admin) -> float:
    response = await admin.target.ask("GET", "/metrics")
    found = _CPU.search(response.body)
    if found is None:
        raise RuntimeError(f"/metrics says no process_cpu_seconds_total (HTTP {response.status})")
    return float(found[1])


def _report(report: Report, kinds: dict[str, Kind]) -> None:
    binary = kinds["binary"].seconds
    figures = []
    for name, kind in kinds.items():
        shares = [b / own for b, own in zip(binary, kind.seconds, strict=True)]
        figures.append(f"{name} {statistics.median(kind.seconds) * 1e6:.1f} us ({statistics.median(shares):.2f})")
        if name == "JSON":
            share = statistics.median(shares)
            measured = f"{share:.2f} ({', '.join(f'{one:.2f}' for one in shares)})"
    report.promise("processor time per answer", True, ", ".join(figures))
    report.promise(f"JSON at {SHARE:g} of the speed of binary, by processor time", share >= SHARE, measured)
    report.promise_no_failures()
