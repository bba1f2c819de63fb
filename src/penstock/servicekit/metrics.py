"""Metrics that cost a hot path almost nothing.

An event loop that carries tens of thousands of operations a second cannot pay a lock and a label
lookup for each of five measurements. These are plain numbers with one owner, the thread of the
event loop; children of a labelled family are looked up once and kept. Prometheus reads them when
it scrapes, through a collector, and the stats line reads the same numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exponential(start: float, factor: float, count: int) -> tuple[float, ...]:
    """Upper bounds of `count` histogram buckets, each `factor` times the one before."""
    return tuple(start * factor**i for i in range(count))


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1) -> None:
        self.value += amount


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def add(self, amount: float = 1) -> None:
        self.value += amount


class Histogram:
    """Counts by size: `counts[i]` for values up to `bounds[i]`, the last one for larger values."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Record `value` `times` over: every element of a batch took as long as the batch."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.count += times


M = TypeVar("M", Counter, Gauge, Histogram)
N = TypeVar("N", Counter, Gauge)


class Family(Generic[M]):
    """Metrics of one name, one for each combination of label values."""

    def __init__(self, names: tuple[str, ...], make: Callable[[], M]) -> None:
        self._names = names
        self._make: Callable[[], M] = make
        self.children: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        """Return the metric of these label values; a hot path looks it up once and keeps it."""
        child = self.children.get(values)
        if child is None:
            if len(values) != len(self._names):
                raise ValueError(f"labels {self._names} were given the values {values}")
            child = self.children[values] = self._make()
        return child


class Registry(Collector):
    """The metrics of one service, under one prefix, and their Prometheus text."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._collectors: list[Callable[[], Metric]] = []
        self._before: list[Callable[[], None]] = []

    def before_collect(self, update: Callable[[], None]) -> None:
        """Run `update` before each reading, for gauges that are cheaper to read than to keep."""
        self._before.append(update)

    def counters(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Family[Counter]:
        return self._scalars(Family(labels, Counter), CounterMetricFamily, name, text, labels)

    def gauges(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Family[Gauge]:
        return self._scalars(Family(labels, Gauge), GaugeMetricFamily, name, text, labels)

    def _scalars(
        self,
        family: Family[N],
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        labels: tuple[str, ...],
    ) -> Family[N]:
        def collect() -> Metric:
            metric = kind(self._prefix + name, text, labels=labels)
            for values, child in family.children.items():
                metric.add_metric(values, child.value)
            return metric

        self._collectors.append(collect)
        return family

    def histograms(
        self, name: str, text: str, bounds: Sequence[float], labels: tuple[str, ...] = ()
    ) -> Family[Histogram]:
        family = Family(labels, lambda: Histogram(bounds))

        def collect() -> Metric:
            metric = HistogramMetricFamily(self._prefix + name, text, labels=labels)
            for values, child in family.children.items():
                upto = accumulate(child.counts)
                names = [*map(floatToGoString, bounds), "+Inf"]
                metric.add_metric(values, list(zip(names, upto, strict=True)), child.sum)
            return metric

        self._collectors.append(collect)
        return family

    def counter(self, name: str, text: str) -> Counter:
        return self.counters(name, text).labels()

    def gauge(self, name: str, text: str) -> Gauge:
        return self.gauges(name, text).labels()

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return self.histograms(name, text, bounds).labels()

    def collect(self) -> Iterator[Metric]:
        for update in self._before:
            update()
        for collect in self._collectors:
            yield collect()

    def render(self) -> bytes:
        """Return the Prometheus exposition text of everything declared here."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)
