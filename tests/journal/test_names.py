from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.journal.names import (
    JournalName,
    PartitionValue,
    collection_prefix,
    decode_value,
    encode_value,
    journal_key,
    journal_of_key,
)

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
_VALUES = st.none() | st.booleans() | st.integers() | _TEXT
_PARTITIONS = st.dictionaries(_TEXT.filter(bool), _VALUES, max_size=3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("eu", "eu"),
        ("", ""),
        ("..", ".."),
        ("a/b", "a%2Fb"),
        ("x=y", "x%3Dy"),
        ("%_true", "%25_true"),
        ("Zürich", "Z%C3%BCrich"),
        (True, "%_true"),
        (42, "%_42"),
        (None, "%_null"),
    ],
)
def test_partition_values_as_text(value: PartitionValue, text: str) -> None:
    assert encode_value(value) == text


@given(_VALUES, _VALUES)
def test_values_survive_and_differ_as_their_texts_do(a: PartitionValue, b: PartitionValue) -> None:
    assert decode_value(encode_value(a)) == a
    same = type(a) is type(b) and a == b
    assert (encode_value(a) == encode_value(b)) == same


@given(_PARTITIONS, st.integers(0, 0xFFFFFFFF))
def test_names_round_trip_and_cannot_escape(
    partitions: dict[str, PartitionValue], key_begin: int
) -> None:
    name = JournalName.of("acme/orders", partitions, key_begin)
    text = str(name)
    assert JournalName.parse(text, "acme/orders") == name
    assert posixpath.normpath(text) == text
    assert text.startswith("acme/orders/")
    assert "\0" not in text
    assert journal_of_key(journal_key(text)) == text
    assert journal_key(text).startswith(collection_prefix("acme/orders"))


def test_a_name_reads_as_its_parts() -> None:
    name = JournalName.of("acme/orders", {"region": "eu", "active": True}, 0x80000000)
    assert str(name) == "acme/orders/active=%_true/region=eu/pivot=80"
    assert name.prefix == "acme/orders/active=%_true/region=eu/"


@pytest.mark.parametrize("collection", ["", "/a", "a/", "a//b", "../x", "a/../b", "a/.", "a b"])
def test_bad_collection_names_are_refused(collection: str) -> None:
    with pytest.raises(UserError, match="is not a collection name"):
        JournalName.of(collection, {})


@pytest.mark.parametrize("value", ["ü" * 40, "x" * 300, "a/b" * 60])
def test_a_value_that_no_path_can_hold_is_refused_with_what_to_do(value: str) -> None:
    with pytest.raises(UserError, match="shorter values") as refused:
        JournalName.of("acme/orders", {"text": value})
    assert "partition text of acme/orders" in str(refused.value)


def test_a_name_that_is_too_long_says_what_to_do() -> None:
    with pytest.raises(UserError, match="shorter values"):
        JournalName.of("acme/orders", dict.fromkeys("abc", "x" * 200))


def test_a_long_journal_that_is_there_can_be_read() -> None:
    name = f"acme/orders/text={'x' * 300}/pivot=00"
    assert str(JournalName.parse(name, "acme/orders")) == name


@pytest.mark.parametrize(
    "name",
    ["other/pivot=00", "acme/orders", "acme/orders/region=eu", "acme/orders/eu/pivot=00",
     "acme/orders/pivot=0", "acme/orders/pivot=zz", "acme/orders/b=1/a=1/pivot=00"],
)  # fmt: skip
def test_what_is_not_a_journal_of_the_collection_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        JournalName.parse(name, "acme/orders")
