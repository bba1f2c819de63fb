"""Who changed what: writes by the principal that asked for them.

Every write is a log line at DEBUG, with its keys. At INFO there is one line for each principal and
stats interval that had any, since a committer takes in tens of thousands of writes a second.
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
    """The writes of one committer that came over the network."""

    def __init__(self, metrics: CommitterMetrics) -> None:
        self._metrics = metrics
        self._told: dict[tuple[str, ...], float] = {}

    def note(
        self, principal: str, op: str, keys: Sequence[str], results: Mapping[str, int]
    ) -> None:
        """One request, and how many of its writes ended how."""
        for result, count in results.items():
            self._metrics.writes.labels(principal, result).add(count)
        if log.isEnabledFor(logging.DEBUG):
            shards = ",".join(keys[:_KEYS_SHOWN]) + (",…" if len(keys) > _KEYS_SHOWN else "")
            told = fields(principal=principal, op=op, shards=shards, **results)
            log.debug("write", extra=told)

    @contextlib.contextmanager
    def failing(self, principal: str, op: str, keys: Sequence[str]) -> Iterator[None]:
        """Note a request that ends by an error: it may have changed something nevertheless."""
        try:
            yield
        except ConsensusError as error:
            self.note(principal, op, keys, {result_of(error): 1})
            raise

    def report(self) -> None:
        """Say how much each principal has written since the last report."""
        since: dict[str, dict[str, int]] = {}
        for labels, counter in self._metrics.writes.children.items():
            if new := int(counter.value - self._told.get(labels, 0.0)):
                principal, result = labels
                since.setdefault(principal, {})[result] = new
            self._told[labels] = counter.value
        for principal, results in since.items():
            log.info("writes", extra=fields(principal=principal, **results))
