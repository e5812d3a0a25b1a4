"""Custom operators of a server: known to the processes that parse and compile, and to the serving one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.compiler import custom_operators
from lathe.core.errors import UnsupportedError
from lathe.server.errors import Unprocessable
from lathe.server.processes.stage_children import Children, Limits
from lathe.server.repository.artifacts import compiler_digest

MODULE = """
import lathe
from lathe.core.compiler.custom_operators import Elementwise

@lathe.register_op("com.example.served")
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


def test_uploads_may_use_the_operators_of_the_servers_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thrice_of_a_test.py").write_text(MODULE)
    (tmp_path / "model.onnx").write_bytes(model())
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(lathe.__file__).parents[1]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(custom_operators.MODULES, "")
    plain = compiler_digest()

    async def compiled() -> None:
        children = Children(Limits(60, 1 << 30))
        await children.run("parse", tmp_path / "model.onnx", tmp_path / "ir")
        await children.run("compile", tmp_path / "ir", tmp_path / "out", "--threads", "1", "--tune", "off")

    with pytest.raises(Unprocessable, match="Thrice"):
        asyncio.run(compiled())
    custom_operators.load_operators("thrice_of_a_test")
    asyncio.run(compiled())
    assert compiler_digest() != plain  # code compiled without the modules, or with others, has another cache key
    with lathe.load_compiled(tmp_path / "out" / "model.lathe") as session:
        got = session.run({"x": np.ones((2, 4), np.float32)})
    np.testing.assert_array_equal(got["y"], np.full((2, 4), 3, np.float32))


def test_child_processes_import_the_modules_of_all_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(custom_operators.MODULES, "")
    for name in ("first_of_a_test", "second_of_a_test"):
        (tmp_path / f"{name}.py").write_text("")
        custom_operators.load_operators(f" {name},")
    custom_operators.load_operators("first_of_a_test")
    assert os.environ[custom_operators.MODULES] == "first_of_a_test,second_of_a_test"


def test_a_missing_module_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"operators of module 'nobody\.has_this'"):
        custom_operators.load_operators("nobody.has_this")
