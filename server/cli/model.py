"""Commands that need no server: compile, run, inspect, profile and bench a model in this process."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lathe.core.byte_sizes import format_bytes
from lathe.core.precisions import PRECISION_CHOICES
from lathe.server.cli.arrays import read_named_arrays
from lathe.server.cli.terminal import console, fail, make_table

if TYPE_CHECKING:
    from lathe import Graph, Profile, Session

COMPILED = ".lathe"

ModelFile = Annotated[
    Path,
    typer.Argument(
        help="An ONNX file, or a .lathe file that `lathe compile` wrote.",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
    ),
]
OnnxFile = Annotated[
    Path, typer.Argument(help="An ONNX file.", metavar="FILE", exists=True, dir_okay=False, readable=True)
]
Threads = Annotated[int | None, typer.Option(help="Use this many compute threads. Default: all CPUs.", min=1)]
Batches = Annotated[
    str, typer.Option("--batch", "--batches", help="Measure these batch sizes, numbers separated by commas.")
]


def compile(
    model: OnnxFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write this file. Default: FILE with the suffix .lathe.")
    ] = None,
    threads: Threads = None,
    max_batch: Annotated[int, typer.Option(help="Choose kernels for this batch size.", min=1)] = 32,
    precision: Annotated[
        str, typer.Option(help=f"Compute products in this precision: {PRECISION_CHOICES}.")
    ] = "float32",
    tune: Annotated[
        str, typer.Option(help="Choose kernels by measuring them: off, default, full, or a number of seconds.")
    ] = "default",
    record: Annotated[
        Path | None, typer.Option(help="Choose the same kernels as this compiled model.", exists=True)
    ] = None,
    packing: Annotated[
        int | None, typer.Option(help="Pack sequences, with at most this many tokens per run.", min=1)
    ] = None,
) -> None:
    """Compile a model into one file, which runs without compilation on machines with the same CPU features."""
    import lathe
    from lathe.core.compiler import compile as compile_module
    from lathe.core.compiler import options
    from lathe.core.compiler.packing import pack_info
    from lathe.core.compiler.tuner import read_findings

    path = output or model.with_suffix(COMPILED)
    started = time.perf_counter()
    with model_errors(), console.status("compiling"):
        findings = read_findings(record) if record else None
        chosen = options.make_options("cpu", precision, threads, max_batch, True, None, tune, findings, packing=packing)
        graph = lathe.load(model)
        compile_module.compile_to(path, graph, chosen)
        packed = pack_info(graph, chosen) if packing else None
    if packed is not None and not packed.packable:
        console.print(f"sequences are not packed: {packed.reason}", soft_wrap=True)
    seconds, size = time.perf_counter() - started, path.stat().st_size
    console.print(f"{path}: {format_bytes(size)} in {seconds:.1f} s, for {chosen.threads} thread(s)", soft_wrap=True)


def run(
    model: ModelFile,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Read the inputs from this .npz file, one array each. Default: random numbers.", exists=True),
    ] = None,
    batch: Annotated[int, typer.Option(help="Generate this many rows of random input.", min=1)] = 1,
    threads: Threads = None,
) -> None:
    """Run a model once and print its outputs; an ONNX file is compiled first."""
    import numpy as np

    with model_errors(), open_session(model, threads, batch) as session:
        feeds = read_named_arrays("--inputs", inputs) if inputs else _sample(session, batch)
        started = time.perf_counter()
        outputs = session.run(feeds)
        elapsed = time.perf_counter() - started
    table = make_table("output", "dtype", "shape", "values")
    for name, array in outputs.items():
        values = np.array2string(np.ravel(array)[:8], precision=4, separator=", ")
        table.add_row(name, str(array.dtype), str(list(array.shape)), values + (" ..." if array.size > 8 else ""))
    console.print(table)
    console.print(f"{elapsed * 1e3:.3f} ms")


def inspect(
    model: ModelFile,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show each node's kernel and the memory plan.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Count the operations of --explain for this batch size.", min=1)] = 1,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the graph of an ONNX file into this .svg file.")
    ] = None,
) -> None:
    """Show the inputs, outputs, size, parameters, FLOPs and operators of a model."""
    with model_errors():
        if picture is not None:
            _draw(model, picture)
        if model.suffix == COMPILED:
            _inspect_compiled(model)
        else:
            _inspect_onnx(model)
        if explain:
            with open_session(model, None, 32) as session:
                session.run(_sample(session, batch))  # a model compiled per shape has no kernels before its first run
                console.print(session.explain(batch), soft_wrap=True)


def _draw(model: Path, picture: Path) -> None:
    import lathe
    from lathe.core.drawing.graphs import draw

    if model.suffix == COMPILED:
        raise fail(f"{model}: a compiled model has no graph to draw; expected an ONNX file")
    if picture.suffix != ".svg":
        raise fail(f"--picture {picture}: expected a file name that ends in .svg, the only format")
    picture.write_text(draw(lathe.load(model)))
    console.print(f"wrote {picture}", soft_wrap=True)


def profile(
    model: ModelFile,
    batches: Batches = "1",
    threads: Threads = None,
    top: Annotated[int, typer.Option(help="Show this many steps, the slowest first.", min=1)] = 15,
    runs: Annotated[int, typer.Option(help="Run the model this often; the table shows medians.", min=1)] = 10,
    trace: Annotated[Path | None, typer.Option(help="Also write a trace for chrome://tracing or Perfetto.")] = None,
) -> None:
    """Profile a model: the time of each step, and its share of the machine's peak (roofline)."""
    from lathe.core.runtime.session.profile import OF_PEAK

    sizes = parse_batch_sizes(batches)
    with model_errors(), open_session(model, threads, max(sizes)) as session:
        for size in sizes:
            measured = session.profile(_sample(session, size), runs)
            console.print(_profile_table(measured, size, top))
            if trace is not None:
                path = trace if len(sizes) == 1 else trace.with_stem(f"{trace.stem}-{size}")
                measured.chrome_trace(path)
                console.print(f"trace: {path}", soft_wrap=True)
        console.print(OF_PEAK, soft_wrap=True)


