"""PURE: the events and actions of a materialization's leader, beside those of every leader.

    action          answered by       which reports
    Gather          Gathered
    Flush           Flushed           counts, greatest keys, patches
    Store           Stored            counts
    StartCommit     StartedCommit     patches
    Acknowledge     Acknowledged      patches
    CallTrigger     TriggerCalled     nothing; a call that failed ends the session

One call serves all shards, and has one answer: reports in it say which shard counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.model.clock import NEVER, Clock
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import Action, Event
from penstock.runtime.recovery import EndpointCheckpoint
from penstock.runtime.stats import NONE, Counts

if TYPE_CHECKING:
    from penstock.runtime.materialize.transaction import Transaction

# ----------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingReport:
    """The counts of one shard, or of all, for one binding in one transaction."""

    binding: int
    shard: int = 0
    sourced: Counts = NONE
    clock_min: Clock = NEVER
    """Clock of the oldest source document; `NEVER` if there were none."""
    clock_max: Clock = NEVER
    max_key: bytes = b""
    """Greatest packed key; empty if none is greater than what is stored."""
    loaded: Counts = NONE
    stored: Counts = NONE

    def reduce(self, other: BindingReport) -> BindingReport:
        """Add another one; in any order, for shards and jobs come in any order."""
        oldest = [clock for clock in (self.clock_min, other.clock_min) if clock != NEVER]
        return BindingReport(
            binding=self.binding,
            sourced=self.sourced + other.sourced,
            clock_min=min(oldest, default=NEVER),
            clock_max=max(self.clock_max, other.clock_max),
            max_key=max(self.max_key, other.max_key),
            loaded=self.loaded + other.loaded,
            stored=self.stored + other.stored,
        )


Reports: TypeAlias = tuple[BindingReport, ...]
"""Each count is reported once: with the first answer that knows it exactly."""


@dataclass(frozen=True, slots=True)
class Gathered(Event):
    """The gather job is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed(Event):
    """All there is was loaded. The extents are complete, and exact."""

    reports: Reports = ()
    patches: Patches = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Event):
    """The documents of a direct store are stored."""

    reports: Reports = ()


@dataclass(frozen=True, slots=True)
class TriggerCalled(Event):
    """All web hooks have answered well."""


# ---------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Gather(Action):
    """Begin to read what the transaction has; it takes no more."""

    txn: Transaction


@dataclass(frozen=True, slots=True)
class Flush(Action):
    """Load what is stored already, reduce, and stage unless the plan is a BARRIER."""

    txn: Transaction
    """From here on it has a close clock."""
    patches: Patches
    """Patches of the acknowledgement of the transaction before."""


@dataclass(frozen=True, slots=True)
class Store(Action):
    """Store what a BARRIER has loaded."""

    txn: Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommit(Action):
    """Release what was staged, as the connector's pattern says."""

    close: Clock
    checkpoint: EndpointCheckpoint
    patches: Patches
    """Patches of the flush of this transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge(Action):
    """The transaction is committed: make it visible. First of all in every session; idempotent."""

    patches: Patches
    """Patches of this transaction's `StartCommit`; none at first: the session opened with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTrigger(Action):
    """Call the web hooks with these variables."""

    params: bytes
