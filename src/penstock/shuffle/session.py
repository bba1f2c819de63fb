"""A session: one task's reading of its collections, from opening to teardown.

What happens, and in which order, is decided by `SessionState`, which has no IO. Here is the IO: the
journals of every collection are followed, each by a task of its own, and one more task, the
*driver*, asks the state what to do next and does it:

    Round        go on: it was read from records that are at hand
    NeedPages    read old records out of the blob store
    NeedRows     look up where a span begins, in the one case that records do not say
    WaitUntil    come back when documents with a read delay are due

Nothing runs while there is nothing to do: the driver sleeps until a journal moves, a checkpoint is
asked for, a document is due, or a tick of `TICK_S` has passed.

**The end.** The first error ends a session: following and planning stop, and whoever asks for a
checkpoint gets that error. The next session starts from the task's durable frontier. `close` ends
one that is well in the same order: no more answers, no more planning, then what is under way is
cancelled and waited for. It is harmless at any time, also twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, Self, TypeVar

import numpy as np

from penstock.errors import Bug, PenstockError, Unavailable
from penstock.garbage import gc_paused
from penstock.journal.blobs import BlobStore, MissingBlob
from penstock.journal.committed import VisibleRows
from penstock.journal.fragments import read_fragment
from penstock.journal.integrity import describe_offsets, locate_damage, read_page
from penstock.journal.journals import MissingJournal
from penstock.journal.planning import Planner
from penstock.journal.rows import STAMPS, Stamps, row_schema
from penstock.journal.state import JournalState, Page, Record
from penstock.model.clock import Clock, duration, elapsed
from penstock.model.columns import Column
from penstock.model.frontier import EMPTY, Frontier
from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.backoff import Backoff
from penstock.shuffle.binding import Binding
from penstock.shuffle.checkpoint import TICK_S
from penstock.shuffle.delivery import Checkpoint
from penstock.shuffle.handover import Handover, first_error
from penstock.shuffle.state import NeedPages, NeedRows, Round, RoundLimits, SessionState, WaitUntil

_log = logging.getLogger("penstock.shuffle")

LOOKUP_ROWS_MAX: Final = 1_000_000
"""Rows of a run up to which a lookup reads their stamps in this process: some 20 MB."""

READS_MAX: Final = 8
"""Pages that are read at once."""

T = TypeVar("T")

Lookup = Callable[[NeedRows], Awaitable[int]]
"""Answers a `NeedRows` about a long run, by a Spark job."""


class SessionClosed(PenstockError):
    """The session was closed, and has no more checkpoints."""


class Session:
    """One task's reading, made by `open`; lives on one event loop, which is that of its planner."""

    def __init__(
        self,
        planner: Planner,
        state: SessionState,
        bindings: Sequence[Binding],
        *,
        now: Callable[[], Clock],
        lookup: Lookup | None,
        tick_s: float,
    ) -> None:
        self.bindings = tuple(bindings)
        self.states: dict[str, JournalState] = {}
        """The newest state of every journal of the collections, also of those that are gone."""
        self._planner = planner
        self._state = state
        self._now = now
        self._lookup = lookup
        self._tick_s = tick_s
        self._unlisted = {binding.collection.name for binding in self.bindings}
        self._handover = Handover()
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        planner: Planner,
        bindings: Sequence[Binding],
        *,
        resume: Frontier = EMPTY,
        limits: RoundLimits = RoundLimits(),  # noqa: B008 - frozen
        now: Callable[[], Clock],
        lookup: Lookup | None = None,
        tick_s: float = TICK_S,
    ) -> Self:
        """A session that knows every journal of its collections, and has read nothing yet.

        It resumes behind what `resume` covers. `lookup` is asked about runs that are too long to be
        looked at here. If opening fails or is cancelled, nothing of it is left.
        """
        state = SessionState(bindings, resume=resume, limits=limits)
        session = cls(planner, state, bindings, now=now, lookup=lookup, tick_s=tick_s)
        try:
            session._running = asyncio.create_task(session._run(), name="shuffle session")
            await session._handover.until(lambda: not session._unlisted)
        except BaseException:
            await session.close()
            raise
        return session

    # ----------------------------------------------------------------------------- for its caller

    async def next_checkpoint(self) -> Checkpoint:
        """Return what the task may process next, as soon as there is anything.

        One call at a time. Cancelling it loses nothing: the next call takes over.
        """
        return await self._handover.take(self._request)

    def _request(self) -> None:
        self._state.request()
        self._wake.set()

    async def caught_up(self, revision: int) -> None:
        """Wait until everything that was committed up to `revision` has been handed out.

        Checkpoints must be asked for meanwhile. A transaction that was acknowledged in some
        of its journals only is committed, and is waited for.
        """
        given = self._handover
        await given.until(lambda: given.empty and self._state.settled_through >= revision)

    def waiting_for(self) -> str:
        """The reason why there is no checkpoint now, in sentences."""
        if (ended := self._handover.ended) is not None:
            return f"the session has ended: {ended}"
        if self._unlisted:
            return f"journals are being listed: {', '.join(sorted(self._unlisted))}"
        return self._state.waiting_for()

    async def close(self) -> None:
        """End the session, and wait until nothing of it runs and nothing is left."""
        self._handover.end(SessionClosed("the session is closed"))
        if self._closing is None:
            self._closing = asyncio.create_task(self._tear_down(), name="shuffle teardown")
        await asyncio.shield(self._closing)

    # ------------------------------------------------------------------------------- its lifetime

    async def _run(self) -> None:
        """Follow and drive; the first error ends all of it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for collection in sorted(self._unlisted):
                    tasks.create_task(self._follow(collection), name=f"follow {collection}")
                tasks.create_task(self._drive(), name="shuffle driver")
        except* Exception as group:
            self._handover.end(first_error(group))

    async def _tear_down(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _follow(self, collection: str) -> None:
        async with aclosing(self._planner.journals.follow(collection)) as moves:
            async for moved in moves:
                self.states.update(moved.changed)
                with gc_paused():
                    acts = self._state.learn(collection, moved.revision, moved.changed)
                if acts:
                    self._wake.set()
                if collection in self._unlisted:
                    self._unlisted.remove(collection)
                    self._handover.notify()
                elif not acts:
                    self._handover.notify()  # it may have been waited for this revision

    # ------------------------------------------------------------------------------------ driving

    async def _drive(self) -> None:
        """Do what the state says; sleep while it says nothing."""
        loop = asyncio.get_running_loop()
        tick_at = loop.time() + self._tick_s
        while True:
            self._wake.clear()
            pause_s = await self._advance()
            if loop.time() >= tick_at:
                for warning in self._state.tick():
                    _log.warning(warning)
                tick_at = loop.time() + self._tick_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, tick_at - loop.time())):
                    await self._wake.wait()

    async def _advance(self) -> float:
        """Do all that can be done now; how long until time alone will bring more, in seconds."""
        while True:
            with gc_paused():
                step = self._state.advance(self._now())
            for notice in self._state.take_notices():
                _log.info(notice)
            match step:
                case Round():
                    pass
                case NeedPages():
                    records = await self._records(step)
                    if records is None:
                        return math.inf  # of a journal that has moved on: it will be heard of
                    self._state.supply(step, records)
                case NeedRows():
                    self._state.supply(step, await self._span_begin(step))
                case WaitUntil():
                    self._hand_out()
                    return elapsed(step.clock, self._now()) / duration(1)
                case None:
                    self._hand_out()
                    return math.inf
            self._hand_out()
            await asyncio.sleep(0)

    def _hand_out(self) -> None:
        """Answer a request, if there is one and something to answer it with."""
        if self._handover.requested and (checkpoint := self._state.answer()) is not None:
            self._handover.give(checkpoint)
        else:
            self._handover.notify()

    # ------------------------------------------------------------------------------------ reading

    async def _records(self, need: NeedPages) -> list[Record] | None:
        """The records of some pages; None if the journal does not have all of them any more."""
        reading = asyncio.Semaphore(READS_MAX)

        async def read(page: Page) -> tuple[Record, ...]:
            async with reading:
                blobs = self._planner.blobs
                work = functools.partial(read_page, blobs, page, need.journal)
                return await _read_until_available(page.path, work)

        try:
            pages = await asyncio.gather(*map(read, need.pages))
        except MissingBlob:
            if await self._has(need):
                raise
            return None
        return [record for page in pages for record in page]

    async def _has(self, need: NeedPages) -> bool:
        """True if a journal still has the pages: retention may have overtaken this reader."""
        try:
            state = await self._planner.journals.load(need.journal)
        except MissingJournal:
            return False
        return {page.path for page in need.pages} <= {page.path for page in state.pages}

    async def _span_begin(self, need: NeedRows) -> int:
        """The offset of the first row of a run whose clock is above what was seen."""
        if need.run.rows > LOOKUP_ROWS_MAX and self._lookup is not None:
            return await self._lookup(need)
        rows = VisibleRows(fragment=need.fragment, run=need.run, clock_gt=need.clock_gt)
        state = self.states.get(need.journal)
        (rows,) = (await self._planner.resolve_rows(need.journal, [rows], state)).visible
        root = await self._planner.schemas.layout(rows.fragment.schema)
        look = functools.partial(_first_visible, self._planner.blobs, rows, root)
        place = need.journal, rows.fragment.begin, rows.fragment.end
        with locate_damage(*place):
            return await _read_until_available(describe_offsets(*place), look)


def _first_visible(blobs: BlobStore, rows: VisibleRows, root: Column) -> int:
    """The offset of the first row of a run to show; reads nothing but stamps."""
    run, begin = rows.run, 0
    stamp = row_schema(root).names[-STAMPS:]
    for batch in read_fragment(blobs, rows.fragment, root, columns=stamp):
        stamps = Stamps.of(batch)
        new = (stamps.producer == int(run.producer)) & (stamps.clock > int(rows.clock_gt))
        new[: max(run.first_offset - begin, 0)] = False
        new[max(run.last_offset + 1 - begin, 0) :] = False
        if new.any():
            return rows.fragment.begin + begin + int(np.argmax(new))
        begin += batch.num_rows
    raise Bug(
        "a run has no row above what was seen, though its record says so",
        where=f"offsets {rows.fragment.begin} to {rows.fragment.end}",
        why=f"producer {run.producer}, clocks up to {run.clock_max:#x}, {rows.clock_gt:#x} seen",
    )


async def _read_until_available(what: str, read: Callable[[], T]) -> T:
    """Read in a thread until the blob store answers; missing or damaged objects raise at once.

    Each retry is logged: a session that waits for a blob store looks like one that hangs.
    """
    backoff = Backoff()
    while True:
        try:
            return await asyncio.to_thread(read)
        except MissingBlob:
            raise
        except Unavailable as error:
            level = logging.WARNING if backoff.attempts else logging.INFO
            _log.log(
                level,
                "reading again",
                extra=fields(what=what, attempt=backoff.attempts + 1, error=error),
            )
            await backoff.wait()
