"""PURE: one transaction, from its first frontier to its commit; and the records it leaves.

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
from penstock.model.frontier import EMPTY, Frontier
from penstock.model.json_order import Json, canonical_json
from penstock.model.producer_frontier import OBSERVED_FLOOR
from penstock.runtime.materialize.messages import BindingReport, Loaded, Reports
from penstock.runtime.materialize.task import Memory, Plan, Task
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import OutOfTurn
from penstock.runtime.recovery import NO_INTENTS, EndpointCheckpoint, Persist
from penstock.runtime.stats import BindingStats, materialization_stats, rfc3339

K = TypeVar("K")
V = TypeVar("V", bytes, Clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """What has become of it so far."""

    opened: Clock
    extents: Frontier = field(default_factory=lambda: EMPTY)
    reports: Mapping[int, BindingReport] = field(default_factory=dict)
    """By binding, of all shards."""
    combiner_bytes: Mapping[int, int] = field(default_factory=dict)
    """By shard, as of the latest round."""
    read_docs: int = 0
    read_bytes: int = 0
    sealed: bool = False
    """Its input is gathered already."""
    closed: Clock = NEVER
    plan: Plan = Plan.FUSED
    hinted: bool = False
    patches: Patches = ()
    """Of its flush."""
    intents: Intents = NO_INTENTS

    # Opening and extending

    def extend(self, frontier: Frontier) -> Transaction:
        """With one more frontier.

        A checkpoint without unresolved hints completes the peeks before it: hints of theirs that it
        does not resolve were given up by the shuffle.
        """
        extents = self.extents.reduce(frontier)
        if not frontier.unresolved_hints:
            extents = extents.clear_discharged_hints()
        return replace(self, extents=extents)

    def measure(self, loaded: Loaded) -> Transaction:
        """With what a shard says of a round."""
        return replace(
            self,
            combiner_bytes={**self.combiner_bytes, loaded.shard: loaded.combiner_bytes},
            read_docs=self.read_docs + loaded.read_docs,
            read_bytes=self.read_bytes + loaded.read_bytes,
        )

    def fold(self, shard: int, reports: Reports, task: Task) -> Transaction:
        """With what a shard counted."""
        folded = dict(self.reports)
        for report in reports:
            at = report.binding
            if not 0 <= at < len(task.bindings):
                raise OutOfTurn(
                    f"shard {shard} reports binding {at}",
                    where=task.name,
                    why=f"the task has {len(task.bindings)}, from 0",
                )
            if self.hinted and report.max_key > self._max_key(at):
                raise Bug(
                    f"shard {shard} stored a key of binding {at} that was not announced",
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

    def source_clocks(self, task: Task) -> dict[str, Clock]:
        """Newest source document, by collection."""
        newest: dict[str, Clock] = {}
        for at, report in self.reports.items():
            if report.clock_max != NEVER:
                collection = task.bindings[at].collection
                newest[collection] = max(newest.get(collection, NEVER), report.clock_max)
        return newest

    def after(self, memory: Memory, task: Task) -> Memory:
        """What a session remembers once this transaction is committed."""
        bytes_behind = dict(memory.bytes_behind)
        for binding, delta in self.extents.bytes_behind().items():
            bytes_behind[binding] = bytes_behind.get(binding, 0) + delta
        return Memory(
            last_close=self.closed,
            max_keys=_greatest(memory.max_keys, self.max_keys),
            last_source_clocks=_greatest(memory.last_source_clocks, self.source_clocks(task)),
            bytes_behind=bytes_behind,
        )

    def trigger_params(self, task: Task) -> bytes | None:
        """The variables of its triggers; none if there are no triggers, or nothing was stored."""
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

    def stats(self, memory: Memory, task: Task) -> dict[str, Json]:
        """Its stats document."""
        after = self.after(memory, task)
        nothing = BindingReport(binding=0)
        counted = [
            (at, binding, self.reports.get(at, nothing)) for at, binding in enumerate(task.bindings)
        ]
        return materialization_stats(
            task.shard_name,
            open_clock=self.opened,
            close_clock=self.closed,
            bindings=[
                BindingStats(
                    collection=binding.collection,
                    loaded=report.loaded,
                    sourced=report.sourced,
                    stored=report.stored,
                    bytes_behind=after.bytes_behind.get(at, 0),
                    last_source=after.last_source_clocks.get(binding.collection, NEVER),
                )
                for at, binding, report in counted
            ],
        )

    # What it leaves behind

    @property
    def checkpoint(self) -> EndpointCheckpoint:
        """For an endpoint that commits by itself, and may then be ahead of the log."""
        return EndpointCheckpoint(close=self.closed, ack_intents=self.intents)

    def hint(self, task: Task) -> Persist:
        """Before the first effect. Of a BARRIER, what will be stored is not known yet."""
        return Persist(
            hinted_close=self.closed,
            hinted_frontier=self.extents,
            patches=self.patches,
            max_keys=self.max_keys,
            last_source_clocks=self.source_clocks(task),
            hinted_trigger_params=self.trigger_params(task) if self.plan.stages else None,
            delete_hinted_trigger_params=True,
        )

    def commit(self, task: Task, patches: Patches) -> Persist:
        """What makes it count. `patches` are those of its `StartCommit`."""
        return Persist(
            committed_close=self.closed,
            committed_frontier=self.extents,
            ack_intents=self.intents,
            patches=patches,
            trigger_params=self.trigger_params(task),
            delete_hinted_trigger_params=True,
            max_keys={} if self.hinted else self.max_keys,
            last_source_clocks={} if self.hinted else self.source_clocks(task),
        )


def _greatest(a: Mapping[K, V], b: Mapping[K, V]) -> dict[K, V]:
    """Each key with the greater of its values."""
    return {key: max(side[key] for side in (a, b) if key in side) for key in (*a, *b)}
