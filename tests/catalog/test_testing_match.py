"""What `verify` calls equal: a table for each rule, and laws of containment."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.catalog.testing.match import (
    HUNKS_MAX,
    compare,
    differences,
    without_uuid,
)
from penstock.model.json_order import Json

Members = dict[str, Json]

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text("ab", max_size=2)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(st.text("abc", max_size=2), VALUES, max_size=4)


@pytest.mark.parametrize(
    ("expected", "actual", "pointers"),
    [
        pytest.param({"a": 1}, {"a": 1, "b": 2}, [], id="other members are free"),
        pytest.param({"a": 1}, {"b": 2}, ["/a"], id="a member that is given must be there"),
        pytest.param({"a": {}}, {"a": {"b": 1}}, [], id="also in objects inside"),
        pytest.param({"a": {}}, {"a": []}, ["/a"], id="an array is no object"),
        pytest.param({"a": {"b": 1, "c": 2}}, {"a": {"b": 2}}, ["/a/b", "/a/c"], id="all of them"),
        pytest.param([{"a": 1}], [{"a": 1, "b": 2}], [], id="items are contained"),
        pytest.param([1], [1, 2], [""], id="arrays have equal length"),
        pytest.param([1, 2], [2, 1], ["/0", "/1"], id="items have an order"),
        pytest.param({"a": []}, {"a": [1]}, ["/a"], id="an empty array is empty"),
        pytest.param({"a": None}, {"a": None}, [], id="null matches null"),
        pytest.param({"a": None}, {}, ["/a"], id="null is not absence"),
        pytest.param({"a": None}, {"a": 0}, ["/a"], id="null is not zero"),
        pytest.param(44.1, 23.2 + 20.9, [], id="sums of floats"),
        pytest.param(2, 2.0, [], id="an integral float is an integer"),
        pytest.param(2, 1.9999999999, [], id="an integer beside a float"),
        pytest.param(1.000001, 1.000002, [""], id="a millionth counts"),
        pytest.param(0, 1e-13, [], id="almost zero"),
        pytest.param(0, 1e-11, [""], id="not quite zero"),
        pytest.param(10**12, 10**12 + 1, [""], id="integers are exact"),
        pytest.param(10**400, 1.5, [""], id="an integer beyond every float"),
        pytest.param(1, True, [""], id="true is no number"),
        pytest.param("1", 1, [""], id="text is no number"),
        pytest.param({"a/b": {"~": 1}}, {"a/b": {"~": 2}}, ["/a~1b/~0"], id="pointers are escaped"),
    ],
)
def test_containment(expected: Json, actual: Json, pointers: list[str]) -> None:
    assert [found.pointer for found in differences(expected, actual)] == pointers


@given(VALUES)
def test_containment_is_reflexive(value: Json) -> None:
    assert not list(differences(value, copy.deepcopy(value)))
    assert not list(differences(value, copy.deepcopy(value), whole=True))


@given(DOCUMENTS, DOCUMENTS)
def test_members_added_to_the_actual_document_never_break_a_match(
    one: Members, more: Members
) -> None:
    assert not list(differences(one, {**more, **one}))


@given(DOCUMENTS, DOCUMENTS)
def test_a_whole_match_goes_both_ways(one: Members, other: Members) -> None:
    there = not list(differences(one, other, whole=True))
    assert there == (not list(differences(other, one, whole=True)))
    assert not there or not list(differences(one, other))


KEYED = [{"id": 1, "n": 1}, {"id": 2, "n": 2}]


@pytest.mark.parametrize(
    ("expected", "actual", "matches"),
    [
        pytest.param([{"id": 2}, {"id": 1}], KEYED, True, id="keys pair documents in any order"),
        pytest.param([{"n": 1}, {"n": 2}], KEYED, True, id="without keys, in the order of keys"),
        pytest.param([{"n": 2}, {"n": 1}], KEYED, False, id="and in no other"),
        pytest.param([{"id": 2}, {}], KEYED, False, id="one without its key is enough for that"),
        pytest.param([{"id": 1}], KEYED, False, id="one too many"),
        pytest.param([{"id": 1}, {"id": 2}, {"id": 3}], KEYED, False, id="one is missing"),
        pytest.param([{"id": 1}, {"id": 1}], KEYED, False, id="one is expected twice"),
        pytest.param([{"id": 1.0}, {"id": 2}], KEYED, True, id="a key is compared by value"),
        pytest.param([], [], True, id="nothing is expected"),
        pytest.param([], KEYED[:1], False, id="nothing is expected, and something is there"),
        pytest.param([{}], [], False, id="something is expected"),
    ],
)
def test_pairing(expected: list[Json], actual: list[Json], matches: bool) -> None:
    found = compare(expected, actual, ("/id",))
    assert found.matches is matches
    assert bool(found.render()) is not matches
    assert bool(found.to_json()) is not matches


def test_a_diff_has_a_hunk_for_each_document_and_a_line_for_each_location() -> None:
    expected: list[Json] = [
        {"id": 1, "n": 1, "in": {"a": [1, 2], "b": {}}},
        {"id": 2, "n": None},
        {"id": 3},
        {"id": 5},
    ]
    actual: list[Json] = [
        {"id": 1, "n": 1, "in": {"a": [1, 3], "b": {}}, "free": True},
        {"id": 2},
        {"id": 4, "n": 4},
        {"id": 5},
    ]
    assert compare(expected, actual, ("/id",)).render() == [
        "--- expected: 4 documents",
        "+++ actual: 4 documents",
        "@@ key [1] @@",
        " /id: 1",
        " /n: 1",
        " /in/a/0: 1",
        "-/in/a/1: 2",
        "+/in/a/1: 3",
        " /in/b: {}",
        "@@ key [2] @@",
        " /id: 2",
        "-/n: null",
        "@@ key [3]: missing @@",
        '-{"id":3}',
        "@@ key [4]: not expected @@",
        '+{"id":4,"n":4}',
    ]
    assert compare(expected, actual, ("/id",)).to_json() == [
        {"key": [1], "pointer": "/in/a/1", "expected": 2, "actual": 3},
        {"key": [2], "pointer": "/n", "expected": None},
        {"key": [3], "pointer": "", "expected": {"id": 3}},
        {"key": [4], "pointer": "", "actual": {"id": 4, "n": 4}},
    ]


def test_a_diff_of_an_empty_collection_counts_to_zero() -> None:
    assert compare([{"id": 1}], [], ("/id",)).render()[1] == "+++ actual: 0 documents"


def test_a_long_diff_ends() -> None:
    many: list[Json] = [{"id": i, "text": "x" * 1000} for i in range(HUNKS_MAX + 7)]
    lines = compare([], many, ("/id",)).render()
    assert lines[-1] == "@@ and 7 more documents that differ @@"
    assert max(map(len, lines)) < 500


@pytest.mark.parametrize(
    ("document", "without"),
    [
        pytest.param({"id": 1, "_meta": {"uuid": "u"}}, {"id": 1}, id="and _meta, if empty"),
        pytest.param(
            {"_meta": {"uuid": "u", "op": "d"}}, {"_meta": {"op": "d"}}, id="other members stay"
        ),
        pytest.param({"_meta": {"op": "d"}}, {"_meta": {"op": "d"}}, id="there is none"),
        pytest.param({"_meta": {}}, {"_meta": {}}, id="_meta was empty"),
        pytest.param({"_meta": 1}, {"_meta": 1}, id="_meta is something else"),
        pytest.param({"a": {"_meta": {"uuid": 1}}}, {"a": {"_meta": {"uuid": 1}}}, id="below"),
    ],
)
def test_uuids_are_removed(document: Json, without: Json) -> None:
    assert without_uuid(document) == without
