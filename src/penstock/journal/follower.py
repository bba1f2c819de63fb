"""A collection followed in a thread: what a stream knows, and what its next batch is made of.

Whoever plans a stream is asked at any moment, by blocking calls, how far it could go and what there
is to read in between. The answers come from a `Timeline` that a watch of the journals keeps up to
date, so that asking costs neither a listing nor a scan.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, Final, TypeVar

from penstock.consensus.statelog import closing
from penstock.consensus.store import Consensus, WatchProgress
from penstock.errors import Bug, UserError
from penstock.journal.planning import Planner
from penstock.journal.selector import LabelSelector
from penstock.journal.splits import Split, pieces
from penstock.journal.state import JournalState
from penstock.journal.timeline import BEGIN, Timeline, TimelinePosition

T = TypeVar("T")

_ENDING_S: Final = 10.0
"""Time that interrupted work has for cleaning up before it is abandoned."""


class LoopThread:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`; if the caller is interrupted, so is the work, and has ended then."""
        ended = threading.Event()

        async def noticed() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(noticed(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            ended.wait(_ENDING_S)
            raise

    def close(self) -> None:
        """End the loop. What still runs there must have been ended before."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def current_revision(store: Consensus) -> int:
    """The revision of the last commit, whatever it was about."""
    async with closing(store.snapshot("revision/")) as events:  # no key is called so
        async for event in events:
            if isinstance(event, WatchProgress):
                return event.revision
    raise Bug("a snapshot ended without its revision")


class Follower:
    """Follows the journals of a collection. Its methods block, and are called by one thread."""

    def __init__(
        self,
        open_planner: Callable[[], AbstractAsyncContextManager[Planner]],
        collection: str,
        selector: LabelSelector,
    ) -> None:
        self._collection = collection
        self._selector = selector
        self._timeline = Timeline()
        self._states: dict[str, JournalState] = {}
        self._revision = -1
        self._taken = BEGIN
        self._stack = AsyncExitStack()
        self._thread = LoopThread("penstock-follower")
        try:
            self._planner = self._thread.run(self._open(open_planner))
        except BaseException:
            self._thread.close()
            raise

    def cut(
        self,
        start: TimelinePosition,
        *,
        rows_max: int | None = None,
        before: int | None = None,
        idle_s: float = 0.0,
    ) -> TimelinePosition:
        """`Timeline.cut` of everything that is committed now.

        If there is nothing to take, waits up to `idle_s` for something to be committed.
        """
        return self._thread.run(self._cut(start, rows_max, before, idle_s))

    def latest(self) -> TimelinePosition:
        """The furthest position of a stream, by what is known already."""
        return self._thread.run(self._latest())

    def now(self) -> int:
        """The revision of the last commit."""
        return self._thread.run(current_revision(self._planner.journals.store))

    def plan(self, start: TimelinePosition, end: TimelinePosition) -> tuple[Split, ...]:
        """The splits between two positions, with rows where they are now."""
        return self._thread.run(self._plan(start, end))

    def forget(self, position: TimelinePosition) -> None:
        """Everything below `position` was taken, for good."""
        self._thread.run(self._forget(position))

    def close(self) -> None:
        """Stop following."""
        try:
            self._thread.run(self._stack.aclose())
        finally:
            self._thread.close()

    # ------------------------------------------------------------------------------- on the loop

    async def _open(
        self, open_planner: Callable[[], AbstractAsyncContextManager[Planner]]
    ) -> Planner:
        self._moved = asyncio.Condition()
        planner = await self._stack.enter_async_context(open_planner())
        self._following = asyncio.create_task(self._follow(planner))
        self._stack.push_async_callback(self._end)
        return planner

    async def _end(self) -> None:
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._following  # callers have seen what went wrong

    async def _follow(self, planner: Planner) -> None:
        try:
            async with aclosing(planner.journals.follow(self._collection)) as moves:
                async for moved in moves:
                    for name, state in moved.changed.items():
                        await self._learn(planner, name, state)
                    self._revision = moved.revision
                    async with self._moved:
                        self._moved.notify_all()
        finally:
            async with self._moved:
                self._moved.notify_all()

    async def _learn(self, planner: Planner, name: str, state: JournalState) -> None:
        if not state.readable:
            self._states.pop(name, None)
            self._timeline.drop(name)
        elif self._selector.matches(state.labels):
            offset = self._timeline.read_through(name, state.generation)
            records = await planner.records(state, offset)
            self._timeline.read(name, state.generation, records)
            self._states[name] = state

    async def _known(self, revision: int) -> None:
        """Wait until everything up to a revision is known."""
        async with self._moved:
            while self._revision < revision:
                self._check()
                await self._moved.wait()

    def _check(self) -> None:
        """Raise what ended the following."""
        if self._following.done():
            self._following.result()
            raise Bug("following the journals ended")

    async def _cut(
        self, start: TimelinePosition, rows_max: int | None, before: int | None, idle_s: float
    ) -> TimelinePosition:
        await self._known(await current_revision(self._planner.journals.store))
        self._check_retained(start)
        end = self._timeline.cut(start, rows_max=rows_max, before=before)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(idle_s), self._moved:
                while end == start:
                    self._check()
                    await self._moved.wait()
                    end = self._timeline.cut(start, rows_max=rows_max, before=before)
        if start == BEGIN != end:
            # A stream that begins gets what is there: what was forgotten before is not missing.
            gone = max((state.forgotten.revision for state in self._states.values()), default=0)
            end = replace(end, revision=max(end.revision, gone))
        return end

    async def _latest(self) -> TimelinePosition:
        await self._known(0)
        return self._timeline.cut(self._taken)

    async def _plan(self, start: TimelinePosition, end: TimelinePosition) -> tuple[Split, ...]:
        await self._known(end.revision)
        self._check_retained(start)
        units = self._timeline.units_between(start, end)
        visible = await self._planner.resolve_units(units, self._states)
        return await self._planner.splits(list(pieces(visible)))

    def _check_retained(self, start: TimelinePosition) -> None:
        """Raise if documents behind a position were forgotten: they would be missing unnoticed."""
        for name, state in sorted(self._states.items()):
            if start != BEGIN and state.forgotten.revision > start.revision:
                raise UserError(
                    f"documents of {self._collection} were forgotten before this query has read "
                    "them",
                    where=f"journal {name}, up to offset {state.begin}",
                    why=f"the query has read commits up to revision {start.revision}, and the "
                    f"retention of the collection has passed revision {state.forgotten.revision}",
                    fix="start the query with a new checkpoint location, which reads what is left; "
                    "keep documents for longer than a query may stand still",
                )

    async def _forget(self, position: TimelinePosition) -> None:
        self._timeline.forget(position)
        self._taken = position
