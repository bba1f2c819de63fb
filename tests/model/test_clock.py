"""Clocks, producers and document UUIDs, bit for bit."""

import copy
import pickle
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.model.clock import (
    CLOCK_MAX,
    CONTROL,
    FLAGS_MAX,
    NEVER,
    Clock,
    DocumentId,
    Flag,
    InvalidDocumentId,
    Producer,
    catch_up,
    duration,
    elapsed,
    from_rfc3339,
    from_unix,
    kind_of,
    rotate,
    tick,
    to_unix,
)
from support.strategies_frontier import producers

NOVEMBER = Clock(0x1EE833B04AFC0000)  # 2023-11-14T22:13:20Z
WRITER = Producer(0x010000000001)
any_clock = st.integers(0, (1 << 64) - 1).map(Clock)


@pytest.mark.parametrize(
    ("unix", "want", "back"),
    [
        pytest.param((0, 0), 0x1B21DD2138140000, (0, 0), id="the Unix epoch"),
        pytest.param((10, 0), 0x1B21DD2197721000, (10, 0), id="ten seconds later"),
        pytest.param(
            (1567304621, 981273734),
            0x1E9CC5F83FC2F810,
            (1567304621, 981273700),
            id="nanoseconds are cut to hundreds",
        ),
        pytest.param((1700000000, 0), NOVEMBER, (1700000000, 0), id="a whole second"),
    ],
)
def test_unix_time_becomes_a_clock_and_comes_back(
    unix: tuple[int, int], want: int, back: tuple[int, int]
) -> None:
    assert from_unix(*unix) == want
    assert to_unix(from_unix(*unix)) == back


def test_a_tick_is_a_microsecond() -> None:
    clock = tick(tick(from_unix(0)))
    assert clock == 0x1B21DD2138140140
    assert to_unix(clock) == (0, 2000)


def test_an_update_never_goes_back() -> None:
    ahead = catch_up(tick(tick(from_unix(0))), from_unix(10))
    assert ahead == 0x1B21DD2197721000
    assert catch_up(ahead, from_unix(5)) == ahead


@pytest.mark.parametrize(("clock", "want"), [(0, (0, 0)), (1, (0, 4)), (15, (0, 60))])
def test_clocks_before_1970_are_at_the_epoch(clock: int, want: tuple[int, int]) -> None:
    assert to_unix(Clock(clock)) == want


def test_the_counter_shows_as_nanoseconds() -> None:
    assert to_unix(Clock(NOVEMBER | 15)) == (1700000000, 60)


@given(st.lists(st.one_of(st.none(), any_clock.filter(lambda c: c < 1 << 63))))
def test_clocks_never_decrease_and_ticks_strictly_increase(steps: list[Clock | None]) -> None:
    clock = from_unix(0)
    for wall in steps:
        after = tick(clock) if wall is None else catch_up(clock, wall)
        assert after > clock if wall is None else after == max(clock, wall)
        clock = after


def test_durations_are_clocks_and_differences_saturate() -> None:
    assert duration(1) == 10_000_000 << 4
    assert elapsed(from_unix(7), from_unix(5)) == duration(2)
    assert elapsed(from_unix(5), from_unix(7)) == 0
    assert from_unix(5) + duration(2, 500) == from_unix(7, 500)


@pytest.mark.parametrize("seconds", [-(1 << 60), 1 << 60])
def test_what_does_not_fit_64_bits_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        from_unix(seconds)


@pytest.mark.parametrize(
    ("clock", "want"),
    [
        (0, 0),
        (1, 0x80000000),
        (2, 0x40000000),
        (3, 0xC0000000),
        (4, 0x20000000),
        (16, 0x80000000),
        (32, 0x40000000),
        (160, 0x50000000),
        (320, 0x28000000),
        (NOVEMBER, 0x0003F520),
        (NOVEMBER + 1, 0x8003F520),
        (NOVEMBER + 160, 0x5003F520),
    ],
)
def test_r_clock(clock: int, want: int) -> None:
    assert rotate(Clock(clock)) == want


@given(any_clock)
def test_the_clocks_of_one_instant_spread_evenly(clock: Clock) -> None:
    instant = clock & ~0xF
    assert {rotate(Clock(instant | n)) >> 28 for n in range(16)} == set(range(16))


@given(any_clock)
def test_r_clock_reverses_bits(clock: Clock) -> None:
    folded = ((clock >> 4) ^ (clock & 0xF)) & 0xFFFFFFFF
    assert f"{rotate(clock):032b}" == f"{folded:032b}"[::-1]


