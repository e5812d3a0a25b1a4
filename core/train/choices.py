"""What a recipe can choose among: losses, optimizers and schedules, by the names that their tables have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from core.train import losses, optimizers, schedules
from core.train.schedules import Schedule
from core.train.section import Part, Section, either, part

_LOSS = {
    "label_smoothing": Field(ge=0, lt=1, description="Share of the target that all classes divide evenly."),
    "delta": Field(gt=0, description="Distance up to which the loss is quadratic."),
}

_OPTIMIZER = {
    "rate": Field(gt=0, description="Learning rate; a schedule's highest."),
    "momentum": Field(ge=0, lt=1, description="Share of the last move that goes into the next one."),
    "dampening": Field(ge=0, le=1, description="How much less of the gradient goes into the momentum."),
    "weight_decay": Field(ge=0, description="Pull of weights towards zero."),
    "nesterov": Field(description="Look ahead along the momentum."),
    "rate_decay": Field(ge=0, description="Decay of the rate per update."),
    "epsilon": Field(gt=0, description="Added to divisors."),
    "rho": Field(ge=0, lt=1, description="Memory of the mean squares."),
    "alpha": Field(ge=0, lt=1, description="Memory of the mean squares."),
    "centered": Field(description="Divide by the deviation instead of the mean square."),
    "beta1": Field(ge=0, lt=1, description="Memory of the mean gradient."),
    "beta2": Field(ge=0, lt=1, description="Memory of the mean square."),
    "amsgrad": Field(description="Divide by the greatest mean square so far."),
    "momentum_decay": Field(ge=0, description="How fast the momentum grows to its full share."),
}

LOSSES: dict[str, type[Part]] = {
    kind: part(kind, target, meaning, _LOSS)
    for kind, target, meaning in (
        ("cross_entropy", losses.CrossEntropy, "Of logits, for classes."),
        ("nll", losses.NegativeLogLikelihood, "Of log-probabilities, for classes."),
        ("mse", losses.MeanSquaredError, "The mean squared error."),
        ("l1", losses.MeanAbsoluteError, "The mean distance."),
        ("huber", losses.Huber, "Squared for small distances, linear for large ones."),
        ("bce", losses.BinaryCrossEntropy, "Of logits, for probabilities: yes or no, each for itself."),
        ("kl", losses.KullbackLeibler, "Kullback and Leibler's divergence, of log-probabilities, for probabilities."),
    )
}

OPTIMIZERS: dict[str, type[Part]] = {
    kind: part(kind, target, meaning, _OPTIMIZER, leave=("decoupled",))
    for kind, target, meaning in (
        ("sgd", optimizers.SGD, "Along the gradient, with momentum or Nesterov's if asked."),
        ("adagrad", optimizers.Adagrad, "By the sum of all squared gradients so far."),
        ("adadelta", optimizers.Adadelta, "By mean squares of gradients and moves."),
        ("rmsprop", optimizers.RMSprop, "By the mean square of the gradient."),
        ("adam", optimizers.Adam, "By mean and mean square of the gradient."),
        ("adamw", optimizers.AdamW, "Adam whose decay of weights does not pass through its means."),
        ("adamax", optimizers.AdaMax, "Adam by the greatest gradient instead of the mean square."),
        ("nadam", optimizers.NAdam, "Adam with Nesterov's momentum."),
    )
}

if TYPE_CHECKING:
    Loss = Part
    Optimizer = Part
else:
    Loss = either(*LOSSES.values())
    Optimizer = either(*OPTIMIZERS.values())


class Span(Section):
    """A part of the training: so many epochs, or so many updates."""

    epochs: float | None = Field(default=None, gt=0, description="Epochs or parts of one.")
    updates: int | None = Field(default=None, ge=1, description="Updates of the weights.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.epochs is None) == (self.updates is None):
            raise ValueError("expected either `epochs` or `updates`")
        return self

    def count(self, per_epoch: float) -> int:
        """Updates, when an epoch has so many."""
        return self.updates or max(1, round((self.epochs or 0) * per_epoch))


class _Schedule(Section):
    warm_up: Span | None = Field(default=None, description="Rise in a line to the first rate for so long.")

    def make(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        """The rate of each update, of which there will be `updates`."""
        before = self.warm_up.count(per_epoch) if self.warm_up else 0
        then = self.after_warm_up(rate, max(updates - before, 1), per_epoch)
        return schedules.WarmUp(then, before) if before else then

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        raise NotImplementedError


class Constant(_Schedule):
    """The optimizer's rate all the time."""

    kind: Literal["constant"] = Field(description="The same rate all the time.")

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        return schedules.Constant(rate)


class Steps(_Schedule):
    """The rate falls in steps."""

    kind: Literal["steps"] = Field(description="The rate is multiplied by `factor` again and again.")
    every: Span = Field(description="How long each step lasts.")
    factor: float = Field(default=0.1, gt=0, description="What the rate is multiplied by.")

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        return schedules.Steps(rate, self.every.count(per_epoch), self.factor)


class Cosine(_Schedule):
    """The rate falls along half a cosine (I. Loshchilov, F. Hutter, 2017, without restarts)."""

    kind: Literal["cosine"] = Field(description="Down along half a cosine.")
    over: Span | None = Field(default=None, description="How long that takes; without it, all of the training.")
    least: float = Field(default=0.0, ge=0, description="The last rate.")

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        return schedules.Cosine(rate, self.over.count(per_epoch) if self.over else updates, self.least)


class OneCycle(_Schedule):
    """The rate rises to the optimizer's and falls (L. N. Smith, 2018)."""

    kind: Literal["one_cycle"] = Field(description="Up and down again, both along half a cosine.")
    rising: float = Field(default=0.3, gt=0, lt=1, description="Share of the training in which the rate rises.")
    start: float = Field(default=25.0, ge=1, description="The first rate is the highest divided by this.")
    end: float = Field(default=1e4, ge=1, description="The last rate is the first divided by this.")

    def after_warm_up(self, rate: float, updates: int, per_epoch: float) -> Schedule:
        return schedules.OneCycle(rate, updates, self.rising, self.start, self.end)


ScheduleChoice = Annotated[Constant | Steps | Cosine | OneCycle, Field(discriminator="kind")]
