"""Uploads versions of a model one after the other, each with distinct weights, so that each is compiled and made live.

python -m loadtest.uploads URL MODEL FILE.onnx     until SIGTERM; writes a line, then one per live version

At the signal it waits for the current upload, which the server would finish anyway.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.admin import Admin
from loadtest.version_oracle import variant


async def upload_until_sigterm(admin: Admin, base: bytes) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print("begun", flush=True)
    while not stopped.is_set():
        await admin.upload(variant(base, random.uniform(1.0, 2.0)))
        print("live", flush=True)


def main(arguments: Sequence[str]) -> None:
    url, model, file = arguments
    asyncio.run(upload_until_sigterm(Admin.at(url, model), Path(file).read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1:])
