"""PURE: a materialization as its leader knows it, and the Spark jobs its transactions take.

    plan       jobs                                               used when
    FUSED      gather + load + reduce + stage                     staged; the tail is done at close
    OVERLAP    gather + combine, while the tail is busy;          staged; ripe before a long tail is
               then load + reduce + stage                         done: it applies, or has triggers
    BARRIER    gather + load; hint; then reduce + store           direct, or a flush barrier

What is staged is invisible, so staged plans hint after their jobs. Direct ones store where everyone
can see it, and hint in between. A connector that applies by a Spark job of its own leaves room for
one job only: a transaction takes two at most.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import UserError
from penstock.model.clock import Clock
from penstock.runtime.close_policy import ClosePolicy
from penstock.runtime.connector.materialize import Pattern
from penstock.runtime.stats import ShardName

KIND: Final = "materialization"

JOBS_MAX: Final = 2
"""Spark jobs of one transaction."""

_DEFAULT_POLICY: Final = ClosePolicy()


class Plan(enum.Enum):
    """The jobs of a transaction, in order; the last one but of BARRIER ends in staging."""

    FUSED = ("gather, load, reduce, stage",)
    OVERLAP = ("gather, combine", "load, reduce, stage")
    BARRIER = ("gather, load", "reduce, store")

    @property
    def stages(self) -> bool:
        """True if everything to be stored is known before the hint."""
        return self is not Plan.BARRIER


class ApplyMode(enum.Enum):
    """Where an APPLY connector does its work when a transaction is acknowledged."""

    LEADER = "in the leader"
    SPARK = "by a Spark job"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderBinding:
    """A source and its target; addressed by index here, and by its state key in storage."""

    collection: str
    state_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderTask:
    """A materialization as its leader's machine sees it; it does not change during a session."""

    name: str
    build: str = ""
    image: str = ""
    """The connector, as triggers name it."""
    bindings: tuple[LeaderBinding, ...]
    shards: int = 1
    policy: ClosePolicy = _DEFAULT_POLICY
    pattern: Pattern
    flush_barrier: bool = False
    apply_mode: ApplyMode = ApplyMode.LEADER
    has_triggers: bool = False
    elide_hints: bool = False
    """Commit without a hint where nothing is visible before the commit."""
    transactions_max: int = 0
    """After which the session stops; zero is never."""
    drain: bool = False
    """Finish the last transaction's tail before stopping, instead of leaving it to the next."""

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError("a task has a shard at least")
        applies = self.apply_mode is ApplyMode.SPARK
        if any(len(self.plan(tail_done=done).value) + applies > JOBS_MAX for done in (True, False)):
            raise UserError(
                "this connector needs three Spark jobs for a transaction",
                where=self.name,
                why="it stores after a barrier, and applies by a job of its own",
                fix=f"apply in the leader, or store without a barrier: {JOBS_MAX} jobs are allowed",
            )

    def plan(self, *, tail_done: bool) -> Plan:
        """Return how to run a transaction that is ripe now."""
        if self.pattern is Pattern.DIRECT or self.flush_barrier:
            return Plan.BARRIER
        if tail_done or self.apply_mode is ApplyMode.SPARK or not self._has_long_tail:
            return Plan.FUSED
        return Plan.OVERLAP

    @property
    def _has_long_tail(self) -> bool:
        """False if the tail is two small records: waiting for them beats a handoff between jobs."""
        return self.pattern is Pattern.APPLY or self.has_triggers

    @property
    def shard_name(self) -> ShardName:
        return ShardName(kind=KIND, name=self.name, build=self.build)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Facts that a session remembers from one transaction to the next."""

    last_close: Clock
    max_keys: Mapping[int, bytes] = field(default_factory=dict)
    """Greatest packed key ever stored, by binding. Greater ones are new, and need no lookup."""
    last_source_clocks: Mapping[str, Clock] = field(default_factory=dict)
    """Newest source document ever reported, by collection."""
    bytes_behind: Mapping[int, int] = field(default_factory=dict)
    """Gauge by binding, since the session began."""
