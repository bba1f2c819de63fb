"""PURE: what every leader does: write a record down, and go on when it is durable."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.runtime.recovery import Persist


class OutOfTurn(PenstockError):
    """Somebody said what nobody waits for. It ends the session: no guess about it is safe."""


def out_of_turn(got: object, *, waits_for: str, where: str | None = None) -> OutOfTurn:
    """The error for a message, or the end of a stream, that does not fit."""
    what = "the end of the stream" if got is None else type(got).__name__
    return OutOfTurn(f"{what} came out of turn", where=where, why=f"expected {waits_for}")


class Kind(enum.Enum):
    """Why a record is written."""

    APPLY = "the endpoint was prepared"
    RECONCILE = "the endpoint was ahead"
    HINT = "a transaction is about to have effects"
    TRIGGER_HINT = "its triggers are known before it commits"
    COMMIT = "it counts"
    ACK = "the connector acknowledged it"
    TRIGGER_DONE = "its triggers were called"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistRecord:
    """An action: append one record to the task's recovery log. At most one is under way."""

    seq_no: int
    kind: Kind
    record: Persist


@dataclass(frozen=True, slots=True)
class Persisted:
    """The record is durable."""

    seq_no: int
