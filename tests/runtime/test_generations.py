"""Generations of tables in the recovery log: what raises one, and what a rename carries on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.runtime.recovery import (
    Entries,
    Layout,
    RecoveryMachine,
    Wanted,
    generations,
    split_state_key,
)

MACHINE = RecoveryMachine()


def session(entries: Entries, *, backfill: int, request: int) -> tuple[Entries, int]:
    """Begin a session as a leader does, and store something; return its generation, too."""
    at = generations(entries).get("t")
    generation = backfill if at is None else at.next(backfill=backfill, request=request)
    layout = Layout({0: f"t.v{generation}"}, wanted={0: Wanted(backfill=backfill, request=request)})
    after = MACHINE.apply(entries, layout.supersede(entries), 1)
    assert layout.supersede(after) == (), "a crash after the record does not repeat it"
    stored = f"FC:j\0t.v{generation}\0".encode() + b"123456"
    return MACHINE.apply(after, (("put", stored, b""),), 2), generation


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 3)), min_size=1, max_size=12
    )
)
def test_a_table_is_filled_again_only_for_a_higher_counter_or_a_new_request(
    steps: list[tuple[int, bool, int]],
) -> None:
    entries: Entries = {}
    request, before = 0, None
    for backfill, asks, sessions in steps:
        request += asks
        for number in range(sessions):
            entries, generation = session(entries, backfill=backfill, request=request)
            if before is not None:
                last_backfill, last_request, last = before
                again = backfill > last_backfill or request != last_request
                assert (generation > last) is again
                assert generation >= last, "it never goes down"
            assert number == 0 or before == (backfill, request, generation), "once"
            before = (backfill, request, generation)
            positions = [key for key in entries if key.startswith(b"FC:")]
            assert len(positions) == 1, "those of lower generations are gone"


def test_a_log_of_an_older_release_goes_on_as_it_is() -> None:
    entries = {b"FC:j\0t.v2\0" + b"123456": b""}
    assert session(entries, backfill=2, request=0)[1] == 2
    assert session(entries, backfill=0, request=0)[1] == 2, "the key was removed with the upgrade"
    assert session(entries, backfill=3, request=0)[1] == 3


@given(
    st.sets(st.tuples(st.sampled_from(["old", "t", "old2"]), st.integers(0, 2)), max_size=4),
    st.binary(min_size=5, max_size=5).map(lambda some: b"\1" + some),
)
def test_a_rename_moves_everything_of_one_resource_and_nothing_else(
    held: set[tuple[str, int]], producer: bytes
) -> None:
    entries: dict[bytes, bytes] = {}
    for resource, generation in held:
        key = f"{resource}.v{generation}"
        entries[f"FC:old.v0/j\0{key}\0".encode() + producer] = key.encode()
        entries[f"FH:j\0{key}\0".encode() + producer] = key.encode()
        entries[f"MK:{key}".encode()] = key.encode()
        entries[f"VK:{resource}".encode()] = (8).to_bytes(8, "big")
    layout = Layout({0: "new.v8"})
    after = MACHINE.apply(entries, layout.rename(entries, {0: "old"}), 1)
    assert len(after) == len(entries)
    known = generations(after)
    assert "old" not in known
    assert ("new" in known) is any(resource == "old" for resource, _ in held)
    for key, value in after.items():
        if key.startswith(b"MK:"):
            resource, generation = split_state_key(key[3:].decode())
            was = f"{'old' if resource == 'new' else resource}.v{generation}"
            assert value == was.encode()
    assert layout.rename(after, {0: "old"}) == (), "once"


def test_two_histories_are_not_joined() -> None:
    both = {b"MK:old.v0": b"", b"MK:new.v0": b""}
    with pytest.raises(UserError, match="both have stored documents"):
        Layout({0: "new.v0"}).rename(both, {0: "old"})
    with pytest.raises(UserError, match="another binding of the task is old"):
        Layout({0: "new.v0", 1: "old.v0"}).rename({b"MK:old.v0": b""}, {0: "old"})
