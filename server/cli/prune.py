"""`lathe prune`: makes an ONNX file with fewer channels, or with zeros among its weights, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lathe.core.byte_sizes import format_bytes
from lathe.server.cli.model import OnnxFile, model_errors
from lathe.server.cli.percentage import read_percentage
from lathe.server.cli.terminal import console, fail, make_table

if TYPE_CHECKING:
    from lathe import Graph


def prune(
    model: OnnxFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write this ONNX file. Default: FILE.pruned.onnx.")
    ] = None,
    channels: Annotated[
        str | None,
        typer.Option(
            help="Remove this share of the channels of each layer, or of the heads of attention, with all that "
            "depends on them.",
            metavar="PERCENT",
        ),
    ] = None,
    measure: Annotated[
        str, typer.Option(help="With --channels: remove those of the least sum of magnitudes (l1) or squares (l2).")
    ] = "l2",
    multiple: Annotated[int, typer.Option(help="With --channels: keep a multiple of this number of channels.")] = 1,
    weights: Annotated[
        str | None,
        typer.Option(help="Set this share of the weights of each product to 0: the smallest.", metavar="PERCENT"),
    ] = None,
    pattern: Annotated[
        str,
        typer.Option(
            help="With --weights: element; 2:4 keeps two of four consecutive inputs, whatever the share; 4x1 takes "
            "blocks of four inputs."
        ),
    ] = "element",
    together: Annotated[
        bool, typer.Option("--global", help="With --weights: compare the weights of all products.")
    ] = False,
    sparse: Annotated[
        bool,
        typer.Option(
            "--sparse",
            help="With --weights: store only the weights that are not 0, where that is smaller. ONNX Runtime reads "
            "such files, OpenVINO does not.",
        ),
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Leave the node of this name as it is. Repeat the option.", metavar="NODE"),
    ] = None,
) -> None:
    """Write a model with fewer channels, or with zeros among its weights.

    Train the result further, with `onnx` in the recipe's table `model`.

    \b
    Examples:
      lathe prune model.onnx --channels 50% -o small.onnx
      lathe prune model.onnx --weights 90% --sparse -o sparse.onnx
      lathe prune model.onnx --weights 50% --pattern 2:4
    """
    import lathe
    from lathe.core.errors import LatheError

    if (channels is None) == (weights is None):
        raise fail("expected either --channels or --weights, such as --channels 50%")
    if sparse and weights is None:
        raise fail("--sparse: expected --weights as well, such as --weights 90%")
    share = read_percentage("--channels" if channels is not None else "--weights", channels or weights or "")
    path = output or model.with_suffix(".pruned.onnx")
    with model_errors():
        graph = lathe.load(model)
        try:
            if channels is not None:
                small = _without_channels(graph, share, measure, multiple, skip or [])
            else:
                small = _with_zeros(graph, share, pattern, together, skip or [])
        except LatheError as problem:
            raise fail(str(problem)) from None
        written = lathe.export(small, sparse=sparse)
    path.write_bytes(written)
    before, after = model.stat().st_size, len(written)
    console.print(f"{path}: {format_bytes(after)} instead of {format_bytes(before)}", soft_wrap=True)


def _without_channels(graph: Graph, share: float, measure: str, multiple: int, skip: list[str]) -> Graph:
    from lathe.core.compress.channel_pruning import ChannelPruning, remove_channels

    options = ChannelPruning(share, measure, multiple, frozenset(skip))  # type: ignore[arg-type]
    small, choices = remove_channels(graph, options)
    table = make_table("channels of", "before", "after")
    for choice in choices:
        table.add_row(choice.name, str(choice.before), str(choice.after))
    console.print(table)
    return small


def _with_zeros(graph: Graph, share: float, pattern: str, together: bool, skip: list[str]) -> Graph:
    from lathe.core.compress.weight_pruning import WeightPruning, prune_weights

    sparse, report = prune_weights(graph, WeightPruning(share, pattern, together, skip=frozenset(skip)))
    table = make_table("product", "weights", "zeros", "share")
    for entry in report:
        table.add_row(entry.name, str(entry.weights), str(entry.zeros), f"{entry.zeros / entry.weights:.1%}")
    console.print(table)
    return sparse
