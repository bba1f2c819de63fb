"""The order of JSON values is total, and canonical text is the same for the same value."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.json_order import (
    ABSENT,
    Absent,
    Json,
    NotJson,
    canonical_json,
    sort_key,
)

ASCENDING: list[Json | Absent] = [
    ABSENT,
    None,
    False,
    True,
    -1.5e300,
    -(10**30),
    -1,
    -0.5,
    0,
    2**53,
    2**53 + 1,
    1e16,
    10**400,
    "",
    "\0",
    "a",
    "a\0",
    "aa",
    "b",
    "\ue000",  # above every surrogate code unit, below the next: UTF-16 order would swap them
    "\U0001f600",
    [],
    [None],
    [None, None],
    [0],
    ["a"],
    [[]],
    {},
    {"a": None},
    {"a": None, "b": None},
    {"a": 1},
    {"a": 1, "b": 0},
    {"b": None},
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([-0.0, 1.0, 2.0, 2.0**53, 1e16, 1.5])
    | st.text(max_size=3)
)
documents: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("low", "high"),
    [pytest.param(a, b, id=f"{a!r:.20} < {b!r:.20}") for a, b in itertools.pairwise(ASCENDING)],
)
def test_values_ascend(low: Json, high: Json) -> None:
    assert sort_key(low) < sort_key(high)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(20, 20.0, id="an integer and the float of that value"),
        pytest.param(0.0, -0.0, id="both zeros"),
        pytest.param([1, {"a": 2.0}], [1.0, {"a": 2}], id="numbers inside containers"),
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="members in another order"),
    ],
)
def test_equal_values_have_equal_keys(a: Json, b: Json) -> None:
    assert sort_key(a) == sort_key(b)
    assert hash(sort_key(a)) == hash(sort_key(b))


@pytest.mark.parametrize(
    ("a", "b"), [(True, 1), (False, 0), ([], {}), ("1", 1), (None, False), (2**53, 2.0**53 + 2)]
)
def test_values_python_may_confuse_stay_apart(a: Json, b: Json) -> None:
    assert sort_key(a) != sort_key(b)


@given(st.lists(documents, min_size=3, max_size=6))
def test_order_is_total(values: list[Json]) -> None:
    for a, b in itertools.combinations_with_replacement(values, 2):
        left, right = sort_key(a), sort_key(b)
        assert (left < right) + (left == right) + (left > right) == 1
    for a, b, c in itertools.permutations(values[:3]):
        if sort_key(a) <= sort_key(b) <= sort_key(c):
            assert sort_key(a) <= sort_key(c)


@given(st.text(max_size=6), st.text(max_size=6))
def test_strings_sort_as_their_utf8_bytes(a: str, b: str) -> None:
    assert (sort_key(a) < sort_key(b)) == (a.encode() < b.encode())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param({"b": 1, "a": [None, True]}, '{"a":[null,true],"b":1}', id="sorted, compact"),
        pytest.param(
            {"\U0001f600": 1, "\ue000": 2}, '{"\ue000":2,"\U0001f600":1}', id="code points"
        ),
        pytest.param(1.0, "1", id="an integral float is an integer"),
        pytest.param(-0.0, "0", id="minus zero is zero"),
        pytest.param(2.0**53 - 1, "9007199254740991", id="the last float that stands for itself"),
        pytest.param(2.0**53, "9007199254740992.0", id="larger floats stay as they are"),
        pytest.param(1e300, "1e+300", id="an exponent"),
        pytest.param([10.5, 10.05], "[10.5,10.05]", id="fractions that contain .0 are kept"),
        pytest.param("10.0", '"10.0"', id="text that looks like a float is kept"),
        pytest.param(10**60, "1" + "0" * 60, id="a large integer"),
        pytest.param(
            [-(10**5000)], "[-1" + "0" * 5000 + "]", id="an integer Python will not print"
        ),
        pytest.param('é\n"\0', '"é\\n\\"\\u0000"', id="only what JSON must escape is escaped"),
        pytest.param({"a~/b": 1.0}, '{"a~/b":1}', id="names of any kind"),
    ],
)
def test_canonical_text(value: Json, text: str) -> None:
    assert canonical_json(value) == text


@given(documents, documents)
def test_canonical_text_keeps_the_value(a: Json, b: Json) -> None:
    again = json.loads(canonical_json(a))
    assert sort_key(again) == sort_key(a)
    assert canonical_json(again) == canonical_json(a)
    if canonical_json(a) == canonical_json(b):
        assert sort_key(a) == sort_key(b)


@given(documents)
def test_text_does_not_depend_on_the_path_taken(value: Json) -> None:
    # 1.0 makes the writer go value by value; without it the whole text comes from one call.
    assert canonical_json([1.0, value]) == f"[1,{canonical_json(value)}]"


@pytest.mark.parametrize(
    ("value", "what", "where"),
    [
        pytest.param({"a": [0, math.nan]}, "nan is not a JSON number", "/a/1", id="NaN"),
        pytest.param([-math.inf], "-inf is not a JSON number", "/0", id="infinity"),
        pytest.param(
            {"a/b": "x\ud800"}, r"lone surrogate, \ud800 at character 1", "/a~1b", id="surrogate"
        ),
        pytest.param({"a": {"\udc00": 1}}, "lone surrogate", "/a", id="surrogate in a name"),
        pytest.param({"a": {1, 2}}, "a set is not a JSON value", "/a", id="a foreign type"),
        pytest.param({"a": {1: 2, "b": 3}}, "a int is not a JSON value", "/a", id="a foreign name"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_place(
    value: Any,  # noqa: ANN401 - not JSON, that is the point
    what: str,
    where: str,
) -> None:
    with pytest.raises(NotJson) as refused:
        canonical_json(value)
    assert what in refused.value.what
    assert refused.value.where == where
    with pytest.raises(NotJson):
        sort_key(value)