def test_a_producer_has_bytes_text_and_an_integer() -> None:
    producer = Producer.parse("090607050309")
    assert producer == 9921492222729
    assert producer.packed == bytes([9, 6, 7, 5, 3, 9])
    assert str(producer) == "090607050309"
    assert f"{producer}" == "090607050309"
    assert repr(producer) == "Producer(0x090607050309)"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        pytest.param(0x080607050309, "multicast", id="multicast bit is not set"),
        pytest.param(1 << 48 | 1 << 40, "48 bits", id="too wide"),
        pytest.param(-1, "48 bits", id="negative"),
    ],
)
def test_a_producer_is_48_bits_with_the_multicast_bit(value: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Producer(value)


@pytest.mark.parametrize(
    "text", ["", "09060705030", "0906070503090", "09060705030G", "0X0607050309"]
)
def test_a_producer_is_read_from_12_lower_case_digits_only(text: str) -> None:
    with pytest.raises(ValueError, match="12 lower-case hex digits"):
        Producer.parse(text)


@given(st.binary(min_size=6, max_size=6))
def test_random_bytes_make_a_producer_and_lose_one_bit(entropy: bytes) -> None:
    producer = Producer.from_random(entropy)
    assert producer.packed == bytes([entropy[0] | 1, *entropy[1:]])
    assert Producer.parse(str(producer)) == producer


def test_randomness_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="6 random bytes"):
        Producer.from_random(b"12345")


@given(producers(wide=True), producers(wide=True))
def test_producers_order_as_their_bytes_do(a: Producer, b: Producer) -> None:
    assert (a < b) == (a.packed < b.packed)


@given(producers(wide=True))
def test_producers_survive_pickling_and_copying(producer: Producer) -> None:
    for twin in (pickle.loads(pickle.dumps(producer)), copy.deepcopy(producer)):  # noqa: S301
        assert (type(twin), twin) == (Producer, producer)


@pytest.mark.parametrize(
    ("producer", "clock", "flags", "want"),
    [
        pytest.param(
            Producer(0x090607050309),
            tick(tick(from_unix(1567304621, 981273734))),
            0x2AA,
            "83fc2f95-cc5f-11e9-82aa-090607050309",
            id="two ticks later, many flags",
        ),
        pytest.param(WRITER, NOVEMBER, 0, "04afc000-833b-11ee-8000-010000000001", id="outside"),
        pytest.param(WRITER, NOVEMBER, 1, "04afc000-833b-11ee-8001-010000000001", id="continue"),
        pytest.param(WRITER, NOVEMBER, 2, "04afc000-833b-11ee-8002-010000000001", id="ack"),
        pytest.param(
            WRITER, NOVEMBER | 15, 1, "04afc000-833b-11ee-bc01-010000000001", id="full counter"
        ),
    ],
)
def test_document_uuid(producer: Producer, clock: Clock, flags: int, want: str) -> None:
    document = DocumentId(producer=producer, clock=clock, flags=flags)
    assert str(document.uuid) == want
    assert DocumentId.parse(want) == document


@given(producers(wide=True), any_clock, st.integers(0, FLAGS_MAX))
def test_document_uuids_round_trip_and_agree_with_the_standard_library(
    producer: Producer, clock: Clock, flags: int
) -> None:
    document = DocumentId(producer=producer, clock=clock, flags=flags)
    value = document.uuid
    assert DocumentId.parse(str(value)) == DocumentId.parse(value) == document
    assert (value.version, value.variant) == (1, uuid.RFC_4122)
    assert (value.time, value.node) == (clock >> 4, producer)
    assert value.clock_seq == (clock & 0xF) << 10 | flags


def test_flags_beyond_ten_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="10 bits"):
        DocumentId(producer=WRITER, clock=NOVEMBER, flags=0x400)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("not-a-uuid", "is not a UUID", id="text"),
        pytest.param(str(uuid.UUID(int=0)), "is not a version 1 UUID", id="nil"),
        pytest.param("7b0f3a1e-8f6e-4c55-9f0a-0123456789ab", "is not a version 1", id="random"),
        pytest.param(
            "04afc000-833b-11ee-8000-000000000001", "not made by a publisher", id="a network card"
        ),
    ],
)
def test_a_uuid_that_no_publisher_made_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(InvalidDocumentId, match=why) as caught:
        DocumentId.parse(text, where="journal acme/a, offset 17")
    assert caught.value.where == "journal acme/a, offset 17"
    assert isinstance(caught.value, PenstockError)


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (0, Flag.OUTSIDE_TXN),
        (1, Flag.CONTINUE_TXN),
        (2, Flag.ACK_TXN),
        (CONTROL, Flag.OUTSIDE_TXN),
        (0x2AA, Flag.ACK_TXN),
    ],
)
def test_kind_is_in_the_low_two_bits(flags: int, want: Flag) -> None:
    assert kind_of(flags) is want


@pytest.mark.parametrize("flags", [3, 7, FLAGS_MAX])
def test_continue_and_ack_at_once_is_malformed(flags: int) -> None:
    with pytest.raises(InvalidDocumentId, match="both CONTINUE and ACK"):
        kind_of(flags, where="journal acme/a, offset 3")


def test_a_moment_in_rfc3339_is_its_first_clock() -> None:
    assert from_rfc3339("1970-01-01T01:00:00+01:00") == from_unix(0)
    assert from_rfc3339("2026-01-31T08:00:00.000001Z") == from_unix(1_769_846_400, 1_000)
    assert from_rfc3339("0001-01-01T00:00:00Z") == NEVER
    assert from_rfc3339("9999-01-01T00:00:00Z") == CLOCK_MAX
    for text, why in (("2026-01-31T08:00:00", "zone"), ("yesterday", "isoformat")):
        with pytest.raises(ValueError, match=why):
            from_rfc3339(text)
