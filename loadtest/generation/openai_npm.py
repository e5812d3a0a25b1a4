"""The npm package `openai`, unmodified: `python -m loadtest generation openai-npm FILE.gguf --package FOLDER`.

FOLDER is where `npm install openai` ran. A server of its own gets the model, and the pipeline of
`docs/pipelines/embedding`. `openai_npm.mjs` has the checks: models, chat, streaming, completions, a JSON schema, tools,
embeddings, errors and retries. Exit status 2 without node or the package.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lathe.server.client import Client
from loadtest.chaos.process import Server

_EMBEDDING = Path(__file__).parents[2] / "docs" / "pipelines" / "embedding"
_QUEUE = "2"  # texts that may wait or run: more are refused, so that clients have to repeat requests


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest generation openai-npm", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--package", type=Path, required=True, help="the folder with node_modules/openai")
    args = parser.parse_args(arguments)
    node = shutil.which("node")
    if node is None or not (args.package / "node_modules" / "openai").is_dir():
        what = "node" if node is None else f"{args.package}/node_modules/openai: npm install openai"
        print(f"the check openai-npm needs {what}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        lines = asyncio.run(_run(node, args.model, args.package, Path(folder)))
    table = Table("check", "error")
    for line in lines:
        table.add_row(line["check"], line["error"] or "")
    Console().print(table)
    return int(not lines or any(line["error"] for line in lines))


async def _run(node: str, model: Path, package: Path, folder: Path) -> list[dict[str, str | None]]:
    server = Server(folder, {"LATHE_QUEUE_ITEMS": _QUEUE})
    server.repository.mkdir()
    try:
        await server.start()
        await server.await_ready(time.monotonic())
        url = f"http://127.0.0.1:{server.target.port}"
        await asyncio.to_thread(_publish, url, model)
        script = Path(__file__).with_suffix(".mjs")
        command = [node, str(script), str(package), f"{url}/v1", "text", "embedding"]
        return await asyncio.to_thread(_checked, command)
    finally:
        await server.end()


def _checked(command: Sequence[str]) -> list[dict[str, str | None]]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _publish(url: str, model: Path) -> None:
    with Client(url) as client:
        client.push("text", model)
        client.push("encoder", _EMBEDDING / "encoder.onnx")
        client.push("embedding", _EMBEDDING / "pipeline.toml")
