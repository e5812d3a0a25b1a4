"""``lathe infer``: ask a model that is served."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from server.cli_models import Name
from server.connection import Connection, asks_server
from server.terminal import Json, console, fail, print_json

if TYPE_CHECKING:
    from server.client import Client
    from server.types import Tensors

_OPEN = 1  # the size of a dimension that a model leaves open, in an example
_SHOWN = 10  # values of an output


@asks_server
def infer(
    server: Connection,
    name: Name,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            "-i",
            help="The inputs: an .npz file with an array for each, an .npy file for a model with one input, or a .json "
            "file as POST /v2/models/MODEL/infer takes it. Default: random numbers.",
            exists=True,
            dir_okay=False,
            metavar="FILE",
        ),
    ] = None,
    version: Annotated[str, typer.Option(help="A version's number, or an alias.", show_default="live")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the outputs to this .npz file.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a model on the server, and print what it answers.

    \b
    Examples:
      lathe infer digits --inputs digits.npz
      lathe infer digits -i docs/digit.json --version 1

    \b
    From Python:
      from server.client import Client
      Client().infer("digits", {"image": array})["probabilities"]
    """
    import numpy as np

    if output is not None and output.suffix != ".npz":
        raise fail(f"--output {output}: expected a name that ends in .npz")
    with server.client(name) as client:
        feeds = _read(inputs, client, name, version) if inputs else _random(client, name, version)
        started = time.perf_counter()
        answer = client.infer(name, feeds, version)
        elapsed = time.perf_counter() - started
    if output is not None:
        np.savez(output, allow_pickle=False, **answer.outputs)
    if as_json:
        arrays = {key: array.tolist() for key, array in answer.outputs.items()}
        print_json({"model": answer.model, "version": answer.version, "outputs": arrays})
        return
    table = Table("output", "datatype", "shape", "values")
    for key, array in answer.outputs.items():
        values = np.array2string(np.ravel(array)[:_SHOWN], precision=4, separator=", ", max_line_width=120)
        more = " ..." if array.size > _SHOWN else ""
        table.add_row(key, str(array.dtype), str(list(array.shape)), values + more)
    console.print(table)
    sent = "" if inputs else "random numbers; "
    console.print(f"{sent}answered by {answer.model} version {answer.version} in {elapsed * 1e3:.1f} ms")


def _read(file: Path, client: Client, name: str, version: str) -> Tensors:
    import numpy as np

    try:
        if file.suffix == ".json":
            return _from_json(json.loads(file.read_text()))
        loaded = np.load(file, allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise fail(f"--inputs {file}: {error}") from error
    if isinstance(loaded, np.ndarray):
        expected = [spec["name"] for spec in client.describe(name, version)["inputs"]]
        if len(expected) != 1:
            raise fail(f"--inputs {file}: expected an .npz file with {', '.join(expected)}, got a single array")
        return {expected[0]: loaded}
    return dict(loaded)


def _from_json(document: Any) -> Tensors:
    """Read the inputs of a request as the protocol writes it in JSON; raises ValueError."""
    import numpy as np

    from server.datatypes import NUMPY_OF

    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        raise ValueError('expected an object with "inputs", a list of tensors with name, shape, datatype and data')
    feeds: Tensors = {}
    for position, tensor in enumerate(document["inputs"]):
        if not isinstance(tensor, dict):
            raise ValueError(f"inputs[{position}]: expected an object, got {type(tensor).__name__}")
        missing = {"name", "shape", "datatype", "data"} - set(tensor)
        if missing:
            raise ValueError(f"inputs[{position}]: {', '.join(sorted(missing))} is missing")
        if tensor["datatype"] == "BYTES":
            array = np.array([str(text).encode() for text in np.ravel(tensor["data"])], object)
        elif tensor["datatype"] in NUMPY_OF:
            array = np.array(tensor["data"], NUMPY_OF[tensor["datatype"]])
        else:
            raise ValueError(f"inputs[{position}].datatype: {tensor['datatype']!r} is not known")
        feeds[tensor["name"]] = array.reshape(tensor["shape"])
    return feeds


def _random(client: Client, name: str, version: str) -> Tensors:
    """Numbers of the types and shapes that a model takes, one row where it leaves the rows open."""
    import numpy as np

    from server.datatypes import NUMPY_OF

    generator, feeds = np.random.default_rng(0), {}
    for spec in client.describe(name, version)["inputs"]:
        shape = [size if size >= 0 else _OPEN for size in spec["shape"]]
        if spec["datatype"] == "BYTES":
            feeds[spec["name"]] = np.full(shape, b"text", object)
        else:
            feeds[spec["name"]] = (generator.random(shape) * 2).astype(NUMPY_OF[spec["datatype"]])
    return feeds
