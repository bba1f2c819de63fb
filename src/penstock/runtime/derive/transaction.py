"""PURE: one transaction of a derivation, from its first checkpoint to its commit record.

The record holds the frontier, how the state changed, and the ACKs of all that was published: they
count together, or not at all. Before it, everything published is pending and belongs to producers
that no ACK names; after it, the ACKs are written, and written again after a crash. So there is
nothing to hint and nothing to repair: a transaction that was cut short never happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.journal.transaction import Intents
from penstock.model.clock import NEVER, Clock
from penstock.model.json_order import Json
from penstock.runtime.derive.task import DeriveLeaderTask, DeriveMemory
from penstock.runtime.patches import Patches
from penstock.runtime.reading import ReadTransaction
from penstock.runtime.recovery import NO_INTENTS, Persist
from penstock.runtime.stats import NONE, Counts, rfc3339, transaction_stats
from penstock.runtime.tail import Unfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformRead:
    """The documents that one transform read in a transaction."""

    counts: Counts = NONE
    newest: Clock = NEVER
    """Clock of the newest of them; `NEVER` if there were none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeriveTransaction(ReadTransaction):
    """A transaction as far as it got: the only record of it that there is (`ClosedTransaction`)."""

    task: DeriveLeaderTask
    before: DeriveMemory
    """The session's memory when it opened."""
    reads: Mapping[int, TransformRead] = field(default_factory=dict)
    """By transform."""
    published: Counts = NONE
    """Documents that transforms published, before those of one key were combined."""
    written: Counts = NONE
    """Documents that were appended to journals."""
    patches: Patches = ()
    """How the state of the transforms changed."""
    intents: Intents = NO_INTENTS

    def memory(self) -> DeriveMemory:
        """Return the session's memory once this transaction is committed."""
        clocks = {**self.before.last_source_clocks}
        for collection, clock in self._newest().items():
            clocks[collection] = max(clocks.get(collection, NEVER), clock)
        behind = dict(self.before.bytes_behind)
        for transform, delta in self.extents.bytes_behind().items():
            behind[transform] = behind.get(transform, 0) + delta
        return DeriveMemory(last_close=self.closed, last_source_clocks=clocks, bytes_behind=behind)

    def _newest(self) -> dict[str, Clock]:
        """Return the newest document that was read, by collection."""
        newest: dict[str, Clock] = {}
        for at, read in self.reads.items():
            if read.newest != NEVER:
                source = self.task.transforms[at].source
                newest[source] = max(newest.get(source, NEVER), read.newest)
        return newest

    # Publishing (`runtime/tail.py`)

    def stats(self) -> dict[str, Json]:
        """Its statistics document."""
        after = self.memory()
        transforms: dict[str, Json] = {}
        for at, read in sorted(self.reads.items()):
            transform = self.task.transforms[at]
            transforms[transform.name] = {
                "source": transform.source,
                "input": read.counts.to_json(),
                "bytesBehind": max(after.bytes_behind.get(at, 0), 0),
                "lastSourcePublishedAt": rfc3339(after.last_source_clocks[transform.source]),
            }
        content: dict[str, Json] = {"transforms": transforms}
        if self.published:
            content["published"] = self.published.to_json()
        if self.written:
            content["out"] = self.written.to_json()
        return transaction_stats(
            self.task.shard_name,
            open_clock=self.opened,
            close_clock=self.closed,
            section="derive",
            content=content,
        )

    def with_intents(self, intents: Intents) -> DeriveTransaction:
        return replace(self, intents=intents)

    def start_commit(self) -> None:
        return None

    def commit(self, patches: Patches) -> Persist:
        """The record that makes it count."""
        return Persist(
            committed_close=self.closed,
            committed_frontier=self.extents,
            ack_intents=self.intents,
            patches=self.patches,
            last_source_clocks=self._newest(),
        )

    def unfinished(self, patches: Patches) -> Unfinished:
        return Unfinished(intents=self.intents)
