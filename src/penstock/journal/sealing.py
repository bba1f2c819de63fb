"""Sealing: the oldest records of a journal move into a page, so that its state stays small.

Opening a journal reads its state, and every rollup writes it. So a state has at most about
`RECORDS_MAX` records, however long the journal is: a writer that appends past that seals all but
the newest quarter, after its own commit, when nothing waits for it. Readers that are further behind
read the page instead; those that are not find what they need in the state.

The order is that of every object: the page is written, then named. A crash between
the two, or a race that another writer wins, leaves a page that no state names, which is garbage.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

from penstock import failpoints
from penstock.consensus.statelog import Command, Superseded, append_all
from penstock.errors import Bug, PenstockError
from penstock.journal.blobs import BlobStore
from penstock.journal.codec import encode_page
from penstock.journal.integrity import digest_of_page
from penstock.journal.journals import Journals
from penstock.journal.ownership import Ownership
from penstock.journal.state import (
    RECORDS_MAX,
    UNKNOWN,
    Fragment,
    JournalState,
    Page,
    Record,
    Refused,
    Reseal,
    Seal,
)

_log = logging.getLogger(__name__)

_PAGED = failpoints.declare("seal.written", "a page is written, no journal names it yet")


def plan_page(state: JournalState, records_max: int = RECORDS_MAX) -> tuple[Record, ...]:
    """The oldest records, if there are too many: those that should become a page."""
    if len(state.records) <= records_max:
        return ()
    return state.records[: len(state.records) - records_max // 4]


async def seal_if_long(
    journals: Journals, blobs: BlobStore, name: str, records_max: int = RECORDS_MAX
) -> None:
    """Seal the oldest records of a journal that this process has just appended to, if it is due.

    An error is logged and left to the next append: nothing depends on it.
    """
    log = journals.log(name)
    if not plan_page(log.state, records_max):
        return
    try:
        if records := plan_page(await log.settled(), records_max):
            await seal(journals, blobs, name, records)
    except (Refused, Superseded):
        pass  # another process has done it, or compacts these records right now
    except PenstockError as error:
        _log.warning("%s has many records, and none were sealed: %s", name, error.what)


async def seal(journals: Journals, blobs: BlobStore, name: str, records: Sequence[Record]) -> None:
    """Move the first records of a state into a page."""
    await Ownership(journals, blobs).claim()
    page = await write_page(blobs, name, records)

    def decide(state: JournalState) -> Seal:
        # The page says where rows are. Had a compactor moved them meanwhile, it would be wrong.
        if _places(state.records[: page.records]) != _places(records):
            raise Refused("the records have changed", where=name)
        return Seal(page=page)

    # With the state: else readers would go on to load the one before it, and this diff.
    await append_all([Command(journals.log(name), decide, roll_up=True)])


async def reseal(
    journals: Journals,
    blobs: BlobStore,
    name: str,
    pages: Sequence[Page],
    records: Sequence[Record],
) -> None:
    """Put one page in the place of some, with their records as they are now.

    Whoever replaces pages notes that first, like every object that it replaces.
    """
    await Ownership(journals, blobs).claim()
    page = await write_page(blobs, name, records)

    def decide(state: JournalState) -> Reseal:
        # As above: what others have done to these pages meanwhile would be undone.
        if not set(pages) <= set(state.pages):
            raise Refused("the pages have changed", where=name)
        return Reseal(page=page)

    await append_all([Command(journals.log(name), decide, roll_up=True)])


async def write_page(blobs: BlobStore, name: str, records: Sequence[Record]) -> Page:
    """A page of records that follow each other, as an object that no state names yet."""
    if any(record.revision == UNKNOWN for record in records):
        raise Bug("a page would have records of which no revision is known", where=name)
    path = f"{name.rpartition('/')[0]}/{secrets.token_hex(16)}.page"
    digest = await asyncio.to_thread(_write, blobs, path, records)
    failpoints.hit(_PAGED)
    fragments = [record for record in records if isinstance(record, Fragment)]
    return Page(
        path=path,
        begin=records[0].begin,
        end=records[-1].end,
        records=len(records),
        rows=sum(fragment.rows for fragment in fragments),
        bytes=sum(fragment.bytes for fragment in fragments),
        revision_min=records[0].revision,
        revision_max=records[-1].revision,
        digest=digest,
    )


def _write(blobs: BlobStore, path: str, records: Sequence[Record]) -> int:
    data = encode_page(records)
    blobs.write(path, data)
    return digest_of_page(data)


def _places(records: Sequence[Record]) -> list[tuple[int, object]]:
    return [(r.begin, r.at if isinstance(r, Fragment) else None) for r in records]
