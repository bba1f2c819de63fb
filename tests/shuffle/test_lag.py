"""How far a reader is behind: what it would get, and what nobody may read yet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import Clock
from penstock.model.frontier import EMPTY, Frontier
from penstock.shuffle.binding import Binding
from penstock.shuffle.lag import ReadingLag, Uncommitted, reading_lag
from shuffle.scripts import P2, ROW_BYTES, A, B, C, Coordinator, Script, bindings, read_all


def lag_of(
    script: Script,
    reads: tuple[Binding, ...] = (),
    resume: Frontier = EMPTY,
    now: int = 1_000_000,
) -> ReadingLag:
    reads = reads or bindings("a")
    names = {binding.collection.name for binding in reads}
    journals = {
        name: {key: state for key, state in script.states.items() if key.startswith(f"{name}/")}
        for name in names
    }
    return reading_lag(reads, resume, journals, Clock(now))


def test_what_is_committed_counts_and_what_is_not_is_named() -> None:
    script = Script(A, B)
    script.write({A: "O10 O20 p2:C30 p2:C35", B: "p2:C40"})
    lag = lag_of(script)
    assert (lag.documents, lag.bytes, lag.oldest, lag.exact) == (2, 2 * ROW_BYTES, 20, True)
    assert lag.uncommitted == (
        Uncommitted(collection="a", producer=P2, documents=3, first=Clock(30), last=Clock(40)),
    )
    script.write({A: f"p2:A50>{B}", B: f"p2:A50>{A}"})
    lag = lag_of(script)
    assert (lag.documents, lag.uncommitted) == (5, ())


def test_what_was_read_does_not_count_and_an_old_open_span_is_still_named() -> None:
    script = Script(A)
    script.write({A: "O10 p2:C20"})
    script.write({A: "O30"})
    read = read_all(script)
    lag = lag_of(script, resume=read.frontier)
    assert lag.documents == 0
    assert lag.uncommitted == (
        Uncommitted(collection="a", producer=P2, documents=1, first=Clock(20), last=Clock(20)),
    )
    script.write({A: "O50 p2:C60"})
    lag = lag_of(script, resume=read.frontier)
    assert (lag.documents, lag.oldest) == (1, 50)
    assert [(each.producer, each.documents) for each in lag.uncommitted] == [(P2, 2)]


def test_what_was_rolled_back_is_neither() -> None:
    script = Script(A)
    script.write({A: "O10 C20 A10"})
    lag = lag_of(script)
    assert (lag.documents, lag.uncommitted) == (1, ())


def test_a_read_delay_holds_back_until_it_is_over() -> None:
    script = Script(A)
    script.write({A: "O100 O110"})
    reads = bindings("a", read_delay=[50])
    held = lag_of(script, reads, now=120)
    assert (held.documents, held.held, held.held_since, held.due) == (
        0,
        2,
        100,
        160,
    )  # whole records
    assert lag_of(script, reads, now=200).documents == 2


def test_old_records_are_counted_from_their_pages() -> None:
    script = Script(A)
    script.write({A: "O10 O20"})
    script.write({A: "O30"})
    script.seal(A, 1)
    lag = lag_of(script)
    assert (lag.documents, lag.bytes, lag.exact) == (3, 3 * ROW_BYTES, False)


def test_a_task_without_journals_has_nothing_before_it() -> None:
    assert lag_of(Script()) == ReadingLag()


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Random writes of two producers to three journals."""
    script = Script(A, B, C)
    clocks = st.integers(1, 5)
    clock = 10
    opened: dict[tuple[str, int], int] = {}
    for _ in range(draw(st.integers(1, 8))):
        texts: dict[str, str] = {}
        for journal in draw(st.sets(st.sampled_from([A, B, C]), min_size=1)):
            words = []
            for who in draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3)):
                clock += draw(clocks)
                if (journal, who) in opened and draw(st.booleans()):
                    words.append(f"p{who}:A{clock}")
                    del opened[journal, who]
                elif (journal, who) in opened or draw(st.booleans()):
                    words.append(f"p{who}:C{clock}")
                    opened[journal, who] = clock
                else:
                    words.append(f"p{who}:O{clock}")
            texts[journal] = " ".join(words)
        script.write(texts)
    return script


@given(scripts(), st.sampled_from([("a",), ("a", "c"), ("c", "c")]))
def test_the_lag_is_what_a_reader_gets(script: Script, collections: tuple[str, ...]) -> None:
    reads = bindings(*collections)
    coordinator = Coordinator(script, reads)
    coordinator.learn()
    got = [seen for each in coordinator.drain() for seen in each.deliveries]
    lag = lag_of(script, reads)
    assert lag.exact
    assert lag.documents == sum(rows.run.rows for each in got for rows in each.rows)
    assert lag.bytes == sum(each.bytes for each in got)
    after = lag_of(script, reads, resume=coordinator.frontier)
    assert (after.documents, after.uncommitted) == (0, lag.uncommitted)