def bench(
    model: ModelFile,
    batches: Batches = "1,8,32",
    seconds: Annotated[float, typer.Option(help="Measure each batch size for this many seconds.", min=0.01)] = 1.0,
    threads: Threads = None,
) -> None:
    """Measure the latency and throughput (rows per second) of a model on this machine."""
    sizes = parse_batch_sizes(batches)
    table = make_table("batch", "median", "p99", "rows/s")
    with model_errors(), open_session(model, threads, max(sizes)) as session:
        for size in sizes:
            times = _times(session, size, seconds)
            median = statistics.median(times)
            p99 = sorted(times)[int(len(times) * 0.99)]
            table.add_row(str(size), f"{median * 1e3:.3f} ms", f"{p99 * 1e3:.3f} ms", f"{size / median:,.0f}")
    console.print(table)


def _inspect_onnx(model: Path) -> None:
    import lathe

    graph = lathe.load(model)
    console.print(_signature([(v.name, v.type) for v in graph.inputs], [(v.name, v.type) for v in graph.outputs]))
    console.print(_facts(model, graph), soft_wrap=True)
    counts = Counter(node.op for node in graph.nodes)
    console.print(", ".join(f"{op} x{count}" for op, count in counts.most_common()))


def _facts(model: Path, graph: Graph) -> str:
    """Return a line with the file's size, the opsets, the number of parameters and the FLOPs of one row."""
    from lathe.core.frontends import model_facts as facts

    file, work = facts.file_facts(model), facts.count_flops(graph)
    opsets = ", ".join(f"{'' if domain == 'ai.onnx' else domain + ' '}{n}" for domain, n in file.opsets.items())
    known = f"{_si(work)}FLOP for batch 1" if work is not None else "FLOPs that depend on the run"
    return f"{format_bytes(file.size)}, opset {opsets}, {facts.count_parameters(graph):,} parameters, {known}"


