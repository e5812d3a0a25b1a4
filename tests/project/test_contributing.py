"""The places that CONTRIBUTING.md names for additions exist, and following a row is enough for a working addition."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
PLACES = PAGE.partition("## Where an addition goes\n")[2].partition("\n## ")[0]
ROWS = [line for line in PLACES.splitlines() if line.startswith("| a")]
KINDS = {
    "an operator", "a CPU kernel", "a GPU kernel", "a pass", "an optimizer", "a loss", "a layer", "a dataset format",
    "a management route", "a setting", "a job kind", "a metric of requests", "another metric", "a CLI command",
    "a load scenario",
}  # fmt: skip

OPERATOR = '''
"""Three times a tensor."""

import numpy as np

from lathe.core.ops.opdef.registry import Call, Infer, OpDef, register
from lathe.core.ops.opdef.type_rules import FLOAT, check_kind


@register
class Triple(OpDef):
    inputs = "x"
    outputs = "y"
    domain = "lathe"
    no_gradient = "an example"

    def infer(self, c: Infer):
        check_kind(c, 0, FLOAT)
        return [c.tensor(0)]

    def reference(self, c: Call, x: np.ndarray) -> np.ndarray:
        return x * x.dtype.type(3)
'''
SPEC = '''
"""Three times a row."""

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.nest import has_plannable_types, traffic


@dataclass(frozen=True)
class TripleSpec(KernelSpec):
    family: ClassVar[str] = "triple"
    generator: ClassVar[str] = "triple.cpu"
    rows: Dim
    length: Dim


def triple(request: Request) -> KernelCall | None:
    node = request.node
    if not has_plannable_types(node) or node.output.dtype is not DType.FLOAT32 or len(node.output.shape) != 2:
        return None
    return KernelCall(TripleSpec(*node.output.shape), (In(0), Out()), bytes=traffic(node))
'''
GENERATOR = '''
"""Rows are shared out between threads; a row is vectors and a tail."""

from lathe.core.codegen.lang import Kernel
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import for_each_vector, even_chunks, has_masks
from lathe.core.kernels.target import Target
from lathe.core.kernels.triple.spec import TripleSpec


def generate(spec: TripleSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y, length = k.operand(0, DType.FLOAT32), k.operand(1, DType.FLOAT32), k.dim(spec.length)
    three = k.constant(3.0, DType.FLOAT32)
    with even_chunks(k, k.dim(spec.rows), k.index(64)) as (start, stop), k.loop(start, stop) as row:
        source, result = x.at(row * length), y.at(row * length)

        def write(i, lanes, mask):
            result.store(source.load(i, lanes, mask) * three, i, mask)

        for_each_vector(k, length, write, k.lanes, has_masks(target, [4]))
    return k
'''
PASS = '''
"""Neg of Neg is the value itself."""

from dataclasses import dataclass

from lathe.core.ir.graph import Graph
from lathe.core.passes.rewrite.base import PassResult
from lathe.core.passes.rewrite.editor import Editor


@dataclass(frozen=True)
class DropDoubleNegation:
    name: str = "drop_double_negation"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            before = node.inputs[0].producer if node.op == "Neg" else None
            if before is not None and before.op == "Neg" and not editor.is_output(node.output):
                editor.replace(node.output, before.inputs[0])
        return editor.finish()
'''
RUN_OPERATOR = """
import numpy as np
import lathe
from lathe.core.ir.text import parse_graph

graph = parse_graph("graph @g {\\n  input %x : float32[n,37]\\n  %y : float32[n,37] = Triple(%x)\\n  output %y\\n}")
x = np.random.default_rng(0).standard_normal((5, 37)).astype(np.float32)
(expected,) = lathe.interpret(graph, {"x": x}).values()
session = lathe.compile(graph, threads=1)
assert (session.run({"x": x})["y"] == expected).all() and (expected == x * np.float32(3)).all()
explained = str(session.explain())
assert "triple" in explained, explained
"""
RUN_PASS = """
import lathe
from lathe.core.ir.text import parse_graph
from lathe.core.passes.pipeline import optimize

text = "  %a : float32[n] = Neg(%x)\\n  %b : float32[n] = Neg(%a)\\n  %y : float32[n] = Relu(%b)\\n"
graph, reports = optimize(parse_graph("graph @g {\\n  input %x : float32[n]\\n" + text + "  output %y\\n}"))
assert [node.op for node in graph.nodes] == ["Relu"], graph
assert next(report for report in reports if report.name == "drop_double_negation").changed
"""
RUN_SETTING = """
import os
os.environ["LATHE_GREETING"] = "good day"
from lathe.server.settings import Settings
from tools.make_docs import configuration

