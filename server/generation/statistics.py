"""Counters and histograms of the texts of each version, and their Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lathe.server.backends.language import TextModel
from lathe.server.serving.servable import Servable
from lathe.server.telemetry.statistics import Histogram
from lathe.server.types import ModelRef

_LABELS = ("model", "version")


@dataclass(slots=True)
class TextStatistics:
    """What one version has generated. Only the event loop's thread writes it."""

    first_token: Histogram = field(default_factory=Histogram)  # from the request to the first token
    each_token: Histogram = field(default_factory=Histogram)  # of each text, mean of its tokens after the first
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, found in the cache
    generated_tokens: int = 0

    def first(self, seconds: float) -> None:
        """Count the first token of a text."""
        self.first_token.add(seconds)

    def ended(self, prompt: int, cached: int, generated: int, seconds: float) -> None:
        """Count a text that has ended, `seconds` after its first token."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.generated_tokens += generated
        if generated > 1:
            self.each_token.add(seconds / (generated - 1))


class TextBook:
    """The statistics of all versions that have generated texts; they survive unloading."""

    def __init__(self) -> None:
        self._pages: dict[ModelRef, TextStatistics] = {}

    def of(self, ref: ModelRef) -> TextStatistics:
        """Return the statistics of a version, new ones if there are none."""
        return self._pages.setdefault(ref, TextStatistics())

    def all(self) -> Iterable[tuple[ModelRef, TextStatistics]]:
        """Return all statistics."""
        return list(self._pages.items())


class TextMetrics(Collector):
    """Exports the statistics, and the state of the engines in memory."""

    def __init__(self, book: TextBook, servables: Callable[[], Iterable[Servable]]) -> None:
        self._book = book
        self._servables = servables

    def collect(self) -> Iterator[Metric]:
        first = HistogramMetricFamily(
            "lathe_time_to_first_token_seconds", "Time from a request to its first token", labels=_LABELS
        )
        each = HistogramMetricFamily(
            "lathe_time_per_output_token_seconds", "Mean time between the tokens of a text", labels=_LABELS
        )
        prompt = CounterMetricFamily("lathe_prompt_tokens", "Tokens of prompts", labels=_LABELS)
        cached = CounterMetricFamily("lathe_cached_prompt_tokens", "Tokens of prompts from the cache", labels=_LABELS)
        generated = CounterMetricFamily("lathe_generated_tokens", "Generated tokens", labels=_LABELS)
        for ref, page in self._book.all():
            labels = (ref.name, str(ref.version))
            first.add_metric(labels, page.first_token.cumulative(), page.first_token.total)
            each.add_metric(labels, page.each_token.cumulative(), page.each_token.total)
            prompt.add_metric(labels, page.prompt_tokens)
            cached.add_metric(labels, page.cached_tokens)
            generated.add_metric(labels, page.generated_tokens)
        yield from (first, each, prompt, cached, generated)
        yield from self._engines()

    def _engines(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("lathe_texts_running", "Texts that have pages of the cache", labels=_LABELS)
        waiting = GaugeMetricFamily("lathe_texts_waiting", "Texts that wait for pages", labels=_LABELS)
        use = GaugeMetricFamily("lathe_kv_cache_usage_ratio", "Share of the cache's pages in use", labels=_LABELS)
        preempted = CounterMetricFamily(
            "lathe_texts_preempted", "Times that a text lost its pages, since loading", labels=_LABELS
        )
        drafted = CounterMetricFamily("lathe_drafted_tokens", "Tokens of drafts, since loading", labels=_LABELS)
        accepted = CounterMetricFamily(
            "lathe_accepted_tokens", "Tokens of drafts that became part of a text, since loading", labels=_LABELS
        )
        for servable in self._servables():
            if isinstance(servable.model, TextModel):
                labels, engine = (servable.ref.name, str(servable.ref.version)), servable.model.generator.engine
                running.add_metric(labels, engine.running)
                waiting.add_metric(labels, engine.waiting)
                use.add_metric(labels, engine.cache_use)
                preempted.add_metric(labels, engine.counters.preemptions)
                if engine.makes_drafts:
                    drafted.add_metric(labels, engine.counters.drafted_tokens)
                    accepted.add_metric(labels, engine.counters.accepted_tokens)
        yield from (running, waiting, use, preempted, drafted, accepted)
