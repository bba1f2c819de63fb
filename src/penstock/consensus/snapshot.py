"""Everything under a prefix as of one revision, read in pages while writers go on.

Reading in the order of keys costs what the prefix holds, however large the rest of the store is.
But each page is of a moment of its own: the keys on page i are whole up to revision r(i), and these
grow. So the pages are followed by what was committed after r(1), in revision order, up to at least
the last r(i); what a page had already is left out. Then all keys are whole up to one revision.

Truncation needs no care beyond what `Live` tells its readers. An entry that is live at the end was
live when its page was read, so it was delivered; an entry may be delivered and be gone at the end,
which does no harm; and an entry that follows a gap was the first live one of its log when its page
was read, since floors only rise. So the log that a reader is left with begins at a floor of that
log and ends at its head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from penstock.consensus.backend import Backend, LivePage, Position
from penstock.consensus.store import Live, Progress, SnapshotEvent

Behind = Position | int
"""Where a page begins: behind an entry, in the order of keys, or behind a revision."""

START: Final[Position] = ("", -1)


async def read_page(backend: Backend, prefix: str, behind: Behind) -> LivePage:
    """One page of a snapshot from the store itself."""
    if isinstance(behind, int):
        page = await backend.entries_since(prefix, behind)
        return LivePage(entries=page.entries, revision=page.upto, more=page.more)
    return await backend.live_page(prefix, behind)


async def read_snapshot(
    read: Callable[[Behind], Awaitable[LivePage]],
) -> AsyncGenerator[SnapshotEvent, None]:
    """The events of `Consensus.snapshot`, from its pages."""
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
            ends.append(position)  # the last page has no end: it is that of all keys behind
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
    yield Progress(revision)
