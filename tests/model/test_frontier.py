"""Frontiers: joining, waiting, and the algebra that makes a late or repeated delta harmless."""

import pickle
from collections.abc import Iterable
from functools import reduce
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import CLOCK_MAX, Clock, Producer
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.frontier_table import InvalidFrontier, Key
from penstock.model.producer_frontier import OFFSET_MAX, ProducerFrontier
from support.strategies_frontier import frontiers, producer_frontiers, producers

P1, P3, P5, P7 = (Producer(Producer.MULTICAST | n) for n in (1, 3, 5, 7))
Entry = tuple[int, int, int]


def entry(producer: Producer, last_commit: int, hint: int, offset: int) -> ProducerFrontier:
    return ProducerFrontier(
        producer=producer,
        last_commit=Clock(last_commit),
        hinted_commit=Clock(hint),
        offset=offset,
    )


def journal(
    name: str, *entries: ProducerFrontier, binding: int = 0, bytes_delta: tuple[int, int] = (0, 0)
) -> JournalFrontier:
    return JournalFrontier(
        journal=name,
        binding=binding,
        producers=entries,
        bytes_read_delta=bytes_delta[0],
        bytes_behind_delta=bytes_delta[1],
    )


REDUCE_TABLE = [
    ([(200, 0, -1000), (100, 0, -500)], (200, 0, -1000)),
    ([(100, 0, -300), (100, 0, 50)], (100, 0, -300)),
    ([(200, 0, -800), (0, 500, 0)], (200, 500, -800)),
    ([(100, 0, -500), (100, 0, 500)], (100, 0, 500)),
    ([(100, 400, 207), (400, 400, -150)], (400, 400, -207)),
    ([(100, 0, 207), (400, 400, 0)], (400, 400, -207)),
    ([(100, 0, 500), (400, 400, -500)], (400, 400, -500)),
    ([(400, 0, 900), (400, 400, -500)], (400, 400, 900)),
    ([(1, 0, 0), (0, 200, 0)], (1, 200, 0)),
    ([(1, 0, 0), (300, 0, -5)], (300, 0, -5)),
    ([(100, 0, 207), (0, 400, 0), (400, 400, -396)], (400, 400, -396)),
]


@pytest.mark.parametrize(("entries", "want"), REDUCE_TABLE, ids=str)
def test_entries_join_in_any_order_and_grouping(entries: list[Entry], want: Entry) -> None:
    for order in permutations(entries):
        parts = [entry(P1, *values) for values in order]
        wanted = entry(P1, *want)
        assert reduce(ProducerFrontier.reduce, parts) == wanted
        assert parts[0].reduce(reduce(ProducerFrontier.reduce, parts[1:])) == wanted
        columns = [Frontier.of([journal("J", part)]) for part in parts]
        assert reduce(Frontier.reduce, columns) == Frontier.of([journal("J", wanted)])


one_producer = producer_frontiers(producer=st.just(P1))


@given(one_producer, one_producer, one_producer)
def test_producer_entries_are_a_semilattice(
    a: ProducerFrontier, b: ProducerFrontier, c: ProducerFrontier
) -> None:
    assert a.reduce(b).reduce(c) == a.reduce(b.reduce(c))
    assert a.reduce(b) == b.reduce(a)
    assert a.reduce(a) == a
    assert a.reduce(b).reduce(b) == a.reduce(b)


@given(st.lists(one_producer, min_size=1, max_size=5))
def test_pairs_join_to_the_aggregate_that_sql_computes(entries: list[ProducerFrontier]) -> None:
    last_commit = max(e.last_commit for e in entries)
    furthest = max(abs(e.offset) for e in entries)
    stays_open = any(e.offset == furthest and e.last_commit == last_commit for e in entries)
    assert reduce(ProducerFrontier.reduce, entries) == entry(
        P1,
        last_commit,
        max(e.hinted_commit for e in entries),
        furthest if stays_open else -furthest,
    )


def test_entries_of_two_producers_have_no_join() -> None:
    with pytest.raises(ValueError, match="do not join"):
        entry(P1, 1, 0, 0).reduce(entry(P3, 1, 0, 0))


