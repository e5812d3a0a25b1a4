"""`lathe compress`: makes a smaller or faster version of a served model, as a job on the server."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from lathe.server.cli import method_options as options
from lathe.server.cli.connection import Connection, is_on_command_line, with_connection
from lathe.server.cli.jobs import read_gate, watch_job
from lathe.server.cli.model import model_errors
from lathe.server.cli.models import complete_model_name
from lathe.server.cli.percentage import read_percentage
from lathe.server.cli.terminal import console, fail, transfer_progress

_FIELDS = {  # of the request -> the options that set them
    "publish.gate": "--gate",
    "publish.model": "--publish",
    "dataset": "--dataset",
    "model": "MODEL",
}


def _print_keys(keys: bool) -> None:
    """Print the keys of a recipe and exit, if the option is given."""
    if keys:
        from lathe.core.train.recipe.compression import Compression
        from lathe.server.cli.recipe_keys import print_recipe_keys

        print_recipe_keys(Compression)
        raise typer.Exit


@with_connection
def compress(
    server: Connection,
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="The model whose live version is compressed; MODEL:VERSION names another version or an alias.",
            metavar="MODEL",
            autocompletion=complete_model_name,
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Upload this dataset, a file or folder, and use it: to calibrate, and to compare on held-out rows. "
            "It has a column for each input of the model, and one for the target, so that accuracy can be measured.",
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Use this dataset stored on the server.")] = None,
    weights: options.Weights = None,
    dynamic: options.Dynamic = False,
    bits: options.Bits = 4,
    block: options.Block = 32,
    rounding: options.Rounding = "nearest",
    calibration: options.Calibration = "percentile",
    percentile: options.Percentile = 99.99,
    activations: options.Activations = "uint8",
    symmetric: options.Symmetric = False,
    per_tensor: options.PerTensor = False,
    smoothing: options.Smoothing = 0.0,
    correct_bias: options.CorrectBias = False,
    equalize: options.Equalize = False,
    budget: options.Budget = None,
    skip: options.Skip = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="Read method, calibration rows, columns and split from this TOML or JSON file, in place of the "
            "options of methods; --keys lists what the file may contain.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    max_accuracy_drop: Annotated[
        str | None,
        typer.Option(
            help="Refuse a result whose accuracy on held-out rows is lower than the source's by more points than this.",
            metavar="PERCENT",
        ),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(help="Refuse a result that is larger than this part of the source.", metavar="PERCENT"),
    ] = None,
    max_latency: Annotated[
        str | None,
        typer.Option(
            help="Refuse a result whose run takes longer than this part of the source's, on one thread.",
            metavar="PERCENT",
        ),
    ] = None,
    gate: Annotated[
        str | None, typer.Option(help="Refuse a result that does not pass this gate, in JSON.", metavar="JSON")
    ] = None,
    promote: Annotated[bool, typer.Option("--promote", help="Make the result live, unless it is refused.")] = False,
    publish: Annotated[
        str | None, typer.Option(help="Make the result a version of this model. Default: of MODEL.", metavar="MODEL")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Follow the job to its end. Ctrl-C ends this view, not the job.")
    ] = True,
    keys: Annotated[
        bool, typer.Option("--keys", help="Print all keys of a recipe.", callback=_print_keys, is_eager=True)
    ] = False,
) -> None:
    """Make a smaller or faster version of a served model, on the server.

    By default all products become int8. --budget uses int8 only where it is faster, --dynamic finds ranges in each run,
    and --weights stores weights in few bits. --recipe also prunes. A refused result is kept as a version that is not
    live. `lathe rollback MODEL` brings the previous version back. `lathe jobs report JOB` shows each layer.

    \b
    Examples:
      lathe compress digits --data digits.npz --promote --max-accuracy-drop 0.5%
      lathe compress digits --dataset handwriting --budget 1% --max-latency 90%
      lathe compress digits:2 --dataset handwriting --weights gptq --bits 4
    """
    if (data is None) == (dataset is None):
        raise fail("expected either --data with a file or folder to upload, or --dataset with a name")
    if data is not None and not data.exists():
        raise fail(f"--data: expected a file or folder, got {str(data)!r}; --dataset names a dataset on the server")
    method = options.MethodOptions(
        weights, dynamic, bits, block, rounding, calibration, percentile, activations, symmetric, per_tensor, smoothing,
        correct_bias, equalize, budget, skip,
    )  # fmt: skip
    document = _recipe(context, method, recipe)
    bounds = GateOptions(max_accuracy_drop, max_size, max_latency, gate)
    name, _, version = model.partition(":")
    order: dict[str, Any] = {
        "kind": "compress",
        "model": {"name": name, "version": version or "live"},
        "publish": {"model": publish or name, "promote": promote, **bounds.field()},
    }
    if data is not None and "format" not in document.get("data", {}):
        from lathe.core.train.data.formats import check_format

        with model_errors():
            check_format(data)
    with server.client(name, _FIELDS | {"recipe": str(recipe) if recipe else "method"}) as client:
        source = dataset or ""
        if data is not None:
            with transfer_progress("uploading", "checking") as on_progress:
                source = client.upload_dataset(data.stem, data, progress=on_progress).digest
        with console.status("checking"):
            job = client.submit_job(document, source, **order)
        again = f"lathe jobs watch {job.id}{server.url_option}"
        if not wait:
            console.print(f"job {job.id} is submitted; `{again}` follows it", soft_wrap=True)
            return
        console.print(f"job {job.id} is submitted; Ctrl-C ends this view, not the job: `{again}`", soft_wrap=True)
        watch_job(client, job.id, url_option=server.url_option)


def _recipe(context: typer.Context, method: options.MethodOptions, file: Path | None) -> dict[str, Any]:
    """Return the recipe from its file, or from the options of methods; an invalid one ends the command."""
    from lathe.core.train.recipe import compression
    from lathe.core.train.recipe.recipe import RecipeError, read_tables

    if file is None:
        document = {"method": method.values()}
    else:
        for name in (field.name for field in fields(method)):
            if is_on_command_line(context, name):
                raise fail(f"--{name.replace('_', '-')}: has no effect with --recipe, which has the method")
        with model_errors():
            document = read_tables(file)
    try:
        compression.from_json(json.dumps(document, default=str))  # TOML has dates
    except RecipeError as error:
        raise fail(f"{file}: {error}" if file else _as_option(str(error))) from None
    return document


def _as_option(text: str) -> str:
    """An error about a field of the method, which begins with the option that sets the field."""
    field, colon, rest = text.removeprefix("method.").partition(": ")
    return f"--{field.replace('_', '-')}{colon}{rest}" if field.isidentifier() else text


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The options that bound metrics of the result."""

    accuracy_drop: str | None
    size: str | None
    latency: str | None
    gate: str | None  # JSON

    def field(self) -> dict[str, Any]:
        """Return the field `gate` of the publication; empty without an option. Invalid options end the command."""
        given = {
            "accuracy_drop": (self.accuracy_drop, "--max-accuracy-drop", True),
            "size_ratio": (self.size, "--max-size", False),
            "latency_ratio": (self.latency, "--max-latency", False),
        }
        bounds = {
            metric: read_percentage(option, text, zero)
            for metric, (text, option, zero) in given.items()
            if text is not None
        }
        if self.gate is not None:
            if bounds:
                raise fail("--gate: expected either --gate or the options --max-..., got both")
            return {"gate": read_gate(self.gate)}
        return {"gate": {"max": bounds}} if bounds else {}
