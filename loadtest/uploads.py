"""One version of a model after the other, each with other values: parsed, compiled, loaded, warmed up and made live.

python -m loadtest.uploads URL MODEL FILE.onnx     until it is killed; writes a line, then one per version that is live
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.admin import Admin
from loadtest.switching import variant


async def upload_for_ever(admin: Admin, base: bytes) -> None:
    print("begun", flush=True)
    while True:
        await admin.upload(variant(base, random.uniform(1.0, 2.0)))
        print("live", flush=True)


def main(arguments: Sequence[str]) -> None:
    url, model, file = arguments
    asyncio.run(upload_for_ever(Admin.at(url, model), Path(file).read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1:])