def test_reduce_merges_journals_sums_bytes_and_counts_hints() -> None:
    a = Frontier.of(
        [
            journal("J/A", entry(P1, 100, 0, -500), bytes_delta=(200, 1000)),
            journal(
                "J/B", entry(P3, 200, 0, -1000), entry(P5, 50, 0, -200), bytes_delta=(100, 500)
            ),
        ],
        flushed_lsn=(10, 50, 3),
    )
    b = Frontier.of(
        [
            journal("J/B", entry(P3, 0, 300, 0), bytes_delta=(50, -300)),
            journal("J/C", entry(P3, 0, 300, 0), binding=1),
        ],
        flushed_lsn=(40, 20, 30),
    )
    want = Frontier.of(
        [
            journal("J/A", entry(P1, 100, 0, -500), bytes_delta=(200, 1000)),
            journal(
                "J/B", entry(P3, 200, 300, -1000), entry(P5, 50, 0, -200), bytes_delta=(150, 200)
            ),
            journal("J/C", entry(P3, 0, 300, 0), binding=1),
        ],
        flushed_lsn=(40, 50, 30),
    )
    assert a.reduce(b) == b.reduce(a) == want
    assert want.unresolved_hints == 2


@given(frontiers(), frontiers(), frontiers())
def test_frontiers_reduce_in_any_order_and_grouping(a: Frontier, b: Frontier, c: Frontier) -> None:
    assert a.reduce(b).reduce(c) == a.reduce(b.reduce(c))
    assert a.reduce(b) == b.reduce(a)
    assert a.reduce(EMPTY) == EMPTY.reduce(a) == a
    assert a.without_bytes().reduce(a.without_bytes()) == a.without_bytes()


@given(frontiers(), frontiers())
def test_columns_reduce_as_their_values_do(a: Frontier, b: Frontier) -> None:
    reduced = a.reduce(b)
    joined: dict[tuple[Key, Producer], ProducerFrontier] = {}
    for read in (*a, *b):
        for one in read.producers:
            key = ((read.journal, read.binding), one.producer)
            joined[key] = joined[key].reduce(one) if key in joined else one
    assert {
        ((read.journal, read.binding), one.producer): one
        for read in reduced
        for one in read.producers
    } == joined
    rebuilt = Frontier.of(reduced, flushed_lsn=reduced.flushed_lsn, gap_floors=reduced.gap_floors)
    assert rebuilt == reduced


@given(frontiers())
def test_values_are_the_same_one_by_one_and_all_together(frontier: Frontier) -> None:
    every = list(frontier)
    assert [frontier.find(each.journal, each.binding) for each in every] == every
    behind = frontier.bytes_behind()
    assert behind.keys() == {each.binding for each in every}
    for binding, total in behind.items():
        assert total == sum(e.bytes_behind_delta for e in every if e.binding == binding)


def test_reducing_a_delta_twice_counts_its_bytes_twice() -> None:
    delta = Frontier.of([journal("J", entry(P1, 9, 0, -1), bytes_delta=(5, -2))])
    assert delta.reduce(delta) == Frontier.of(
        [journal("J", entry(P1, 9, 0, -1), bytes_delta=(10, -4))]
    )


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [((10, 20), (5, 25, 30), (10, 25, 30)), ((), (1, 2), (1, 2)), ((3,), (), (3,)), ((), (), ())],
)
def test_log_positions_reduce_shard_by_shard(
    a: tuple[int, ...], b: tuple[int, ...], want: tuple[int, ...]
) -> None:
    left, right = Frontier.of((), flushed_lsn=a), Frontier.of((), flushed_lsn=b)
    assert left.reduce(right).flushed_lsn == want


def test_gap_floors_only_rise() -> None:
    a = Frontier.of((), gap_floors={0: Clock(5), 1: Clock(9)})
    b = Frontier.of((), gap_floors={1: Clock(7), 2: Clock(3)})
    assert a.reduce(b).gap_floors == {0: 5, 1: 9, 2: 3}


