"""PURE: one transaction of a capture, from its first sequence to its commit record.

The record holds how the connector's state changed, and the ACKs of all that was published: they
count together, or not at all. Before it, everything published is pending and belongs to producers
that no ACK names; a transaction that was cut short never happened, and its documents are read again
from the state before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.journal.transaction import Intents
from penstock.model.clock import NEVER, Clock
from penstock.model.json_order import Json
from penstock.runtime.capture.task import CaptureLeaderTask, CaptureMemory
from penstock.runtime.connector.capture import CaptureSequence
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import Action
from penstock.runtime.recovery import NO_INTENTS, Persist
from penstock.runtime.stats import NONE, Counts, transaction_stats
from penstock.runtime.tail import Unfinished


@dataclass(frozen=True, slots=True)
class Acknowledge(Action):
    """Tell the source that this many sequences are committed; answered by `Acknowledged`."""

    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingCounts:
    """The documents that one binding captured in a transaction."""

    written: Counts = NONE
    """Documents that were published, and their bytes as they are stored."""
    refused: int = 0
    """Documents that do not fit the schema, and were skipped or put into quarantine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTransaction:
    """A transaction as far as it got (`ClosedTransaction`)."""

    task: CaptureLeaderTask
    opened: Clock
    sequences: tuple[CaptureSequence, ...] = ()
    closed: Clock = NEVER
    captured: Mapping[int, BindingCounts] = field(default_factory=dict)
    """By binding."""
    intents: Intents = NO_INTENTS

    @property
    def read_bytes(self) -> int:
        return sum(each.bytes for each in self.sequences)

    @property
    def read_docs(self) -> int:
        """Documents that came with their sequences; how many Spark will read is not known."""
        return sum(each.given_documents for each in self.sequences)

    @property
    def patches(self) -> Patches:
        return tuple(patch for each in self.sequences for patch in each.patches)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to read: it only moves the connector's state."""
        return not any(each.given or each.reads for each in self.sequences)

    def extend(self, sequence: CaptureSequence) -> CaptureTransaction:
        """Take one more sequence in, as a whole."""
        return replace(self, sequences=(*self.sequences, sequence))

    def memory(self) -> CaptureMemory:
        """Return the session's memory once this transaction is committed."""
        return CaptureMemory(last_close=self.closed)

    # Publishing (`runtime/tail.py`)

    def stats(self) -> dict[str, Json]:
        """Its statistics document."""
        collections: dict[str, tuple[Counts, int]] = {}
        for at, counts in sorted(self.captured.items()):
            target = self.task.targets[at]
            written, refused = collections.get(target, (NONE, 0))
            collections[target] = (written + counts.written, refused + counts.refused)
        content: dict[str, Json] = {}
        for target, (written, refused) in collections.items():
            content[target] = {"out": written.to_json()}
            if refused:
                content[target] = {"out": written.to_json(), "refusedTotal": refused}
        return transaction_stats(
            self.task.shard_name,
            open_clock=self.opened,
            close_clock=self.closed,
            section="capture",
            content=content,
        )

    def with_intents(self, intents: Intents) -> CaptureTransaction:
        return replace(self, intents=intents)

    def start_commit(self) -> None:
        return None

    def commit(self, patches: Patches) -> Persist:
        """The record that makes it count."""
        return Persist(committed_close=self.closed, ack_intents=self.intents, patches=self.patches)

    def unfinished(self, patches: Patches) -> Unfinished:
        return Unfinished(acknowledge=Acknowledge(len(self.sequences)), intents=self.intents)
