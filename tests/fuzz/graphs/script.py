"""Writes a standalone script that shows a disagreement: the model, its feeds, the expected outputs."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Sequence

import numpy as np
import onnx

from tests.fuzz.graphs.config import Config
from tests.fuzz.graphs.generate import Case

_TEMPLATE = '''"""{kind}

{text}

Seed {seed}. The model as text:

{printed}
"""

import base64
import io
import os
import zlib

os.environ["LATHE_CHECK_PLANS"] = "1"
{target}
import numpy as np

import lathe
import lathe.core.runtime.host.executable
import lathe.core.runtime.host.chunks
{settings}

def unpacked(text):
    return zlib.decompress(base64.b64decode(text))


MODEL = """{model}"""
CASES = """{cases}"""

arrays = np.load(io.BytesIO(unpacked(CASES)), allow_pickle=True)
session = lathe.compile(lathe.load(unpacked(MODEL)), threads={threads}, max_batch={max_batch}, optimize={optimize},
                       tune="off", winograd={winograd}, new_shapes="wait", packing={packing})
print(session.batching)
for case in {rows}:
    names = [name for name in (*session.inputs, *session.defaults) if f"{{case}} in {{name}}" in arrays]
    feeds = {{name: arrays[f"{{case}} in {{name}}"] for name in names}}
    got = session.run(feeds)
    for name, array in got.items():
        want = arrays[f"{{case}} out {{name}}"]
        near = {{2: 1e-2, 4: 1e-4, 8: 1e-9}}.get(array.dtype.itemsize)
        same = array.shape == want.shape and array.dtype == want.dtype and (
            np.allclose(array, want, rtol=near, atol=near) if array.dtype.kind == "f" else (array == want).all())
        print(f"{{case}} rows, {{name}}:", "same" if same else "DIFFERENT")
        if not same:
            print("got", array, "expected", want, sep="\\n")
    if session.batching.batchable:
        for row in range(case):
            alone = {{name: array[row : row + 1] if name in session.inputs else array for name, array in feeds.items()}}
            alone = session.run(alone)
            for name, array in alone.items():
                if array.shape != got[name][row : row + 1].shape or not np.allclose(
                    array.astype(float), got[name][row : row + 1].astype(float), rtol=1e-3, atol=1e-3, equal_nan=True):
                    print(f"row {{row}} of {{case}}, {{name}}: ANOTHER VALUE ALONE", array.ravel()[:8],
                          got[name][row].ravel()[:8])
'''


def script(
    seed: int, model: onnx.ModelProto, cases: Sequence[Case], config: Config, target: str, kind: str, text: str
) -> str:
    """The Python source of the script, which does not import the tests."""
    arrays = {}
    for case in cases:
        arrays.update({f"{case.rows} in {name}": array for name, array in case.feeds.items()})
        arrays.update({f"{case.rows} out {name}": array for name, array in case.expected.items()})
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    settings = []
    if config.forced:
        settings.append(
            "from lathe.core.runtime.host import executable\n"
            "executable._ONE_THREAD_BELOW = executable._ONE_THREAD_BELOW_WHEN_AWAKE = 0"
        )
    if config.cache is not None:
        settings.append(f"lathe.core.runtime.host.chunks._CACHE_BYTES = {config.cache}")
    printed = onnx.printer.to_text(model).replace("\\", "\\\\").replace('"""', "'''")
    said = text.strip()[:800].replace("\\", "\\\\").replace('"""', "'''")
    return _TEMPLATE.format(
        kind=kind, text=said, seed=seed, printed=printed[:6000],
        target=f'os.environ["LATHE_TARGET"] = "{target}"\n' if target else "",
        settings="\n".join(["", *settings, ""]), model=_packed(model.SerializeToString()),
        cases=_packed(buffer.getvalue()), threads=config.threads, max_batch=config.max_batch, optimize=config.optimize,
        winograd=config.winograd, packing=config.packing, rows=[case.rows for case in cases],
    )  # fmt: skip


def _packed(data: bytes) -> str:
    text = base64.b64encode(zlib.compress(data, 9)).decode()
    return "\n".join(text[at : at + 110] for at in range(0, len(text), 110))