@pytest.mark.parametrize(
    ("journals", "want"),
    [
        pytest.param(
            [journal("B"), journal("A")],
            r"journal 1 of the frontier \(A, binding 0\) is out of order",
            id="journal out of order",
        ),
        pytest.param(
            [journal("A", binding=2), journal("A", binding=1)],
            r"journal 1 .*binding 1\) is out of order",
            id="binding out of order",
        ),
        pytest.param(
            [journal("A"), journal("B"), journal("B")],
            r"journal 2 of the frontier \(B, binding 0\) is a duplicate",
            id="journal duplicate",
        ),
        pytest.param(
            [
                journal("A", entry(P3, 0, 0, 0)),
                journal("B", entry(P1, 0, 0, 0), entry(P5, 0, 0, 0), entry(P3, 0, 0, 0)),
            ],
            r"producer 2 of journal B, binding 0 \(010000000003\) is out of order",
            id="producer out of order",
        ),
        pytest.param(
            [journal("A"), journal("B", entry(P1, 0, 0, 0), entry(P1, 0, 0, 0))],
            r"producer 1 of journal B, binding 0 \(010000000001\) is a duplicate",
            id="producer duplicate",
        ),
        pytest.param([journal("A"), journal("")], "journal 1 .* has no name", id="empty name"),
        pytest.param([journal("\ud800")], "has no name", id="half a character"),
        pytest.param([journal("A", binding=1 << 16)], "has binding 65536", id="binding"),
        pytest.param([journal("A", bytes_delta=(1 << 63, 0))], "64 bits", id="bytes"),
    ],
)
def test_what_is_no_frontier_is_refused_by_index(
    journals: list[JournalFrontier], want: str
) -> None:
    with pytest.raises(InvalidFrontier, match=want):
        Frontier.of(journals)


@pytest.mark.parametrize(
    ("lsn", "floors"), [((-1,), {}), ((), {0: Clock(CLOCK_MAX + 1)}), ((), {-1: Clock(1)})]
)
def test_impossible_positions_and_floors_are_refused(
    lsn: tuple[int, ...], floors: dict[int, Clock]
) -> None:
    with pytest.raises(InvalidFrontier):
        Frontier.of((), flushed_lsn=lsn, gap_floors=floors)


@pytest.mark.parametrize(
    "values", [(-1, 0, 0), (CLOCK_MAX + 1, 0, 0), (0, -1, 0), (0, 0, OFFSET_MAX + 1)], ids=str
)
def test_impossible_entries_cannot_be_built(values: Entry) -> None:
    with pytest.raises(ValueError, match=str(P1)):
        entry(P1, *values)


@given(st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=5))
def test_journals_are_ordered_by_their_utf8_bytes(names: list[str]) -> None:
    ordered = sorted(names, key=str.encode)
    assert [read.journal for read in Frontier.of([journal(name) for name in ordered])] == ordered


def test_a_delta_is_gathered_from_reads_in_any_order() -> None:
    reads = [
        journal("B", entry(P5, 9, 0, -3), entry(P1, 8, 0, -2), bytes_delta=(4, 1)),
        journal("C", bytes_delta=(7, 7)),
        journal("A", entry(P3, 7, 0, -1), binding=2),
        journal("A", entry(P3, 7, 0, -1), binding=0),
    ]
    assert Frontier.gather(reads) == Frontier.of(
        [
            journal("A", entry(P3, 7, 0, -1), binding=0),
            journal("A", entry(P3, 7, 0, -1), binding=2),
            journal("B", entry(P1, 8, 0, -2), entry(P5, 9, 0, -3), bytes_delta=(4, 1)),
        ]
    )


