"""The losses, optimizers and schedules that a recipe can name, each as a table with a `kind`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from lathe.core.section import Section
from lathe.core.train.recipe.section import Part, make_part, tagged_union
from lathe.core.train.training_step import losses, optimizers, schedules
from lathe.core.train.training_step.schedules import Schedule

_LOSS = {
    "label_smoothing": Field(ge=0, lt=1, description="Share of the target that is spread evenly over all classes."),
    "delta": Field(gt=0, description="Largest distance at which the loss is quadratic."),
}

_OPTIMIZER = {
    "rate": Field(gt=0, description="Learning rate; with a schedule its highest rate."),
    "momentum": Field(ge=0, lt=1, description="Momentum factor."),
    "dampening": Field(
        ge=0, le=1, description="Share by which the gradient is reduced before it is added to the momentum."
    ),
    "weight_decay": Field(ge=0, description="Weight decay (L2 penalty; decoupled in `adamw`)."),
    "nesterov": Field(description="Use Nesterov momentum."),
    "rate_decay": Field(
        ge=0, description="Decay of the rate: it is divided by 1 + `rate_decay` x the number of earlier updates."
    ),
    "epsilon": Field(gt=0, description="Added to divisors for numerical stability."),
    "rho": Field(ge=0, lt=1, description="Decay of the mean squares."),
    "alpha": Field(ge=0, lt=1, description="Decay of the mean squares."),
    "centered": Field(description="Divide by the standard deviation instead of the root mean square."),
    "beta1": Field(ge=0, lt=1, description="Decay of the mean gradient."),
    "beta2": Field(ge=0, lt=1, description="Decay of the mean square."),
    "amsgrad": Field(description="Divide by the largest mean square so far."),
    "momentum_decay": Field(ge=0, description="How fast the momentum grows to its final value."),
}

LOSSES: dict[str, type[Part]] = {
    kind: make_part(kind, target, meaning, _LOSS)
    for kind, target, meaning in (
        (
            "cross_entropy",
            losses.CrossEntropy,
            "Cross entropy of logits and classes; a final Softmax stays in the model, but the loss leaves it out.",
        ),
        ("nll", losses.NegativeLogLikelihood, "Negative log-likelihood of log-probabilities and classes."),
        ("mse", losses.MeanSquaredError, "Mean squared error."),
        ("l1", losses.MeanAbsoluteError, "Mean absolute error."),
        ("huber", losses.Huber, "Huber loss: quadratic for small distances, linear for large ones."),
        (
            "bce",
            losses.BinaryCrossEntropy,
            "Binary cross entropy of logits and independent probabilities; a final Sigmoid stays in the model, but the "
            "loss leaves it out.",
        ),
        ("kl", losses.KullbackLeibler, "Kullback-Leibler divergence of log-probabilities and probabilities."),
    )
}

OPTIMIZERS: dict[str, type[Part]] = {
    kind: make_part(kind, target, meaning, _OPTIMIZER, leave=("decoupled",))
    for kind, target, meaning in (
        ("sgd", optimizers.SGD, "Stochastic gradient descent, optionally with momentum or Nesterov momentum."),
        ("adagrad", optimizers.Adagrad, "Scales by the sum of all squared gradients so far."),
        ("adadelta", optimizers.Adadelta, "Scales by mean squares of gradients and updates."),
        ("rmsprop", optimizers.RMSprop, "Scales by the mean square of the gradient."),
        ("adam", optimizers.Adam, "Scales by mean and mean square of the gradient."),
        ("adamw", optimizers.AdamW, "Adam with decoupled weight decay."),
        ("adamax", optimizers.AdaMax, "Adam with the infinity norm instead of the mean square."),
        ("nadam", optimizers.NAdam, "Adam with Nesterov momentum."),
    )
}

if TYPE_CHECKING:
    Loss = Part
    Optimizer = Part
else:
    Loss = tagged_union(*LOSSES.values())
    Optimizer = tagged_union(*OPTIMIZERS.values())


class Span(Section):
    """A duration within the training, either in epochs or in updates."""

    epochs: float | None = Field(default=None, gt=0, description="Duration in epochs, which may be a fraction.")
    updates: int | None = Field(
        default=None, ge=1, description="Duration in updates of the weights, instead of `epochs`."
    )

    @model_validator(mode="after")
    def _check_unit(self) -> Self:
        if (self.epochs is None) == (self.updates is None):
            raise ValueError("expected either `epochs` or `updates`")
        return self

    def count(self, per_epoch: float) -> int:
        """The duration in updates, for `per_epoch` updates per epoch: at least 1."""
        return self.updates or max(1, round((self.epochs or 0) * per_epoch))


class _Schedule(Section):
    warm_up: Span | None = Field(
        default=None,
        description="Duration of a linear warm-up to the first rate of the schedule; the schedule follows.",
    )

    def make(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        """The schedule for a training of `updates` updates, `per_epoch` in an epoch, with the highest rate `rate`."""
        before = self.warm_up.count(per_epoch) if self.warm_up else 0
        then = self.after_warm_up(rate, max(updates - before, 1), per_epoch)
        return schedules.WarmUp(then, before) if before else then

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        """The schedule of the `updates` updates after the warm-up."""
        raise NotImplementedError


class Constant(_Schedule):
    """The constant rate of the optimizer."""

    kind: Literal["constant"] = Field(description="Constant rate.")

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        return schedules.Constant(rate)


class Steps(_Schedule):
    """Step decay."""

    kind: Literal["steps"] = Field(description="Step decay: the rate is multiplied by `factor` at even intervals.")
    every: Span = Field(description="Duration between two changes of the rate.")
    factor: float = Field(default=0.1, gt=0, description="Factor of the rate at each change.")

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        return schedules.Steps(rate, self.every.count(per_epoch), self.factor)


class Cosine(_Schedule):
    """Cosine annealing (I. Loshchilov, F. Hutter, 2017, without restarts)."""

    kind: Literal["cosine"] = Field(description="Cosine annealing: the rate falls along half a cosine.")
    over: Span | None = Field(
        default=None,
        description="Duration of the decay, after which the rate stays at `least`; by default the training without "
        "the warm-up.",
    )
    least: float = Field(default=0.0, ge=0, description="The rate at the end of the decay.")

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        return schedules.Cosine(rate, self.over.count(per_epoch) if self.over else updates, self.least)


class OneCycle(_Schedule):
    """The one-cycle policy: the rate rises to the optimizer's rate and falls again (L. N. Smith, 2018)."""

    kind: Literal["one_cycle"] = Field(
        description="One-cycle policy: the rate rises and falls again, each along half a cosine."
    )
    rising: float = Field(
        default=0.3, gt=0, lt=1, description="Share of the updates after the warm-up in which the rate rises."
    )
    start: float = Field(default=25.0, ge=1, description="The first rate is the highest rate divided by `start`.")
    end: float = Field(default=1e4, ge=1, description="The last rate is the first rate divided by `end`.")

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        return schedules.OneCycle(rate, updates, self.rising, self.start, self.end)


ScheduleChoice = Annotated[Constant | Steps | Cosine | OneCycle, Field(discriminator="kind")]
