"""The training step as one graph: forward, loss, backward and update; parameters and moments are its state."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from core.autodiff import derivatives
from core.errors import ModelError
from core.ir.graph import Array, Graph, State, Value
from core.ir.types import Dim, DType, TensorType
from core.ops import registry
from core.ops.backward import Rewrite
from core.ops.inference import infer_graph
from core.ops.terms import Term, Writer
from core.train import noise
from core.train.losses import Loss
from core.train.optimizers import Optimizer
from core.train.scaling import LossScaling, Scaler

Trainable: TypeAlias = Callable[[str, Array], bool]

TARGET, LOSS = "target", "loss"
SCALAR = "optimizer."  # begins the names of the inputs that an optimizer asks for
KEY = "random.key"  # uint32, rank 0: what is drawn in a run is a function of it


@dataclass(frozen=True)
class Clip:
    """Bounds of gradients: `norm` of all of them together, as PyTorch's clip_grad_norm_, then `value` of each one."""

    norm: float | None = None
    value: float | None = None


NO_CLIP = Clip()


@dataclass(frozen=True)
class StepSettings:
    """What a training step does besides running the model. `accumulate`: how many runs make one update. `average`: how
    much of a parameter's running average stays at each update; None: there is none. `seed`: of what is drawn.
    `scaling`: of the loss, so that float16 holds its gradients; None: there is none."""

    loss: Loss
    optimizer: Optimizer
    clip: Clip = NO_CLIP
    accumulate: int = 1
    average: float | None = None
    seed: int = 0
    scaling: LossScaling | None = None


def is_weight(name: str, array: Array) -> bool:
    """The parameters by default: constants of real numbers that are no single numbers."""
    return array.ndim > 0 and DType.from_numpy(array.dtype).is_float


def joint_graph(
    model: Graph,
    settings: StepSettings,
    trainable: Trainable,
    updates: bool,
    keep_outputs: bool,
    held: Container[str] = (),
) -> Graph:
    """The step for a model of one output or more, of which the first one goes into the loss.

    Its inputs are the model's, `target`, the optimizer's scalars as `optimizer.<name>`, and `random.key` where numbers
    are drawn; its outputs the `loss`, and with `keep_outputs` the model's, then, where the loss is scaled, what
    `core.train.scaling.Scaler.outputs` says. Without `updates` gradients are only added up. Constants named in `held`
    become state that this step leaves as it is.
    """
    check_inputs(model)
    graph = model.clone()
    graph.defaults.clear()  # constants become state, gradients are computed with their values
    infer_graph(graph)
    _train_mode(graph)
    writer = Writer(graph, infer_graph(graph))
    output = Term(writer, graph.outputs[0])
    target = writer.input(TARGET, settings.loss.target(output.value.tensor))
    loss = settings.loss(output, target)
    parameters = _parameters(graph, trainable)
    scaler = Scaler(writer, settings.scaling) if settings.scaling is not None else None
    found = derivatives(writer, [(scaler.scaled(loss) if scaler else loss).value], parameters)
    graph.outputs = [_named(loss, LOSS), *(_outputs(writer, model) if keep_outputs else ())]
    step = _Step(writer, settings, scaler)
    step.write([(p, g) for p, g in zip(parameters, found, strict=True) if g is not None], updates)
    if scaler is not None:
        graph.outputs += [_named(term, name) for name, term in scaler.outputs.items()]
    hold(graph, held)
    graph.remove_dead()
    return graph


def check_inputs(model: Graph) -> None:
    """ModelError for an input that is called as something of the step's own is."""
    for name in (value.name for value in model.inputs):
        if name in (TARGET, LOSS, KEY) or name.startswith(SCALAR):
            message = f"has an input called '{name}', a name that a training step needs itself"
            raise ModelError(message, where=f"graph '{model.name}'")


def evaluation_graph(model: Graph, loss: Loss, held: Container[str]) -> Graph:
    """The model as it answers, its constants named in `held` as state: outputs are the `loss` and the model's."""
    graph = model.clone()
    graph.defaults.clear()
    infer_graph(graph)
    _define(graph, {"BatchNormalization": _defined, **_RECURRENT})
    writer = Writer(graph, infer_graph(graph))
    output = Term(writer, graph.outputs[0])
    target = writer.input(TARGET, loss.target(output.value.tensor))
    graph.outputs = [_named(loss(output, target), LOSS), *_outputs(writer, model)]
    hold(graph, held)
    graph.remove_dead()
    return graph


