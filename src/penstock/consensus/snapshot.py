"""Everything under a prefix as of one revision, read in pages while writers go on.

The cost of reading in the order of keys depends on the prefix, not on the size of the store. But
each page has its own revision: the keys on page i are complete up to revision r(i), and r(i) grows.
So the pages are followed by what was committed after r(1), in revision order, up to at least the
last r(i), except for entries that a page already had. Then all keys are complete up to the
same revision.

Truncation needs no care beyond what `Live` states. An entry that is live at the end was live when
its page was read, so it was delivered; an entry may be delivered and be gone at the end, which does
no harm; and an entry that follows a gap was the first live one of its log when its page was read,
since floors only rise. So a reader ends up with a log that begins at a floor and ends at its head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from penstock.consensus.backend import Backend, LivePage, Position
from penstock.consensus.store import Live, SnapshotEvent, WatchProgress

Behind = Position | int
"""Where a page begins: behind an entry, in the order of keys, or behind a revision."""

START: Final[Position] = ("", -1)


async def read_page(backend: Backend, prefix: str, behind: Behind) -> LivePage:
    """Read one page of a snapshot from the backend."""
    if isinstance(behind, int):
        page = await backend.entries_since(prefix, behind)
        return LivePage(entries=page.entries, revision=page.upto, more=page.more)
    return await backend.live_page(prefix, behind)


async def read_snapshot(
    read: Callable[[Behind], Awaitable[LivePage]],
) -> AsyncGenerator[SnapshotEvent, None]:
    """Yield the events of `Consensus.snapshot`, from its pages."""
    ends: list[Position] = []
    revisions: list[int] = []
    position, more = START, True
    while more:
        page = await read(position)
        if page.entries:
            yield Live(page.entries)
            key, last = page.entries[-1]
            position = key, last.seqno
        if more := page.more:
            ends.append(position)  # the last page has no end: it covers all keys behind it
        revisions.append(page.revision)
    revision = revisions[0]
    while revision < revisions[-1]:
        page = await read(revision)
        later = tuple(
            (key, entry)
            for key, entry in page.entries
            if entry.revision > revisions[bisect_left(ends, (key, entry.seqno))]
        )
        if later:
            yield Live(later)
        revision = page.revision
    yield WatchProgress(revision)
