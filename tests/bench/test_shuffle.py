"""What the shuffle benchmark prepares, counts and checks."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import Bug
from penstock.journal.reader import CollectionReader
from penstock_bench.backlog import TABLE, bytes_below, check, stock_of
from penstock_bench.shuffle import Spans, ordered
from penstock_bench.stock import Stage, Stock, Sums, collection, fill, sums_of

STOCK = Stock(documents=120, lots=2, parts=30)


@pytest.mark.parametrize("by", ["lot", "part"])
def test_documents_are_the_same_however_they_are_partitioned(by: str) -> None:
    whole = STOCK.made(range(120))
    pieces = [STOCK.made(ids) for ids in STOCK.pieces(by)]
    assert [row for piece in pieces for row in piece.to_pylist()] == whole.to_pylist()
    assert sum(map(sums_of, pieces), Sums()) == sums_of(whole)
    for number, piece in enumerate(pieces):
        assert set(piece.column(by).to_pylist()) == {number}


def test_sums_distinguish_documents() -> None:
    one, other = STOCK.made(range(60)), STOCK.made(range(60, 120))
    assert sums_of(one).documents == sums_of(other).documents == 60
    assert sums_of(one) != sums_of(other)
    assert len(set(STOCK.made(range(120)).column("note").to_pylist())) == 120


def test_a_stock_that_cannot_be_split_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="equal pieces"):
        Stock(documents=100, lots=2, parts=30)


@pytest.mark.parametrize("by", ["lot", "part"])
async def test_journals_hold_what_they_are_filled_with(tmp_path: Path, by: str) -> None:
    spec = collection("bench/some", by=by)
    async with Stage.opened(tmp_path) as here:
        written = await fill(here, spec, STOCK)
        reader = CollectionReader(here.journals, here.blobs, here.schemas, spec.name)
        read = [rows async for rows in reader.read()]
    assert len({rows.journal for rows in read}) == len(STOCK.pieces(by))
    assert sum((sums_of(rows.batch) for rows in read), Sums()) == written
    assert written == sums_of(STOCK.made(range(120)))


def test_order_matters_within_a_key_and_not_between_keys() -> None:
    keys = np.array([7, 8, 7, 9, 8, 7])
    ids = np.array([1, 2, 3, 4, 5, 6])
    every = ordered(keys, ids)
    among_others = np.array([1, 0, 3, 2, 4, 5])
    assert ordered(keys[among_others], ids[among_others]) == every
    by_shard = [ordered(keys[keys == key], ids[keys == key]) for key in (7, 8, 9)]
    assert sum(by_shard, Sums()) == every
    swapped = np.array([2, 1, 0, 3, 4, 5])
    assert ordered(keys[swapped], ids[swapped]) != every
    torn = [ordered(keys[:3], ids[:3]), ordered(keys[3:], ids[3:])]
    assert sum(torn, Sums()) != every


def test_steps_are_timed_one_after_the_other() -> None:
    ticks = iter([10.0, 11.0, 14.0, 20.0, 21.0, 29.0])
    spans = Spans(clock=lambda: next(ticks))
    for _ in range(2):
        spans.begin()
        spans.end("list")
        spans.end("read")
    assert spans.taken == {"list": [1.0, 1.0], "read": [3.0, 8.0]}
    assert spans.median("read") == 8.0, "the first time is a warm-up"


def test_files_below_a_directory_are_counted(tmp_path: Path) -> None:
    assert bytes_below(tmp_path / "none") == 0
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "one").write_bytes(b"12")
    (tmp_path / "a" / "b" / "two").write_bytes(b"345")
    assert bytes_below(tmp_path) == 5


@pytest.mark.parametrize("size", [1, 32 << 20, 100 << 20])
def test_a_backlog_has_as_many_whole_transactions_for_each_journal(size: int) -> None:
    stock = stock_of(size)
    assert size <= stock.documents * stock.note_bytes < size + (64 << 20)
    assert stock.parts % stock.lots == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param("", None, id="as it must be"),
        pytest.param("DELETE FROM customers WHERE customer = 3", "1 of 12", id="one is missing"),
        pytest.param("UPDATE customers SET note = 'x' WHERE customer = 4", "customer 4", id="note"),
        pytest.param(
            "UPDATE customers SET id = 0 WHERE customer = 5", "customer 5", id="an old one"
        ),
        pytest.param("INSERT INTO customers VALUES (99, 0, '')", "customer 99", id="one too many"),
    ],
)
def test_a_table_that_is_wrong_is_refused(tmp_path: Path, change: str, why: str | None) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as database:
        database.execute(f"CREATE TABLE {TABLE} (customer INTEGER, id INTEGER, note TEXT)")
        rows = {row["customer"]: row for row in STOCK.made(range(120)).to_pylist()}
        database.executemany(
            f"INSERT INTO {TABLE} VALUES (:customer, :id, :note)",  # noqa: S608
            list(rows.values()),
        )
        database.execute(change)
        database.commit()
    with pytest.raises(Bug, match=why) if why else contextlib.nullcontext():
        check(tmp_path / "t.db", STOCK)
