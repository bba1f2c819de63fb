from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.json_order import Json, canonical_json
from penstock.runtime.patches import (
    MalformedPatches,
    Patches,
    apply_patches,
    decode,
    encode,
    updated,
)

A: Json = {"a": 1}
B: Json = {"b": 2}


@pytest.mark.parametrize(
    ("data", "want"),
    [
        pytest.param(b"", (), id="nothing"),
        pytest.param(b"[]", (), id="an empty array"),
        pytest.param(b"[]\n", (), id="an empty array and a newline"),
        pytest.param(b'[{"a":1}\n]', (A,), id="one patch"),
        pytest.param(b'[{"a":1}\n]\n', (A,), id="one patch and a newline"),
        pytest.param(b'[{"a":1}\n,{"b":2}\n]', (A, B), id="two patches"),
        pytest.param(b"[null\n,7\n]", (None, 7), id="patches that replace"),
    ],
)
def test_a_stream_is_read(data: bytes, want: Patches) -> None:
    assert decode(data) == want


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b'{"a":1}', "not framed", id="not framed"),
        pytest.param(b'[{"a":1}]', "does not end its line", id="patch not newline terminated"),
        pytest.param(b'[{"a":1}\n] x', "bytes trail", id="trailing bytes"),
        pytest.param(b'[{"a":1}\n]\n\n', "bytes trail", id="two newlines"),
        pytest.param(b'[{"a":1}\n{"b":2}\n]', "comma is missing", id="missing comma"),
        pytest.param(b'[{"a":1}\n,]', "comma trails", id="trailing comma"),
        pytest.param(b'[{"a":1}\n', "does not end", id="cut off"),
        pytest.param(b"[{\n]", "not JSON", id="cut off within a patch"),
        pytest.param(b"[NaN\n]", "not JSON", id="a number that JSON has not"),
        pytest.param(b"[1e999\n]", "not JSON", id="a number past all numbers"),
        pytest.param(b'["\\ud800"\n]', "not JSON", id="half a character"),
        pytest.param(b"[" * 100_000 + b"\n]", "not JSON", id="too deep"),
        pytest.param(b"[\xff\n]", "not JSON", id="not UTF-8"),
        pytest.param(b"[", "does not end its line", id="a bracket"),
    ],
)
def test_a_stream_with_bad_framing_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(MalformedPatches) as raised:
        decode(data)
    assert why in (raised.value.why or "")


@pytest.mark.parametrize(
    ("state", "patches", "want"),
    [
        pytest.param({"x": 1}, updated({"y": 2}, merge=False), {"y": 2}, id="reset, then set"),
        pytest.param({"x": 1}, updated({"y": 2}, merge=True), {"x": 1, "y": 2}, id="merge"),
        pytest.param({"x": 1}, ({"x": None},), {}, id="null removes a member"),
        pytest.param({"x": {"a": 1}}, ({"x": {"b": 2}},), {"x": {"a": 1, "b": 2}}, id="nested"),
        pytest.param({"x": 1}, ({"x": {"a": None}},), {"x": {}}, id="object over scalar"),
        pytest.param({"x": 1}, ([1, None],), [1, None], id="a list replaces"),
        pytest.param(None, ({"x": 1},), {"x": 1}, id="null is the empty object"),
        pytest.param({"x": 1}, (None,), {}, id="null resets"),
        pytest.param({"x": 1}, (), {"x": 1}, id="nothing to do"),
        pytest.param(None, (), {}, id="no state is the empty object"),
    ],
)
def test_patches_apply_in_order(state: Json, patches: Patches, want: Json) -> None:
    assert apply_patches(state, patches) == want


scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab\n\u2028", max_size=2)
values: st.SearchStrategy[Json] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=5,
)
streams = st.lists(values, max_size=4).map(tuple)


@given(streams)
def test_a_stream_reads_back_as_it_was_written(patches: Patches) -> None:
    data = encode(patches)
    assert decode(data) == patches
    if patches:
        assert decode(data + b"\n") == patches
    assert data.count(b"\n") == len(patches)


@given(values, streams, streams)
def test_applying_a_stream_is_applying_its_parts_and_changes_nothing_else(
    state: Json, first: Patches, second: Patches
) -> None:
    before = canonical_json([state, *first, *second])
    whole = apply_patches(state, first + second)
    assert apply_patches(apply_patches(state, first), second) == whole
    assert canonical_json([state, *first, *second]) == before


@given(st.binary(max_size=12) | st.text('[]{}\n,"a1', max_size=12).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        patches = decode(data)
    except MalformedPatches:
        return
    assert decode(encode(patches)) == patches
