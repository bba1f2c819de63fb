"""A record of writes by principal.

Every write is a log line at DEBUG, with its keys. At INFO there is one line per principal and stats
interval, since a committer takes tens of thousands of writes a second.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from penstock.consensus.committer.metrics import CommitterMetrics, result_of
from penstock.consensus.store import ConsensusError
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.consensus.writes")

_KEYS_SHOWN: Final = 20


class Writes:
    """Counts and logs the writes of one committer."""

    def __init__(self, metrics: CommitterMetrics) -> None:
        self._metrics = metrics
        self._reported: dict[tuple[str, ...], float] = {}

    def note(
        self, principal: str, op: str, keys: Sequence[str], results: Mapping[str, int]
    ) -> None:
        """Record one request, and the number of its writes by result."""
        for result, count in results.items():
            self._metrics.writes.labels(principal, result).add(count)
        if log.isEnabledFor(logging.DEBUG):
            shards = ",".join(keys[:_KEYS_SHOWN]) + (",…" if len(keys) > _KEYS_SHOWN else "")
            log.debug("write", extra=fields(principal=principal, op=op, shards=shards, **results))

    @contextlib.contextmanager
    def failing(self, principal: str, op: str, keys: Sequence[str]) -> Iterator[None]:
        """Record a request that ends in an error: it may have changed something nevertheless."""
        try:
            yield
        except ConsensusError as error:
            self.note(principal, op, keys, {result_of(error): 1})
            raise

    def report(self) -> None:
        """Log how much each principal has written since the last report."""
        since: dict[str, dict[str, int]] = {}
        for labels, counter in self._metrics.writes.children.items():
            if new := int(counter.value - self._reported.get(labels, 0.0)):
                principal, result = labels
                since.setdefault(principal, {})[result] = new
            self._reported[labels] = counter.value
        for principal, results in since.items():
            log.info("writes", extra=fields(principal=principal, **results))
