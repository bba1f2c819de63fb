"""Frontiers as bytes: exact both ways, and never a wrong value from damaged input."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import CLOCK_MAX, Clock, Producer, from_unix
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.frontier_codec import (
    NAMES_BYTES_MAX,
    CorruptFrontier,
    decode,
    encode,
)
from penstock.model.producer_frontier import OFFSET_MAX, ProducerFrontier
from support.strategies_frontier import frontiers

P1 = Producer(Producer.MULTICAST | 1)
any_frontier = st.one_of(frontiers(), frontiers(wide=True))


def one_entry(last_commit: int, hint: int, offset: int) -> Frontier:
    entry = ProducerFrontier(
        producer=P1, last_commit=Clock(last_commit), hinted_commit=Clock(hint), offset=offset
    )
    return Frontier.of([JournalFrontier(journal="acme/a", producers=(entry,))])


@given(any_frontier)
def test_bytes_round_trip(frontier: Frontier) -> None:
    decoded = decode(encode(frontier))
    assert decoded == frontier
    assert decoded.unresolved_hints == frontier.unresolved_hints
    assert encode(decoded) == encode(frontier)


@pytest.mark.parametrize(
    "frontier",
    [
        pytest.param(EMPTY, id="empty"),
        pytest.param(one_entry(0, 0, 0), id="all zero"),
        pytest.param(one_entry(CLOCK_MAX, CLOCK_MAX, OFFSET_MAX), id="greatest"),
        pytest.param(one_entry(CLOCK_MAX, 1, -OFFSET_MAX), id="least offset"),
        pytest.param(one_entry(1, 2, 0), id="floor and small hint"),
        pytest.param(
            one_entry(1, 0, 0).reduce(one_entry(CLOCK_MAX, 0, -1)), id="floor joined with a clock"
        ),
    ],
)
def test_extremes_round_trip(frontier: Frontier) -> None:
    assert decode(encode(frontier)) == frontier


def test_the_binary_form_is_pinned() -> None:
    """State logs outlive releases: if this fails, raise the version and keep reading the old."""
    frontier = one_entry(from_unix(1700000000), 0, -17)
    packed = zlib.compress(b"acme/a", 1)
    assert encode(frontier).hex() == (
        "505346" "01" "00000001" "00000001" "00000000" "00000000" + f"{len(packed):08x}"
        + packed.hex()
        + "0000000000000006" "00"  # length of the name
        "0000000000000000" "00"  # binding
        "0000000000000001" "00"  # producers
        "0000000000000000" "00"  # bytes read
        "0000000000000000" "00"  # bytes behind
        "0000010000000001" "00"  # producer
        "1ee833b04afc0000" "01" "02"  # last commit: the least, after the two values kept apart
        "0000000000000001" "00"  # hint: all are of the one value kept apart
        "0000000000000021" "00"  # offset, its sign in the lowest bit
        "0000000000000000" "00" "0000000000000000" "00" "0000000000000000" "00"
        + f"{zlib.crc32(encode(frontier)[:-4]):08x}"
    )  # fmt: skip


def test_a_resolved_checkpoint_takes_about_half_of_its_plain_size() -> None:
    clock, rows = from_unix(1700000000), 1000
    frontier = Frontier.gather(
        [
            JournalFrontier(
                journal="acme/a",
                producers=tuple(
                    ProducerFrontier(
                        producer=Producer(Producer.MULTICAST | n * 7919),
                        last_commit=Clock(clock + n * 16_000_000),
                        offset=-n * 1000,
                    )
                    for n in range(1, rows + 1)
                ),
            )
        ]
    )
    assert len(encode(frontier)) < 16 * rows


@given(any_frontier, st.data())
def test_a_changed_byte_is_refused(frontier: Frontier, data: st.DataObject) -> None:
    encoded = bytearray(encode(frontier))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptFrontier):
        decode(bytes(encoded))


@given(any_frontier, st.data())
def test_what_is_cut_off_or_followed_by_more_is_refused(
    frontier: Frontier, data: st.DataObject
) -> None:
    encoded = encode(frontier)
    end = data.draw(st.integers(0, len(encoded) - 1))
    for damaged in (encoded[:end], encoded + b"\0", encoded + encoded):
        with pytest.raises(CorruptFrontier):
            decode(damaged)


@given(any_frontier, st.data())
def test_damage_under_a_valid_checksum_never_crashes(
    frontier: Frontier, data: st.DataObject
) -> None:
    """A sound frontier, or a clear refusal: nothing else comes out, whatever goes in."""
    body = bytearray(encode(frontier)[:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(4, len(body) - 1))] = data.draw(st.integers(0, 255))
    sealed = bytes(body) + struct.pack(">I", zlib.crc32(body))
    try:
        decoded = decode(sealed)
    except CorruptFrontier:
        return
    assert decode(encode(decoded)) == decoded
    decoded.table.check()


def test_bytes_after_the_last_column_are_refused_though_the_checksum_is_right() -> None:
    body = encode(one_entry(5, 0, 1))[:-4] + b"\0"
    with pytest.raises(CorruptFrontier, match="1 bytes follow"):
        decode(body + struct.pack(">I", zlib.crc32(body)))


def test_rows_out_of_order_are_refused_though_the_checksum_is_right() -> None:
    table = Frontier.of(
        [
            JournalFrontier(
                journal="acme/a",
                producers=tuple(
                    ProducerFrontier(
                        producer=Producer(Producer.MULTICAST | n), last_commit=Clock(5)
                    )
                    for n in (1, 2)
                ),
            )
        ]
    ).table
    reversed_rows = replace(table, producer=table.producer[::-1].copy())
    with pytest.raises(CorruptFrontier, match="out of order"):
        decode(encode(Frontier(table=reversed_rows)))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptFrontier):
        decode(data)
    with pytest.raises(CorruptFrontier):
        decode(b"PSF\x01" + data)


def test_a_newer_version_is_named() -> None:
    body = b"PSF\x02" + encode(EMPTY)[4:-4]
    with pytest.raises(CorruptFrontier, match="version 2"):
        decode(body + struct.pack(">I", zlib.crc32(body)))


def header(journals: int, rows: int, shards: int, floors: int, names: bytes) -> bytes:
    packed = zlib.compress(names)
    body = struct.pack(">3sB5I", b"PSF", 1, journals, rows, shards, floors, len(packed))
    return body + packed


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(header(2**32 - 1, 0, 0, 0, b""), id="journals"),
        pytest.param(header(1, 2**32 - 1, 0, 0, b"a"), id="producers"),
        pytest.param(header(0, 0, 2**32 - 1, 0, b""), id="shards"),
        pytest.param(header(0, 0, 0, 2**32 - 1, b""), id="gap floors"),
        pytest.param(
            header(1, 1, 0, 0, bytes(NAMES_BYTES_MAX + 1)), id="names that unfold to too much"
        ),
    ],
)
def test_lengths_that_cannot_be_are_refused_before_memory_is_taken(body: bytes) -> None:
    columns = struct.pack(">qB", 0, 0) * 12
    sealed = body + columns + struct.pack(">I", zlib.crc32(body + columns))
    with pytest.raises(CorruptFrontier, match="is not valid"):
        decode(sealed)


def test_decoded_columns_cannot_be_written_to() -> None:
    table = decode(encode(one_entry(5, 0, 1))).table
    assert not any(
        column.flags.writeable for column in (table.offset, table.producer, table.starts)
    )
    assert table.offset.dtype == np.int64