def _outputs(writer: Writer, model: Graph) -> list[Value]:
    """The graph's outputs under the model's names, which what was defined anew has lost."""
    pairs = zip(writer.graph.outputs, model.outputs, strict=True)
    return [now if now.name == before.name else _named(writer.term(now), before.name) for now, before in pairs]


def _named(term: Term, name: str) -> Value:
    value = term.op("Identity").value
    value.name = term.writer.fresh(name)
    return value


def hold(graph: Graph, names: Container[str]) -> None:
    """Constants of these names become state that stays as it is until somebody else writes to it."""
    for value in [value for value in graph.constants if value.name in names]:
        graph.states.append(State(value, value, graph.constants.pop(value)))


def _parameters(graph: Graph, trainable: Trainable) -> list[Value]:
    found = [value for value, array in graph.constants.items() if trainable(value.name, array)]
    if not found:
        raise ModelError("has no parameters to train", where=f"graph '{graph.name}'")
    return found


Definer: TypeAlias = Callable[[Rewrite], Sequence[Term]]  # gives what stands for the first outputs of a node


def _train_mode(graph: Graph) -> None:
    """Batch normalization by the batch's own statistics, their running means becoming state; dropout drops."""
    drawn = _Drawn()
    uniform = dict.fromkeys(("RandomUniform", "RandomUniformLike"), drawn.uniform)
    normal = dict.fromkeys(("RandomNormal", "RandomNormalLike"), drawn.normal)
    _define(
        graph, {"BatchNormalization": _normalized_by_batch, "Dropout": drawn.dropout, **uniform, **normal, **_RECURRENT}
    )


def _define(graph: Graph, definers: Mapping[str, Definer]) -> None:
    """Replace operators by what computes them: its parts are compiled, and go along with what surrounds them."""
    writer, replaced = Writer(graph), dict[Value, Value]()
    nodes, graph.nodes = graph.nodes, []
    for node in nodes:
        if node.op in definers:
            terms = definers[node.op](Rewrite(registry.get(node.op), node, writer))
            replaced.update(zip(node.outputs, (term.value for term in terms), strict=False))
        else:
            graph.nodes.append(node)
    graph.replace_uses(replaced)


def _defined(g: Rewrite) -> Sequence[Term]:
    return g.op.definition(g)


# Their kernels want weights that stay as they are, and gradients need what they do not keep: every step's gates.
_RECURRENT: Mapping[str, Definer] = {"RNN": _defined, "GRU": _defined, "LSTM": _defined}


def _normalized_by_batch(g: Rewrite) -> Sequence[Term]:
    g.node.attrs["training_mode"] = 1
    result, *following = g.op.definition(g)
    graph = g.writer.graph
    for value, update in zip(g.node.inputs[3:], following, strict=True):
        if value is None or value not in graph.constants:
            g.fail("has running statistics that are no constants")
        graph.states.append(State(value, update.value, graph.constants.pop(value)))
    return [result]


@dataclass
class _Drawn:
    """What is drawn in a run: by its key, the node's seed (without one, its place among its like), and the element."""

    count: int = 0
    key: Term | None = None

    def dropout(self, g: Rewrite) -> Sequence[Term]:
        (ratio,) = (g.param("ratio") if g.has_param("ratio") else (0.5,)) or (None,)
        if ratio is None or not 0 <= ratio < 1:
            g.fail(f"ratio is {ratio}, expected a constant of at least 0 and below 1")
        x = g.x()
        kept = noise.kept(*self._source(g), x.shape, ratio)
        return [kept.where(x * (1 / (1 - ratio)), 0), kept]

    def uniform(self, g: Rewrite) -> Sequence[Term]:
        shape, dtype = _drawn_type(g)
        low, high = g.attr("low"), g.attr("high")
        return [(noise.uniform(*self._source(g), shape) * (high - low) + low).cast(dtype)]

    def normal(self, g: Rewrite) -> Sequence[Term]:
        shape, dtype = _drawn_type(g)
        return [(noise.normal(*self._source(g), shape) * g.attr("scale") + g.attr("mean")).cast(dtype)]

    def _source(self, g: Rewrite) -> tuple[Writer, Term, int]:
        """Where random numbers come from, and what tells this node's from others."""
        self.count += 1
        self.key = self.key or g.writer.input(KEY, TensorType(DType.UINT32, ()))
        seed = g.attr("seed")
        return g.writer, self.key, self.count if seed is None else int(seed)


