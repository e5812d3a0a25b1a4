"""The training step as one graph: forward pass, loss, backward pass, update. Parameters and moments are its state."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lathe.core.autodiff import derivatives
from lathe.core.errors import ModelError
from lathe.core.ir.graph import Array, Graph, State, Value
from lathe.core.ir.types import Dim, DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.train.training_step import random_numbers
from lathe.core.train.training_step.loss_scaling import LossScaling, Scaler
from lathe.core.train.training_step.losses import Loss
from lathe.core.train.training_step.optimizers import Optimizer

Trainable: TypeAlias = Callable[[str, Array], bool]

TARGET, LOSS = "target", "loss"
SCALAR_PREFIX = "optimizer."  # prefix of the inputs that carry the optimizer's scalars
RANDOM_KEY = "random.key"  # uint32, rank 0: the key of all random numbers in a run


@dataclass(frozen=True)
class Clip:
    """Gradient clipping: first all gradients to a common L2 norm of at most `norm` (PyTorch's clip_grad_norm_).

    Then each number to the range from -`value` to `value`. None switches either one off.
    """

    norm: float | None = None
    value: float | None = None


NO_CLIP = Clip()


@dataclass(frozen=True)
class StepSettings:
    """The parts of a training step besides the model.

    `accumulate` is the number of runs per update. `average` is the decay of the running averages of the parameters,
    None for no averages. `seed` is the seed of random operators. `scaling` scales the loss so that gradients fit in
    float16, None for no scaling.
    """

    loss: Loss
    optimizer: Optimizer
    clip: Clip = NO_CLIP
    accumulate: int = 1
    average: float | None = None
    seed: int = 0
    scaling: LossScaling | None = None


def is_weight(name: str, array: Array) -> bool:
    """The default choice of parameters: floating-point constants of rank 1 or more."""
    return array.ndim > 0 and DType.from_numpy(array.dtype).is_float


def training_step_graph(
    model: Graph,
    settings: StepSettings,
    trainable: Trainable,
    updates: bool,
    keep_outputs: bool,
    held: Container[str] = (),
) -> Graph:
    """The graph of a training step. The loss takes the first output of the model.

    The parameters are the constants for which `trainable(name, array)` is true. Inputs: the model's, `target`, the
    optimizer's scalars as `optimizer.<name>`, and `random.key` if an operator draws random numbers. Outputs: the
    `loss`, the model's outputs with `keep_outputs`, then with loss scaling those of `loss_scaling.Scaler.outputs`.
    Without `updates` the step only accumulates gradients. Constants named in `held` become state that this step does
    not change.

    ModelError if the model has no parameters, or an input with one of the names above. UnsupportedError if it cannot
    be differentiated.
    """
    check_input_names(model)
    graph = model.clone()
    graph.defaults.clear()  # a run of the step cannot replace constants: they become state
    infer_graph(graph)
    _set_training_mode(graph)
    writer = Writer(graph, infer_graph(graph))
    output = Term(writer, graph.outputs[0])
    target = writer.input(TARGET, settings.loss.target(output.value.tensor))
    parameters = _parameters(graph, trainable)  # before the loss, which may bring constants of its own
    loss = settings.loss(output, target)
    scaler = Scaler(writer, settings.scaling) if settings.scaling is not None else None
    gradients = derivatives(writer, [(scaler.scale_loss(loss) if scaler else loss).value], parameters)
    graph.outputs = [_name_output(loss, LOSS), *(_outputs(writer, model) if keep_outputs else ())]
    step = _UpdateWriter(writer, settings, scaler)
    step.write([(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None], updates)
    if scaler is not None:
        graph.outputs += [_name_output(term, name) for name, term in scaler.outputs.items()]
    constants_to_state(graph, held)
    graph.remove_dead()
    return graph


def check_input_names(model: Graph) -> None:
    """ModelError if an input of the model has a name that the training step uses itself."""
    for name in (value.name for value in model.inputs):
        if name in (TARGET, LOSS, RANDOM_KEY) or name.startswith(SCALAR_PREFIX):
            message = f"has an input '{name}', a name that training steps reserve"
            raise ModelError(message, where=f"graph '{model.name}'")


def evaluation_graph(model: Graph, loss: Loss, held: Container[str]) -> Graph:
    """The graph that evaluates the model: outputs are the `loss` and the model's.

    Inputs are the model's and `target`. Constants named in `held` are state. Unlike in `training_step_graph`, batch
    normalization uses its running statistics, and dropout does nothing.
    """
    graph = model.clone()
    graph.defaults.clear()
    infer_graph(graph)
    _define(graph, {"BatchNormalization": _definition, **_RECURRENT})
    writer = Writer(graph, infer_graph(graph))
    output = Term(writer, graph.outputs[0])
    target = writer.input(TARGET, loss.target(output.value.tensor))
    graph.outputs = [_name_output(loss(output, target), LOSS), *_outputs(writer, model)]
    constants_to_state(graph, held)
    graph.remove_dead()
    return graph


def _outputs(writer: Writer, model: Graph) -> list[Value]:
    """The graph's outputs under the model's names: nodes that `_define` replaced have outputs of other names."""
    pairs = zip(writer.graph.outputs, model.outputs, strict=True)
    return [now if now.name == before.name else _name_output(writer.term(now), before.name) for now, before in pairs]


def _name_output(term: Term, name: str) -> Value:
    value = term.op("Identity").value
    value.name = term.writer.fresh(name)
    return value


def constants_to_state(graph: Graph, names: Container[str]) -> None:
    """Turn the constants of these names into state that the graph reads and does not change."""
    for value in [value for value in graph.constants if value.name in names]:
        graph.states.append(State(value, value, graph.constants.pop(value)))


def _parameters(graph: Graph, trainable: Trainable) -> list[Value]:
    parameters = [value for value, array in graph.constants.items() if trainable(value.name, array)]
    if not parameters:
        raise ModelError("has no parameters to train", where=f"graph '{graph.name}'")
    return parameters


Definer: TypeAlias = Callable[[Rewrite], Sequence[Term]]  # writes the replacement of a node's first outputs


def _set_training_mode(graph: Graph) -> None:
    """Switch the graph to training mode.

    Batch normalization uses the statistics of the batch, and its running statistics become state. Dropout is active.
    Random operators draw from the key of the run. ModelError for running statistics that are not constant, and for a
    dropout ratio that is not constant or not from 0 to below 1.
    """
    random = _RandomOperators()
    uniform = dict.fromkeys(("RandomUniform", "RandomUniformLike"), random.uniform)
    normal = dict.fromkeys(("RandomNormal", "RandomNormalLike"), random.normal)
    _define(
        graph,
        {"BatchNormalization": _batch_normalization, "Dropout": random.dropout, **uniform, **normal, **_RECURRENT},
    )


def _define(graph: Graph, definers: Mapping[str, Definer]) -> None:
    """Replace nodes by the subgraphs that `definers` write, by operator, so that passes can fuse their parts."""
    writer, replaced = Writer(graph), dict[Value, Value]()
    nodes, graph.nodes = graph.nodes, []
    for node in nodes:
        if node.op in definers:
            terms = definers[node.op](Rewrite(registry.get(node.op), node, writer))
            replaced.update(zip(node.outputs, (term.value for term in terms), strict=False))
        else:
            graph.nodes.append(node)
    graph.replace_uses(replaced)


def _definition(g: Rewrite) -> Sequence[Term]:
    return g.op.definition(g)


# Recurrent kernels need constant weights, and do not store the gates of each time step, which the backward pass needs.
_RECURRENT: Mapping[str, Definer] = {"RNN": _definition, "GRU": _definition, "LSTM": _definition}


def _batch_normalization(g: Rewrite) -> Sequence[Term]:
    g.node.attrs["training_mode"] = 1
    result, *following = g.op.definition(g)
    graph = g.writer.graph
    for value, update in zip(g.node.inputs[3:], following, strict=True):
        if value is None or value not in graph.constants:
            g.fail("has running statistics that are not constant")
        graph.states.append(State(value, update.value, graph.constants.pop(value)))
    return [result]


@dataclass
class _RandomOperators:
    """Writes random operators. Each number is a function of the run's key, the node and the element.

    The node is identified by its `seed` attribute, without one by its position among the random nodes.
    """

    count: int = 0
    key: Term | None = None

    def dropout(self, g: Rewrite) -> Sequence[Term]:
        (ratio,) = (g.param("ratio") if g.has_param("ratio") else (0.5,)) or (None,)
        if ratio is None or not 0 <= ratio < 1:
            g.fail(f"ratio is {ratio}, expected a constant of at least 0 and below 1")
        x = g.x()
        mask = random_numbers.dropout_mask(*self._random_source(g), x.shape, ratio)
        return [mask.where(x * (1 / (1 - ratio)), 0), mask]

    def uniform(self, g: Rewrite) -> Sequence[Term]:
        shape, dtype = _output_type(g)
        low, high = g.attr("low"), g.attr("high")
        return [(random_numbers.uniform(*self._random_source(g), shape) * (high - low) + low).cast(dtype)]

    def normal(self, g: Rewrite) -> Sequence[Term]:
        shape, dtype = _output_type(g)
        return [(random_numbers.normal(*self._random_source(g), shape) * g.attr("scale") + g.attr("mean")).cast(dtype)]

    def _random_source(self, g: Rewrite) -> tuple[Writer, Term, int]:
        """The writer, the key of the run and this node's salt: the first arguments in `random_numbers`."""
        self.count += 1
        self.key = self.key or g.writer.input(RANDOM_KEY, TensorType(DType.UINT32, ()))
        seed = g.attr("seed")
        return g.writer, self.key, self.count if seed is None else random_numbers.salt_of_seed(seed)


def _output_type(g: Rewrite) -> tuple[Sequence[Dim], DType]:
    """The shape and the element type of a random operator's output."""
    declared = g.node.output.tensor
    return declared.dims, declared.dtype


class _UpdateWriter:
    """Writes the part of the graph that follows the gradients: unscaling, accumulation, clipping, update, averages."""

    def __init__(self, writer: Writer, settings: StepSettings, scaler: Scaler | None) -> None:
        self.writer, self.settings, self.scaler = writer, settings, scaler
        optimizer = settings.optimizer
        names = optimizer.scalars(1, optimizer.rate)
        self.scalars = {name: f"{SCALAR_PREFIX}{name}" for name in names}

    def write(self, pairs: Sequence[tuple[Value, Value]], updates: bool) -> None:
        raw_gradients = [Term(self.writer, gradient) for _, gradient in pairs]
        gradients = self.scaler.unscale(raw_gradients) if self.scaler is not None else raw_gradients
        statistics = list(self.writer.graph.states)
        parameters = [self._parameter(value) for value, _ in pairs]
        if self.settings.accumulate > 1:
            raw_gradients = gradients = self._accumulate(parameters, gradients, updates)
        scalar = TensorType(DType.FLOAT32, ())
        scalars = {name: self.writer.input(label, scalar) for name, label in self.scalars.items()}
        are_finite = self.scaler.are_finite(raw_gradients) if self.scaler is not None else None
        self._guard(statistics, are_finite)
        if not updates:
            return
        for state, gradient in zip(parameters, self._clip(gradients), strict=True):
            self._guard(self._update(state, gradient, scalars), are_finite)
        if self.scaler is not None and are_finite is not None:
            self.scaler.count(are_finite)

    def _guard(self, moved: Sequence[State], are_finite: Term | None) -> None:
        if self.scaler is not None and are_finite is not None:
            self.scaler.guard(are_finite, moved)

    def _parameter(self, value: Value) -> State:
        """Turn a constant into state, which keeps its value unless `_update` sets another; returns the state."""
        graph = self.writer.graph
        state = State(value, value, graph.constants.pop(value))
        graph.states.append(state)
        return state

    def _moment(self, like: State, name: str, initial: Array | None = None) -> State:
        """Add and return a state with the type of the parameter `like`, initially `initial` or zeros."""
        value = Value(self.writer.fresh(f"{like.value.name}.{name}"), like.value.type)
        state = State(value, value, np.zeros_like(like.initial) if initial is None else initial)
        self.writer.graph.states.append(state)
        return state

    def _accumulate(self, parameters: Sequence[State], gradients: Sequence[Term], updates: bool) -> list[Term]:
        """Add the gradients, divided by the number of runs per update, to their sums; returns the sums.

        With `updates` this is the last run of an update: the sums are then the means of all its runs, and are reset to
        zero.
        """
        totals = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self._moment(parameter, "gradient_sum")
            total = Term(self.writer, state.value) + gradient / self.settings.accumulate
            state.update = self.writer.zeros_like(state.value).value if updates else total.value
            totals.append(total)
        return totals

    def _clip(self, gradients: Sequence[Term]) -> list[Term]:
        clip, clipped = self.settings.clip, list(gradients)
        if clip.norm is not None:
            squares = [gradient.square().sum(keepdims=False) for gradient in clipped]
            norm = squares[0].op("Sum", *squares[1:]).sqrt()
            factor = (clip.norm / (norm + 1e-6)).op("Min", 1.0)
            clipped = [gradient * factor for gradient in clipped]
        if clip.value is not None:
            clipped = [gradient.op("Max", -clip.value).op("Min", clip.value) for gradient in clipped]
        return clipped

    def _update(self, parameter: State, gradient: Term, scalars: dict[str, Term]) -> list[State]:
        """Write the update of a parameter; returns the states that change: parameter, moments and running average."""
        moments = [self._moment(parameter, name) for name in self.settings.optimizer.moments]
        before = [Term(self.writer, moment.value) for moment in moments]
        following, after = self.settings.optimizer.update(Term(self.writer, parameter.value), gradient, before, scalars)
        parameter.update = following.value
        for moment, term in zip(moments, after, strict=True):
            moment.update = term.value
        moved = [parameter, *moments]
        if self.settings.average is not None:
            moved.append(self._average(parameter, following, self.settings.average))
        return moved

    def _average(self, parameter: State, following: Term, decay: float) -> State:
        """Add and return the running average of a parameter, initially the parameter itself.

        `following` is the parameter's next value.
        """
        average = self._moment(parameter, "average", parameter.initial)
        average.update = (Term(self.writer, average.value) * decay + following * (1 - decay)).value
        return average
