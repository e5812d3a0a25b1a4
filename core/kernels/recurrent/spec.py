"""The steps of recurrent layers: `RecurrentSteps` of float32 with constant weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import Dim, DType, TensorType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, Scratch
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, traffic

F32 = DType.FLOAT32
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULTS = {"RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")}
# ONNX's names of activations that are operators too -> the operator, and its attributes for alpha and beta.
_OPERATORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "relu": ("Relu", ()), "tanh": ("Tanh", ()), "sigmoid": ("Sigmoid", ()), "softsign": ("Softsign", ()),
    "softplus": ("Softplus", ()), "hardsigmoid": ("HardSigmoid", ("alpha", "beta")),
    "leakyrelu": ("LeakyRelu", ("alpha",)), "elu": ("Elu", ("alpha",)),
}  # fmt: skip
_HEIGHT, _LOW = 8, 4  # rows of a tile with 32 registers, and with fewer
_BLOCK = 32  # rows that a task runs through time: their state and sums stay in the first-level cache


@dataclass(frozen=True)
class Recurrence(KernelSpec):
    """`steps` time steps of the rows of a batch with `hidden` units.

    `backwards` has an item for each direction: whether it runs from the last time to the first. `activations` has a
    body for each activation of a direction.

    The operands are G (the input's contributions to the gates, [steps, batch, directions * gates * hidden]), packed
    weights, then bias, lengths, initial h, initial c and peepholes as far as they are present, Y, the final h, an
    LSTM's final c, and scratch. `stages` are groups of gates whose products must be complete before the cell can
    continue.
    """

    family: ClassVar[str] = "recurrent"
    generator: ClassVar[str] = "recurrent.cpu"
    cuda_generator: ClassVar[str] = "recurrent.cuda"
    cell: str
    steps: Dim
    batch: Dim
    hidden: int
    backwards: tuple[bool, ...]
    activations: tuple[Graph, ...]
    clip: float | None
    linear_before_reset: bool
    input_forget: bool
    bias: bool
    lengths: bool
    initial: tuple[bool, bool]  # h, c
    peepholes: bool

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        return stages_of(self.cell, self.linear_before_reset)

    @property
    def gates(self) -> int:
        return GATES[self.cell]


@dataclass(frozen=True)
class RecurrentSpec(Recurrence):
    """The CPU kernel, with one packed weight per stage.

    A register tile computes as many gates of a stage at once as fit the registers.
    """

    lanes: int
    height: int  # rows of a tile
    registers: int

    def width(self, stage: int, rows: int) -> int:
        """The number of gates of a stage that a tile of `rows` rows computes at once: a divisor of their number.

        Accumulators and a line of weights must fit the registers.
        """
        count = len(self.stages[stage])
        return next(
            w for w in range(count, 0, -1) if count % w == 0 and (rows + 1) * w <= max(self.registers, rows + 1)
        )

    @property
    def blocks(self) -> int:
        """The number of vectors that hold all units of a row."""
        return -(-self.hidden // self.lanes)

    @property
    def pitch(self) -> int:
        """Elements between rows of state: whole vectors and a further vector.

        Without that, rows a power of two apart would share cache sets.
        """
        return (self.blocks + 1) * self.lanes

    @property
    def block(self) -> int:
        """The most rows per task."""
        return _BLOCK // self.height * self.height

    @property
    def buffers(self) -> int:
        """The number of state buffers of a block.

        Two for the hidden state before and after a step, and further ones for an LSTM's cell, or a GRU's update gate
        and reset state.
        """
        return 2 + {"RNN": 0, "GRU": 0 if self.linear_before_reset else 2, "LSTM": 1}[self.cell]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the state buffers and of the sums of a vector of units."""
        widest = max(map(len, self.stages))
        return (self.buffers * self.pitch + widest * self.lanes) * self.block * F32.itemsize

    @property
    def summary(self) -> str:
        rows = f"{self.height} rows, {self.lanes} of {self.hidden} units"
        return f"{self.cell.lower()} steps of {rows}, {len(self.backwards)} direction(s)"


def stages_of(cell: str, linear_before_reset: bool) -> tuple[tuple[int, ...], ...]:
    """The stages of a cell, each a tuple of the indices of its gates.

    All gates form one stage, but a GRU that resets the state before the product has its third gate in a second stage.
    """
    if cell == "GRU" and not linear_before_reset:
        return ((0, 1), (2,))
    return (tuple(range(GATES[cell])),)


def recurrent(request: Request) -> KernelCall | None:
    """Selector of RecurrentSteps (RNN, GRU and LSTM) of float32 with constant weights R.

    None for other nodes, if generated code cannot compute a dimension, and for activations that no kernel computes, or
    that differ by direction: see `recurrence_of`.
    """
    facts = recurrence_of(request)
    if facts is None:
        return None
    lanes = request.cpu.lanes
    spec = RecurrentSpec(
        **facts.facts,
        lanes=lanes,
        height=_HEIGHT if request.cpu.registers >= 32 else _LOW,
        registers=request.cpu.registers,
    )
    weights = [
        Packed(1, f"gates{stage}x{lanes}", partial(_pack, cell=spec.cell, stage=stage, lanes=lanes))
        for stage in spec.stages
    ]
    return call_of(request, spec, weights, Scratch(spec.scratch_bytes))


def call_of(request: Request, spec: Recurrence, weights: Sequence[Operand], scratch: Scratch) -> KernelCall:
    """The call of `spec`, with the operands, cost and traffic that are the same on all devices.

    `weights` are the operands of the packed recurrent weights.
    """
    node, gates = request.node, request.node.required_input(0)
    operands: list[Operand] = [
        In(0),
        *weights,
        *(In(i) for i in range(2, 7) if node.input(i) is not None),
        *(Out(i) for i in range(len(node.outputs))),
        scratch,
    ]
    return KernelCall(spec, tuple(operands), flops=product(gates.shape) * (2 * spec.hidden), bytes=traffic(node))


def recurrence_of(request: Request) -> Recurrence | None:
    """A spec with the fields that the specs of all devices share, for a node RecurrentSteps.

    None for weights that are not constant, types other than float32, activations that are not operators, directions
    with different activations, and activation parameters for two directions or without `activations`.
    """
    node = request.node
    r, activations = request.constant(1), _activations(node)
    floats = [value for i, value in enumerate(node.inputs) if value is not None and i != 3]
    if r is None or activations is None or not has_plannable_types(node) or any(v.dtype is not F32 for v in floats):
        return None
    gates = node.required_input(0)
    present = [i for i in range(2, 7) if node.input(i) is not None]
    return Recurrence(
        cell=str(attribute(node, "cell")),
        steps=gates.shape[0],
        batch=gates.shape[1],
        hidden=r.shape[2],
        backwards={"forward": (False,), "reverse": (True,)}.get(str(attribute(node, "direction")), (False, True)),
        activations=activations,
        clip=attribute(node, "clip"),
        linear_before_reset=bool(attribute(node, "linear_before_reset")),
        input_forget=bool(attribute(node, "input_forget")),
        bias=2 in present,
        lengths=3 in present,
        initial=(4 in present, 5 in present),
        peepholes=6 in present,
    )


def _pack(r: Array, cell: str, stage: tuple[int, ...], lanes: int) -> Array:
    """[D, G*H, H] as panels [D, units/lanes, H, gates of the stage, lanes]."""
    directions, _, hidden = r.shape
    blocks = -(-hidden // lanes)
    padded = np.zeros((directions, GATES[cell], blocks * lanes, hidden), r.dtype)
    padded[:, :, :hidden] = r.reshape(directions, GATES[cell], hidden, hidden)
    chosen = padded[:, list(stage)].reshape(directions, len(stage), blocks, lanes, hidden)
    return np.ascontiguousarray(chosen.transpose(0, 2, 4, 1, 3)).reshape(-1)


def _activations(node: Node) -> tuple[Graph, ...] | None:
    """One body per activation of a direction.

    None if an activation is no operator with a kernel, directions have different ones, or parameters are given for two
    directions or without `activations`.
    """
    cell = str(attribute(node, "cell"))
    count = len(_DEFAULTS[cell])
    names = [str(name).lower() for name in attribute(node, "activations") or ()] or list(_DEFAULTS[cell]) * 2
    given = [list(attribute(node, f"activation_{name}") or ()) for name in ("alpha", "beta")]
    if any(given) and len(names) > count:
        return None  # parameters belong to the activations of both directions in turn, so the directions would differ
    if any(name not in _OPERATORS for name in names) or (
        len(names) > count and names[:count] != names[count : 2 * count]
    ):
        return None
    return tuple(_body(name, *given) for name in names[:count])


def _body(name: str, alphas: list[float], betas: list[float]) -> Graph:
    """A body with the activation `name` as its single node.

    Its parameters are the first items of `alphas` and `betas`, if it has them; they are removed from the lists.
    """
    operator, parameters = _OPERATORS[name]
    left = {"alpha": alphas, "beta": betas}
    attrs: dict[str, Attr] = {parameter: left[parameter].pop(0) for parameter in parameters if left[parameter]}
    scalar = TensorType(F32, ())
    x = Value("x0", scalar)
    node = Node(operator, [x], [], attrs)
    node.outputs = [Value("t0", scalar, node)]
    return bodies.canonical(Graph("body", [x], [node.output], [node]), {})
