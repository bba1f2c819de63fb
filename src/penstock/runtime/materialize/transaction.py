"""PURE: one transaction, from its first checkpoint to its commit; and the records it leaves.

    hint           its extents, before anything of it can be seen
    trigger hint   its trigger variables, if they were not known then
    commit         the same extents, byte for byte, and what follows from them

A transaction is identified by the clock at which it opened while it runs, and by the one at which
it closed for ever after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from penstock.errors import Bug
from penstock.journal.transaction import Intents
from penstock.model.clock import NEVER, Clock
from penstock.model.frontier import Frontier
from penstock.model.json_order import Json, canonical_json
from penstock.model.producer_frontier import OBSERVED_FLOOR
from penstock.runtime.materialize.messages import Acknowledge, BindingReport, Reports, StartCommit
from penstock.runtime.materialize.stats import BindingStats, by_collection
from penstock.runtime.materialize.task import LeaderTask, Memory, Plan
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import OutOfTurn
from penstock.runtime.reading import ReadTransaction
from penstock.runtime.recovery import NO_INTENTS, EndpointCheckpoint, Persist
from penstock.runtime.stats import rfc3339, transaction_stats
from penstock.runtime.tail import Unfinished

K = TypeVar("K")
V = TypeVar("V", bytes, Clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction(ReadTransaction):
    """A transaction as far as it got: the only record of it that there is (`ClosedTransaction`)."""

    task: LeaderTask
    before: Memory
    """The session's memory when it opened."""
    reports: Mapping[int, BindingReport] = field(default_factory=dict)
    """Counts of all shards, by binding."""
    plan: Plan = Plan.FUSED
    hinted: bool = False
    patches: Patches = ()
    """Patches of its flush."""
    intents: Intents = NO_INTENTS

    def fold(self, reports: Reports) -> Transaction:
        """Add what shards counted."""
        folded, task = dict(self.reports), self.task
        for report in reports:
            at = report.binding
            if not 0 <= at < len(task.bindings):
                raise OutOfTurn(
                    f"shard {report.shard} reports binding {at}",
                    where=task.name,
                    why=f"the task has {len(task.bindings)}, from 0",
                )
            if self.hinted and report.max_key > self._max_key(at):
                raise Bug(
                    f"shard {report.shard} stored a key of binding {at} that was not announced",
                    where=task.name,
                    why="a greatest key that is durable too late makes rows look absent",
                )
            folded[at] = folded[at].reduce(report) if at in folded else report
        return replace(self, reports=folded)

    def _max_key(self, binding: int) -> bytes:
        return self.reports[binding].max_key if binding in self.reports else b""

    def check_replay(self, resume: Frontier) -> None:
        """Refuse to close a replay that is not exactly what was hinted."""
        if missing := resume.resolve_hints(self.extents).frontier.unresolved_hints:
            raise Bug(f"a replay closes, and {missing} hinted commits were not read")
        through = {
            (read.journal, read.binding, entry.producer): max(
                entry.last_commit, entry.hinted_commit
            )
            for read in resume
            for entry in read.producers
        }
        for read in self.extents:
            for entry in read.producers:
                hinted = through.get((read.journal, read.binding, entry.producer), OBSERVED_FLOOR)
                if entry.last_commit > max(hinted, OBSERVED_FLOOR):
                    raise Bug(
                        f"a replay read to {entry.last_commit:#x}, past the hinted {hinted:#x}",
                        where=f"journal {read.journal}, producer {entry.producer}",
                    )

    # What it adds up to

    @property
    def max_keys(self) -> dict[int, bytes]:
        """Greatest keys that are greater than what was stored before."""
        return {at: report.max_key for at, report in self.reports.items() if report.max_key}

    @property
    def source_clocks(self) -> dict[str, Clock]:
        """Newest source document, by collection."""
        newest: dict[str, Clock] = {}
        for at, report in self.reports.items():
            if report.clock_max != NEVER:
                collection = self.task.bindings[at].collection
                newest[collection] = max(newest.get(collection, NEVER), report.clock_max)
        return newest

    def memory(self) -> Memory:
        """Return the session's memory once this transaction is committed."""
        before = self.before
        bytes_behind = dict(before.bytes_behind)
        for binding, delta in self.extents.bytes_behind().items():
            bytes_behind[binding] = bytes_behind.get(binding, 0) + delta
        return Memory(
            last_close=self.closed,
            max_keys=_greatest(before.max_keys, self.max_keys),
            last_source_clocks=_greatest(before.last_source_clocks, self.source_clocks),
            bytes_behind=bytes_behind,
        )

    def trigger_params(self) -> bytes | None:
        """Return its triggers' variables; None if there are no triggers, or nothing was stored."""
        task = self.task
        stored = [report for _, report in sorted(self.reports.items()) if report.stored.docs]
        if not stored or not task.has_triggers:
            return None
        oldest = [report.clock_min for report in stored if report.clock_min != NEVER]
        names = dict.fromkeys(task.bindings[report.binding].collection for report in stored)
        params: dict[str, Json] = {
            "materialization_name": task.name,
            "connector_image": task.image,
            "collection_names": list(names),
            "published_at_min": rfc3339(min(oldest, default=NEVER)),
            "published_at_max": rfc3339(max(report.clock_max for report in stored)),
            "run_id": rfc3339(self.opened),
        }
        return canonical_json(params).encode()

    # Publishing (`runtime/tail.py`)

    def stats(self) -> dict[str, Json]:
        """Its statistics document."""
        after, nothing = self.memory(), BindingReport(binding=0)
        counted = [
            (at, binding, self.reports.get(at, nothing))
            for at, binding in enumerate(self.task.bindings)
        ]
        content = by_collection(
            BindingStats(
                collection=binding.collection,
                loaded=report.loaded,
                sourced=report.sourced,
                stored=report.stored,
                bytes_behind=after.bytes_behind.get(at, 0),
                last_source=after.last_source_clocks.get(binding.collection, NEVER),
            )
            for at, binding, report in counted
        )
        return transaction_stats(
            self.task.shard_name,
            open_clock=self.opened,
            close_clock=self.closed,
            section="materialize",
            content=content,
        )

    def with_intents(self, intents: Intents) -> Transaction:
        return replace(self, intents=intents)

    def start_commit(self) -> StartCommit:
        """An endpoint that commits by itself may then be ahead of the log."""
        checkpoint = EndpointCheckpoint(close=self.closed, ack_intents=self.intents)
        return StartCommit(close=self.closed, checkpoint=checkpoint, patches=self.patches)

    def hint(self) -> Persist:
        """The record before the first effect. A BARRIER does not know yet what it will store."""
        return Persist(
            hinted_close=self.closed,
            hinted_frontier=self.extents,
            patches=self.patches,
            max_keys=self.max_keys,
            last_source_clocks=self.source_clocks,
            hinted_trigger_params=self.trigger_params() if self.plan.stages else None,
            delete_hinted_trigger_params=True,
        )

    def commit(self, patches: Patches) -> Persist:
        """The record that makes it count."""
        return Persist(
            committed_close=self.closed,
            committed_frontier=self.extents,
            ack_intents=self.intents,
            patches=patches,
            trigger_params=self.trigger_params(),
            delete_hinted_trigger_params=True,
            max_keys={} if self.hinted else self.max_keys,
            last_source_clocks={} if self.hinted else self.source_clocks,
        )

    def unfinished(self, patches: Patches) -> Unfinished:
        return Unfinished(acknowledge=Acknowledge(patches=patches), intents=self.intents)


def _greatest(a: Mapping[K, V], b: Mapping[K, V]) -> dict[K, V]:
    """Return each key with the greater of its values."""
    return {key: max(side[key] for side in (a, b) if key in side) for key in (*a, *b)}