def _si(count: float) -> str:
    """Return a count with an SI prefix: `850 k`."""
    for prefix in ("", "k", "M", "G", "T"):
        if count < 1000 or prefix == "T":
            break
        count /= 1000
    return f"{count:.3g} {prefix}"


def _inspect_compiled(model: Path) -> None:
    import lathe

    with lathe.load_compiled(model) as session:
        console.print(_signature(session.inputs.items(), session.outputs.items()))
        console.print(f"{format_bytes(model.stat().st_size)}, compiled")
        console.print(f"batching: {session.batching.reason}")
        if session.memory is not None:
            console.print(f"memory: {session.memory}")


def _signature(inputs: Any, outputs: Any) -> Table:
    table = make_table("", "name", "type")
    for side, values in (("input", inputs), ("output", outputs)):
        for name, type_ in values:
            table.add_row(side, name, str(type_))
    return table


def _profile_table(measured: Profile, batch: int, top: int) -> Table:
    title = f"batch {batch}, {measured.threads} threads, {measured.runs} runs"
    table = Table(title=title, title_justify="left", show_footer=True)
    total = f"{measured.total / 1e3:.1f}"
    for name, footer in (
        ("us", total),
        ("share", ""),
        ("GFLOP/s", ""),
        ("GB/s", ""),
        ("of peak", f"{measured.roofline:.0%}"),
    ):
        table.add_column(name, footer, justify="right")
    table.add_column("node", f"{len(measured.nodes)} steps", overflow="fold")
    table.add_column("kernel", overflow="fold")
    for node in measured.top(top):
        table.add_row(
            f"{node.nanoseconds / 1e3:.1f}", f"{measured.share(node):.1%}", f"{node.gflops:.1f}",
            f"{node.gigabytes:.1f}", f"{node.roofline:.0%}", f"{node.op} {node.label}", node.kernel,
        )  # fmt: skip
    return table


def parse_batch_sizes(text: str) -> list[int]:
    """Parse batch sizes separated by commas; raises typer.BadParameter unless all are whole numbers of at least 1."""
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"batches {text!r}: expected numbers separated by commas") from error
    if min(sizes) < 1:
        raise typer.BadParameter(f"batches {text!r}: expected numbers of at least 1")
    return sizes


def _times(session: Session, size: int, seconds: float) -> list[float]:
    feeds = _sample(session, size)
    session.run(feeds)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        started = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - started)
    return times


def _sample(session: Session, rows: int) -> dict[str, Any]:
    from lathe.core.runtime.session.sample_inputs import sample_inputs

    return sample_inputs(session, rows)


def _compiled(model: Path, threads: int | None, max_batch: int) -> Session:
    import lathe

    return lathe.compile(model, threads=threads, max_batch=max_batch)


@contextmanager
def open_session(model: Path, threads: int | None, max_batch: int) -> Iterator[Session]:
    """Open a session of a compiled file, or of an ONNX file, which is compiled for `max_batch` rows, at least 32.

    A context manager: leaving it closes the session.
    """
    import lathe

    if model.suffix == COMPILED:
        session = lathe.load_compiled(model, threads=threads)
    else:
        with console.status("compiling"):
            session = _compiled(model, threads, max(32, max_batch))
    with session:
        yield session


@contextmanager
def model_errors() -> Iterator[None]:
    """A context manager that prints compiler errors, ValueError and OSError as one line, and exits with status 1."""
    from lathe.core.errors import LatheError

    try:
        yield
    except (LatheError, ValueError) as error:
        raise fail(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise fail(f"{where}{error.strerror or error}") from error
