"""Start-up, memory and reproducibility of compiled models: `python -m loadtest footprint`.

Every time and every figure of resident memory comes from a fresh process on one thread. Each model has a cache of its
own, which is empty at first. Times are processor seconds, which other processes do not lengthen. `cold` is the first
compilation of a file with default settings, tuning included. `warm` is the second one. `load` is `lathe.load_compiled`
of the file that `lathe compile` writes. The arena is given per row, beside its lower bound: the most bytes alive at one
step. Resident memory counts mapped files. It is taken before loading, while loaded, after a run of eight rows, and
after closing. `same` says whether three compilations, one of them with another cache, give equal files. Exit status 1
if a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from lathe.core.compiler import compile as compile_module
from loadtest import zoo

PROJECT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
COLD, WARM = 5.0, 0.3  # seconds
ARENA = 1.05  # times the lower bound
LEFT_OVER = 8 * MIB  # more resident memory after closing than before loading
MODELS = ("lenet", "mlp", "mobilenet", "resnet", "transformer", "unet", "densenet", "vit")


@dataclass(frozen=True)
class Footprint:
    """The figures of one model, in seconds and bytes."""

    model: str
    cold: float
    warm: float
    load: float
    artifact: int
    weights: int
    arena: int
    lower_bound: int
    before: int
    loaded: int
    used: int
    closed: int
    identical: bool

    @property
    def broken(self) -> list[str]:
        """Messages for every promise that this model breaks."""
        found = {
            f"cold compile took {self.cold:.1f} s": self.cold > COLD,
            f"warm compile took {self.warm:.2f} s": self.warm > WARM,
            f"loading took {self.load:.2f} s": self.load > WARM,
            f"the arena is {self.arena / max(self.lower_bound, 1):.2f} times its bound":
                self.arena > ARENA * self.lower_bound,
            f"{(self.closed - self.before) / MIB:.0f} MiB stay after closing": self.closed - self.before > LEFT_OVER,
            "two builds differ": not self.identical,
        }  # fmt: skip
        return [f"{self.model}: {what}" for what, is_so in found.items() if is_so]


def measure(path: Path, work: Path) -> Footprint:
    """Measure all figures of one ONNX file. `work` is an empty folder."""
    cold, warm = (run_step("compile", path, work / "cache") for _ in range(2))
    first, second = (build(path, work / name, work / "cache", None) for name in ("a.lathe", "b.lathe"))
    again = build(path, work / "c.lathe", work / "other", first)
    loaded = run_step("load", first, work / "cache")
    weights, arena, bound = memory_of(first)
    return Footprint(
        path.stem,
        cold=cold["processor"],
        warm=warm["processor"],
        load=loaded["processor"],
        artifact=first.stat().st_size,
        weights=weights,
        arena=arena,
        lower_bound=bound,
        before=int(loaded["before"]),
        loaded=int(loaded["loaded"]),
        used=int(loaded["used"]),
        closed=int(loaded["closed"]),
        identical=len({file.read_bytes() for file in (first, second, again)}) == 1,
    )


def run_step(name: str, path: Path, cache: Path) -> dict[str, float]:
    """The figures of one step in a fresh process; see one_process.py. RuntimeError if the process fails."""
    command = [sys.executable, "-m", "loadtest.one_process", name, str(path)]
    environment = {**os.environ, "LATHE_CACHE_DIR": str(cache)}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} of {path.name} failed: {done.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def build(path: Path, out: Path, cache: Path, record: Path | None) -> Path:
    """Compile `path` to the artifact `out`, and return `out`.

    Kernels are those of the tuner's records in `cache` or, with `record`, those of the artifact `record`.
    """
    import lathe
    from lathe.core.codegen.target import host
    from lathe.core.compiler.options import make_options
    from lathe.core.compiler.tuner import Record, read_findings

    findings = read_findings(record) if record else Record(cache / "tuning", host()).read()
    options = make_options(threads=1, cache_dir=cache, findings=findings)
    compile_module.compile_to(out, lathe.load(path), options)
    return out


def memory_of(artifact: Path) -> tuple[int, int, int]:
    """Bytes of the weights, of the arena per row, and of the arena's lower bound. RuntimeError if they are unknown."""
    import lathe

    with lathe.load_compiled(artifact, threads=1) as session:
        memory = session.memory
    if memory is None:
        raise RuntimeError(f"{artifact.name} is compiled per shape: its memory is not known")
    return memory.weights, memory.peak, memory.lower_bound


def table(rows: Sequence[Footprint]) -> Table:
    made = Table(title="one thread; seconds of the processor, and MiB", title_justify="left")
    for column in ("model", *HEADINGS):
        made.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        made.add_row(row.model, *cells(row))
    return made


HEADINGS = (
    "cold",
    "warm",
    "load",
    "file",
    "weights",
    "arena/row",
    "bound",
    "before",
    "loaded",
    "used",
    "closed",
    "same",
)


def cells(row: Footprint) -> list[str]:
    """The row's figures as text, in the order of HEADINGS."""
    seconds = [f"{value:.2f}" for value in (row.cold, row.warm, row.load)]
    sizes = (row.artifact, row.weights, row.arena, row.lower_bound, row.before, row.loaded, row.used, row.closed)
    return [*seconds, *(f"{size / MIB:.2f}" if size < 100 * MIB else f"{size / MIB:.0f}" for size in sizes),
            "yes" if row.identical else "no"]  # fmt: skip


def collect(names: Sequence[str], files: Sequence[Path], console: Console) -> list[Footprint]:
    """Measure files, then models of the zoo."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / f"{name}.onnx"
            path.write_bytes(zoo.model(name).SerializeToString())
            files = [*files, path]
        for file in files:
            console.print(f"[dim]{file.stem}[/dim]")
            with tempfile.TemporaryDirectory() as work:
                rows.append(measure(file, Path(work)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest footprint", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="ONNX files; without any, models of the zoo")
    parser.add_argument("--models", type=lambda text: text.split(","), help="names of models in loadtest/zoo.py")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen, console = parser.parse_args(arguments), Console()
    names = chosen.models or ([] if chosen.files else MODELS)
    rows = collect(names, chosen.files, console)
    console.print(table(rows))
    broken = [what for row in rows for what in row.broken]
    for what in broken:
        console.print(f"[red]{what}[/red]")
    if chosen.json:
        chosen.json.write_bytes(orjson.dumps([asdict(row) for row in rows], option=orjson.OPT_INDENT_2))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
