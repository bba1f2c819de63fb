"""Splits: every piece is in one of them, and there are as many as there are cores to read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.journal.splits import (
    OBJECT_BYTES,
    SPLIT_BYTES,
    SPLIT_BYTES_MAX,
    WholeRows,
    split_bytes,
    splits,
)
from penstock.journal.state import Blob
from penstock.model.columns import columns
from penstock.model.infer import infer

LAYOUTS = {"s": columns(infer({"type": "object"}))}


def piece(size: int, at: int = 0) -> WholeRows:
    return WholeRows(Blob(path=f"c/{at}.parquet"), rows=1, bytes=size, schema="s")


SMALL = OBJECT_BYTES // 10
LARGE = SPLIT_BYTES_MAX // 4

CASES = [
    pytest.param([SMALL] * 10, 4, 1, id="too little for two"),
    pytest.param([SMALL] * 10_000, 2, 2, id="one for each core"),
    pytest.param([SMALL] * 10_000, 3, 3, id="and no rest"),
    pytest.param([SMALL] * 2_000, 1_000, 5, id="no more than are worth a task"),
    pytest.param([LARGE] * 8, 1, 3, id="none that takes too long"),
]


@pytest.mark.parametrize(("sizes", "cores", "tasks"), CASES)
def test_there_is_a_split_for_each_core_within_limits(
    sizes: list[int], cores: int, tasks: int
) -> None:
    found = [piece(size, at) for at, size in enumerate(sizes)]
    assert len(splits(found, LAYOUTS, split_bytes(found, cores))) == tasks


@given(st.lists(st.integers(1, 2 * SPLIT_BYTES), max_size=50), st.integers(1, 8))
def test_every_piece_is_in_one_split_in_order(sizes: list[int], cores: int) -> None:
    found = [piece(size, at) for at, size in enumerate(sizes)]
    made = splits(found, LAYOUTS, split_bytes(found, cores))
    assert [each for split in made for each in split.pieces] == found
    assert all(split.pieces for split in made)
