"""Limits, defaults and intervals in the pages are those of the code.

A row has a sentence, or a part of it, with `{}` in the place of each number, and the numbers from the code. If one of
the two changes, the other has to follow.
"""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lathe.core.compress import dynamic, histogram, latency, mixed, weight_only
from lathe.core.compress.channel_pruning import DEFAULTS as CHANNELS
from lathe.core.compress.ranges import DEFAULT_PERCENTILE
from lathe.core.passes.precision import weight_only as reading_weights
from lathe.core.train.data import describe
from lathe.core.train.recipe.sweep_space import Sweep
from lathe.core.train.recipe.training_compression import Prune
from lathe.core.train.report import operators
from lathe.core.train.report.page import _CLASSES_SHOWN
from lathe.core.train.run import checkpoint, metrics, search, training_loop
from lathe.core.train.run.evaluation import EvaluationRequest
from lathe.core.train.training_step.loss_scaling import LossScaling
from lathe.server.api.codec import compression, json_limit
from lathe.server.api.connection import message_size, receive_deadline
from lathe.server.api.grpc import health
from lathe.server.api.management import job_schemas
from lathe.server.api.management import jobs as jobs_routes
from lathe.server.batching.abandoned_runs import INTERRUPT_DELAY
from lathe.server.canary import guard, steps, traffic
from lathe.server.canary.plan import CanaryPlan
from lathe.server.client import retry_policy
from lathe.server.client.blocking import Client
from lathe.server.datatypes import ELEMENT_OVERHEAD
from lathe.server.jobs import assembly, event_stream, outcome, publisher, result_metrics, runner, scheduler
from lathe.server.pipelines import definition
from lathe.server.pipelines.builtins import image, labels, text
from lathe.server.pipelines.builtins.graphs import NormalizeOptions
from lathe.server.processes import descriptors
from lathe.server.repository import aliases, canary_schedules, journal, store, trials, watcher
from lathe.server.repository.model_config import PaddingRules, QueuePolicy
from lathe.server.scheduling import tenants
from lathe.server.serving import servable
from lathe.server.settings import Settings
from lathe.server.shared_memory import MAX_REGIONS
from lathe.server.telemetry import tracing
from loadtest import flood, interference, jobs, overload, pacing, packing, publishing, rollback, scenarios, soak, tokens
from loadtest.chaos import clients, process

MIB, GIB = 1 << 20, 1 << 30
WORDS = dict(enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]))
PLAN = CanaryPlan(1)
FIFTH = {0.2: "a fifth"}


def default(kind: Any, field: str) -> Any:
    return kind.model_fields[field].default


def most(kind: Any, field: str) -> Any:
    """The upper bound of a field."""
    return next(bound.le for bound in kind.model_fields[field].metadata if hasattr(bound, "le"))


