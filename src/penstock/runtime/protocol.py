"""PURE: the events and actions that leaders of every kind share.

A leader's machine receives an **event**, and answers with **actions**, each one piece of IO:

    action          answered by
    PersistRecord   Persisted
    WriteStats      StatsWritten: the ACK intents of the transaction
    WriteIntents    IntentsWritten
    Sleep           Woken, if nothing else comes first
    Stop            nothing: no action follows it

A kind adds its own, of which the publishing tail knows two answers: `StartedCommit` and
`Acknowledged` (`runtime/tail.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.journal.transaction import Intents
from penstock.model.clock import Clock
from penstock.model.json_order import Json
from penstock.runtime.patches import Patches
from penstock.runtime.recovery import Persist


class Event:
    """Something that came to pass."""

    __slots__ = ()


class Action:
    """Something to do."""

    __slots__ = ()


class OutOfTurn(PenstockError):
    """An event that nobody waits for. It ends the session: no guess about it is safe."""


def out_of_turn(got: object, *, waits_for: str, where: str | None = None) -> OutOfTurn:
    """Return the error for an event, or the end of a stream, that does not fit."""
    what = "the end of the stream" if got is None else type(got).__name__
    return OutOfTurn(f"{what} came out of turn", where=where, why=f"expected {waits_for}")


# ----------------------------------------------------------------------------------------- records


class RecordKind(enum.Enum):
    """Why a record is written."""

    APPLY = "the endpoint was prepared"
    RECONCILE = "the endpoint was ahead"
    HINT = "a transaction is about to have effects"
    TRIGGER_HINT = "its triggers are known before it commits"
    COMMIT = "it counts"
    ACK = "the connector acknowledged it"
    TRIGGER_DONE = "its triggers were called"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistRecord(Action):
    """Append one record to the task's recovery log. At most one is under way."""

    seq_no: int
    kind: RecordKind
    record: Persist


@dataclass(frozen=True, slots=True)
class Persisted(Event):
    """The record is durable."""

    seq_no: int


# ---------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """End at the next transaction boundary; `drain`: after the tail of that transaction, too."""

    drain: bool = False


@dataclass(frozen=True, slots=True)
class CloseRequested(Event):
    """Close the open transaction, if there is one, whatever its minima."""


@dataclass(frozen=True, slots=True)
class Sleep(Action):
    """Come back after this long. The last action of its step; a step without it sets no timer."""

    wake_after: Clock


@dataclass(frozen=True, slots=True)
class Woken(Event):
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """End the session: it is at a boundary, and nothing is under way."""


# -------------------------------------------------------------------------------------- publishing


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStats(Action):
    """Publish the statistics document as part of the transaction, and close what it published."""

    document: dict[str, Json]


@dataclass(frozen=True, slots=True)
class StatsWritten(Event):
    """All documents of the transaction are durable, and wait for these ACKs."""

    intents: Intents


@dataclass(frozen=True, slots=True)
class StartedCommit(Event):
    """The transaction is as durable as its endpoint can make it before the commit record."""

    patches: Patches = ()


@dataclass(frozen=True, slots=True)
class Acknowledged(Event):
    """The endpoint, or the source, knows that the last transaction is committed."""

    patches: Patches = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteIntents(Action):
    """Write the ACKs of the committed transaction to their journals; idempotent."""

    intents: Intents


@dataclass(frozen=True, slots=True)
class IntentsWritten(Event):
    """The ACKs are in their journals."""
