"""Resuming from stored frontiers, and forgetting producers that will not write again."""

import pytest
from hypothesis import given

from penstock.model.clock import Clock, Producer, duration
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.producer_frontier import OBSERVED_FLOOR, ProducerFrontier
from penstock.model.resume import PRUNE_BYTES, prepare_resume, prune_producers
from support.strategies_frontier import frontiers

P1, P2, P3, P4, P5, P6, P9 = (Producer(Producer.MULTICAST | n) for n in (1, 2, 3, 4, 5, 6, 9))


def entry(producer: Producer, last_commit: int, hint: int, offset: int) -> ProducerFrontier:
    return ProducerFrontier(
        producer=producer,
        last_commit=Clock(last_commit),
        hinted_commit=Clock(hint),
        offset=offset,
    )


def journals(**entries: tuple[ProducerFrontier, ...]) -> Frontier:
    return Frontier.of(
        JournalFrontier(journal=name, producers=producers) for name, producers in entries.items()
    )


def test_commits_of_a_prepared_transaction_become_hints() -> None:
    committed = journals(A=(entry(P1, 50, 0, -3),), C=(entry(P9, 70, 0, -11),))
    hinted = journals(A=(entry(P1, 100, 0, -6),), B=(entry(P1, 100, 100, -4),))
    resumed = prepare_resume(committed, hinted)
    assert resumed == journals(
        A=(entry(P1, 50, 100, -3),), B=(entry(P1, 0, 100, 0),), C=(entry(P9, 70, 0, -11),)
    )
    assert resumed.unresolved_hints == 2


def test_open_spans_of_a_prepared_transaction_are_no_hints() -> None:
    committed = journals(A=(entry(P1, 50, 0, 3),))
    hinted = journals(A=(entry(P1, 100, 0, -6), entry(P2, OBSERVED_FLOOR, 0, 5)))
    assert prepare_resume(committed, hinted) == journals(A=(entry(P1, 50, 100, 3),))


def test_a_prepared_transaction_without_commits_is_as_good_as_committed() -> None:
    committed = journals(A=(entry(P1, 50, 0, -3),))
    hinted = journals(A=(entry(P1, 50, 0, 7), entry(P2, OBSERVED_FLOOR, 0, 5)))
    resumed = prepare_resume(committed, hinted)
    assert resumed == journals(A=(entry(P1, 50, 0, 7), entry(P2, OBSERVED_FLOOR, 0, 5)))
    assert resumed.unresolved_hints == 0
    assert prepare_resume(committed, EMPTY) == committed


@given(frontiers(), frontiers())
def test_replaying_the_hints_reaches_the_prepared_commits(
    committed: Frontier, hinted: Frontier
) -> None:
    """Resolved by exactly what was prepared, a recovery commits what the transaction would have."""
    committed = committed.clear_discharged_hints()
    hinted = hinted.clear_discharged_hints()
    resumed = prepare_resume(committed, hinted)
    replayed = resumed.resolve_hints(hinted).frontier
    assert replayed.unresolved_hints == 0
    for read in hinted:
        after = replayed.find(read.journal, read.binding)
        reached = {one.producer: one.last_commit for one in after.producers} if after else {}
        for one in read.producers:
            if one.last_commit > OBSERVED_FLOOR:
                assert reached[one.producer] >= one.last_commit


NEW, OLD = duration(1_000_000), duration(1_000_000 - 48 * 3600)
FAR = 3  # rows of a gibibyte each


def gibibytes(_journal: str, offset: int) -> int:
    return offset * PRUNE_BYTES


def test_only_what_is_old_far_behind_and_silent_is_forgotten() -> None:
    kept = (
        entry(P2, OLD, 0, -9),  # old, but near
        entry(P3, OLD + 1, 0, -FAR),  # far, but new
        entry(P4, OLD, 0, FAR),  # old and far, but open, and its writer lives
        entry(P6, OLD, OLD + 1, -FAR),  # old and far, but awaited
        entry(P9, NEW, 0, -9),
    )
    checkpoint = journals(A=(entry(P1, OLD, 0, -8), *kept[:3], entry(P5, OLD, 0, FAR), *kept[3:]))
    pruned = prune_producers(checkpoint, byte_position=gibibytes, retired={P5})
    assert pruned == journals(A=kept)


def test_spans_open_at_row_0_wait_for_their_writers() -> None:
    checkpoint = journals(A=(entry(P1, OBSERVED_FLOOR, 0, 0), entry(P2, NEW, 0, -9)))
    assert prune_producers(checkpoint, byte_position=gibibytes, retired=()) == checkpoint
    assert prune_producers(checkpoint, byte_position=gibibytes, retired={P1}) == journals(
        A=(entry(P2, NEW, 0, -9),)
    )


def test_journals_are_pruned_each_by_its_own_newest() -> None:
    checkpoint = journals(A=(entry(P1, OLD, 0, -1),), B=(entry(P1, NEW, 0, -9),))
    assert prune_producers(checkpoint, byte_position=gibibytes, retired={P1}) == checkpoint


def test_the_furthest_producer_is_never_forgotten() -> None:
    with pytest.raises(ValueError, match="must not be forgotten"):
        prune_producers(EMPTY, byte_position=gibibytes, retired=(), prune_bytes=0)


@given(frontiers())
def test_pruning_keeps_the_newest_and_the_cut_floor(checkpoint: Frontier) -> None:
    aged = journals(
        **{
            f"{n}": tuple(
                entry(p.producer, p.last_commit * duration(24 * 3600), 0, p.offset)
                for p in read.producers
            )
            for n, read in enumerate(checkpoint)
        }
    )
    pruned = prune_producers(
        aged, byte_position=lambda _, offset: offset, retired={P1, P2}, prune_bytes=2
    )
    assert len(pruned) == len(aged)
    for before, after in zip(aged, pruned, strict=True):
        assert after.cut_floor == before.cut_floor
        newest = max((p.last_commit for p in before.producers), default=0)
        assert newest == max((p.last_commit for p in after.producers), default=0)
        assert set(after.producers) <= set(before.producers)
