"""Metrics of connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ConnectionCounts(Protocol):
    """The counters of HTTP connections."""

    most: int
    evicted: int
    refused: int

    @property
    def connection_count(self) -> int: ...


class GrpcConnectionCounts(Protocol):
    """The counters of gRPC connections."""

    evicted: int

    @property
    def connection_count(self) -> int: ...


class ConnectionMetrics(Collector):
    """Collects the numbers of open, evicted and refused connections."""

    def __init__(self, slots: ConnectionCounts, of_grpc: GrpcConnectionCounts | None = None) -> None:
        self._slots = slots
        self._of_grpc = of_grpc

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        slots = self._slots
        yield GaugeMetricFamily(
            "lathe_connections", "HTTP connections, TLS handshakes included", value=slots.connection_count
        )
        yield GaugeMetricFamily("lathe_connections_limit", "HTTP connections served at once", value=slots.most)
        yield CounterMetricFamily(
            "lathe_connections_evicted", "Idle HTTP connections that were closed to make room", value=slots.evicted
        )
        yield CounterMetricFamily(
            "lathe_connections_refused", "HTTP requests refused for want of connections", value=slots.refused
        )
        if self._of_grpc is None:
            return
        yield GaugeMetricFamily("lathe_grpc_connections", "gRPC connections", value=self._of_grpc.connection_count)
        yield CounterMetricFamily(
            "lathe_grpc_connections_evicted",
            "gRPC connections that were closed since there were more than may be",
            value=self._of_grpc.evicted,
        )
