"""The command line: `lathe --help` lists the commands."""

from __future__ import annotations

from typing import Annotated

import typer

from lathe.server.cli import (
    canary,
    completion,
    datasets,
    generate,
    infer,
    jobs,
    kernels,
    keys,
    model,
    models,
    prune,
    push,
    rollout,
    serve,
)
from lathe.server.cli import compress as cli_compress
from lathe.server.cli import quantize as cli_quantize
from lathe.server.cli import status as cli_status
from lathe.server.cli import top as cli_top
from lathe.server.cli import train as cli_train
from lathe.server.cli import versions as cli_versions
from lathe.server.cli.command_group import Commands
from lathe.server.cli.terminal import console

SERVING, VERSIONS, MONITORING = "Serving and inference", "Models and versions", "Monitoring"
TRAINING, LOCAL = "Training and compression", "On this machine, without a server"

app = Commands(
    "Serve ONNX models, compiled to native code. `lathe serve` starts a server, and most other commands call one. "
    "The commands under 'On this machine', `lathe keys` and `lathe datasets describe` need no server. "
    "`lathe COMMAND --help` explains a command, with examples.",
    add_completion=True,
    epilog="First steps: `lathe serve --model-repo FOLDER`, then in another terminal `lathe push NAME model.onnx` and "
    "`lathe infer NAME`.",
)


def _print_version(version: bool) -> None:
    if version:
        from lathe.server.api.v2.model_info import VERSION

        console.print(f"lathe {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before a command."""


for command in (serve.serve, infer.infer):
    app.command(rich_help_panel=SERVING)(command)
app.add_typer(keys.app, name="keys", rich_help_panel=SERVING)

for command in (push.push, models.models, models.versions, cli_versions.promote, cli_versions.rollback):
    app.command(rich_help_panel=VERSIONS)(command)
app.add_typer(canary.app, name="canary", rich_help_panel=VERSIONS)
for command in (cli_versions.alias, cli_versions.delete, cli_versions.load, cli_versions.unload):
    app.command(rich_help_panel=VERSIONS)(command)

for command in (cli_status.status, cli_status.health, cli_top.top, models.audit):
    app.command(rich_help_panel=MONITORING)(command)
app.add_typer(rollout.app, name="rollout", rich_help_panel=MONITORING)

for command in (cli_train.train, cli_compress.compress):
    app.command(rich_help_panel=TRAINING)(command)
app.add_typer(jobs.app, name="jobs", rich_help_panel=TRAINING)
app.add_typer(datasets.app, name="datasets", rich_help_panel=TRAINING)

for command in (model.compile, model.run, model.inspect, model.profile, model.bench):
    app.command(rich_help_panel=LOCAL)(command)
for command in (generate.generate, generate.chat):
    app.command(rich_help_panel=LOCAL)(command)
app.command(rich_help_panel=LOCAL)(cli_quantize.quantize)
app.command(rich_help_panel=LOCAL)(prune.prune)
for command in (kernels.kernels, kernels.load_kernels, completion.completion):
    app.command(rich_help_panel=LOCAL)(command)
