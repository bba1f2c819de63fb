"""Packed keys: the published bytes and hashes, the law of order, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.model.keys import (
    Key,
    KeyValue,
    UnpackableValue,
    key_hash,
    pack,
    pack_columns,
)

VECTORS: list[tuple[Key, str, str]] = [
    ((None,), "00", "83a7b47f"),
    ((False,), "26", "39d45af0"),
    ((True,), "27", "65818d8d"),
    ((0,), "14", "d9e78640"),
    ((1,), "1501", "78318482"),
    ((255,), "15ff", "dd7d6267"),
    ((256,), "160100", "18f7f27c"),
    ((-1,), "13fe", "1a23b591"),
    ((-256,), "12feff", "a4ac8139"),
    ((2**63,), "1c8000000000000000", "a1bb4c60"),
    ((-(2**63),), "0c7fffffffffffffff", "7ae3c9cb"),
    (("",), "0200", "4e65b51d"),
    (("a",), "026100", "34901157"),
    (("a\0b",), "026100ff6200", "c976f0f9"),
    (("key", 42), "026b657900152a", "162ffe02"),
    (("acme", "orders", 7), "0261636d6500026f7264657273001507", "da4555c4"),
]

EDGES = [0, 1, 255, 256, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**72, 10**38, 2**2048]
integers = (
    st.integers(-300, 300)
    | st.sampled_from([s * e for e in EDGES for s in (1, -1)])
    | st.integers()
)
floats = (
    st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-600, 600).map(lambda n: n / 2)  # fractions close to the integers above
    | st.sampled_from(
        [5e-324, -5e-324, 2.0**52 + 0.5, math.nextafter(1, 2), math.nextafter(-1, -2)]
    )
)
texts = st.text(max_size=4) | st.text(st.sampled_from("\0\x01a\ue000\U0001f600"), max_size=4)
blobs = st.binary(max_size=4) | st.lists(st.sampled_from(b"\x00\x01\xfe\xff"), max_size=4).map(
    bytes
)
components: st.SearchStrategy[KeyValue] = (
    st.none() | st.booleans() | integers | floats | texts | blobs
)
keys = st.lists(components, max_size=3).map(tuple)


def key_order(values: Iterable[KeyValue]) -> tuple[tuple[Any, ...], ...]:
    """A sort key over keys as values."""
    return tuple((rank(value), *(() if value is None else (value,))) for value in values)


def rank(value: KeyValue) -> int:
    match value:
        case None:
            return 0
        case bytes():
            return 1
        case str():
            return 2
        case bool():
            return 5 if value else 4
        case int() | float():
            return 3


@pytest.mark.parametrize(
    ("key", "packed", "digest"), [pytest.param(*v, id=f"{v[0]!r:.40}") for v in VECTORS]
)
def test_published_vectors(key: Key, packed: str, digest: str) -> None:
    assert pack(key).hex() == packed
    assert f"{key_hash(pack(key)):08x}" == digest


@pytest.mark.parametrize(
    ("key", "packed"),
    [
        pytest.param((b"\0\xff",), "0100ffff00", id="bytes are escaped like strings"),
        pytest.param((2**64 - 1,), "1cffffffffffffffff", id="the largest integer of eight bytes"),
        pytest.param((2**64,), "1d00000009010000000000000000", id="nine bytes carry their length"),
        pytest.param((-(2**64) + 1,), "0c0000000000000000", id="the smallest of eight bytes"),
        pytest.param((-(2**64),), "0bfffffff6feffffffffffffffff", id="nine negative bytes"),
        pytest.param((1.0,), "1501", id="an integral float is that integer"),
        pytest.param((-0.0,), "14", id="minus zero is zero"),
        pytest.param((1e30,), "1d0000000d" + f"{int(1e30):026x}", id="a large integral float"),
        pytest.param((0.5,), "1430bfe0000000000000", id="a fraction follows its floor"),
        pytest.param((-0.5,), "13fe30401fffffffffffff", id="below zero the floor is lower"),
    ],
)
def test_forms_beyond_the_published_ones(key: Key, packed: str) -> None:
    assert pack(key).hex() == packed


@given(keys, keys)
@example((1, "a"), (1.5,))
@example((1, None), (1.5, None))
@example((1.5, True), (2, None))
@example(("a", "b"), ("a\0", ""))
@example(("a",), ("a", None))
@example((-(2**64),), (-(2**64) - 0.0,))
def test_packed_bytes_sort_as_the_values_do(a: Key, b: Key) -> None:
    """So distinct keys have distinct bytes, too."""
    assert (pack(a) < pack(b)) == (key_order(a) < key_order(b))
    assert (pack(a) == pack(b)) == (key_order(a) == key_order(b))


@given(keys)
def test_no_packed_key_begins_with_ff(key: Key) -> None:
    assert not pack(key).startswith(b"\xff")
    assert 0 <= key_hash(pack(key)) < 2**32


@given(keys, components, components, keys)
def test_the_first_difference_decides(head: Key, a: KeyValue, b: KeyValue, tail: Key) -> None:
    left, right = (*head, a, *tail), (*head, b, *tail)
    assert (pack(left) < pack(right)) == (key_order([a]) < key_order([b]))


@given(st.lists(st.tuples(texts, integers, components), max_size=5))
def test_columns_pack_as_rows_do(rows: list[tuple[str, int, KeyValue]]) -> None:
    columns: list[list[KeyValue]] = [list(column) for column in zip(*rows, strict=True)]
    assert pack_columns(columns) == [pack(row) for row in rows]
    assert pack_columns(columns[:1]) == [pack(row[:1]) for row in rows]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        pytest.param(math.nan, "nan cannot be part of a key", id="NaN"),
        pytest.param(math.inf, "inf cannot be part of a key", id="infinity"),
        pytest.param([1], "a list cannot be part of a key", id="an array"),
        pytest.param({}, "a dict cannot be part of a key", id="an object"),
        pytest.param("\ud800", r"lone surrogate, \ud800", id="text that UTF-8 cannot hold"),
    ],
)
def test_values_that_cannot_be_keys_are_refused(value: Any, what: str) -> None:  # noqa: ANN401
    for attempt in (lambda: pack([value]), lambda: pack_columns([[value]])):
        with pytest.raises(UnpackableValue) as refused:
            attempt()
        assert what in refused.value.what
