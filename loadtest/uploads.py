"""One version of a model after the other, each with other values: parsed, compiled, loaded, warmed up and made live.

python -m loadtest.uploads URL MODEL FILE.onnx     until SIGTERM; writes a line, then one per version that is live

The upload that is under way at the signal is awaited: the server would work on it anyway.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.admin import Admin
from loadtest.switching import variant


async def upload_until_told(admin: Admin, base: bytes) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print("begun", flush=True)
    while not told.is_set():
        await admin.upload(variant(base, random.uniform(1.0, 2.0)))
        print("live", flush=True)


def main(arguments: Sequence[str]) -> None:
    url, model, file = arguments
    asyncio.run(upload_until_told(Admin.at(url, model), Path(file).read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1:])