def default_argument(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


ROWS: list[tuple[str, str, tuple[Any, ...]]] = [
    # canaries
    ("canaries", "| `weight` | {} | share of the requests that take part, at most {} (above {} see below)",
     (PLAN.weight, steps.MAX_WEIGHT, steps.FIRST_WEIGHT)),
    ("canaries", "| `tolerated` | {} |", (PLAN.tolerated,)),
    ("canaries", "the candidate first gets {} of the requests, until it has answered {} ",
     (FIFTH[steps.FIRST_WEIGHT], steps.FIRST_REQUESTS)),
    ("canaries", "while the candidate has more than {} requests in progress", (traffic.MAX_SHADOWS_IN_FLIGHT,)),
    ("canaries", "if it is undecided after it has answered {} requests", (guard.MAX_REQUESTS,)),
    ("canaries", "has at most {} steps, each of at most {} days", (steps.MAX_STEPS, steps.MAX_SECONDS / 86_400)),
    ("canaries", "The server checks every {} second whether", ({0.5: "half"}[canary_schedules.CHECK_INTERVAL],)),
    ("canaries", "tries again after {} seconds", (trials.RETRY,)),
    ("canary-decisions", "slower than {} times the live version's 90th percentile", (guard.SLACK[0.90],)),
    ("canary-decisions", "slower than {} times the live version's 99th percentile", (guard.SLACK[0.99],)),
    ("canary-decisions", "slower than {} times the live version's slowest answer", (guard.SLACK[1.0],)),
    ("canary-decisions", "the live version's last {} answers without failure, computed again after every {}. The three "
     "tests of slow answers begin when the live version has given {} such answers",
     (guard.WINDOW, guard.UPDATE_EVERY, guard.MIN_LATENCIES)),
    ("canary-decisions", "When one of the six e-processes reaches {}", (guard._TESTS / guard.FALSE_ALARM,)),
    ("canary-decisions", "The latency of the candidate's first {} answers does not count", (guard.WARM_UP_REQUESTS,)),
    ("canary-decisions", "When this ratio is at least {} in all tests", (1 / guard.MISS,)),
    ("canary-decisions", "- {}% for failing", (guard.HARM_TAIL * 100,)),
    ("canary-decisions", "- {}% for slow (p90)", (guard.HARM_BULK * 100,)),
    ("canary-decisions", "- {}% beyond `tolerated`", (guard.HARM_DIFFERING * 100,)),
    # overload
    ("overload", "is {} second past its deadline", (WORDS[INTERRUPT_DELAY],)),
    ("overload", "the version was unloaded at least {} seconds ago", (WORDS[servable._LAST],)),
    ("overload", "these models get at least {}%", (tenants.MIN_REMAINDER * 100,)),
    ("overload", "keeps up to {} further connections", (descriptors.SPARE_CONNECTIONS,)),
    ("overload", "The server reserves {} descriptors", (descriptors.RESERVED,)),
    ("overload", "at most to {}", (descriptors.MAX_DESCRIPTORS,)),
    ("overload", "by default `LATHE_QUEUE_BYTES` ({} MiB)", (default(Settings, "queue_bytes") / MIB,)),
    # pipelines
    ("pipelines", "A pipeline has at most {} steps", (definition.MAX_STEPS,)),
    ("pipelines", "most pixels of one image, by default {}.", (image.ImageOptions().max_pixels,)),
    ("pipelines", "together at most {} GiB as UINT8 pixels", (image._LARGEST / GIB,)),
    ("pipelines", "(`tokenize`, at most {} MiB)", (text._MAX_FILE_BYTES / MIB,)),
    ("pipelines", "(`label`, at most {} MiB, UTF-8)", (labels._MAX_FILE_BYTES / MIB,)),
    ("pipelines", "most tokens of one text, by default {}", (text.TokenizeOptions().max_length,)),
    ("pipelines", "By default {}, or 1 while all steps", (text._MULTIPLE,)),
    ("pipelines", "most bytes of one text, by default {}", (text.TokenizeOptions().max_bytes,)),
    ("pipelines", "by default `scale` is 1/{}", (1 / NormalizeOptions().scale,)),
    ("pipelines", "by default {}, at most {} and not more",
     (labels.LabelOptions().top, most(labels.LabelOptions, "top"))),
    ("pipelines", "limited to {} GiB of memory. Its start may take {} s of processor time and {} s in all, "
     "a request {} s of processor time and {} s in all.",
     (text._PARSING.memory / GIB, *(seconds for limits in (text._PARSING, text._ENCODING)
                                    for seconds in (limits.seconds, limits.seconds * limits.patience)))),
    # gates
    ("gates", "rows times classes are at most {})", (metrics.MAX_SCORES,)),
    ("gates", "If that happens {} times", (WORDS[publisher._ATTEMPTS],)),
    ("gates", "`confusion` (for at most {} classes)", (metrics.MAX_CONFUSION_CLASSES,)),
    ("gates", "the {} slowest operators for each of {}, {} and {} rows", (WORDS[operators.TOP], *operators.BATCHES)),
    ("gates", "A job's `metrics` hold at most {} KiB", (result_metrics._MAX_RECORD_BYTES / 1024,)),
    ("gates", "rows per run; by default {}", (default(EvaluationRequest, "batch"),)),
    ("gates", "At most `parallel` trials (default {})", (default(Sweep, "parallel"),)),
    ("gates", "after `patience` epochs (default {})", (default(Sweep, "patience"),)),
    ("gates", "If at least {} trials are complete", (WORDS[search._MIN_TRIALS],)),
    # compression
    ("compression", "A histogram of {} intervals", (histogram.BINS,)),
    ("compression", "`percentile` (default) | {} %", (DEFAULT_PERCENTILE,)),
    ("compression", "if that is more than {} % faster", (round((mixed._LEAST_GAIN - 1) * 100, 6),)),
    ("compression", "products with fewer than {} weights stay float32", (dynamic._FEWEST_WEIGHTS,)),
    ("compression", "of at least {} elements become codes", (weight_only.DEFAULTS.least_elements,)),
    ("compression", "by default over {} % of the training", (round(default(Prune, "end") * 100, 6),)),
    ("compression", "Both models run in turns, {} times for at least {} ms",
     (WORDS[latency._ROUNDS], latency._SHORTEST / 1e6)),
    ("compression", "lathe prune model_repo/digits/2/model.onnx --channels {}%", (CHANNELS.share * 100,)),
    ("precision", "Weights of fewer than {} elements", (reading_weights._FEWEST_ELEMENTS,)),
    # jobs
    ("jobs", "| `priority` | -{} to {}, by default 0", (job_schemas.MAX_PRIORITY, job_schemas.MAX_PRIORITY)),
    ("jobs", "A job fails after {} crashes", (WORDS[outcome.MAX_CRASHES],)),
    ("jobs", "stops within about {} seconds", (assembly._GRACE,)),
    ("jobs", "plus 1 for each {} minutes", (WORDS[scheduler.Policy().seconds_per_level / 60],)),
    ("jobs", "preempted after {} seconds", (scheduler.Policy().min_run_seconds,)),
    ("jobs", "At most {} streams are open", (event_stream.MAX_STREAMS,)),
    ("jobs", "{} KiB, or `?tail=` bytes, at most {} MiB",
     (jobs_routes._LOG_TAIL / 1024, jobs_routes._LOG_MOST / MIB)),
    ("jobs", "for at most {} classes, the confusion matrix", (_CLASSES_SHOWN,)),
    ("datasets", "the first problems, at most {}", (describe._MAX_PROBLEMS,)),
    ("training", "for at most {} classes the confusion matrix", (metrics.MAX_CONFUSION_CLASSES,)),
    ("training", "the newest {} checkpoints", (WORDS[checkpoint._CHECKPOINTS_KEPT],)),
    ("training", "The scale begins at {}. It doubles after {} updates",
     (LossScaling().initial, LossScaling().interval)),
    ("training", "falls below 2^-{}", (-math.log2(training_loop._MIN_LOSS_SCALE),)),
    # operations
    ("operations", "Running jobs get {} seconds", (WORDS[assembly._GRACE],)),
    ("operations", "A client has {} seconds to send the rest", (WORDS[receive_deadline.STOP_GRACE],)),
    ("operations", "the first {} seconds of a body", (receive_deadline.ALLOWANCE,)),
    ("operations", "`queue.delay_interval_ms` (by default {} ms)", (default(QueuePolicy, "delay_interval_ms"),)),
    ("operations", "rounded up to a multiple of this; by default {}", (default(PaddingRules, "multiple"),)),
    ("operations", "are padded and cut; by default {}", (default(PaddingRules, "axis"),)),
    ("operations", "reserves `LATHE_MIN_FREE_DISK` ({} MiB)", (default(Settings, "min_free_disk") / MIB,)),
    ("operations", "grow by more than {} MiB while the disk is full", (runner._GROWTH / MIB,)),
    ("operations", "with which more than {} kernel spans would wait", (tracing._KEPT,)),
    # model repository and HTTP
    ("model-repository", "a history of its last {} versions", (aliases.HISTORY_LIMIT,)),
    ("model-repository", "Idempotency keys are known for the newest {} changes", (journal.MAX_REMEMBERED,)),
    ("model-repository", "`LATHE_SETTLE_TIME` ({} s)", (default(Settings, "settle_time"),)),
    ("model-repository", "`LATHE_POLL_INTERVAL` ({} s)", (default(Settings, "poll_interval"),)),
    ("configuration", "every {} seconds after a transient error", (watcher._RETRY,)),
    ("configuration", "Each element of a BYTES tensor counts as {} bytes", (ELEMENT_OVERHEAD,)),
    ("http-api", "the last {} such calls in memory, until it stops", (store._MOST_UNCHANGED,)),
    ("http-api", "more than {} MiB and more than {} times its size",
     (compression.FREE_BYTES / MIB, compression.MAX_RATIO)),
    ("http-api", "more than {} gzip members", (compression.MAX_MEMBERS,)),
    ("http-api", "JSON may have {} values", (json_limit.MAX_VALUES,)),
    ("http-api", "may have 1 MiB and {} values", (json_limit.MAX_DOCUMENT_VALUES,)),
    ("http-api", "At most {} regions exist at once", (MAX_REGIONS,)),
    ("http-api", "At most {} `Watch` calls", (health.WATCHERS,)),
    ("http-api", "400 for more than {} chunks with fewer than {} bytes",
     (message_size.FEW_CHUNKS, message_size.MEAN_CHUNK)),
    # load tests
    ("load-tests", "the rate rises in {} steps", (WORDS[scenarios.RAMP_STEPS],)),
    ("load-tests", "three phases at {} times the capacity", (WORDS[overload.FACTOR],)),
    ("load-tests", "bursts, then {} times the capacity", (overload.EXCESS,)),
    ("load-tests", "| `publishing` | {} versions uploaded", (WORDS[publishing.TIMES],)),
    ("load-tests", "is live within {} s of the start of its upload", (publishing.LIMIT_MS / 1e3,)),
    ("load-tests", "the median rollback takes at most {} ms", (rollback.ROLLBACK_MS,)),
    ("load-tests", "memory grows by at most {} MiB, and file descriptors and threads by at most {} each",
     (soak.MEMORY, soak.HANDLES)),
    ("load-tests", "beside {} slow clients | [p99 ratio](#interference) at most {}",
     (interference.SLOW, interference.SLOW_RATIO)),
    ("load-tests", "idle processors | p99 ratio at most {}", (jobs.RATIO,)),
    ("load-tests", "answered with 200 within {} s", (flood.PATIENCE,)),
    ("load-tests", "at least {}% of the mean of the capacities", (overload.GOODPUT * 100,)),
    ("load-tests", "clients set a timeout of {} ms", (overload.DEADLINE * 1e3,)),
    ("load-tests", "the p99 of refusals at most {} ms", (overload.REJECTION_MS,)),
    ("load-tests", "target plus {} batches", (WORDS[overload.IN_FLIGHT],)),
    ("load-tests", "alternate {} windows without", (WORDS[interference.WINDOWS],)),
    ("load-tests", "due within {} ms ({} ms in `overload`)", (pacing.TICK * 1e3, overload.COARSE * 1e3)),
    ("load-tests", "becomes ready within {} s", (process.PATIENCE,)),
    ("load-tests", "again repeats it with probability 1/{}", (1 / clients.RETRY,)),
    ("load-tests", "compiled after the first {} tokens", (WORDS[tokens.SETTLING],)),
    ("load-tests", "at {}% of the rate", (packing.UTILIZATION * 100,)),
    # client
    ("client", "longest single wait for the server in seconds; by default {}.",
     (default_argument(Client.__init__, "timeout"),)),
    ("client", "moves of aliases, `start_canary`), in place of `timeout`; by default {} |",
     (default_argument(Client.__init__, "upload_timeout"),)),
    ("client", "between its attempts, in total; by default {}", (default_argument(Client.__init__, "patience"),)),
    ("client", "waits {} s before the next attempt, and then twice as long each time, up to {} s",
     (retry_policy._FIRST, retry_policy._LONGEST)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sentence", "numbers"), ROWS, ids=[f"{name}: {part[:60]}" for name, part, _ in ROWS])
def test_a_page_has_the_numbers_of_the_code(project: Path, name: str, sentence: str, numbers: tuple[Any, ...]) -> None:
    text = re.sub(r"\s+", " ", (project / "docs" / f"{name}.md").read_text())
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)  # 1,024 and 1024 are both usual
    assert sentence.format(*map(_shown, numbers)) in text


def _shown(number: Any) -> str:
    """A number as text: 50000.0 as 50000, and 0.005 as it is."""
    if isinstance(number, str):
        return number
    return f"{round(number)}" if number == pytest.approx(round(number)) else f"{number:g}"
