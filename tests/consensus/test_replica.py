from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consensus.ledger import LedgerMachine, author
from penstock.consensus import replica as replicas
from penstock.consensus.entries import CorruptEntry, NewerFormat
from penstock.consensus.replica import (
    MARKS_MAX,
    Fate,
    Replica,
    RollupPolicy,
    compose,
    fate_of,
    fate_of_all,
    start_of,
)
from penstock.consensus.store import VersionedData

MACHINE = LedgerMachine()
EMPTY: Replica[tuple[str, ...], str] = Replica.empty("k", MACHINE)
OFTEN = RollupPolicy(diffs_min=3, diffs_max=9)


def log_of(
    count: int, *, policy: RollupPolicy = OFTEN, writers: int = 2, machine: LedgerMachine = MACHINE
) -> tuple[list[VersionedData], list[Replica[tuple[str, ...], str]], list[int]]:
    """A log of `count` commands, the replica after each, and the truncations they ask for."""
    replica = Replica.empty("k", machine)
    log, history, truncations = [], [], []
    for n in range(count):
        attempt = compose(replica, author(f"w{n % writers}", n), f"c{n}", policy=policy)
        if attempt.truncate_to is not None:
            truncations.append(attempt.truncate_to)
        committed = dataclasses.replace(attempt.new, revision=n + 1)
        replica, _ = replica.advance(committed)
        log.append(committed)
        history.append(replica)
    return log, history, truncations


@given(st.integers(1, 60), st.data())
def test_a_replica_is_the_same_whatever_it_started_from(count: int, data: st.DataObject) -> None:
    log, history, _ = log_of(count, writers=data.draw(st.integers(1, 5)))
    stale = history[data.draw(st.integers(0, count - 1))]
    floor = data.draw(
        st.sampled_from([0, *(r.base for r in history if r.base >= 0)]), label="truncated to"
    )
    kept = log[floor:]
    for start in (EMPTY, stale):
        scanned = [entry for entry in kept if entry.seqno > start.seqno]
        assert start.catch_up(scanned) == history[-1]
        assert start.catch_up(scanned).state == tuple(f"c{n}" for n in range(count))


@given(st.integers(1, 200), st.integers(0, 3000))
def test_opening_reads_a_bounded_part_and_what_is_kept_is_bounded(count: int, pad: int) -> None:
    machine = LedgerMachine(noise_bytes=pad)
    log, history, truncations = log_of(count, machine=machine)
    for newest, replica in zip(log, history, strict=True):
        assert newest.seqno - start_of("k", newest) < OFTEN.diffs_max + OFTEN.diffs_min
        assert start_of("k", newest) == max(replica.base, 0)
    floor = truncations[-1] if truncations else 0
    assert len(log) - floor <= 2 * (OFTEN.diffs_max + OFTEN.diffs_min)
    assert truncations == sorted(truncations)


@pytest.mark.parametrize(
    ("diffs", "diff_bytes", "base_bytes", "due"),
    [
        pytest.param(127, 5000, 4000, True, id="enough entries, as large as the rollup: due"),
        pytest.param(126, 5000, 4000, False, id="one entry too few"),
        pytest.param(128, 5000, 4000, False, id="between two multiples: decided at the one before"),
        pytest.param(127, 3999, 4000, False, id="rolling up would cost more than the diffs did"),
        pytest.param(1023, 3999, 4000, True, id="too many rows, whatever they weigh"),
        pytest.param(127, 1, 0, True, id="the first rollup"),
    ],
)
def test_when_a_rollup_is_due(diffs: int, diff_bytes: int, base_bytes: int, due: bool) -> None:
    assert RollupPolicy().due(diffs, diff_bytes, base_bytes) is due


def test_a_rollup_that_does_not_fit_leaves_the_command_alone() -> None:
    policy = RollupPolicy(diffs_min=1, bytes_max=50)
    attempt = compose(EMPTY, author("w", 1), "c", policy=policy)
    assert attempt.rollup_skipped
    assert attempt.truncate_to is None
    assert attempt.after.state == ("c",)
    assert attempt.after.base == EMPTY.base


# -------------------------------------------------------------------------------------- judging


