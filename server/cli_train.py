"""``lathe train``: a recipe's training in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from server.cli_model import Threads, model_errors
from server.connection import Connection, asks_server, is_typed
from server.terminal import console, fail

_INTERRUPTED = 130  # what shells expect of a command that was interrupted


@asks_server
def train(
    server: Connection,
    context: typer.Context,
    recipe: Annotated[
        Path,
        typer.Argument(
            help="What to train: a TOML or JSON file, see docs/recipes.md.",
            metavar="RECIPE",
            exists=True,
            dir_okay=False,
        ),
    ],
    data: Annotated[Path | None, typer.Option("--data", help="The dataset: a file or folder.", exists=True)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the training. Default: the recipe's name.")] = None,
    parent: Annotated[
        Path | None, typer.Option(help="ONNX file to start from, if the recipe says `parent = true`.", exists=True)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training in the folder.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Also draw the curves of loss and metrics.")] = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard's event files.")] = None,
    threads: Threads = None,
    dataset: Annotated[str | None, typer.Option(help="Train on the server, with this dataset of it.")] = None,
    publish: Annotated[
        str | None, typer.Option(help="Train on the server; the result is a version of this model.")
    ] = None,
    promote: Annotated[bool, typer.Option("--promote", help="With --publish: make the version live.")] = False,
    gate: Annotated[
        str | None, typer.Option(help="With --publish: what the result must reach, as JSON (docs/gates.md).")
    ] = None,
    begin_with: Annotated[
        str | None, typer.Option("--from", help="Train on the server, starting from MODEL or MODEL:VERSION.")
    ] = None,
) -> None:
    """Train a model from a recipe: the model, its metrics and a report end up in the folder's `result`.

    Ctrl-C writes a checkpoint and ends; --resume continues from there, with the same result bit by bit.

    The training runs in this process. With --url, --dataset, --publish or --from it runs on a server, as a job, which
    Ctrl-C does not end; the server gets --data first, under the recipe's name.

    \b
    The smallest recipe.toml, for numbers in columns; lenet5 and resnet-small take images:
      epochs = 10
      model = {architecture = "mlp"}
      optimizer = {kind = "adamw", rate = 0.001}

    \b
    Examples:
      lathe train recipe.toml --data digits.npz --watch
      lathe train recipe.toml --data digits.npz --publish digits --promote
    """
    if dataset or publish or begin_with or is_typed(context, "url"):
        from server.cli_jobs import Wanted, train_there

        train_there(server, recipe, Wanted(data, dataset, publish, promote, begin_with, gate), watch)
        return
    if data is None:
        raise fail("--data is missing: the dataset, a file or folder")
    from core.train import recipe as recipes
    from core.train.assembly import Means
    from core.train.beginning import Words, begin, first_weights
    from core.train.fitting import Outcome
    from core.train.watched import work_watched
    from core.train.work import Sources

    with model_errors():
        folder, what = out or Path(recipe.stem), recipes.read(recipe)
        first = first_weights(what, recipe, parent)
        begin(folder, what, first, said=str(recipe), resume=resume, words=Words("--resume", "--out"))
        outcome = work_watched(folder, Sources(data), Means(threads), console, watch)
        if tensorboard is not None:
            from core.train.report import write_tensorboard

            write_tensorboard(folder, tensorboard)
    if outcome is Outcome.STOPPED:
        console.print(f"stopped; --resume goes on with the training in {folder}", soft_wrap=True)
        raise typer.Exit(_INTERRUPTED)
    _show(folder)


def _show(folder: Path) -> None:
    from core.train import result

    record = result.read_metrics(folder)
    table = Table("metric", "held-out rows")
    for name, value in record["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)
    seconds, steps = record["seconds"], record["steps"]
    where = folder / result.FOLDER
    text = f"{steps} steps in {seconds:.1f} s, compilation apart; the model and its report are in {where}"
    console.print(text, soft_wrap=True)
    console.print(f"next: lathe push {folder.name} {where / result.MODEL}", soft_wrap=True)
