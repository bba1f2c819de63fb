"""Every split into transactions gives the same table: that of documents in the order of commits.

Writers with skewed clocks, spans that are acknowledged late or in parts, several journals, crashes
and compaction: the schedules of the simulation, and what becomes of the documents of a key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.journal.state import AckRecord
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.hints import Commit
from penstock.model.json_order import ABSENT
from penstock.model.reduce import Lookup, State, reduce_full
from penstock.model.schema import compiled
from penstock.shuffle.delivery import Delivery
from penstock.shuffle.state import Round, RoundLimits, SessionState
from support.schedules import run, schedule
from support.shuffle_oracle import Doc, Ledger, Stamp
from support.simulated_bindings import Reads, bindings_of
from support.simulation import START, Habits, World, create_journal

HERE, THERE = "a/pivot=00", "a/pivot=80"
KEYS = 3

Transactions = Sequence[Sequence[Doc]]


def content(doc: Doc) -> dict[str, Any]:
    """A document, which follows from its stamp: some lack members, some delete."""
    number = int(doc.clock * 31 + doc.producer * 7) % 1009
    found: dict[str, Any] = {
        "k": int(doc.clock) % KEYS,
        "v": number,
        "tags": [number],
        "object": {f"m{number % 3}": number, "deep": {"last": number}},
        "op": "d" if number % 11 == 0 else "add" if number % 2 else "set",
        "set": {"add" if number % 3 else "remove": [number % 5]},
    }
    if number % 4 == 0:
        del found["v"]
    return found


def schema(**properties: Any) -> dict[str, Any]:  # noqa: ANN401 - of JSON Schema
    return {"type": "object", "reduce": {"strategy": "merge"}, "properties": properties}


SCHEMAS: dict[str, dict[str, Any]] = {
    "lastWriteWins": {"type": "object", "reduce": {"strategy": "lastWriteWins"}},
    "firstWriteWins": {"type": "object", "reduce": {"strategy": "firstWriteWins"}},
    "of a member": schema(v={"type": "integer", "reduce": {"strategy": "lastWriteWins"}}),
    "first of a member": schema(v={"type": "integer", "reduce": {"strategy": "firstWriteWins"}}),
    "append": schema(tags={"type": "array", "reduce": {"strategy": "append"}}),
    "merge": schema(
        object={
            "type": "object",
            "reduce": {"strategy": "merge"},
            "properties": {"deep": {"type": "object", "reduce": {"strategy": "merge"}}},
        }
    ),
    "set": schema(set={"type": "object", "reduce": {"strategy": "set"}}),
    "deletion": {
        "type": "object",
        "if": {"properties": {"op": {"const": "d"}}},
        "then": {"reduce": {"strategy": "merge", "delete": True}},
        "else": {"reduce": {"strategy": "merge"}},
        "properties": {"tags": {"type": "array", "reduce": {"strategy": "append"}}},
    },
    "conditional": {
        "type": "object",
        "reduce": {"strategy": "merge"},
        "properties": {"v": {"type": "integer", "reduce": {"strategy": "sum"}}},
        "if": {"properties": {"op": {"const": "set"}}},
        "then": {"properties": {"tags": {"reduce": {"strategy": "lastWriteWins"}}}},
        "else": {"properties": {"tags": {"reduce": {"strategy": "append"}}}},
    },
}


def table(transactions: Transactions, lookup: Lookup) -> dict[int, State]:
    """Transactions one after the other, each reduced into what is stored."""
    stored: dict[int, State] = {}
    for docs in transactions:
        for key in range(KEYS):
            new = [content(doc) for doc in docs if doc.clock % KEYS == key]
            before = stored.pop(key, ABSENT)
            state = reduce_full([*([] if before is ABSENT else [before]), *new], lookup, key)
            if state is not ABSENT:
                stored[key] = state
    return stored


def transactions_of(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[int, list[list[Doc]]], Ledger | None]:
    """What each binding of a schedule's task has processed, by transactions."""
    found: dict[int, list[list[Doc]]] = {}
    ledgers: list[Ledger] = []
    commit = Ledger.commit

    def recording(ledger: Ledger, docs: Sequence[tuple[int, Doc]]) -> None:
        commit(ledger, docs)
        ledgers.append(ledger)
        for binding in {binding for binding, _ in docs}:
            found.setdefault(binding, []).append([doc for of, doc in docs if of == binding])

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "commit", recording)
        run(schedule(seed))
    return found, ledgers[0] if ledgers else None


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Compare all tables of a schedule: how many there are, and of how many clocks lie."""
    compared = reordered = 0
    found, ledger = transactions_of(seed, monkeypatch)
    for binding, transactions in found.items():
        assert ledger is not None
        docs = [doc for some in transactions for doc in some]
        places = [ledger.place(binding, doc) for doc in docs]
        if None in places:
            continue  # something was removed before it was read
        in_order = [doc for _, doc in sorted(zip(places, docs, strict=True))]
        compared += 1
        reordered += in_order != sorted(docs, key=lambda doc: (doc.clock, doc.producer))
        for name, annotated in SCHEMAS.items():
            lookup = compiled(json.dumps(annotated)).active_rules
            assert table(transactions, lookup) == table([in_order], lookup), name
    return compared, reordered


def test_what_an_ack_announces_comes_with_it_whatever_was_committed_before_it_is_read() -> None:
    """P acknowledges a journal it wrote nothing to, Q commits, then P's ACK where its rows are."""
    p, q = (Producer(Producer.MULTICAST | n) for n in (1, 2))
    world = World({"a": (HERE, THERE)}, Habits())
    for name in (HERE, THERE):
        create_journal(world, name)

    def at(clock: int) -> Clock:
        return Clock(START + clock)

    def ack(other: str) -> AckRecord:
        return AckRecord(producer=p, clock=at(30), hints=(Commit(other, p, at(30)),))

    rows = [Stamp(p, Flag.CONTINUE_TXN, at(clock)) for clock in (10, 20)]
    world.append({THERE: [world.fragment(rows)]})
    world.append({HERE: [ack(THERE)]})
    world.append({HERE: [world.fragment([Stamp(q, Flag.OUTSIDE_TXN, at(12))])]})
    world.append({THERE: [ack(HERE)]})
    for limits in (RoundLimits(), RoundLimits(bytes=1)):
        session = SessionState(bindings_of([Reads(collection="a")]), limits=limits)
        states = {name: journal.state for name, journal in world.journals.items()}
        session.learn("a", world.revision, states)
        found: list[Delivery] = []
        for _ in range(8):
            session.request()
            while isinstance(session.advance(at(100)), Round):
                pass
            if (checkpoint := session.answer()) is not None:
                found += checkpoint.deliveries
            if len(found) == 2:
                break
        by_level = sorted(found, key=lambda each: (max(each.first, each.level), each.first))
        assert [each.producer for each in by_level] == [p, q]
        levels = {each.producer: each.level for each in found}
        assert levels[q] > at(20) > levels[p], "Q comes behind all rows of P"


def test_all_splits_give_the_table_of_commits_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = reordered = 0
    for seed in range(120):
        some, other = check(seed, monkeypatch)
        compared, reordered = compared + some, reordered + other
    assert compared > 60
    assert reordered > compared // 10, "clocks alone would not have done"


@given(st.integers(1_000, 1_000_000))
def test_any_split_gives_the_table_of_commits_in_order(seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(seed, monkeypatch)
