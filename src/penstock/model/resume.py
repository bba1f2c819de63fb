"""How a task resumes after a restart, and which producers it may forget.

Two frontiers are stored. The *committed* one is cumulative. The *hinted* one belongs to a
transaction that was prepared and may or may not have been committed. After a crash between the two,
that transaction must be replayed exactly: its commits become hints of the committed frontier, and
recovery reads up to them and no further.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Final

import numpy as np

from penstock.model.clock import Producer
from penstock.model.completed import STALENESS_HORIZON
from penstock.model.frontier import Frontier
from penstock.model.frontier_table import Mask, Table
from penstock.model.producer_frontier import OBSERVED_FLOOR

PRUNE_BYTES: Final = 1 << 30
"""Bytes of a journal between a forgotten producer and the furthest one, at least."""


def prepare_resume(committed: Frontier, hinted: Frontier) -> Frontier:
    """Return the frontier to resume from. Unresolved hints in it mean: replay one transaction.

    Commits of the prepared transaction become hints over the committed frontier, whose offsets
    stay. If the transaction held no commits, there is nothing to replay: it counts as committed.
    """
    prepared, known = hinted.table, committed.table
    through = np.full(len(prepared.producer), OBSERVED_FLOOR)
    theirs, mine = known.join(prepared)
    through[mine] = np.maximum(known.last_commit[theirs], OBSERVED_FLOOR)
    replayed = prepared.last_commit > through
    if not replayed.any():
        return committed.reduce(hinted)
    hints = prepared.take(replayed).without_bytes()
    nothing = np.zeros(len(hints.producer), np.int64)
    return committed.reduce(
        Frontier(
            table=replace(
                hints, last_commit=nothing, hinted_commit=hints.last_commit, offset=nothing
            )
        )
    )


def open_spans(frontier: Frontier) -> list[tuple[str, Producer, int]]:
    """Return the journal, producer and first offset of every span open at the cut."""
    table = frontier.table
    rows = np.flatnonzero(_open(table))
    return [
        (table.keys[at][0], Producer(producer), offset)
        for at, producer, offset in zip(
            table.key_of(rows).tolist(),
            table.producer[rows].tolist(),
            table.offset[rows].tolist(),
            strict=True,
        )
    ]


def _open(table: Table) -> Mask:
    """`ProducerFrontier.is_open`, for columns."""
    at_row_0: Mask = (table.offset == 0) & (table.last_commit == OBSERVED_FLOOR)
    return (table.offset > 0) | at_row_0


def prune_producers(
    frontier: Frontier,
    *,
    byte_position: Callable[[str, int], int],
    retired: Container[Producer],
    prune_bytes: int = PRUNE_BYTES,
) -> Frontier:
    """Forget producers that will not write again, so that startup cost does not grow with age.

    An entry is forgotten if all of these hold among the entries of its (journal, binding):

    - no hint of it is unresolved;
    - its last commit is `STALENESS_HORIZON` behind the newest, so that hints to it that still
      arrive are discharged as stale; the newest itself is never forgotten;
    - it is `prune_bytes` behind the furthest, by `byte_position` of a journal's offset, so that a
      resumed read will not meet it again;
    - its span is closed, or `retired` contains it: its writer is gone and owes no ACK.

    The age of a writer that never committed is not known here: `retired` must decide.
    """
    if prune_bytes < 1:
        raise ValueError("the furthest producer marks where to resume and must not be forgotten")
    table = frontier.table
    newest = table.spread(table.greatest(table.last_commit))
    stale = (table.hinted_commit <= table.last_commit) & (
        newest - table.last_commit >= STALENESS_HORIZON
    )
    is_open = _open(table)
    furthest = table.greatest(np.abs(table.offset))
    forgotten = np.zeros(len(stale), np.bool_)
    candidates = np.flatnonzero(stale)
    at_keys = table.key_of(candidates)
    heads = {
        at: byte_position(table.keys[at][0], int(furthest[at]))
        for at in np.unique(at_keys).tolist()
    }
    for row, at in zip(candidates.tolist(), at_keys.tolist(), strict=True):
        near = byte_position(table.keys[at][0], abs(int(table.offset[row])))
        forgotten[row] = heads[at] - near >= prune_bytes and (
            not is_open[row] or Producer(int(table.producer[row])) in retired
        )
    return replace(frontier, table=table.take(~forgotten, np.ones(len(frontier), np.bool_)))
