from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consensus import entries
from penstock.consensus.entries import NO_BASE, CorruptEntry, LogEntry, NewerFormat

identities = st.binary(min_size=16, max_size=16)
numbers = st.integers(min_value=0, max_value=2**63 - 1)
payloads = st.none() | st.binary(max_size=100) | st.binary(max_size=9).map(lambda b: b * 2000)
any_entry = st.builds(
    LogEntry,
    format=st.integers(0, 300),
    writer=identities,
    writer_seq=numbers,
    token=identities,
    epoch=numbers,
    base=numbers | st.just(NO_BASE),
    wall_ms=numbers,
    diff=payloads,
    state=payloads,
)
PLAIN = LogEntry(
    format=1, writer=b"w" * 16, writer_seq=1, token=b"t" * 16, epoch=0, base=NO_BASE, wall_ms=0,
    diff=b"diff",
)  # fmt: skip


@given(any_entry)
def test_an_entry_comes_back_as_it_was_and_has_one_spelling(entry: LogEntry) -> None:
    data = entries.encode(entry)
    assert entries.decode(data, where="here") == entry
    assert entries.encode(entries.decode(data, where="here")) == data


@given(any_entry, st.integers(0, 7))
def test_the_version_is_under_the_checksum(entry: LogEntry, bit: int) -> None:
    whole = entries.encode(entry)
    with pytest.raises((CorruptEntry, NewerFormat)):
        entries.decode(whole[:1] + bytes([whole[1] ^ (1 << bit)]) + whole[2:], where="k, entry 0")


@given(any_entry, st.data())
def test_no_damaged_byte_goes_unnoticed(entry: LogEntry, data: st.DataObject) -> None:
    whole = entries.encode(entry)
    position = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytes([whole[position] ^ (1 << data.draw(st.integers(0, 7)))])
    damaged = whole[:position] + flipped + whole[position + 1 :]
    with pytest.raises((CorruptEntry, NewerFormat)):
        entries.decode(damaged, where="here")
    with pytest.raises(CorruptEntry):
        entries.decode(whole[:position], where="here")


def test_large_bodies_are_compressed() -> None:
    large = msgspec.structs.replace(PLAIN, state=bytes(100_000))
    assert len(entries.encode(large)) < 2_000


@pytest.mark.parametrize(
    ("position", "value"),
    [pytest.param(1, 2, id="a newer envelope"), pytest.param(2, 0x80, id="an unknown flag")],
)
def test_an_entry_of_a_newer_release_is_distinguished_from_damage(
    position: int, value: int
) -> None:
    data = bytearray(entries.encode(PLAIN))
    data[position] = value
    with pytest.raises(NewerFormat) as caught:
        entries.decode(bytes(data), where="task/a, entry 7")
    assert "task/a, entry 7" in str(caught.value)
    assert "upgrade" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x50", b"hello, this is not an entry"])
def test_foreign_values_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(CorruptEntry, match="not a state-log entry"):
        entries.decode(data, where="here")
