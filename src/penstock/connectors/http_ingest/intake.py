"""PURE: requests that wait for their commit, grouped into sequences.

A request is admitted, waits to be taken into a sequence, and is settled when that sequence is
committed. Until then its idempotency key is under way: a repeat finds the first request, and waits
for the same outcome.

When are waiting requests taken? At once, if no sequence is on its way: nothing is gained by
waiting. Otherwise they wait for others: until none has come for `QUIET_S`, the first has waited for
`GROUP_S`, or there is enough for a sequence. A transaction takes several sequences while the one
before it commits, so a longer wait would only let requests miss their transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.connectors.http_ingest.keys import KeyedRequest, KeyLog, Remembered
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import GIVEN_BYTES_MAX

QUIET_S: Final = 0.005
GROUP_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Published:
    """The documents are committed."""

    documents: int
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing of the request is published, since these documents are invalid."""

    invalid: tuple[dict[str, Json], ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The capture stopped, and the request was not committed before."""


Outcome = Published | Refused | Stopped


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A request, from its admission to its outcome."""

    binding: int
    texts: Sequence[bytes]
    bytes: int
    received_s: float
    """Since 1970."""
    keyed: KeyedRequest | None = None
    key: str | None = None
    waiter: Any = None
    """With which the shell waits for the outcome."""
    came_s: float = 0.0
    """When it began to wait, by the intake's clock."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The key belongs to another request."""


@dataclass(frozen=True, slots=True)
class Group:
    """The requests of one sequence, and how the state changes by them, by binding."""

    tickets: tuple[Ticket, ...]
    changes: Mapping[int, Json] = field(default_factory=dict)


class Intake:
    """Everything that waits. Not thread-safe, and asks nobody for the time."""

    def __init__(self, keys: Mapping[int, KeyLog]) -> None:
        self._keys = keys
        self._underway: dict[tuple[int, bytes], Ticket] = {}
        self._waiting: deque[Ticket] = deque()
        self._waiting_bytes = 0
        self._given: deque[Group] = deque()
        self.admitted = 0
        """Requests without an outcome."""
        self.admitted_bytes = 0
        self.stopping = False
        self.commit_s = 0.0
        """How long the oldest request of the last commit had waited."""

    # ------------------------------------------------------------------------------ requests come

    def admit(self, ticket: Ticket) -> Ticket | Published | Conflict:
        """Let a request in; or return the one that it repeats, or what became of that."""
        if ticket.keyed is not None:
            where = ticket.binding, ticket.keyed.digest
            done = self._keys[ticket.binding].find(ticket.keyed.digest)
            if done is not None:
                return _repeated(done, ticket.keyed)
            first = self._underway.get(where)
            if first is not None:
                same = first.keyed is not None and first.keyed.body == ticket.keyed.body
                return first if same else Conflict()
            self._underway[where] = ticket
        self.admitted += 1
        self.admitted_bytes += ticket.bytes
        return ticket

    def wait(self, ticket: Ticket, now_s: float) -> None:
        """Its documents are valid: it waits for a sequence now."""
        ticket.came_s = now_s
        self._waiting.append(ticket)
        self._waiting_bytes += ticket.bytes

    def leave(self, ticket: Ticket) -> None:
        """It has an outcome: a repeat of its key would be another request."""
        self.admitted -= 1
        self.admitted_bytes -= ticket.bytes
        if ticket.keyed is not None:
            self._underway.pop((ticket.binding, ticket.keyed.digest), None)

    # --------------------------------------------------------------------------- requests are taken

    def delay_s(self, now_s: float) -> float | None:
        """Return the seconds until requests are to be taken; None if there are none."""
        if not self._waiting:
            return None
        if not self._given or self._waiting_bytes >= GIVEN_BYTES_MAX:
            return 0.0
        first, last = self._waiting[0].came_s, self._waiting[-1].came_s
        return max(0.0, min(first + GROUP_S, last + QUIET_S) - now_s)

    def take(self, now_ms: int) -> Group:
        """Take waiting requests, as many as make a sequence."""
        taken: list[Ticket] = []
        size = 0
        while self._waiting and (not taken or size + self._waiting[0].bytes <= GIVEN_BYTES_MAX):
            ticket = self._waiting.popleft()
            taken.append(ticket)
            size += ticket.bytes
        self._waiting_bytes -= size
        changes: dict[int, Json] = {}
        for binding, log in self._keys.items():
            if entries := _entries(taken, binding):
                changes[binding] = log.add(entries, now_ms)
        group = Group(tuple(taken), changes)
        self._given.append(group)
        return group

    # ------------------------------------------------------------------------- requests are settled

    def commit(self, sequences: int, now_s: float) -> list[Ticket]:
        """The next sequences are committed: return their requests."""
        settled: list[Ticket] = []
        for _ in range(sequences):
            group = self._given.popleft()
            for binding, log in self._keys.items():
                log.commit(_entries(group.tickets, binding))
            settled += group.tickets
        for ticket in settled:
            self.leave(ticket)
        if settled:
            self.commit_s = now_s - min(ticket.came_s for ticket in settled)
        return settled

    def stop(self) -> list[Ticket]:
        """Return the requests that get no commit any more; those that come are not to be let in."""
        self.stopping = True
        left = [ticket for group in self._given for ticket in group.tickets] + list(self._waiting)
        self._given.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        for ticket in left:
            self.leave(ticket)
        return left


def _entries(tickets: Sequence[Ticket], binding: int) -> list[tuple[KeyedRequest, int]]:
    return [
        (each.keyed, len(each.texts))
        for each in tickets
        if each.keyed is not None and each.binding == binding
    ]


def _repeated(done: Remembered, again: KeyedRequest) -> Published | Conflict:
    same = done.body == again.body
    return Published(done.published, repeated=True) if same else Conflict()
