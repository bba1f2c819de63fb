"""PURE: the frames of streaming replication, and the messages of `pgoutput` inside of them.

A frame is what the server puts into one CopyData: `w` carries a message, `k` says how far the
server has come. A client answers with `r`. Messages are those of protocol version 1: a transaction
comes whole, after its commit, as `B`, its changes, and `C`; a relation is described by `R` before
its first change, and again when it has changed.

Rows are read by the hundred thousand, so their messages become tuples, and all others values of
their own. A column of a row is the server's text for it, None for NULL, or `UNCHANGED`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

XLOG_DATA: Final = ord("w")
KEEPALIVE: Final = ord("k")
MESSAGE_AT: Final = 25
"""Where the message begins in a frame of `XLOG_DATA`."""

BEGIN: Final = ord("B")
COMMIT: Final = ord("C")
RELATION: Final = ord("R")
INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
TRUNCATE: Final = ord("T")
IGNORED: Final = frozenset(b"OYM")
"""The origin of a transaction, the name of a type, and a message that a program has left."""

POSTGRES_EPOCH_S: Final = 946_684_800
"""Seconds of Unix time at which PostgreSQL's time begins."""


class Unchanged:
    """A large value that an update did not touch: the server does not send it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNCHANGED"

    def __reduce__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()

Value: TypeAlias = bytes | Unchanged | None
Row: TypeAlias = list[Value]

_KEEPALIVE: Final = struct.Struct(">BQqB")
_STATUS: Final = struct.Struct(">BQQQqB")
_BEGIN: Final = struct.Struct(">BQqI")
_COMMIT: Final = struct.Struct(">BBQQq")
_size: Final = struct.Struct(">I").unpack_from
_count: Final = struct.Struct(">H").unpack_from

_TEXT: Final = ord("t")
_NULL: Final = ord("n")
_TOAST: Final = ord("u")
_NEW: Final = ord("N")
KEY: Final = ord("K")
"""The old row of a change has its identity only."""
OLD: Final = ord("O")
"""The old row of a change is whole."""


class Malformed(ValueError):
    """These bytes are no message that this version of the protocol has."""


# -------------------------------------------------------------------------------------- positions


def lsn_text(lsn: int) -> str:
    """A position in the log, as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_of(text: str) -> int:
    """Read a position in the log."""
    high, slash, low = text.partition("/")
    if not slash:
        raise Malformed(f"{text!r} is no position in a log")
    return int(high, 16) << 32 | int(low, 16)


# ----------------------------------------------------------------------------------------- frames


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How far the server has sent its log, and whether it wants to hear of its client."""

    end: int
    wants_reply: bool


def keepalive(frame: bytes) -> Keepalive:
    """Read a frame of `KEEPALIVE`."""
    try:
        _, end, _, wants_reply = _KEEPALIVE.unpack(frame)
    except struct.error as error:
        raise Malformed("a keepalive is cut short") from error
    return Keepalive(end, wants_reply != 0)


def status(lsn: int, *, now_us: int = 0, wants_reply: bool = False) -> bytes:
    """Make the frame by which a client says up to where it needs nothing more."""
    return _STATUS.pack(ord("r"), lsn, lsn, lsn, now_us, wants_reply)


# --------------------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction begins. `commit` is the position of its commit."""

    commit: int
    time_us: int
    """When it was committed: microseconds since 2000."""
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A transaction ends. `end` is the position after its commit."""

    commit: int
    end: int
    time_us: int


@dataclass(frozen=True, slots=True)
class ColumnOf:
    """A column of a relation."""

    name: str
    type: int
    modifier: int
    is_identity: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """What rows of a table look like from here on."""

    oid: int
    schema: str
    table: str
    identity: str
    """`d`: the primary key; `i`: an index; `f`: the whole row; `n`: nothing."""
    columns: tuple[ColumnOf, ...]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables lost all of their rows."""

    relations: tuple[int, ...]


def begin(message: bytes) -> Begin:
    """Read a message of `BEGIN`."""
    try:
        _, commit, time_us, xid = _BEGIN.unpack(message)
    except struct.error as error:
        raise Malformed("the begin of a transaction is cut short") from error
    return Begin(commit, time_us, xid)


def commit(message: bytes) -> Commit:
    """Read a message of `COMMIT`."""
    try:
        _, _, at, end, time_us = _COMMIT.unpack(message)
    except struct.error as error:
        raise Malformed("the commit of a transaction is cut short") from error
    return Commit(at, end, time_us)


def relation(message: bytes) -> Relation:
    """Read a message of `RELATION`."""
    try:
        (oid,) = _size(message, 1)
        schema, at = _text(message, 5)
        table, at = _text(message, at)
        identity = chr(message[at])
        (count,) = _count(message, at + 1)
        at += 3
        columns = []
        for _ in range(count):
            flags = message[at]
            name, at = _text(message, at + 1)
            type_oid, modifier = struct.unpack_from(">Ii", message, at)
            at += 8
            columns.append(ColumnOf(name, type_oid, modifier, bool(flags & 1)))
    except (struct.error, IndexError, ValueError) as error:
        raise Malformed("the description of a table is cut short") from error
    return Relation(oid, schema or "pg_catalog", table, identity, tuple(columns))


def truncate(message: bytes) -> Truncate:
    """Read a message of `TRUNCATE`."""
    try:
        (count,) = _size(message, 1)
        return Truncate(struct.unpack_from(f">{count}I", message, 6))
    except struct.error as error:
        raise Malformed("a truncate is cut short") from error


def relation_of(message: bytes) -> int:
    """The relation that an insert, an update or a delete is about."""
    oid: int = _size(message, 1)[0]
    return oid


def inserted(message: bytes) -> Row:
    """Read the row of an insert."""
    row, _ = _row(message, 6)
    return row


def updated(message: bytes) -> tuple[int | None, Row, Row]:
    """Read an update: what its old row is (`KEY`, `OLD`, or None), that row, and the new one."""
    kind = message[5]
    if kind == _NEW:
        row, _ = _row(message, 6)
        return None, [], row
    old, at = _row(message, 6)
    if message[at : at + 1] != b"N":
        raise Malformed("an update has no new row")
    row, _ = _row(message, at + 1)
    return kind, old, row


def deleted(message: bytes) -> tuple[int, Row]:
    """Read a delete: what its old row is (`KEY` or `OLD`), and that."""
    row, _ = _row(message, 6)
    return message[5], row


def _row(message: bytes, at: int) -> tuple[Row, int]:
    """The columns that begin at a place, and where they end."""
    row: Row = []
    add = row.append
    try:
        (count,) = _count(message, at)
        at += 2
        for _ in range(count):
            kind = message[at]
            if kind == _TEXT:
                start = at + 5
                at = start + _size(message, at + 1)[0]
                add(message[start:at])
            elif kind == _NULL:
                add(None)
                at += 1
            elif kind == _TOAST:
                add(UNCHANGED)
                at += 1
            else:
                raise Malformed(f"a column is sent as {chr(kind)!r}, which nobody asked for")
    except (struct.error, IndexError) as error:
        raise Malformed("a row is cut short") from error
    if at > len(message):
        raise Malformed("a row is cut short")
    return row, at


def _text(message: bytes, at: int) -> tuple[str, int]:
    end = message.index(0, at)
    return message[at:end].decode(), end + 1
