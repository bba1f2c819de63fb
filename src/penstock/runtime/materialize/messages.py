"""PURE: what a leader is told (events), and what it wants done (actions).

Each action is one piece of IO. Those to all shards are answered by every shard, once:

    action          answered by                  which is then folded in
    Load            Loaded of every shard        what it will read, and how full it is
    Gather          Gathered                     that the input of the transaction is put together
    Flush           Flushed of every shard       counts, greatest keys, patches
    Store           Stored of every shard        counts
    StartCommit     StartedCommit of every shard patches
    Acknowledge     Acknowledged of every shard  patches
    PersistRecord   Persisted                    (see `runtime/protocol.py`)
    WriteStats      StatsWritten                 the intents of the transaction
    WriteIntents    IntentsWritten
    CallTrigger     TriggerCalled                a call that failed is no event: it ends the session
    Rotate          nothing: the transaction counts, and its tail begins
    Sleep           Woken, if nothing else comes first
    Stop            nothing: no action follows it

Where one call serves all shards, an adapter answers for each of them, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from penstock.journal.transaction import Intents
from penstock.model.clock import NEVER, Clock
from penstock.model.frontier import Frontier
from penstock.model.json_order import Json
from penstock.runtime.materialize.task import Plan
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import Persisted, PersistRecord
from penstock.runtime.recovery import EndpointCheckpoint
from penstock.runtime.stats import NONE, Counts

# ----------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingReport:
    """What a shard, or all of them, did for one binding in one transaction."""

    binding: int
    sourced: Counts = NONE
    clock_min: Clock = NEVER
    """Of its source documents; `NEVER` if there were none."""
    clock_max: Clock = NEVER
    max_key: bytes = b""
    """Greatest packed key; empty if none is greater than what is stored."""
    loaded: Counts = NONE
    stored: Counts = NONE

    def reduce(self, other: BindingReport) -> BindingReport:
        """Both together; in any order, for shards and rounds come in any order."""
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
"""Each count is reported once: with the first message that knows it exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A shard took a frontier in. Its measures steer the close policy, and may be estimates."""

    shard: int
    combiner_bytes: int = 0
    """That the shard holds now, of all rounds."""
    read_docs: int = 0
    """Of this round."""
    read_bytes: int = 0
    reports: Reports = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """A shard has loaded all there is. Its extents are complete, and exact."""

    shard: int
    reports: Reports = ()
    patches: Patches = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A shard has stored, or staged, its documents."""

    shard: int
    reports: Reports = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCommit:
    """A shard's part is as durable as its endpoint can make it before the commit."""

    shard: int
    patches: Patches = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """A shard's part of the last committed transaction is visible."""

    shard: int
    patches: Patches = ()


@dataclass(frozen=True, slots=True)
class FrontierReady:
    """The next checkpoint of the shuffle. At most one is held; see `Leader.wants_frontier`."""

    frontier: Frontier


@dataclass(frozen=True, slots=True)
class Gathered:
    """The gather job was accepted."""


@dataclass(frozen=True, slots=True)
class StatsWritten:
    """All documents of the transaction are durable, and wait for these ACKs."""

    intents: Intents


@dataclass(frozen=True, slots=True)
class IntentsWritten:
    """The ACKs are in their journals."""


@dataclass(frozen=True, slots=True)
class TriggerCalled:
    """All web hooks have answered well."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """End at the next transaction boundary; `drain`: when its tail is done, too."""

    drain: bool = False


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """Close the open transaction, if there is one, whatever its minima."""


@dataclass(frozen=True, slots=True)
class Woken:
    """Time has passed."""


ShardMessage: TypeAlias = Loaded | Flushed | Stored | StartedCommit | Acknowledged
Event: TypeAlias = (
    ShardMessage
    | FrontierReady
    | Gathered
    | Persisted
    | StatsWritten
    | IntentsWritten
    | TriggerCalled
    | StopRequested
    | CloseRequested
    | Woken
)

# ---------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Take a frontier into the transaction that opened at `transaction`."""

    transaction: Clock
    frontier: Frontier


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Begin to read what the transaction has; it takes no more."""

    transaction: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Load what is stored already, and reduce. From here on the transaction has a close clock."""

    transaction: Clock
    close: Clock
    plan: Plan
    max_keys: Mapping[int, bytes]
    """Committed, by binding: greater keys need no lookup. Absent: nothing was ever stored."""
    patches: Patches
    """Of the acknowledgements of the transaction before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Store, or say what was staged."""

    transaction: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStats:
    """Publish the stats document as part of the transaction, and close what it published."""

    document: dict[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommit:
    """Release what was staged, as the connector's pattern says."""

    close: Clock
    checkpoint: EndpointCheckpoint
    patches: Patches
    """Of the flush of this transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge:
    """The transaction is committed: make it visible. First of all in every session; idempotent."""

    patches: Patches
    """Of the commit of this transaction; none at first, when they were opened with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteIntents:
    """Write the ACKs of the committed transaction to their journals; idempotent."""

    intents: Intents


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTrigger:
    """Call the web hooks with these variables."""

    params: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate:
    """The transaction is committed; what is left of it is the tail's."""

    close: Clock
    transactions: int
    """Of this session, this one included."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Come back after this long. The last action of its step; a step without it sets no timer."""

    wake_after: Clock


@dataclass(frozen=True, slots=True)
class Stop:
    """End the session: it is at a boundary, and nothing is under way."""


Action: TypeAlias = (
    Load
    | Gather
    | Flush
    | PersistRecord
    | Store
    | WriteStats
    | StartCommit
    | Acknowledge
    | WriteIntents
    | CallTrigger
    | Rotate
    | Sleep
    | Stop
)
