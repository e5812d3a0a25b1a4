"""`lathe push`: uploads a version, and prints what the server found in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.server.archive import MODEL, PIPELINE
from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.model import model_errors
from lathe.server.cli.models import Name, format_tensor, signature_of, size_of
from lathe.server.cli.terminal import console, print_facts, transfer_progress
from lathe.server.cli.versions import OtherSignature

if TYPE_CHECKING:
    from lathe.server.api.management.schemas import Published, VersionDetail, VersionState
    from lathe.server.client import Client


@with_connection
def push(
    server: Connection,
    name: Name,
    model: Annotated[
        Path,
        typer.Argument(
            help="An ONNX file, an exported program of PyTorch (.pt2), a `pipeline.toml`, or a language model: a GGUF "
            "file or a Hugging Face folder.",
            exists=True,
            readable=True,
            metavar="FILE",
        ),
    ],
    promote: Annotated[bool, typer.Option("--promote", help="Make the version live at once.")] = False,
    allow_signature_change: OtherSignature = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Set the idempotency key, at most 255 visible ASCII characters: a push repeated with the same key "
            "creates no second version.",
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Export a .pt2 file with this Python interpreter, which needs torch and onnxscript. "
            "Default: the one that runs Lathe.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="Upload this LoRA adapter with a language model; requests name it as MODEL/NAME. Repeat the option "
            "for several.",
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Upload this GGUF file with a language model, as its draft model: a smaller one with the same "
            "vocabulary.",
        ),
    ] = None,
) -> None:
    """Upload a version of a model: the server compiles it and reports its inputs and outputs.

    Files that the model refers to, such as external weights, are uploaded with it. The first version of a model goes
    live at once, later ones with --promote or by `lathe promote MODEL VERSION`. A .pt2 file, which torch.export.save
    writes, is converted to ONNX on this machine.

    \b
    Examples:
      lathe push digits model.onnx
      lathe push smollm SmolLM2-135M-Instruct.Q4_1.gguf
      lathe push smollm smollm2/ --adapter legal=legal-lora
      lathe push digits model.pt2 --python ~/torch/bin/python
      lathe push digits model.onnx --promote \\
        --url https://models.example.com --ca ca.pem
    """
    with server.client(options={"python": "--python", "key": "--idempotency-key"}) as client:
        with model_errors(), transfer_progress("uploading", "compiling", first="reading") as on_progress:
            published = client.push(
                name,
                model,
                python=python,
                adapters=read_adapter_options(adapter) or None,
                draft=draft,
                promote=promote,
                allow_signature_change=allow_signature_change,
                key=idempotency_key,
                progress=on_progress,
            )
        where = "live" if published.live else "not live yet"
        console.print(f"{name} version {published.version} is {published.state}, {where}")
        print_facts(describe_version(client, server, published))


def read_adapter_options(given: list[str] | None) -> dict[str, Path]:
    """Return the folders of adapters by name, from texts NAME=FOLDER."""
    found: dict[str, Path] = {}
    for text in given or []:
        name, equals, folder = text.partition("=")
        if not equals or not folder or name in found:
            raise typer.BadParameter(f"expected NAME=FOLDER with another name each time, got {text!r}")
        found[name] = Path(folder)
    return found


def describe_version(client: Client, server: Connection, published: Published) -> Iterable[tuple[str, str]]:
    """Yield title and text of each line about a new version: tensors, batching, size, URL, example, next command."""
    from lathe.server.client import ApiError

    name, number = published.model, published.version
    try:
        detail, versions = client.version(name, number), client.versions(name)
    except ApiError as error:
        yield "note", f"inputs and outputs are not shown: {error}"
        return
    if detail.reason:
        yield "reason", detail.reason
    texts = _generates_texts(detail)
    if published.state == "ready" and texts:
        yield "batches", "yes: all texts share each run of the model"
    elif published.state == "ready":
        yield from _signature_lines(client.describe(name, number), client.config(name, number))
    elif signature := signature_of(detail):
        yield "types", signature
    yield "size", size_of(detail)
    differs = _signature_change(client, name, detail, versions)
    if differs:
        yield "note", f"inputs or outputs differ from those of version {differs}, which is live"
    same = [str(other.version) for other in versions if other.version != number and other.digest == detail.digest]
    if same and detail.digest:
        yield "note", f"the same bytes as version {', '.join(same)}"
    yield from _call_lines(server, name, published, texts)
    if not published.live and published.state == "ready":
        option = " --allow-signature-change" if differs else ""
        yield "next", f"lathe promote {name} {published.version}{option}{server.url_option}"


def _generates_texts(detail: VersionDetail) -> bool:
    """Return whether the version is a language model: it has the files of one, and no ONNX file or pipeline."""
    files = (detail.manifest or {}).get("files", {})
    return not {MODEL, PIPELINE} & files.keys() and bool(files)


def _signature_change(client: Client, name: str, detail: VersionDetail, versions: list[VersionState]) -> int | None:
    """Return the live version if its inputs or outputs are known, and differ from those of another version."""
    live = next((other.version for other in versions if "live" in other.aliases), detail.version)
    if live == detail.version:
        return None
    theirs, ours = (_signature(each) for each in (client.version(name, live), detail))
    return live if None not in (theirs, ours) and theirs != ours else None


def _signature(version: VersionDetail) -> tuple[Any, Any] | None:
    manifest = version.manifest or {}
    return (manifest["inputs"], manifest["outputs"]) if "inputs" in manifest else None


def _signature_lines(metadata: dict[str, Any], config: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for side in ("inputs", "outputs"):
        yield side, ", ".join(format_tensor(spec) for spec in metadata[side])
    parameters = config.get("parameters", {})
    if optional := parameters.get("optional_inputs", {}).get("string_value"):
        yield "optional", optional
    largest, reason = config.get("max_batch_size", 0), parameters.get("batching", {}).get("string_value", "")
    yield "batches", f"up to {largest} rows" if largest else f"no: {reason}{_advice(metadata)}"


def _advice(metadata: dict[str, Any]) -> str:
    """Return advice on inputs whose leading dimension is fixed, which prevents batching; empty if there are none."""
    fixed = [spec["name"] for spec in metadata["inputs"] if spec["shape"][:1] != [-1] and not spec.get("any_rank")]
    if not fixed:
        return ""
    return f"; export it with a symbolic leading dimension of {', '.join(fixed)} (torch.onnx.export: dynamic_shapes)"


def _call_lines(server: Connection, name: str, published: Published, texts: bool) -> Iterable[tuple[str, str]]:
    if texts:
        model = name if published.live else f"{name}:{published.version}"
        yield "ask", f'POST {server.url.rstrip("/")}/v1/chat/completions with "model": "{model}"'
        return
    version = "" if published.live else f"/versions/{published.version}"
    yield "ask", f"POST {server.url.rstrip('/')}/v2/models/{name}{version}/infer"
    option = "" if published.live else f" --version {published.version}"
    yield "example", f"lathe infer {name}{option}{server.url_option}"