def _drawn_type(g: Rewrite) -> tuple[Sequence[Dim], DType]:
    """Shape and element type of what an operator draws."""
    declared = g.node.output.tensor
    return declared.dims, declared.dtype


class _Step:
    """Writes what follows the gradients."""

    def __init__(self, writer: Writer, settings: StepSettings, scaler: Scaler | None) -> None:
        self.writer, self.settings, self.scaler = writer, settings, scaler
        optimizer = settings.optimizer
        names = optimizer.scalars(1, optimizer.rate)
        self.scalars = {name: f"{SCALAR}{name}" for name in names}

    def write(self, pairs: Sequence[tuple[Value, Value]], updates: bool) -> None:
        found = [Term(self.writer, gradient) for _, gradient in pairs]
        slopes = self.scaler.unscaled(found) if self.scaler is not None else found
        statistics = list(self.writer.graph.states)
        parameters = [self._parameter(value) for value, _ in pairs]
        if self.settings.accumulate > 1:
            found = slopes = self._accumulated(parameters, slopes, updates)
        scalar = TensorType(DType.FLOAT32, ())
        scalars = {name: self.writer.input(label, scalar) for name, label in self.scalars.items()}
        fine = self.scaler.are_fine(found) if self.scaler is not None else None
        self._guard(statistics, fine)
        if not updates:
            return
        for state, slope in zip(parameters, self._clipped(slopes), strict=True):
            self._guard(self._update(state, slope, scalars), fine)
        if self.scaler is not None and fine is not None:
            self.scaler.count(fine)

    def _guard(self, moved: Sequence[State], fine: Term | None) -> None:
        if self.scaler is not None and fine is not None:
            self.scaler.guard(fine, moved)

    def _parameter(self, value: Value) -> State:
        """A constant becomes state; until it is updated it stays what it is."""
        graph = self.writer.graph
        state = State(value, value, graph.constants.pop(value))
        graph.states.append(state)
        return state

    def _moment(self, like: State, name: str, initial: Array | None = None) -> State:
        """A new state of a parameter's type, zeros unless an initial value is given."""
        value = Value(self.writer.fresh(f"{like.value.name}.{name}"), like.value.type)
        state = State(value, value, np.zeros_like(like.initial) if initial is None else initial)
        self.writer.graph.states.append(state)
        return state

    def _accumulated(self, parameters: Sequence[State], slopes: Sequence[Term], updates: bool) -> list[Term]:
        """The mean of the gradients of several runs, if this is the last of them."""
        totals = []
        for parameter, slope in zip(parameters, slopes, strict=True):
            state = self._moment(parameter, "gradient_sum")
            total = Term(self.writer, state.value) + slope / self.settings.accumulate
            state.update = self.writer.zeros_like(state.value).value if updates else total.value
            totals.append(total)
        return totals

    def _clipped(self, slopes: Sequence[Term]) -> list[Term]:
        clip, found = self.settings.clip, list(slopes)
        if clip.norm is not None:
            squares = [slope.square().sum(keepdims=False) for slope in found]
            norm = squares[0].op("Sum", *squares[1:]).sqrt()
            factor = (clip.norm / (norm + 1e-6)).op("Min", 1.0)
            found = [slope * factor for slope in found]
        if clip.value is not None:
            found = [slope.op("Max", -clip.value).op("Min", clip.value) for slope in found]
        return found

    def _update(self, parameter: State, slope: Term, scalars: dict[str, Term]) -> list[State]:
        """What has moved: the parameter and all that goes with it."""
        moments = [self._moment(parameter, name) for name in self.settings.optimizer.moments]
        before = [Term(self.writer, moment.value) for moment in moments]
        following, after = self.settings.optimizer.update(Term(self.writer, parameter.value), slope, before, scalars)
        parameter.update = following.value
        for moment, term in zip(moments, after, strict=True):
            moment.update = term.value
        moved = [parameter, *moments]
        if self.settings.average is not None:
            moved.append(self._average(parameter, following, self.settings.average))
        return moved

    def _average(self, parameter: State, following: Term, kept: float) -> State:
        """The running average of a parameter, which begins as the parameter."""
        average = self._moment(parameter, "average", parameter.initial)
        average.update = (Term(self.writer, average.value) * kept + following * (1 - kept)).value
        return average
