"""The codec of the replication protocol: whatever a server may write is read as it was meant."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.postgres_cdc import wire
from penstock.connectors.postgres_cdc.wire import (
    UNCHANGED,
    Begin,
    ColumnOf,
    Commit,
    Keepalive,
    Malformed,
    Relation,
    Row,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
ROWS = st.lists(st.binary(max_size=5) | st.none() | st.just(UNCHANGED), max_size=6)
COLUMNS = st.builds(ColumnOf, NAMES, U32, st.integers(-1, 2**31 - 1), st.booleans())


def row(values: Row) -> bytes:
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif isinstance(value, bytes):
            parts.append(b"t" + struct.pack(">I", len(value)) + value)
        else:
            parts.append(b"u")
    return b"".join(parts)


def text(value: str) -> bytes:
    return value.encode() + b"\0"


@given(U64)
def test_positions_are_read_as_they_are_written(lsn: int) -> None:
    assert wire.lsn_of(wire.lsn_text(lsn)) == lsn


def test_a_position_is_written_as_postgres_writes_it() -> None:
    assert wire.lsn_text(0x16_B374D848) == "16/B374D848"
    with pytest.raises(Malformed):
        wire.lsn_of("16B3")


@given(U64, I64, st.booleans())
def test_keepalives(end: int, time_us: int, wants_reply: bool) -> None:
    frame = struct.pack(">BQqB", ord("k"), end, time_us, wants_reply)
    assert wire.keepalive(frame) == Keepalive(end, wants_reply)
    with pytest.raises(Malformed):
        wire.keepalive(frame[:-1])


@given(U64, I64, st.booleans())
def test_a_status_has_one_position_three_times(lsn: int, now_us: int, wants_reply: bool) -> None:
    frame = wire.status(lsn, now_us=now_us, wants_reply=wants_reply)
    assert struct.unpack(">cQQQqB", frame) == (b"r", lsn, lsn, lsn, now_us, wants_reply)


@given(U64, U64, I64, U32)
def test_transactions_begin_and_end(commit: int, end: int, time_us: int, xid: int) -> None:
    begun = b"B" + struct.pack(">QqI", commit, time_us, xid)
    assert wire.begin(begun) == Begin(commit, time_us, xid)
    ended = b"C\0" + struct.pack(">QQq", commit, end, time_us)
    assert wire.commit(ended) == Commit(commit, end, time_us)
    for broken in (begun[:-1], ended[:-1]):
        with pytest.raises(Malformed):
            (wire.begin if broken[:1] == b"B" else wire.commit)(broken)


@given(U32, NAMES.filter(bool), NAMES, st.sampled_from("dfin"), st.lists(COLUMNS, max_size=4))
def test_relations(
    oid: int, schema: str, table: str, identity: str, columns: list[ColumnOf]
) -> None:
    message = (
        b"R"
        + struct.pack(">I", oid)
        + text(schema)
        + text(table)
        + identity.encode()
        + struct.pack(">H", len(columns))
        + b"".join(
            bytes([each.is_identity])
            + text(each.name)
            + struct.pack(">Ii", each.type, each.modifier)
            for each in columns
        )
    )
    assert wire.relation(message) == Relation(oid, schema, table, identity, tuple(columns))
    with pytest.raises(Malformed):
        wire.relation(message[:-1])


@given(U32, ROWS, ROWS, st.sampled_from("KO"))
def test_changes_of_rows(oid: int, old: Row, new: Row, kind: str) -> None:
    about = struct.pack(">I", oid)
    inserted = b"I" + about + b"N" + row(new)
    assert wire.relation_of(inserted) == oid
    assert wire.inserted(inserted) == new
    assert wire.updated(b"U" + about + b"N" + row(new)) == (None, [], new)
    updated = b"U" + about + kind.encode() + row(old) + b"N" + row(new)
    assert wire.updated(updated) == (ord(kind), old, new)
    assert wire.deleted(b"D" + about + kind.encode() + row(old)) == (ord(kind), old)
    with pytest.raises(Malformed):
        wire.inserted(inserted[:-1])


@given(st.lists(U32, max_size=5))
def test_truncates(relations: list[int]) -> None:
    message = b"T" + struct.pack(f">IB{len(relations)}I", len(relations), 0, *relations)
    assert wire.truncate(message).relations == tuple(relations)


def test_a_value_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(Malformed, match="'b'"):
        wire.inserted(b"I\0\0\0\1N" + struct.pack(">H", 1) + b"b\0\0\0\1x")
