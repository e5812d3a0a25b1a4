"""Custom operators of a server: known to the processes that parse and compile, and to the one that answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import core
from core import custom
from core.errors import UnsupportedError
from server.children import Children, Limits
from server.errors import Unprocessable
from server.repository.artifacts import compiler_now

MODULE = """
import core
from core.custom import Elementwise

@core.register_op("com.example.served")
class Thrice(Elementwise):
    def reference(self, c, x):
        return x * x.dtype.type(3)

    def scalar(self, e, c, x):
        return e.mul(x, 3.0)
"""


def model() -> bytes:
    node = helper.make_node("Thrice", ["x"], ["y"], domain="com.example.served")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.example.served", 1)]
    made = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=versions, ir_version=10)
    return bytes(made.SerializeToString())


def test_uploads_may_use_operators_of_the_servers_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thrice_of_a_test.py").write_text(MODULE)
    (tmp_path / "model.onnx").write_bytes(model())
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(core.__file__).parents[1]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(custom.MODULES, "")
    plain = compiler_now()

    async def compiled() -> None:
        children = Children(Limits(60, 1 << 30))
        await children.run("parse", tmp_path / "model.onnx", tmp_path / "ir")
        await children.run("compile", tmp_path / "ir", tmp_path / "out", "--threads", "1", "--tune", "off")

    with pytest.raises(Unprocessable, match="Thrice"):
        asyncio.run(compiled())
    custom.load_operators("thrice_of_a_test")
    asyncio.run(compiled())
    assert compiler_now() != plain  # what was compiled without them, or with others, is not taken for this
    with core.load_compiled(tmp_path / "out" / "model.lathe") as session:
        got = session.run({"x": np.ones((2, 4), np.float32)})
    np.testing.assert_array_equal(got["y"], np.full((2, 4), 3, np.float32))


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"operators of module 'nobody\.has_this'"):
        custom.load_operators("nobody.has_this")
