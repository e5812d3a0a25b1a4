"""Runs a model over rows of examples and computes its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lathe.core.errors import DataError
from lathe.core.train.data import Examples, Loader, Rows
from lathe.core.train.data.dataset import Values
from lathe.core.train.data.features import has_same_order
from lathe.core.train.run.metrics import Matrix, MetricCollector, metric_collector
from lathe.core.train.run.token_metrics import TokenMetrics
from lathe.core.train.text.token_examples import TokenExamples
from lathe.core.train.training_step.step_graph import LOSS, TARGET

_MOST_LOGITS = 1 << 24  # of a run: 64 MiB, and as many bytes again for each array that the metrics make of them
RunFunction = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Scores:
    """Metrics by name, and the confusion matrix (rows are true, columns are predicted classes).

    `confusion` is None for regression, without rows, and for more than `metrics.MAX_CONFUSION_CLASSES` classes.
    """

    metrics: dict[str, float]
    confusion: Matrix | None = None


class Stopped(Exception):
    """The training or evaluation was stopped by request."""


def compute_scores(
    run: RunFunction, examples: Examples, rows: Rows, batch: int, output: str, stop: Callable[[], bool]
) -> Scores:
    """Run the model over the rows in batches of `batch`, and compute the metrics of its output named `output`.

    `run` maps a batch (the inputs and `target` by name) to the outputs by name. If it returns a `loss`, the mean of the
    loss over all rows is a metric, too. Stopped if `stop`, called before each batch, returns true. DataError if there
    are no rows, if a row cannot be read, or if the output does not have the shape that the targets need.
    """
    collector, batch = _collector(examples), _rows_at_once(examples, batch)
    total = 0.0
    with Loader(examples, rows, batch, shuffle=False, workers=0) as loader:
        for feeds in loader.epoch(0):
            if stop():
                raise Stopped
            results = run(feeds)
            total += float(results.get(LOSS, 0.0)) * len(feeds[TARGET])
            _check_output(results[output], feeds[TARGET], examples, output)
            collector.add(feeds[TARGET], results[output])
            with_loss = LOSS in results
    losses = {"loss": total / len(rows)} if with_loss else {}
    return Scores(losses | collector.values(), collector.confusion)


def _collector(examples: Examples) -> MetricCollector:
    if isinstance(examples, TokenExamples):
        return TokenMetrics()
    return metric_collector(len(examples.classes) if examples.classes else None)


def _rows_at_once(examples: Examples, batch: int) -> int:
    """Rows of a run: `batch`, but fewer for a language model whose logits would need more than 64 MiB."""
    if not isinstance(examples, TokenExamples):
        return batch
    return max(1, min(batch, _MOST_LOGITS // (examples.target.shape[0] * examples.vocabulary)))


def _check_output(values: Values, target: Values, examples: Examples, output: str) -> None:
    """DataError unless the model's output has the shape and the type that the metrics need.

    That shape is [N, classes, ...] for class indices [N, ...], and the targets' own for numbers. Axes of extent 1 do
    not matter, and a vector passes for a shape of as many elements.
    """
    sizes, needed = values.shape[1:], target.shape[1:]
    if isinstance(examples, TokenExamples):
        needed = (*needed, examples.vocabulary)
        fits = sizes == needed
    elif examples.classes is not None:
        fits = sizes[:1] == (len(examples.classes),) and has_same_order(sizes[1:], needed)
        needed = (len(examples.classes), *needed)
    else:
        fits = has_same_order(sizes, needed)
    if not fits or len(values) != len(target) or values.dtype.kind in "OSU":
        expected, given = (", ".join(map(str, ("rows", *shape))) for shape in (needed, sizes))
        message = f"expected numbers [{expected}] from the model, but its output '{output}' is {values.dtype} [{given}]"
        raise DataError(message, file=examples.dataset.name, column=examples.target.name)
