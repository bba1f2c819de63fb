"""Positions that a task need not remember any more, found when it starts.

Every writer that ever was is an entry of the task's frontier, so what a task recovers would grow
with its age. Those that are two days and a gigabyte behind are forgotten (`model.durable`), once
there are many: to know how far behind they are takes a listing of their journals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from penstock.journal.journals import Journals
from penstock.journal.state import AckRecord, JournalState
from penstock.model.byte_progress import byte_position
from penstock.runtime.recovery import Recovered, prune

ENTRIES_MIN: Final = 1000
"""Fewer than these are not worth a listing."""


async def pruned(
    recovered: Recovered,
    journals: Journals,
    collections: Iterable[str],
    *,
    entries_min: int = ENTRIES_MIN,
) -> Recovered:
    """What a task recovers, without the writers that will not be heard of again."""
    if len(recovered.committed_frontier.table.producer) < entries_min:
        return recovered
    states = {
        journal.name: journal.state
        for collection in dict.fromkeys(collections)
        for journal in await journals.list(collection)
    }
    return prune(recovered, byte_position=positions(states))


def positions(states: Mapping[str, JournalState]) -> Callable[[str, int], int]:
    """How many stored bytes lie before an offset of a journal; of one that is gone, none do."""

    def position(journal: str, offset: int) -> int:
        state = states.get(journal)
        return 0 if state is None else _before(state, offset)

    return position


def _before(state: JournalState, offset: int) -> int:
    before = 0
    for part in (*state.pages, *state.records):
        size = 0 if isinstance(part, AckRecord) else part.bytes
        if part.end <= offset:
            before += size
        elif part.begin < offset:
            return byte_position(
                offset,
                first_offset=part.begin,
                rows=part.end - part.begin,
                first_byte=before,
                size_bytes=size,
            )
        else:
            break
    return before
