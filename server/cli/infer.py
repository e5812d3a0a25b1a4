"""`lathe infer`: sends one inference request to a server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.server.cli.arrays import read_arrays
from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.models import Name
from lathe.server.cli.terminal import Json, console, fail, make_table, print_json

if TYPE_CHECKING:
    from lathe.server.client import Client
    from lathe.server.types import Tensors

_DYNAMIC_SIZE = 1  # of dynamic dimensions in random inputs
_VALUES_SHOWN = 10  # of each output


@with_connection
def infer(
    server: Connection,
    name: Name,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            "-i",
            help="Read the inputs from this file: .npz with an array per input, .npy for a model with one input, or "
            ".json with the body of POST /v2/models/MODEL/infer. Default: random numbers.",
            exists=True,
            dir_okay=False,
            metavar="FILE",
        ),
    ] = None,
    version: Annotated[
        str, typer.Option(help="Call this version, by its number or an alias.", show_default="live")
    ] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the outputs to this .npz file.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send an inference request to a model on the server, and print the outputs.

    \b
    Examples:
      lathe infer digits --inputs digits.npz
      lathe infer digits -i request.json --version 1

    \b
    From Python:
      from lathe.client import Client
      Client().infer("digits", {"image": array})["probabilities"]
    """
    import numpy as np

    if output is not None and output.suffix != ".npz":
        raise fail(f"--output {output}: expected a file name that ends in .npz")
    with server.client(name, {"inputs": f"--inputs {inputs}"} if inputs else {}) as client:
        feeds = _read_inputs(inputs, client, name, version) if inputs else _random_inputs(client, name, version)
        started = time.perf_counter()
        answer = client.infer(name, feeds, version)
        elapsed = time.perf_counter() - started
    if output is not None:
        np.savez(output, allow_pickle=False, **answer.outputs)
    if as_json:
        arrays = {key: array.tolist() for key, array in answer.outputs.items()}
        print_json({"model": answer.model, "version": answer.version, "outputs": arrays})
        return
    table = make_table("output", "datatype", "shape", "values")
    for key, array in answer.outputs.items():
        values = np.array2string(np.ravel(array)[:_VALUES_SHOWN], precision=4, separator=", ", max_line_width=120)
        more = " ..." if array.size > _VALUES_SHOWN else ""
        table.add_row(key, str(array.dtype), str(list(array.shape)), values + more)
    console.print(table)
    sent = "" if inputs else "random numbers; "
    console.print(f"{sent}answered by {answer.model} version {answer.version} in {elapsed * 1e3:.1f} ms")


def _read_inputs(file: Path, client: Client, name: str, version: str) -> Tensors:
    if file.suffix == ".json":
        try:
            return _parse_request(json.loads(file.read_text()))
        except OSError as error:
            raise fail(f"--inputs {file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise fail(f"--inputs {file}: {error}") from error
    loaded = read_arrays("--inputs", file)
    if isinstance(loaded, dict):
        return loaded
    expected = [spec["name"] for spec in client.describe(name, version)["inputs"]]
    if len(expected) != 1:
        raise fail(f"--inputs {file}: expected an .npz file with {', '.join(expected)}, got a single array")
    return {expected[0]: loaded}


def _parse_request(document: Any) -> Tensors:
    """Return the input arrays by name of an inference request in the protocol's JSON form; raises ValueError."""
    import numpy as np

    from lathe.server.datatypes import NUMPY_OF

    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        raise ValueError('expected an object with "inputs", a list of tensors with name, shape, datatype and data')
    feeds: Tensors = {}
    for position, tensor in enumerate(document["inputs"]):
        if not isinstance(tensor, dict):
            raise ValueError(f"inputs[{position}]: expected an object, got {type(tensor).__name__}")
        missing = [key for key in ("name", "shape", "datatype", "data") if key not in tensor]
        if missing:
            raise ValueError(
                f"inputs[{position}]: expected name, shape, datatype and data; missing: {', '.join(missing)}"
            )
        if tensor["datatype"] == "BYTES":
            array = np.array([str(text).encode() for text in np.ravel(tensor["data"])], object)
        elif tensor["datatype"] in NUMPY_OF:
            array = np.array(tensor["data"], NUMPY_OF[tensor["datatype"]])
        else:
            expected = ", ".join(NUMPY_OF)
            raise ValueError(f"inputs[{position}].datatype: expected one of {expected}, got {tensor['datatype']!r}")
        feeds[tensor["name"]] = array.reshape(tensor["shape"])
    return feeds


def _random_inputs(client: Client, name: str, version: str) -> Tensors:
    """Return random numbers in [0, 2), or `text` for BYTES, in the types and shapes of a model's inputs, by name.

    Dynamic dimensions have size 1. The seed is fixed.
    """
    import numpy as np

    from lathe.server.datatypes import NUMPY_OF

    generator, feeds = np.random.default_rng(0), {}
    for spec in client.describe(name, version)["inputs"]:
        shape = [size if size >= 0 else _DYNAMIC_SIZE for size in spec["shape"]]
        if spec["datatype"] == "BYTES":
            feeds[spec["name"]] = np.full(shape, b"text", object)
        else:
            feeds[spec["name"]] = (generator.random(shape) * 2).astype(NUMPY_OF[spec["datatype"]])
    return feeds
