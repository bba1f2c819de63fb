"""The requests that others make of a running task: above all, that it stops.

**A stop is remembered** by the `Control`, and not by the session that happens to run: whatever ends
that session, there is no other. The first stop lets a transaction that makes progress come to its
end, for `GRACE_S` at most; where nothing is under way (a session begins, a failed one is to be
repeated), or where the task waits for others, it ends the work at once. The second ends it at once
wherever it is. Nothing is lost by that: a task goes on from what is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from penstock.errors import PenstockError
from penstock.model.json_order import Json
from penstock.runtime.introspection import Activity, Introspection
from penstock.runtime.leadership import IfBusy
from penstock.runtime.protocol import CloseRequested, Event, StopRequested
from penstock.runtime.waiting import Waits

_log = logging.getLogger("penstock.runtime")

GRACE_S: Final = 10.0
"""Seconds that a transaction may take to come to its end after a first stop."""

ENDING_S: Final = 5.0
"""Seconds that cancelled work may take to clean up before it is left behind."""

_LOOK_S: Final = 0.1

T = TypeVar("T")


class StoppedEarly(PenstockError):
    """The work was ended by a stop, before its own end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSummary:
    """A committed transaction, for people."""

    transactions: int
    """Committed in this session, this one included."""
    documents: int
    bytes: int
    stored: int
    jobs: int
    seconds: float


def unobserved() -> Activity:
    """Return an activity that nobody looks at."""
    return Introspection(time.time).task("materialization", "")


@dataclass(slots=True, kw_only=True)
class Control:
    """The requests made of a running task, and the callbacks that report on it. Not thread-safe."""

    until_revision: int | None = None
    """Stop when everything that was committed up to it is stored."""
    transactions_max: int = 0
    """A session stops after this many; zero is never."""
    drain: bool = False
    """A session finishes the tail of its last transaction, instead of leaving it to the next."""
    on_progress: Callable[[TransactionSummary], None] = lambda _: None
    on_applied: Callable[[str], None] = lambda _: None
    on_state: Callable[[Sequence[Json]], None] = lambda _: None
    """Called with the state patches of each committed transaction."""
    on_document: Callable[[str, str], None] = lambda _, __: None
    """Called by a preview, with a collection and the JSON of a document that it would get."""
    if_busy: IfBusy = IfBusy.TAKE_OVER
    """What to do if a living process runs the task."""
    takes_from_up: bool = False
    """Take it over in any case if that is a `penstock up`."""
    activity: Activity = field(default_factory=unobserved)
    """Where the runtime says what the task does."""
    waits: Waits = field(init=False)
    nothing_to_finish: bool = True
    """True while a first stop may end the work at once."""
    transactions: int = 0
    """Committed so far, in all sessions."""
    kept_from_running: bool = False
    """It stops because it may not run for now."""
    begins_anew: bool = False
    """The session ends, and another one follows: what it was built from has changed."""
    _asked: list[Event] = field(default_factory=list)
    _wake: Callable[[], None] = lambda: None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _aborted: bool = False

    def __post_init__(self) -> None:
        self.waits = Waits(self.activity.wait_changed)
        self.activity.waits_are(lambda: self.waits.longest)

    def committed(self, summary: TransactionSummary, patches: Sequence[Json]) -> None:
        """Report a committed transaction."""
        self.transactions += 1
        self.activity.committed(
            documents=summary.documents,
            size=summary.bytes,
            stored=summary.stored,
            jobs=summary.jobs,
        )
        self.on_state(patches)
        self.on_progress(summary)

    @contextlib.contextmanager
    def listening(self, wake: Callable[[], None]) -> Iterator[None]:
        """Within this, a session runs: it has something to finish, and `wake` takes requests."""
        self._wake, self.nothing_to_finish = wake, False
        try:
            wake()
            yield
        finally:
            self._wake = lambda: None

    def is_stopping(self) -> bool:
        """True if a stop was asked for, of this session or of an earlier one."""
        return self._stop.is_set()

    def stop(self) -> None:
        """End at the next transaction boundary, which does not wait for a minimum duration.

        Asked for once more, end at once.
        """
        self._aborted = self.is_stopping()
        self._stop.set()
        self._wake()

    def stop_for_now(self) -> None:
        """End as `stop` does, once: somebody keeps the task from running (`runtime.requests`)."""
        if not self.is_stopping():
            self.kept_from_running = True
            self.stop()

    def begin_anew(self) -> None:
        """End the session at its next transaction boundary, and begin another."""
        self.begins_anew = True
        self._wake()

    def abort(self) -> None:
        """End at once."""
        self.stop()
        self._aborted = True

    def close_now(self) -> None:
        """Close the open transaction, whatever its minima."""
        self._asked.append(CloseRequested())
        self._wake()

    def take(self) -> list[Event]:
        """Return what was asked for since the last call; a stop, at every call."""
        asked, self._asked = self._asked, []
        ends = self.is_stopping() or self.begins_anew
        return [*asked, StopRequested(), CloseRequested()] if ends else asked

    async def pause(self, seconds: float) -> None:
        """Sleep, unless or until a stop is asked for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    async def stoppable(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`; raises `StoppedEarly` if it does not come to its end after a stop."""
        running = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
            await self._let_finish(running)
        finally:
            stopped.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=ENDING_S)
        if running.done() and not running.cancelled():
            return running.result()
        if not running.done():
            _log.warning("what was stopped does not end, and is left behind")
        raise StoppedEarly("stopped before its end", fix="run it again: it continues where it was")

    async def _let_finish(self, running: asyncio.Future[T]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + GRACE_S
        while not running.done():
            if (
                self._aborted
                or self.nothing_to_finish
                or self.waits.reported
                or loop.time() > until
            ):
                return
            await asyncio.wait([running], timeout=_LOOK_S)
