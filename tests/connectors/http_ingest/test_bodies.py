"""Bodies, taken apart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.http_ingest.bodies import JSON, LINES, NotDocuments, media_type, split
from penstock.connectors.http_ingest.rates import TokenBucket

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(values, max_size=5), st.sampled_from([None, 2]))
def test_an_array_is_its_items(items: list[object], indent: int | None) -> None:
    body = json.dumps(items, indent=indent).encode()
    assert [json.loads(text) for text in split(body, JSON)] == items


@given(st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=5))
def test_lines_are_documents(items: list[object]) -> None:
    body = "\r\n".join(json.dumps(item) for item in items).encode()
    assert [json.loads(text) for text in split(body, LINES)] == items


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b' {"a": 1}\n', [b'{"a": 1}']),
        (b"7", [b"7"]),
        (b'[ {"a":1} , {"b":2} ]', [b'{"a":1}', b'{"b":2}']),
        (b"[]", []),
    ],
)
def test_json(body: bytes, wanted: list[bytes]) -> None:
    assert split(body, JSON) == wanted


@pytest.mark.parametrize("body", [b"", b" \n", b"[1, ", b'[{"a":1}] x', b"[" * 100_000])
def test_a_body_that_is_no_array_is_refused(body: bytes) -> None:
    with pytest.raises(NotDocuments):
        split(body, JSON)


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("application/json", JSON),
        ("Application/JSON; charset=utf-8", JSON),
        ("application/cloudevents+json", JSON),
        ("application/x-ndjson", LINES),
        ("application/jsonl", LINES),
        ("text/plain", None),
        ("application/x-www-form-urlencoded", None),
        ("", None),
        (None, None),
    ],
)
def test_types(header: str | None, wanted: str | None) -> None:
    assert media_type(header) == wanted


@given(st.integers(1, 20), st.lists(st.floats(0, 3), min_size=1, max_size=80))
def test_a_bucket_lets_no_more_pass_than_its_rate_and_one_second_at_once(
    rate: int, moments: list[float]
) -> None:
    bucket, passed = TokenBucket.full(rate, 0.0), 0
    for now in sorted(moments):
        wait_s = bucket.take(now)
        passed += wait_s == 0
        assert passed <= rate + rate * now + 1e-6
        assert wait_s <= 1 / rate + 1e-9


def test_an_empty_bucket_says_when_to_come_again() -> None:
    bucket = TokenBucket.full(2, 0.0)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert bucket.take(0.5) == 0.0
