"""Idempotency keys: as a codec, and as a log that survives a crash at any time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.http_ingest.keys import (
    KEPT_MS,
    KeyedRequest,
    KeyLog,
    Remembered,
    decode,
    encode,
    is_over,
)
from penstock.model.json_order import Json
from penstock.runtime.patches import apply_patches

requests = st.builds(
    KeyedRequest, st.binary(min_size=16, max_size=16), st.binary(min_size=4, max_size=4)
)
entries = st.lists(st.tuples(requests, st.integers(0, 2**32 - 1)), min_size=1, max_size=5)


def request(key: str, body: bytes = b"{}") -> KeyedRequest:
    return KeyedRequest.of(key, body)


@given(entries)
def test_what_is_encoded_is_decoded(some: list[tuple[KeyedRequest, int]]) -> None:
    wanted = [(each.digest, Remembered(each.body, published)) for each, published in some]
    assert decode(encode(some)) == wanted


@pytest.mark.parametrize("text", ["?", "AAAA", "AA=A"])
def test_what_was_not_encoded_is_not_decoded(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        decode(text)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, KEPT_MS)),
        max_size=12,
    ),
    st.integers(3, 12),
)
def test_a_log_that_was_recovered_knows_what_the_first_one_knew(
    sequences: list[tuple[list[int], int]], kept_max: int
) -> None:
    log, state, now = KeyLog({}, kept_max=kept_max), {}, 1_700_000_000_000
    for numbers, passed in sequences:
        now += passed
        fresh = [n for n in dict.fromkeys(numbers) if log.find(request(str(n)).digest) is None]
        if not fresh:
            continue
        some = [(request(str(n)), n) for n in fresh]
        patch: Any = log.add(some, now)
        state = apply_patches(state, [patch])
        log.commit(some)
        again = KeyLog(state, kept_max=kept_max)
        for n in range(41):
            digest = request(str(n)).digest
            assert again.find(digest) == log.find(digest)
        assert len(again) == len(log) <= max(kept_max, len(some))
        for n in fresh:
            assert again.find(request(str(n)).digest) == Remembered(request(str(n)).body, n)


def test_a_patch_has_only_what_is_new_and_what_goes() -> None:
    log = KeyLog({}, kept_max=2)
    first: Any = log.add([(request("a"), 1), (request("b"), 1)], 1000)
    second: Any = log.add([(request("c"), 1)], 1000)
    assert list(first["keys"]) == ["0000000001000"]
    assert second["keys"]["0000000001000"] is None, "more than two: the oldest go"
    assert list(second["keys"]) == ["0000000001001", "0000000001000"]


def test_keys_are_forgotten_after_a_day() -> None:
    log = KeyLog({})
    log.add([(request("a"), 1)], 1000)
    log.commit([(request("a"), 1)])
    log.add([(request("b"), 1)], 1000 + KEPT_MS - 1)
    assert log.find(request("a").digest) is not None
    log.add([(request("c"), 1)], 1000 + KEPT_MS)
    assert log.find(request("a").digest) is None


@pytest.mark.parametrize(
    ("state", "over"),
    [
        pytest.param({}, True, id="nothing in it"),
        pytest.param({"keys": {"0000000000001": ""}}, True, id="of long ago"),
        pytest.param({"keys": {"1700000000000": ""}}, False, id="of today"),
    ],
)
def test_the_part_of_a_binding_that_is_gone_is_kept_for_a_day(state: Json, over: bool) -> None:
    assert is_over(state, 1_700_000_000_000) is over
