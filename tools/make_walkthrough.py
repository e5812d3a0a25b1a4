"""Writes docs/walkthrough.md: one small model at every stage of the compiler, as the compiler prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from lathe import load
from lathe.core.codegen.jit import assembly_of
from lathe.core.compiler import symbol_binding
from lathe.core.compiler.description import describe
from lathe.core.compiler.options import Options
from lathe.core.ir.graph import Graph
from lathe.core.kernels.choose import select
from lathe.core.kernels.cpu import generate
from lathe.core.kernels.target import Target
from lathe.core.passes.pipeline import Options as PassOptions
from lathe.core.passes.pipeline import optimize
from lathe.core.plan.plan import ARENA, WEIGHTS, Address, Plan, PlannedGraph
from lathe.core.plan.planner import make_plan

WALKTHROUGH = Path("docs/walkthrough.md")
# A fixed target, so that the page is the same on every machine.
TARGET = Target("avx2", "x86_64-unknown-linux-gnu", "x86-64-v3", "", vector_bytes=32, registers=16)
_HEAD, _LOOP = 12, 19  # printed lines of a kernel's beginning, and of its innermost loop

PAGE = """\
# One model, stage by stage

<!-- Written by `make docs` (tools/make_walkthrough.py) from the compiler's own output; a test holds it true. -->

This page follows a dense layer with a Relu and a Softmax from ONNX to machine code. The listings come from the
compiler. For your own models, `print(graph)` prints the graph, and `print(session.explain())` the passes and the
kernels.

## 1. Imported

The importer turns the file into a graph. Every operator is in its newest form, and every value has a type. `batch` is a
symbol. The elements of large weights are not printed.

```
{imported}
```

## 2. Bound

`lathe.core.compiler.symbol_binding.bind` renames the leading symbol to `n`, an argument of the generated code. Each
other symbol would become a number, or a size that the code reads at each run from a table of sizes. The line of the
input is now:

```
{bound}
```

## 3. After the passes

The passes that changed the graph:

```
{passes}
```

`Gemm` and `Relu` have become one `FusedMatMul`. The bias and the Relu are its epilogue: a graph of scalars, which the
kernel applies to the sums while they are in registers.

```
{optimized}
```

## 4. The plan

This plan has a kernel for each node, in order, and an address for each operand. An address is a base (`arena`,
`weights`, an input or an output) and an offset `a*n + b` in bytes; an offset of 0 is not printed. Only the bases and
`n` are open until the model runs.

```
{plan}
```

## 5. One kernel as LLVM assembly

The first kernel has {lines} lines, because register tiles are unrolled. Its arguments are the table of operand
addresses, `n`, the index of the thread, the number of threads, and the counter from which threads take tasks. It
begins:

```llvm
{head}
```

An iteration of the innermost loop of its largest tile does several steps. A step takes one element of each of {rows}
rows of `x`, broadcasts it to the {lanes} lanes of a register, and multiplies it by {lanes} weights. The loop begins:

```llvm
{loop}
```

## 6. The same loop as machine code

In LLVM's code for `{cpu}`, a step is a broadcast and a fused multiply-add for each row. The weights of some steps
are loaded ahead. The sums stay in registers, except that LLVM puts one of them on the stack between some steps.

```asm
{machine}
```

The object file of every kernel goes into the cache (by default `~/.cache/lathe`), if that folder can be used. The key
of an object file is a digest of the kernel's parameters, the target, the source of `core/codegen`, `core/kernels` and
`core/ops`, and the version of LLVM.
`core/codegen/jit.py` links the object files, and `core/runtime/host/executable.py` runs the plan.
"""


def walkthrough() -> str:
    """The text of docs/walkthrough.md."""
    graph = load(model())
    bound = symbol_binding.bind(graph, describe(graph, Options()).batching, ())
    optimized, reports = optimize(bound, PassOptions())
    planned = make_plan(optimized, TARGET, 1, select)
    spec = planned.specs[planned.plan.steps[0].symbol]
    kernel = generate(spec, TARGET)
    text, machine = kernel.finish().splitlines(), assembly_of(kernel).expandtabs(8).splitlines()
    tile = spec.tile  # type: ignore[attr-defined]  # the first step is a product
    return PAGE.format(
        imported=printed(graph),
        bound=next(line for line in str(bound).splitlines() if "input" in line),
        passes="\n".join(report.line for report in reports if report.changed),
        optimized=printed(optimized),
        plan="\n".join(plan_lines(planned)),
        lines=len(text),
        rows=tile.rows,
        lanes=tile.lanes,
        head="\n".join(text[:_HEAD]),
        loop="\n".join(innermost(text, "llvm.fma", ":")[:_LOOP]),
        cpu=TARGET.cpu,
        machine="\n".join(innermost(machine, "vfmadd", ":")[:_LOOP]),
    )


def model() -> bytes:
    """softmax(relu(x @ w + b)) of sixteen inputs and eight outputs."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((16, 8)).astype(np.float32), "w"),
        numpy_helper.from_array(np.arange(8, dtype=np.float32) / 8, "b"),
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["sums"], name="dense"),
        helper.make_node("Relu", ["sums"], ["hidden"], name="relu"),
        helper.make_node("Softmax", ["hidden"], ["y"], axis=1, name="classes"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])
    graph = helper.make_graph(nodes, "tiny", [x], [y], weights)
    return bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def printed(graph: Graph) -> str:
    return str(graph).strip()


def plan_lines(planned: PlannedGraph) -> Iterator[str]:
    plan = planned.plan
    for step in plan.steps:
        yield f"{step.op} '{step.label}': {step.summary}"
        yield f"  {planned.specs[step.symbol].symbol}"
        yield "  " + ", ".join(place(plan, address) for address in step.operands)
    yield f"memory: {plan.memory}"


def place(plan: Plan, address: Address) -> str:
    """An address as text: `arena + 32*n + 64`."""
    ports = (*plan.inputs, *plan.states, *plan.outputs)
    names = {ARENA: "arena", WEIGHTS: "weights", **{port.base: f"%{port.name}" for port in ports}}
    slope, constant = address.offset.a, address.offset.b
    parts = [names[address.base], f"{slope}*n" if slope else "", str(constant) if constant else ""]
    return " + ".join(filter(None, parts))


def innermost(lines: list[str], wanted: str, label: str) -> list[str]:
    """The lines from the first block that contains `wanted` on, with its label: a line that ends with `label`."""
    first = next(index for index, line in enumerate(lines) if wanted in line and not line.startswith("declare"))
    start = max(index for index in range(first) if lines[index].rstrip().endswith(label))
    return lines[start:]


def main() -> None:
    WALKTHROUGH.write_text(walkthrough())
