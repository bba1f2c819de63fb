"""The committer's metrics, and the stats line that shows them without Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from penstock.consensus.store import CasResult, Determinate, ErrorKind
from penstock.servicekit.metrics import Counter, Family, Histogram, Registry, exponential

PREFIX = "penstock_persist_"
OPERATIONS = (
    "head", "cas", "cas_many", "cas_all", "scan", "snapshot", "truncate", "list_keys",
    "subscribe", "watch",
)  # fmt: skip

_SECONDS = exponential(0.0001, 2, 18)
_BYTES = exponential(64, 4, 12)
_SIZES = exponential(1, 2, 12)


class CommitterMetrics:
    """Every metric of the committer, declared together."""

    def __init__(self) -> None:
        self.registry = r = Registry(PREFIX)
        self.rpc = r.counters("rpc", "Operations by result", ("op", "result"))
        self.rpc_seconds = r.histograms(
            "rpc_duration_seconds", "Whole operation", _SECONDS, ("op", "transport")
        )
        self.backing_seconds = r.histograms(
            "backing_duration_seconds", "Backend call only, pool wait included", _SECONDS, ("op",)
        )
        self.inflight = r.gauge("inflight_rpcs", "Operations in progress")
        self.inflight_by_op = r.gauges("inflight_rpcs_by_op", "Operations in progress", ("op",))
        self.cache_hits = r.counters("cache_hits", "Heads answered from memory", ("op",))
        self.cache_misses = r.counters("cache_misses", "Heads read from the backend", ("op",))
        self.cached_shards = r.gauge("cached_shards", "Heads in the cache")
        self.cached_bytes = r.gauge("cached_bytes", "Bytes of the cache")
        self.late_inserts_dropped = r.gauge(
            "cache_late_inserts_dropped_total", "Answers that came too late to be cached"
        )
        self.store_regressions = r.counter(
            "store_regressions", "Times the store knew less than it had said before"
        )
        self.refresh_lag = r.histogram(
            "cas_refresh_lag_seconds", "From a mismatch to the refreshed head", _SECONDS
        )
        self.batch_size = r.histogram("coalesce_batch_size", "Units per transaction", _SIZES)
        self.batch_seconds = r.histogram(
            "coalesce_batch_seconds", "Duration of a transaction", _SECONDS
        )
        self.queue_depth = r.gauge("coalesce_queue_depth", "Units that wait for a transaction")
        self.rejected = r.gauges("admission_rejected_total", "Refused operations", ("reason",))
        self.auth_failures = r.counters("auth_failures", "Failed authentications", ("reason",))
        self.writes = r.counters(
            "writes", "Writes by principal and result", ("principal", "result")
        )
        self.subscribers = r.gauge("subscribers", "Open subscriptions and watches")
        self.subscribe_lag = r.counter("subscribe_lag", "Buffers that overflowed")
        self.subscribe_resync = r.counters(
            "subscribe_resync", "Streams told to resync", ("reason",)
        )
        self.subscribe_gap = r.counter("subscribe_gap", "Gaps in a stream; must stay 0")
        self.pool = r.gauges("pool_connections", "Database connections", ("state",))
        self.heals = r.counter("backend_heals", "Times a vanished store was replaced")
        self.up = r.gauge("backend_up", "1 if the last backend call got an answer")
        self.entry_bytes = r.histograms("entry_bytes", "Payload sizes", _BYTES, ("op",))
        for op in OPERATIONS:  # so that every operation is on the page before its first use
            self.inflight_by_op.labels(op)
            self.rpc_seconds.labels(op, "grpc")

    def operation(self, op: str, transport: str, times: int = 1) -> Operation:
        """Measure a block; every way out of it is counted, errors and cancellation included."""
        return Operation(self, op, transport, times)


class Operation:
    """The guard around an operation, or around `times` of them that go together.

    A block that ends well counts as `ok` unless it reported `outcomes`.
    """

    __slots__ = ("_counted", "_metrics", "_op", "_started", "_transport", "times")

    def __init__(self, metrics: CommitterMetrics, op: str, transport: str, times: int) -> None:
        self._metrics = metrics
        self._op = op
        self._transport = transport
        self.times = times
        self._counted = False
        self._started = 0.0

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._metrics.inflight.add(self.times)
        self._metrics.inflight_by_op.labels(self._op).add(self.times)
        return self

    def outcomes(self, results: Mapping[str, int]) -> None:
        """Count operations by result."""
        self._counted = True
        for result, count in results.items():
            self._metrics.rpc.labels(self._op, result).add(count)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        metrics = self._metrics
        metrics.inflight.add(-self.times)
        metrics.inflight_by_op.labels(self._op).add(-self.times)
        took = time.perf_counter() - self._started
        metrics.rpc_seconds.labels(self._op, self._transport).observe(took, self.times)
        if not self._counted:
            metrics.rpc.labels(self._op, result_of(error)).add(self.times)


def result_of(outcome: CasResult | BaseException | None) -> str:
    """Return the `result` label of an outcome."""
    match outcome:
        case CasResult.COMMITTED:
            return "committed"
        case CasResult.EXPECTATION_MISMATCH:
            return "mismatch"
        case None | GeneratorExit():  # a reader may stop reading a stream
            return "ok"
        case asyncio.CancelledError():
            return "cancelled"
        case Determinate(kind=ErrorKind.OVERLOADED):
            return "rejected"
        case Determinate():
            return "err_determinate"
        case _:
            return "err_indeterminate"


class StatsLine:
    """One log line per interval, about what happened since the last one."""

    def __init__(self, metrics: CommitterMetrics) -> None:
        self._metrics = metrics
        self._before: dict[str, float] = {}

    def fields(self) -> dict[str, object]:
        """Return the fields of the next line: rates and means of the interval, current gauges."""
        m = self._metrics
        line: dict[str, object] = {}
        for op in OPERATIONS:
            n, mean_s = self._mean(f"rpc/{op}", *_children(m.rpc_seconds, op))
            if not n:
                continue
            line[f"{op}_n"] = n
            line[f"{op}_mean_ms"] = mean_s * 1_000
            line[f"{op}_inflight"] = int(m.inflight_by_op.labels(op).value)
            backed, backing_s = self._mean(f"backing/{op}", *_children(m.backing_seconds, op))
            if backed:
                line[f"{op}_backing_mean_ms"] = backing_s * 1_000
        for result in ("committed", "mismatch", "err_determinate", "err_indeterminate", "rejected"):
            line[f"cas_{result}"] = int(self._delta(f"cas/{result}", _value(m.rpc, "cas", result)))
        hits = self._delta("hits", _value(m.cache_hits, "head"))
        misses = self._delta("misses", _value(m.cache_misses, "head"))
        line["cache_hit_rate"] = hits / (hits + misses) if hits + misses else 0.0
        line["cached_shards"] = int(m.cached_shards.value)
        line["refreshes"], lag_s = self._mean("refresh", m.refresh_lag)
        line["refresh_lag_mean_ms"] = lag_s * 1_000
        line["batches"], line["batch_mean"] = self._mean("batch", m.batch_size)
        line["subscribers"] = int(m.subscribers.value)
        line["inflight"] = int(m.inflight.value)
        for (state,), gauge in m.pool.children.items():
            line[f"pool_{state}"] = int(gauge.value)
        return line

    def _delta(self, name: str, now: float) -> float:
        before = self._before.get(name, 0.0)
        self._before[name] = now
        return now - before

    def _mean(self, name: str, *histograms: Histogram) -> tuple[int, float]:
        count = self._delta(f"{name}/n", sum(h.count for h in histograms))
        total = self._delta(f"{name}/sum", sum(h.sum for h in histograms))
        return int(count), total / count if count else 0.0


def _children(family: Family[Histogram], op: str) -> list[Histogram]:
    return [child for labels, child in family.children.items() if labels[0] == op]


def _value(family: Family[Counter], *labels: str) -> float:
    return family.labels(*labels).value
