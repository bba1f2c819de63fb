"""The part that connectors of every kind share: errors, attempts, and interrupts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.errors import PenstockError
from penstock.model.clock import Clock
from penstock.model.json_order import Json


class ConnectorError(PenstockError):
    """The endpoint did not do what was asked. A transient error is worth another session."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        transient: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.transient = transient
        self.retry_after_s = retry_after_s
        """Seconds that the next session should wait at least, after a transient error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkAttempt:
    """The identity of one try of a piece of work in Spark: no two tries share it."""

    task: str
    epoch: int
    transaction: Clock
    """The clock at which the transaction opened."""
    job: str
    shard: int
    attempt: int

    @property
    def name(self) -> str:
        """For tables and directories: digits, lower-case letters and underscores."""
        return f"{self.epoch}_{self.transaction:x}_{self.job}_{self.shard}_{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The result of `apply`: a description for people, and patches of the connector's state."""

    description: str
    patches: tuple[Json, ...] = ()


class Connector(Protocol):
    """A connector of any kind. Made from the endpoint's configuration; opens nothing by itself."""

    def check(self) -> None:
        """Raise a `ConnectorError` if the endpoint cannot be reached or used."""
        ...

    def interrupt(self) -> None:
        """Make the call under way, of a session too, raise soon; do nothing else.

        Called from another thread, repeatedly until the call has ended. The next session finds out
        how it ended: an ENDPOINT may have committed.
        """
        ...

    def waits_for(self) -> str | None:
        """Return what the call under way, or a Spark task, is waiting for: a lock, and its holder.

        None if it is working. Called from another thread; may ask the endpoint for a second or two.
        """
        ...
