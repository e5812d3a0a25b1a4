"""``lathe push``: upload a version, and say what the server learnt about it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli_model import model_errors
from server.cli_models import Name, signature_of, size_of, tensor
from server.cli_versions import OtherSignature
from server.connection import DEFAULT_URL, Connection, asks_server
from server.terminal import console, transfer

if TYPE_CHECKING:
    from server.api.schemas import Published, VersionDetail
    from server.client import Client


@asks_server
def push(
    server: Connection,
    name: Name,
    model: Annotated[
        Path,
        typer.Argument(
            help="An ONNX file, an exported program of PyTorch (.pt2), or a `pipeline.toml`.",
            exists=True,
            dir_okay=False,
            readable=True,
            metavar="FILE",
        ),
    ],
    promote: Annotated[bool, typer.Option("--promote", help="Make the version live at once.")] = False,
    allow_signature_change: OtherSignature = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Any text of yours: a push that is repeated with it makes no second version."
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The Python that exports a .pt2 file, with torch and onnxscript. Default: Lathe's own."
        ),
    ] = None,
) -> None:
    """Upload a version of a model: the server compiles it, and says what it takes and gives.

    Files that the model names, such as external weights, go along. The first version of a model goes live at once,
    later ones with --promote, or by `lathe promote MODEL VERSION`. Of a .pt2 file, which torch.export.save writes, an
    ONNX file is made on this machine.

    \b
    Examples:
      lathe push digits model.onnx
      lathe push digits model.pt2 --python ~/torch/bin/python
      lathe push digits model.onnx --promote --url https://models.example.com --ca ca.pem
    """
    with server.client() as client:
        with model_errors(), transfer("uploading", "compiling", first="reading") as sent:
            published = client.push(
                name,
                model,
                python=python,
                promote=promote,
                allow_signature_change=allow_signature_change,
                key=idempotency_key,
                progress=sent,
            )
        where = "live" if published.live else "not live yet"
        console.print(f"{name} version {published.version} is {published.state}, {where}")
        for title, text in learnt(client, server, published):
            console.print(f"  {title:<9}{text}", soft_wrap=True)


def learnt(client: Client, server: Connection, published: Published) -> Iterable[tuple[str, str]]:
    """Yield what is known of a new version: its tensors, its size, whether it batches, and how to ask it."""
    from server.client import ApiError

    name, number = published.model, published.version
    try:
        detail, versions = client.version(name, number), client.versions(name)
    except ApiError as error:
        yield "note", f"what it takes and gives is not shown: {error}"
        return
    if detail.reason:
        yield "reason", detail.reason
    if published.state == "ready":
        yield from _described(client.describe(name, number), client.config(name, number))
    elif signature := signature_of(detail):
        yield "takes", signature
    yield "size", size_of(detail)
    same = [str(other.version) for other in versions if other.version != number and other.digest == detail.digest]
    if same and detail.digest:
        yield "note", f"the same bytes as version {', '.join(same)}"
    yield from _asking(server, detail, name, published)


def _described(metadata: dict[str, Any], config: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for side in ("inputs", "outputs"):
        yield side, ", ".join(tensor(spec) for spec in metadata[side])
    parameters = config.get("parameters", {})
    if optional := parameters.get("optional_inputs", {}).get("string_value"):
        yield "optional", optional
    largest, reason = config.get("max_batch_size", 0), parameters.get("batching", {}).get("string_value", "")
    yield "batches", f"up to {largest} rows" if largest else f"no: {reason}{_advice(metadata)}"


def _advice(metadata: dict[str, Any]) -> str:
    """What to do about inputs whose leading dimension is a number."""
    fixed = [spec["name"] for spec in metadata["inputs"] if spec["shape"][:1] != [-1] and not spec.get("any_rank")]
    if not fixed:
        return ""
    return f"; export it with a symbolic leading dimension of {', '.join(fixed)} (torch.onnx.export: dynamic_shapes)"


def _asking(server: Connection, detail: VersionDetail, name: str, published: Published) -> Iterable[tuple[str, str]]:
    version = "" if published.live else f"/versions/{published.version}"
    yield "ask", f"POST {server.url.rstrip('/')}/v2/models/{name}{version}/infer"
    where = "" if server.url == DEFAULT_URL else f" --url {shlex.quote(server.url)}"
    option = "" if published.live else f" --version {published.version}"
    yield "example", f"lathe infer {name}{option}{where}"
    if not published.live and published.state == "ready":
        yield "next", f"lathe promote {name} {published.version}{where}"
