"""What the benchmark of shuffles prepares, counts and checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.backlog import bytes_below, resident
from penstock.bench.shuffle import Spans, ordered
from penstock.bench.stock import Stage, Stock, Sums, collection, fill, sums_of
from penstock.journal.reader import CollectionReader

STOCK = Stock(documents=120, lots=2, parts=30)


@pytest.mark.parametrize("by", ["lot", "part"])
def test_documents_are_the_same_however_they_are_cut(by: str) -> None:
    whole = STOCK.made(range(120))
    pieces = [STOCK.made(ids) for ids in STOCK.pieces(by)]
    assert [row for piece in pieces for row in piece.to_pylist()] == whole.to_pylist()
    assert sum(map(sums_of, pieces), Sums()) == sums_of(whole)
    for number, piece in enumerate(pieces):
        assert set(piece.column(by).to_pylist()) == {number}


def test_sums_tell_documents_apart() -> None:
    one, other = STOCK.made(range(60)), STOCK.made(range(60, 120))
    assert sums_of(one).documents == sums_of(other).documents == 60
    assert sums_of(one) != sums_of(other)
    assert len(set(STOCK.made(range(120)).column("note").to_pylist())) == 120


def test_a_stock_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="equal pieces"):
        Stock(documents=100, lots=2, parts=30)


@pytest.mark.parametrize("by", ["lot", "part"])
async def test_journals_have_what_they_are_filled_with(tmp_path: Path, by: str) -> None:
    spec = collection("bench/some", by=by)
    async with Stage.opened(tmp_path) as here:
        written = await fill(here, spec, STOCK)
        reader = CollectionReader(here.journals, here.blobs, here.schemas, spec.name)
        read = [rows async for rows in reader.read()]
    assert len({rows.journal for rows in read}) == len(STOCK.pieces(by))
    assert sum((sums_of(rows.batch) for rows in read), Sums()) == written
    assert written == sums_of(STOCK.made(range(120)))


def test_the_order_of_a_key_counts_and_that_of_keys_does_not() -> None:
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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it has no /proc")
def test_the_memory_of_a_process_and_its_descendants_is_told_apart() -> None:
    child = "import sys; held = bytearray(64 << 20); print(flush=True); sys.stdin.read()"
    before = resident(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        held = resident(os.getpid())
        process.communicate()
    assert held["driver"] > 10 << 20
    assert held["workers"] - before["workers"] > 64 << 20


def test_files_below_a_directory_are_counted(tmp_path: Path) -> None:
    assert bytes_below(tmp_path / "none") == 0
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "one").write_bytes(b"12")
    (tmp_path / "a" / "b" / "two").write_bytes(b"345")
    assert bytes_below(tmp_path) == 5