def landed(*commands: tuple[str, int, str]) -> Replica[tuple[str, ...], str]:
    """The replica after (writer, writer_seq, token) have committed in this order."""
    replica = EMPTY
    for name, writer_seq, token in commands:
        who = author(name, writer_seq, token)
        replica = compose(replica, who, token, policy=RollupPolicy()).after
    return replica


@pytest.mark.parametrize(
    ("replica", "slot", "verdict"),
    [
        pytest.param(landed(), 0, Fate.OPEN, id="nothing there yet"),
        pytest.param(landed(("a", 1, "x")), 0, Fate.LANDED, id="our token"),
        pytest.param(landed(("b", 1, "y")), 0, Fate.LOST, id="somebody else's entry"),
        pytest.param(landed(("b", 1, "y")), 1, Fate.OPEN, id="somebody else's, one slot before"),
        pytest.param(landed(("a", 1, "old")), 0, Fate.SUPERSEDED, id="one that we gave up"),
        pytest.param(landed(("a", 0, "old")), 0, Fate.LOST, id="an earlier command of ours"),
        pytest.param(
            landed(("a", 1, "x"), ("b", 1, "y")), 0, Fate.LANDED, id="our token, and then more"
        ),
    ],
)
def test_what_became_of_an_attempt(
    replica: Replica[tuple[str, ...], str], slot: int, verdict: Fate
) -> None:
    assert fate_of(replica, author("a", 1, "x"), slot) is verdict


def test_absence_proves_nothing_about_writers_that_were_forgotten() -> None:
    mine = author("me", 1)
    never = RollupPolicy(diffs_min=2 * MARKS_MAX)
    replica = compose(EMPTY, mine, "mine", policy=never).after
    for n in range(MARKS_MAX):
        assert fate_of(replica, mine, 0) is Fate.LANDED
        replica = compose(replica, author(f"w{n}", 1), "other", policy=never).after
    assert len(replica.marks) == MARKS_MAX
    assert fate_of(replica, mine, 0) is Fate.FORGOTTEN
    assert fate_of(replica, author("unseen", 1), 5) is Fate.LOST, "5 would be remembered"


@pytest.mark.parametrize(
    ("fates", "whole"),
    [
        ([Fate.OPEN, Fate.OPEN], Fate.OPEN),
        ([Fate.OPEN, Fate.LANDED], Fate.LANDED),
        ([Fate.OPEN, Fate.LOST], Fate.LOST),
        ([Fate.LOST, Fate.SUPERSEDED], Fate.SUPERSEDED),
        ([Fate.OPEN, Fate.FORGOTTEN], Fate.FORGOTTEN),
    ],
)
def test_a_batch_shares_its_fate(fates: list[Fate], whole: Fate) -> None:
    assert fate_of_all(fates) is whole


# ---------------------------------------------------------------------------------- newer, damaged


def test_a_newer_format_can_be_looked_at_but_not_written() -> None:
    log, history, _ = log_of(2)
    newer = LedgerMachine(format=2)
    ahead = dataclasses.replace(history[-1], machine=newer)
    log.append(compose(ahead, author("n", 1), "future", policy=OFTEN).new)
    seen = EMPTY.catch_up(log)
    assert seen.state == ("c0", "c1")
    assert seen.newer is not None
    with pytest.raises(NewerFormat, match="newer release"):
        compose(seen, author("w", 9), "past", policy=OFTEN)
    assert Replica.empty("k", newer).catch_up(log).state == ("c0", "c1", "future")


def test_a_newer_rollup_alone_cannot_be_looked_at() -> None:
    log, _, _ = log_of(4, machine=LedgerMachine(format=2))
    with pytest.raises(NewerFormat):
        EMPTY.catch_up(log[2:])


def test_a_log_without_its_rollup_is_refused() -> None:
    log, _, _ = log_of(2)
    with pytest.raises(CorruptEntry, match="no rollup"):
        EMPTY.catch_up(log[1:])


def test_entries_must_follow_each_other() -> None:
    log, _, _ = log_of(2)
    with pytest.raises(ValueError, match="does not follow"):
        EMPTY.advance(log[1])


def test_a_newer_head_is_read_from_the_floor() -> None:
    newer = bytes([replicas.entries.MAGIC, 99, 0]) + bytes(20)
    assert start_of("k", VersionedData(50, newer)) == 0