RESOLVE_TABLE = [
    pytest.param(
        [
            journal("A", entry(P1, 50, 200, -100)),
            journal("B", entry(P3, 0, 300, 0), entry(P5, 100, 0, -500)),
        ],
        [journal("A", entry(P1, 250, 0, -800)), journal("B", entry(P3, 250, 0, -600))],
        [
            journal("A", entry(P1, 200, 200, -100)),
            journal("B", entry(P3, 250, 300, -500), entry(P5, 100, 0, -500)),
        ],
        (2, 1),
        id="one reaches its hint, one comes closer",
    ),
    pytest.param(
        [journal("B", entry(P3, 250, 300, -500), entry(P5, 100, 0, -500))],
        [journal("B", entry(P3, 400, 0, -900))],
        [journal("B", entry(P3, 300, 300, -500), entry(P5, 100, 0, -500))],
        (1, 1),
        id="the other is past the hint: stop at the hint",
    ),
    pytest.param(
        [journal("X", entry(P1, 50, 200, 300), entry(P3, 100, 0, -900))],
        [journal("X", entry(P1, 250, 0, -700))],
        [journal("X", entry(P1, 200, 200, -900), entry(P3, 100, 0, -900))],
        (1, 1),
        id="an open span is closed at this cut floor",
    ),
    pytest.param(
        [journal("X", entry(P1, 0, 100, 0), binding=1)],
        [journal("X", entry(P1, 200, 0, -5), binding=0)],
        [journal("X", entry(P1, 0, 100, 0), binding=1)],
        (0, 0),
        id="another binding's read resolves nothing",
    ),
    pytest.param(
        [journal("X", entry(P1, 100, 0, -4))],
        [journal("X", entry(P1, 200, 0, -5))],
        [journal("X", entry(P1, 100, 0, -4))],
        (0, 0),
        id="without a hint nothing moves",
    ),
]


@pytest.mark.parametrize(("mine", "theirs", "want", "counts"), RESOLVE_TABLE)
def test_resolve_hints(
    mine: list[JournalFrontier],
    theirs: list[JournalFrontier],
    want: list[JournalFrontier],
    counts: tuple[int, int],
) -> None:
    frontier, advanced, resolved = Frontier.of(mine).resolve_hints(Frontier.of(theirs))
    assert frontier == Frontier.of(want)
    assert (advanced, resolved) == counts


@given(frontiers(), frontiers())
def test_resolving_counts_exactly_and_changes_only_what_waits(a: Frontier, b: Frontier) -> None:
    resolved = a.resolve_hints(b)
    assert resolved.frontier.unresolved_hints == a.unresolved_hints - resolved.resolved
    assert resolved.frontier.unresolved_hints == count_unresolved(resolved.frontier)
    again = resolved.frontier.resolve_hints(b)
    assert (again.advanced, again.frontier) == (0, resolved.frontier)
    changed = 0
    for before, after in zip(a, resolved.frontier, strict=True):
        theirs = b.find(before.journal, before.binding)
        read = {one.producer: one.last_commit for one in theirs.producers} if theirs else {}
        for was, now in zip(before.producers, after.producers, strict=True):
            commit = read.get(was.producer, 0)
            if was.is_unresolved and commit > was.last_commit:
                reached = min(commit, was.hinted_commit)
                assert now == entry(was.producer, reached, was.hinted_commit, -before.cut_floor)
                changed += 1
            else:
                assert now == was
    assert changed == resolved.advanced


def count_unresolved(reads: Iterable[JournalFrontier]) -> int:
    return sum(one.is_unresolved for read in reads for one in read.producers)


def test_projection_keeps_what_waits() -> None:
    frontier = Frontier.of(
        [
            journal("A", entry(P1, 50, 200, -100), entry(P3, 300, 100, -500), bytes_delta=(7, 8)),
            journal("B", entry(P5, 100, 0, -200)),
            journal("C", entry(P7, 0, 300, 0)),
        ],
        flushed_lsn=(1, 2),
        gap_floors={0: Clock(9)},
    )
    assert frontier.project_unresolved_hints() == Frontier.of(
        [journal("A", entry(P1, 50, 200, -100)), journal("C", entry(P7, 0, 300, 0))],
        gap_floors={0: Clock(9)},
    )


@given(frontiers())
def test_projection_and_discharge_split_the_hints(frontier: Frontier) -> None:
    waiting = frontier.project_unresolved_hints()
    assert waiting.unresolved_hints == count_unresolved(frontier) == count_unresolved(waiting)
    assert sum(len(read.producers) for read in waiting) == waiting.unresolved_hints
    assert all(read.producers for read in waiting)
    cleared = frontier.clear_discharged_hints()
    assert cleared.unresolved_hints == 0
    assert cleared.clear_discharged_hints() == cleared
    for before, after in zip(frontier, cleared, strict=True):
        for was, now in zip(before.producers, after.producers, strict=True):
            hint = 0 if was.is_unresolved else was.hinted_commit
            assert now == entry(was.producer, was.last_commit, hint, was.offset)