assert Settings().greeting == "good day"
assert "| `LATHE_GREETING` | `hello` | What the server says first. |" in configuration()
"""


def test_every_kind_of_addition_has_a_row() -> None:
    named = {row.split(" | ")[0].removeprefix("| ") for row in ROWS}
    assert named >= KINDS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split(" | ")[0].removeprefix("| "))
def test_the_places_of_a_row_exist(project: Path, row: str) -> None:
    paths = re.findall(r"`((?:[\w.<>*-]+/)+[\w.<>*-]*|[\w-]+\.(?:md|toml))`(?: \(((?:`\w+`,? ?)+)[^)]*\))?", row)
    assert paths
    for path, names in paths:
        assert found(project, path), f"{path} does not exist"
        for name in re.findall(r"`(\w+)`", names):
            text = (project / path).read_text()
            assert re.search(rf"^(?:    )?(?:(?:async )?def |class )?{name}\b", text, re.MULTILINE), f"{path}: {name}"


def found(project: Path, path: str) -> bool:
    """Whether a file of this pattern exists; `<name>` stands for any name."""
    return any(True for _ in project.glob(re.sub(r"<\w+>", "*", path.rstrip("/"))))


def test_every_make_target_is_in_the_table(project: Path) -> None:
    """The names in the page equal the Makefile's phony targets, which are the ones that people type."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (project / "Makefile").read_text(), re.MULTILINE)
    table = PAGE.partition("## Make targets\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `make ([a-z0-9-]+)` \|", table, re.MULTILINE)) == sorted(phony.split())


def test_what_continuous_integration_runs_is_in_the_page(project: Path) -> None:
    ran = re.findall(r"^make ([a-z0-9-]+)$", (project / ".ci/run").read_text(), re.MULTILINE)
    sentence = PAGE.partition("Continuous integration runs `.ci/run`")[2].partition("\n\n")[0]
    assert re.findall(r"`make ([a-z0-9-]+)`", sentence) == ran


class Checkout:
    """A copy of the product that a contributor extends."""

    def __init__(self, project: Path, folder: Path) -> None:
        self.folder = folder
        for name in ("core", "lathe"):
            shutil.copytree(project / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tools", "tests"):
            (folder / name).symlink_to(project / name)
        shutil.copytree(project / "server", folder / "server", ignore=shutil.ignore_patterns("__pycache__"))

    def write(self, path: str, text: str) -> None:
        """Write a new file; a new folder becomes a package."""
        file = self.folder / path
        if not file.parent.exists():
            file.parent.mkdir()
            (file.parent / "__init__.py").touch()
        file.write_text(text)

    def insert(self, path: str, before: str, line: str) -> None:
        """Insert a line before the first line that begins with `before`."""
        text = (self.folder / path).read_text()
        changed = re.sub(rf"^(?=\s*{re.escape(before)})", line + "\n", text, count=1, flags=re.MULTILINE)
        assert changed != text, f"{path} has no line {before}"
        (self.folder / path).write_text(changed)

    def run(self, script: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "LATHE_CACHE_DIR": str(self.folder / "cache")}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def checkout(project: Path, tmp_path: Path) -> Checkout:
    return Checkout(project, tmp_path)


def test_the_rows_of_an_operator_and_of_a_kernel_are_enough(checkout: Checkout) -> None:
    checkout.write("core/ops/tensor/triple.py", OPERATOR)
    checkout.insert("core/ops/__init__.py", "set_inference(", "from lathe.core.ops.tensor import triple  # noqa: F401")
    checkout.write("core/kernels/triple/spec.py", SPEC)
    checkout.write("core/kernels/triple/cpu.py", GENERATOR)
    checkout.insert("core/kernels/kernel_table.py", "_PRODUCT =", "from lathe.core.kernels.triple.spec import triple")
    checkout.insert("core/kernels/kernel_table.py", '"PooledConv":', '    "Triple": Row((triple,)),')
    checkout.run(RUN_OPERATOR)


def test_the_row_of_a_pass_is_enough(checkout: Checkout) -> None:
    checkout.write("core/passes/simplify/drop_double_negation.py", PASS)
    module = "lathe.core.passes.simplify.drop_double_negation"
    checkout.insert("core/passes/pipeline.py", "@dataclass", f"from {module} import DropDoubleNegation")
    checkout.insert("core/passes/pipeline.py", "SimplifyLoops(),", "        DropDoubleNegation(),")
    checkout.run(RUN_PASS)


def test_the_row_of_a_setting_is_enough(checkout: Checkout) -> None:
    field = '    greeting: str = Field("hello", description="What the server says first.")'
    checkout.insert("server/settings.py", "host: str =", field)
    checkout.run(RUN_SETTING)
