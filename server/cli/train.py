"""`lathe train`: trains from a recipe, in this process or as a job on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lathe.server.cli.connection import Connection, is_on_command_line, with_optional_connection
from lathe.server.cli.model import Threads, model_errors
from lathe.server.cli.terminal import console, fail, make_table

_LOCAL_OPTIONS = {  # options that have no effect on a server, and what the server does instead
    "out": "the server keeps the result with the job",
    "parent": "--from names the version to start from",
    "resume": "the server resumes jobs by itself",
    "tensorboard": "`lathe jobs report` has the curves",
    "threads": "the server chooses the threads of its jobs",
}
_INTERRUPTED = 130  # exit status of an interrupted command: 128 + SIGINT, by the shells' convention


def _print_keys(keys: bool) -> None:
    """Print the keys of a recipe and exit, if the option is given."""
    if keys:
        from lathe.server.cli.recipe_keys import print_recipe_keys

        print_recipe_keys()
        raise typer.Exit


@with_optional_connection(
    "Train on the server at this URL. The variable alone does not choose a server.", default="train in this process"
)
def train(
    server: Connection,
    context: typer.Context,
    recipe: Annotated[
        Path,
        typer.Argument(
            help="A TOML or JSON file that says what to train; --keys lists what it may contain.",
            metavar="RECIPE",
            exists=True,
            dir_okay=False,
        ),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", help="Train on this dataset, a file or folder.", exists=True)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write checkpoints and results to this folder. Default: the recipe's name.")
    ] = None,
    parent: Annotated[
        Path | None, typer.Option(help="Start from this ONNX file, if the recipe says `parent = true`.", exists=True)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training in the folder.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Also draw the curves of loss and metrics.")] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write TensorBoard event files to this folder, after the training.")
    ] = None,
    threads: Threads = None,
    dataset: Annotated[str | None, typer.Option(help="Train on a server, on this dataset stored there.")] = None,
    publish: Annotated[
        str | None, typer.Option(help="Train on a server, and publish the result as a version of this model.")
    ] = None,
    promote: Annotated[
        bool,
        typer.Option(
            "--promote",
            help="With --publish: make the version live. The first version of a model goes live in any case.",
        ),
    ] = False,
    gate: Annotated[
        str | None,
        typer.Option(
            help="With --publish: let the version go live only if its metrics pass this gate, in JSON.", metavar="JSON"
        ),
    ] = None,
    begin_with: Annotated[
        str | None,
        typer.Option(
            "--from", help="Train on a server, starting from MODEL or MODEL:VERSION, or with it as the teacher."
        ),
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="Print all keys of a recipe.", callback=_print_keys, is_eager=True)
    ] = False,
) -> None:
    """Train a model from a recipe, and write the model, its metrics and a report to the folder's `result`.

    The training runs in this process. Ctrl-C writes a checkpoint and stops; --resume continues from it, with a
    bit-identical result.

    With --publish, --dataset, --from or --url the training runs on a server, as a job, which Ctrl-C does not stop.
    --data is uploaded first, under the recipe's name. The server is that of --url, otherwise of LATHE_URL.

    \b
    The smallest recipe.toml, for numeric columns; lenet5 and resnet-small take images:
      epochs = 10
      model = {architecture = "mlp"}
      optimizer = {kind = "adamw", rate = 0.001}

    \b
    Gates bound metrics of the result on held-out rows, or compare with the live version:
      {"min": {"accuracy": 0.97}, "max": {"log_loss": 0.2}}
      {"not_worse_than_live": {"metric": "accuracy", "by": 0.002}}
    A result that a gate refuses is kept as a version; with "refused": "discard" it is not.

    \b
    Examples:
      lathe train recipe.toml --data digits.npz --watch
      lathe train recipe.toml --data digits.npz --publish digits --promote
      lathe train recipe.toml --dataset digits --publish digits --promote \\
        --gate '{"min": {"accuracy": 0.97}}'
    """
    if publish is None and (promote or gate is not None):
        raise fail(f"{'--promote' if promote else '--gate'}: expected --publish with it, otherwise there is no version")
    if dataset or publish or begin_with or is_on_command_line(context, "url"):
        from lathe.server.cli.jobs import ServerTraining, train_on_server

        _refuse_local_options(context)
        train_on_server(server, recipe, ServerTraining(data, dataset, publish, promote, begin_with, gate), watch)
        return
    if data is None:
        raise fail("--data is missing: the dataset, a file or folder")
    from lathe.core.train.recipe import recipe as recipes
    from lathe.core.train.recipe.training_compression import teacher_path
    from lathe.core.train.recipe.training_setup import Resources
    from lathe.core.train.run.folder_setup import OptionNames, begin_training, initial_model_reader
    from lathe.core.train.run.foreground import run_in_foreground
    from lathe.core.train.run.training_loop import Outcome
    from lathe.core.train.run.work_folder import Sources

    with model_errors():
        folder, parsed = out or Path(recipe.stem), recipes.read(recipe)
        first = initial_model_reader(parsed, recipe, parent)
        words, teacher = OptionNames("--resume", "--out"), teacher_path(parsed.distil, recipe)
        begin_training(folder, parsed, first, said=str(recipe), resume=resume, words=words, teacher=teacher)
        outcome = run_in_foreground(folder, Sources(data), Resources(threads), console, watch)
        if tensorboard is not None:
            from lathe.core.train.report import write_tensorboard

            write_tensorboard(folder, tensorboard)
    if outcome is Outcome.STOPPED:
        console.print(f"stopped; --resume continues the training in {folder}", soft_wrap=True)
        raise typer.Exit(_INTERRUPTED)
    _show(folder)


def _refuse_local_options(context: typer.Context) -> None:
    """Refuse options that a training on a server would ignore."""
    for name, instead in _LOCAL_OPTIONS.items():
        if is_on_command_line(context, name):
            raise fail(f"--{name}: has no effect for a training on a server: {instead}")


def _show(folder: Path) -> None:
    from lathe.core.train.run import result

    record = result.read_metrics(folder)
    table = make_table("metric", "held-out rows")
    for name, value in record["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)
    seconds, steps = record["seconds"], record["steps"]
    where = folder / result.FOLDER
    text = f"{steps} steps in {seconds:.1f} s, time for compilation not included; model and report are in {where}"
    console.print(text, soft_wrap=True)
    console.print(f"next: lathe push {folder.name} {where / result.MODEL}", soft_wrap=True)