@given(frontiers(), st.sets(st.integers(0, 1)))
def test_bindings_are_retained_with_their_floors(frontier: Frontier, wanted: set[int]) -> None:
    kept = frontier.retain_bindings(wanted.__contains__)
    assert list(kept) == [read for read in frontier if read.binding in wanted]
    assert kept.gap_floors.keys() == frontier.gap_floors.keys() & wanted
    assert kept.flushed_lsn == frontier.flushed_lsn


@given(frontiers())
def test_every_journal_is_found_and_no_other(frontier: Frontier) -> None:
    for read in frontier:
        assert frontier.find(read.journal, read.binding) == read
        assert frontier.find(read.journal, 9) is None
    assert frontier.find("acme", 0) is None
    assert len(frontier) == len(list(frontier))
    assert bool(frontier) == (len(frontier) > 0)


def test_one_journal_is_found_among_many() -> None:
    many = Frontier.of(journal(f"J/{n:03}", entry(P1, n, 0, -n)) for n in range(100))
    assert many.find("J/042", 0) == journal("J/042", entry(P1, 42, 0, -42))
    assert many.find("J/0420", 0) is None
    assert many.find("Z", 0) is None


def test_what_waits_is_described_in_at_most_21_lines() -> None:
    waiting = Frontier.of(journal(f"J/{n:02}", entry(P1, 16, 32 + n, -1)) for n in range(25))
    lines = waiting.describe_unresolved().splitlines()
    assert lines[0] == (
        f"journal J/00, binding 0: producer {P1} is at 0x10, waiting for the hinted 0x20"
    )
    assert (len(lines), lines[-1]) == (21, "and 5 more")
    assert EMPTY.describe_unresolved() == ""


@given(frontiers())
def test_frontiers_survive_pickling(frontier: Frontier) -> None:
    assert pickle.loads(pickle.dumps(frontier)) == frontier  # noqa: S301


def test_a_frontier_says_how_large_it_is_and_is_equal_to_frontiers_only() -> None:
    frontier = Frontier.of([journal("J", entry(P1, 0, 5, 0))])
    assert repr(frontier) == "<Frontier of 1 journals, 1 producers, 1 unresolved hints>"
    assert frontier != "J"
    assert frontier.table != "J"


def test_columns_cannot_be_written_to() -> None:
    frontier = Frontier.of([journal("J", entry(P1, 0, 5, 0))])
    with pytest.raises(ValueError, match="read-only"):
        frontier.table.last_commit[0] = 7


def test_journals_beyond_one_block_are_located() -> None:
    """Journal positions and producers share 64 bits, 32,768 journals at a time."""
    names = [f"J/{n:05}" for n in range(40_000)]
    wide = Frontier.of(journal(name, entry(P3, 5, 0, -1)) for name in names)
    delta = Frontier.of(
        journal(name, entry(P1, 7, 0, -2), entry(P3, 6, 9, -3))
        for name in (names[0], names[32_767], names[32_768], names[-1])
    )
    reduced = wide.reduce(delta)
    assert reduced.unresolved_hints == 4
    for read in delta:
        assert reduced.find(read.journal, 0) == read
    assert reduced.find(names[1], 0) == journal(names[1], entry(P3, 5, 0, -1))
    assert len(reduced.table.producer) == 40_004


@given(st.lists(producers(wide=True), unique=True, max_size=20), st.data())
def test_wide_producers_merge_in_order(ids: list[Producer], data: st.DataObject) -> None:
    left = data.draw(st.sets(st.sampled_from(ids))) if ids else set[Producer]()
    right = set(ids) - left
    parts = [
        Frontier.gather([journal("J", *(entry(p, 5, 0, -1) for p in side))])
        for side in (left, right)
    ]
    whole = Frontier.gather([journal("J", *(entry(p, 5, 0, -1) for p in ids))])
    assert parts[0].reduce(parts[1]) == whole
