"""Load tests and measurements. Exit status: 1 when a promise is broken, 2 when a scenario cannot run.

python -m loadtest SCENARIO --url http://127.0.0.1:8080 --out reports   loads a running server
python -m loadtest chaos                                                starts servers, kills them, checks their answers
python -m loadtest starting                                             measures the start of a server
python -m loadtest engine | exported | tokens | cold | footprint | packing | weights | gpu | docs   measure the engine
python -m loadtest compression                                          measures methods of compression
python -m loadtest quantized MODEL.onnx                                 measures int8 models beside other quantizers
python -m loadtest search                                               searches an architecture within a time
python -m loadtest sparse                                               measures products with many zeros
python -m loadtest generate MODEL                                       measures text generation
python -m loadtest generation CHECK                                     checks text generation
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import uvloop
from rich.console import Console
from rich.markup import escape

from loadtest import (
    cold,
    compression,
    engine,
    exported,
    footprint,
    generate,
    packing,
    quantized,
    report_docs,
    search,
    sparse,
    starting,
    tokens,
    weights,
)
from loadtest.admin import CallFailed
from loadtest.chaos import run as chaos
from loadtest.generation import run as generation
from loadtest.gpu import run as gpu
from loadtest.output import save, show
from loadtest.scenario import Options, Report
from loadtest.scenarios import SCENARIOS

HELP = {
    "url": "the running server",
    "model": "model that gets the requests (steady, ramp, soak, flood, peak)",
    "rate": "requests/s; for ramp the highest rate",
    "seconds": "length of a phase",
    "connections": "largest number of connections",
    "rows": "rows per request",
    "onnx": "ONNX file that rollback, soak, loading and publishing derive versions from",
    "switches": "alias switches (rollback)",
    "cycles": "cycles of upload and rollback (rollback)",
    "requests": "smallest number of requests (rollback)",
    "repository": "the server's model repository, on this machine (standing)",
    "grpc": "the server's gRPC address, as host:port; without it the gRPC messages are skipped (stalls)",
}
OFFLINE: dict[str, Callable[[Sequence[str]], int]] = {
    "chaos": chaos.main,
    "cold": cold.main,
    "compression": compression.main,
    "engine": engine.main,
    "exported": exported.main,
    "footprint": footprint.main,
    "generate": generate.main,
    "generation": generation.main,
    "gpu": gpu.main,
    "packing": packing.main,
    "quantized": quantized.main,
    "docs": report_docs.main,
    "search": search.main,
    "sparse": sparse.main,
    "starting": starting.main,
    "tokens": tokens.main,
    "weights": weights.main,
}
TYPES = {"url": str, "model": str, "rate": float, "seconds": float, "onnx": str, "repository": str, "grpc": str}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m loadtest", description="Load tests of a running server.")
    scenarios = "; ".join(f"{name}: {(function.__doc__ or '').splitlines()[0]}" for name, function in SCENARIOS.items())
    made.add_argument("scenario", choices=SCENARIOS, help=scenarios)
    for field in fields(Options):
        default = f"default {field.default}" if field.default is not None else "default: by scenario"
        kind = TYPES.get(field.name, int)
        made.add_argument(f"--{field.name}", type=kind, default=field.default, help=f"{HELP[field.name]} ({default})")
    made.add_argument("--out", type=Path, default=Path("reports"), help="folder for the JSON and HTML report")
    return made


def run(name: str, options: Options, out: Path, console: Console) -> bool:
    """Run one scenario and write its report to the console and to `out`. True if its promises held."""
    report = Report(name, asdict(options))
    uvloop.run(SCENARIOS[name](options, report))
    show(report, console)
    data, html = save(report, out)
    console.print(f"[dim]{data}  {html}[/dim]")
    return report.held


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in OFFLINE:
        return OFFLINE[given[0]](given[1:])
    chosen = vars(parser().parse_args(given))
    name, out = chosen.pop("scenario"), chosen.pop("out")
    console = Console()
    try:
        return 0 if run(name, Options(**chosen), out, console) else 1
    except (CallFailed, OSError, RuntimeError) as error:  # OSError: a refused connection, a timeout, a missing file
        console.print(f"[red]{name}: {escape(str(error)) or type(error).__name__}[/red]")
        return 2


if __name__ == "__main__":
    sys.exit(main())
