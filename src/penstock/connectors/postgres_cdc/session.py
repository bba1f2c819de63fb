"""A session: tables read whole where that is due, and then the log, for ever.

The session is a story, told in `_story` and continued by every poll: it yields what a poll returns.

    claim     commit the name of the slot, before there is one
    snapshot  make the slot, and read the tables as they are at its start
    tail      read the log; where tables are to be read later, stop at the position of their
              snapshot, give that, and go on

So all tables are as of one position at every commit, whatever was added when. Nothing is confirmed
to the server that is not committed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.connectors.postgres_cdc import faults, progress, tables, wire
from penstock.connectors.postgres_cdc.gathering import (
    ChangeGathering,
    Replaced,
    Route,
    Truncated,
    ValueLost,
)
from penstock.connectors.postgres_cdc.opening import BoundTable, Start
from penstock.connectors.postgres_cdc.replication import Replication
from penstock.connectors.postgres_cdc.snapshot import plan_read, read_here
from penstock.connectors.postgres_cdc.spool import Spool
from penstock.connectors.postgres_cdc.values import USER_TYPES_FROM
from penstock.connectors.postgres_cdc.wire import lsn_text
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import CaptureSequence, Idle, Polled

if TYPE_CHECKING:
    from penstock.connectors.postgres_cdc.source import PostgresChanges

_log = logging.getLogger("penstock.connectors")

ASK_S: Final = 0.1
"""Seconds after which the server is asked again how far it has come, if somebody waits for it."""
HEARTBEAT_S: Final = 60.0
HEARTBEAT_BYTES: Final = 16 << 20
"""Time, or log, after which the slot is moved although nothing happened to the tables."""
_LOOK_EVERY: Final = 512
"""Frames between looks at the clock."""
_REPORT_S: Final = 2.0
_CLOSE_S: Final = 5.0

Story = Generator[Polled, None, None]

_ELDERS: Final = """
SELECT pid, coalesce(usename::text, ''), coalesce(application_name, ''),
    extract(epoch FROM now() - xact_start)::int
FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> $1 ORDER BY xact_start LIMIT 1"""


@dataclass(slots=True)
class _Sent:
    """A sequence that was given, and is not committed."""

    cursor: int | None
    spool: Spool | None = None


@dataclass(slots=True)
class _Snapshot:
    """Tables as they are at a position, for as long as the connection lives."""

    replication: Replication
    lsn: int
    name: str
    bound: Sequence[BoundTable]


class ChangesSession:
    """A session of `source-postgres` (`CaptureSession`)."""

    def __init__(
        self,
        source: PostgresChanges,
        replication: Replication,
        start: Start,
        *,
        publication: str | None,
        spool_home: Path | None,
        ends: bool,
        temporary: bool,
    ) -> None:
        self._source = source
        self._server = source.server
        self._replication = replication
        self._start = start
        self._publication = publication
        self._spool_home = spool_home
        self._ends = ends
        self._temporary = temporary
        self._polling = threading.Lock()
        self._closing = False
        self._deadline = 0.0
        self._lock = threading.Condition()
        self._sent: deque[_Sent] = deque()
        self._confirmed = start.cursor or 0
        self._told = 0
        self._position = 0
        self._owes_snapshot = False
        """The log is read up to where tables were read whole."""
        self._types: dict[int, tuple[int, int]] = {}
        self._extra: list[Replication] = []
        self._gathering: ChangeGathering | None = None
        self._tale = self._story()

    # ------------------------------------------------------------------------- what is called

    def poll(self, wait_s: float) -> Polled:
        with self._polling:
            if self._closing:
                return Idle.PENDING
            self._deadline = time.monotonic() + wait_s
            try:
                with faults.explained(self._server):
                    return next(self._tale)
            except wire.Malformed as error:
                raise faults.misunderstood(self._server, error) from error
            except OSError as error:
                raise faults.not_on_disk(self._server, error) from error

    def acknowledge(self, sequences: int) -> None:
        with self._lock:
            done = [self._sent.popleft() for _ in range(sequences)]
            for each in done:
                self._confirmed = each.cursor or self._confirmed
            self._lock.notify_all()
        for each in done:
            if each.spool is not None:
                each.spool.remove()

    def close(self) -> None:
        self._closing = True
        polled = self._polling.acquire(timeout=_CLOSE_S)
        try:
            if polled and self._told:
                with contextlib.suppress(Exception):  # the next session confirms it, too
                    self._replication.confirm(self._confirmed)
            for each in (self._replication, *self._extra):
                each.close()
            if self._gathering is not None:
                self._gathering.discard()
            for sent in self._sent:
                if sent.spool is not None:
                    sent.spool.remove()
        finally:
            if polled:
                self._polling.release()

    # ---------------------------------------------------------------------------------- the story

    def _story(self) -> Story:
        start = self._start
        if start.cursor is None:
            yield from self._begin()
        elif start.forgotten is not None:
            yield self._given(CaptureSequence(patches=(start.forgotten,)), None)
            yield from self._settled()
        if self._publication is None:
            _log.info("no publication has these tables yet: changes are not shown")
            while True:
                yield from self._pause(Idle.NOTHING)
        snapshot = None
        if start.cursor is not None and start.pending:
            replication = Replication(self._server)
            self._extra.append(replication)
            name = f"{start.slot}_{replication.pid}"
            snapshot = yield from self._export(replication, name, temporary=True)
            self._owes_snapshot = True
        yield from self._tail(snapshot, self._publication)

    def _begin(self) -> Story:
        """Make the slot, and read everything."""
        start = self._start
        if not start.is_claimed:
            claim = progress.claimed(start.system, start.slot)
            yield self._given(CaptureSequence(patches=(claim,)), None)
            yield from self._settled()
        snapshot = yield from self._export(self._replication, start.slot, temporary=self._temporary)
        self._confirmed = snapshot.lsn
        yield from self._give(snapshot)

    def _settled(self) -> Story:
        """Until all that was given is committed."""
        while True:
            with self._lock:
                if self._sent:
                    self._lock.wait(max(0.0, self._deadline - time.monotonic()))
                if not self._sent:
                    return
            yield Idle.PENDING

    def _pause(self, idle: Idle) -> Story:
        self._source.stopping.wait(max(0.0, self._deadline - time.monotonic()))
        yield idle

    def _given(
        self, sequence: CaptureSequence, cursor: int | None, spool: Spool | None = None
    ) -> CaptureSequence:
        with self._lock:
            self._sent.append(_Sent(cursor, spool))
        return sequence

    # ----------------------------------------------------------------------------------- snapshots

    def _export(
        self, replication: Replication, slot: str, *, temporary: bool
    ) -> Generator[Polled, None, _Snapshot]:
        """Make a slot, which waits until transactions that are under way have ended."""
        replication.create_slot(slot, temporary=temporary)
        began, report_s = time.monotonic(), _REPORT_S
        while (created := replication.created(self._deadline)) is None:
            waited_s = time.monotonic() - began
            if waited_s >= report_s:
                report_s *= 2
                self._source.waiting = self._elder(replication.pid)
                _log.warning("a new slot waits for %s, for %.0f s", self._source.waiting, waited_s)
            yield Idle.PENDING
        self._source.waiting = None
        lsn, name = created
        return _Snapshot(replication, lsn, name, self._start.pending)

    def _elder(self, own_pid: int) -> str:
        with self._source.connected() as connection:
            row = connection.run(_ELDERS, (own_pid,)).fetchone()
        if row is None:
            return "open transactions"
        pid, user, application, seconds = row
        about = ", ".join(part for part in (user, application, f"{seconds} s old") if part)
        return f"a transaction that began before, of pid {pid} ({about})"

    def _give(self, snapshot: _Snapshot) -> Story:
        """Give tables as they are in a snapshot, and wait until they are committed."""
        with self._source.connected() as connection:
            self._types = tables.bases(connection)
            names = [(each.table.schema, each.table.name) for each in snapshot.bound]
            # As they are now: columns may have come since the session began.
            found = {each.oid: each for each in tables.tables_named(connection, names)}
            if gone := [each for each in snapshot.bound if each.table.oid not in found]:
                raise faults.replaced(self._server, gone[0].table.shown)
            reads = [
                plan_read(
                    connection,
                    found[each.table.oid],
                    tables.leaves(connection, each.table),
                    binding=each.binding.index,
                    server=self._server,
                    snapshot=snapshot.name,
                    lsn=snapshot.lsn,
                    key=each.key,
                    bases=self._types,
                )
                for each in snapshot.bound
            ]
            given, left = read_here(connection, reads)
        _log.info(
            "read %d tables whole, as they are at %s; %d of them by Spark",
            len(reads),
            lsn_text(snapshot.lsn),
            len(left),
        )
        oids = {each.state_key: each.table.oid for each in snapshot.bound}
        sequence = CaptureSequence(
            given=tuple(given),
            reads=tuple(left),
            patches=(progress.read(snapshot.lsn, oids),),
        )
        self._position = max(self._position, snapshot.lsn)
        yield self._given(sequence, snapshot.lsn)
        yield from self._settled()

    # ------------------------------------------------------------------------------------ the tail

    def _tail(self, snapshot: _Snapshot | None, publication: str) -> Story:
        """Read the log, from what is committed on."""
        self._position = self._confirmed
        pending = set() if snapshot is None else {each.state_key for each in snapshot.bound}
        later = 0 if snapshot is None else snapshot.lsn
        gathering = self._gathering = ChangeGathering(
            [
                Route(
                    binding=each.binding.index,
                    oid=each.table.oid,
                    table=(each.table.schema, each.table.name),
                    key=each.key,
                    ignores_truncate=each.ignores_truncate,
                    since=later if each.state_key in pending else self._confirmed,
                )
                for each in (*self._start.known, *self._start.pending)
            ],
            self._bases,
            lambda: Spool(self._spool_home, self._start.slot),
        )
        self._replication.start(self._start.slot, self._confirmed, publication)
        self._confirm(always=True)
        frames = self._replication.frames
        moved_s, count = time.monotonic(), 0
        while True:
            size, data = frames(1)
            if size < 0:
                raise self._replication.ended()
            if size == 0:
                sequence = self._taken(gathering) or self._heartbeat(gathering, moved_s)
                if sequence is not None:
                    moved_s = time.monotonic()
                    yield sequence
                    self._confirm()
                elif not self._replication.wait(until := self._until()):
                    self._confirm(always=not self._reached)
                    if until >= self._deadline or (self._ends and self._reached):
                        yield self._idle(gathering)
                continue
            frame = bytes(data)
            end = self._read(gathering, frame)
            if end is not None and snapshot is not None and end >= snapshot.lsn:
                if (sequence := self._taken(gathering)) is not None:
                    yield sequence
                yield from self._give(snapshot)
                snapshot.replication.close()
                snapshot, self._owes_snapshot = None, False
            if frame[0] == wire.XLOG_DATA and frame[wire.MESSAGE_AT] == wire.BEGIN:
                gathering.begin(wire.begin(frame[wire.MESSAGE_AT :]))
            elif gathering.is_full and (sequence := self._taken(gathering)) is not None:
                moved_s = time.monotonic()
                yield sequence
                self._confirm()
            count += 1
            if count % _LOOK_EVERY == 0 and time.monotonic() >= self._deadline:
                self._confirm()
                yield self._taken(gathering) or self._idle(gathering)

    def _read(self, gathering: ChangeGathering, frame: bytes) -> int | None:
        """Take a frame in; returns a position before which all transactions have been read.

        The begin of a transaction only says that: it is the caller's to begin it.
        """
        if frame[0] != wire.XLOG_DATA:
            if frame[0] != wire.KEEPALIVE:
                raise wire.Malformed(f"a frame of {chr(frame[0])!r}")
            alive = wire.keepalive(frame)
            if alive.wants_reply:
                self._confirm(always=True)
            if gathering.in_transaction:
                return None
            self._position = max(self._position, alive.end)
            return self._position
        message = frame[wire.MESSAGE_AT :]
        kind = message[0]
        match kind:
            case wire.INSERT | wire.UPDATE | wire.DELETE:
                try:
                    gathering.change(kind, message)
                except ValueLost as error:
                    raise faults.value_lost(self._server, *error.args) from error
            case wire.BEGIN:
                return wire.begin(message).commit
            case wire.COMMIT:
                gathering.commit(wire.commit(message))
                self._position = max(self._position, gathering.end)
            case wire.RELATION:
                try:
                    gathering.relation(wire.relation(message))
                except Replaced as error:
                    raise faults.replaced(self._server, str(error)) from error
            case wire.TRUNCATE:
                try:
                    gathering.truncate(wire.truncate(message).relations)
                except Truncated as error:
                    raise faults.truncated(self._server, str(error)) from error
            case _:
                if kind not in wire.IGNORED:
                    raise wire.Malformed(f"a message of {chr(kind)!r}")
        return None

    def _taken(self, gathering: ChangeGathering) -> CaptureSequence | None:
        taken = gathering.take()
        if taken is None:
            return None
        sequence, spool = taken
        return self._given(sequence, gathering.end, spool)

    def _heartbeat(self, gathering: ChangeGathering, moved_s: float) -> CaptureSequence | None:
        """Move the slot on if others fill the log, so that the server need not keep it."""
        with self._lock:
            if self._sent or gathering.in_transaction:
                return None
            ahead = self._position - self._confirmed
        late = not self._ends and time.monotonic() - moved_s >= HEARTBEAT_S
        if ahead < HEARTBEAT_BYTES and not (late and ahead > 0):
            return None
        patch: Json = progress.moved(self._position)
        return self._given(CaptureSequence(patches=(patch,)), self._position)

    @property
    def _reached(self) -> bool:
        """All that was there when the session began has been given."""
        return self._position >= self._start.target and not self._owes_snapshot

    def _idle(self, gathering: ChangeGathering) -> Idle:
        return Idle.NOTHING if self._reached and gathering.is_empty else Idle.PENDING

    def _until(self) -> float:
        """How long to wait for the server: nobody waits for what comes after the end of a run."""
        if self._reached:
            return 0.0 if self._ends else self._deadline
        return min(self._deadline, time.monotonic() + ASK_S)

    def _confirm(self, *, always: bool = False) -> None:
        confirmed = self._confirmed
        if always or confirmed > self._told:
            self._replication.confirm(confirmed, wants_reply=not self._reached)
            self._told = confirmed

    def _bases(self, types: Sequence[int]) -> Mapping[int, tuple[int, int]]:
        """What types of users are made of; asks the server for those that are new."""
        if any(oid >= USER_TYPES_FROM and oid not in self._types for oid in types):
            with self._source.connected() as connection:
                self._types = tables.bases(connection)
        return self._types
