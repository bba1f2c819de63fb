"""Which process leads a task, whether it lives, and what another one does that wants to run it.

The recovery log would let the newest leader have a task at any time, and fence the one before. That
is right after a crash, and wrong if somebody runs a task twice: the second would end the first. So
the entry that takes a log over also says who does (`leader`), and whoever comes later looks at it
first. Since it is one entry, of two that come at once one is second. The entry is removed when the
process runs the task no more (`release`).

**A process that was killed** leaves its entry. On its own machine it is known at once that it is
gone. Elsewhere it is gone when its heartbeat (`runtime.reports`) and the log have not moved for
`SILENT_S`, as seen from here and by a clock that only goes forward; a process that has never been
heard of is given `UNHEARD_S`.

Nothing but politeness depends on it: a leader that is wrongly held for dead is fenced by the log.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from typing import Final

import msgspec

from penstock.consensus.statelog import Fenced, StateLog
from penstock.consensus.statelog import load as load_log
from penstock.consensus.store import Consensus
from penstock.errors import PenstockError, UserError
from penstock.runtime.awaited import Awaited
from penstock.runtime.recovery import LEADER, Entries, Op, RecoveryMachine, recovery_key
from penstock.runtime.reports import SILENT_S, ProcessReport, load_reports, runs_tasks_here

UNHEARD_S: Final = 5.0
"""Seconds that a process of another machine may take to be heard of for the first time."""

LOOK_S: Final = 0.25
"""Between two looks at a leader that is waited for."""

RELEASE_S: Final = 2.0
"""Seconds that it may take to say that a task is not run any more."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ProcessReport).decode


class IfBusy(enum.Enum):
    """What to do about a task that a living process runs."""

    WAIT = "wait"
    REFUSE = "refuse"
    TAKE_OVER = "take over"


class TaskBusy(UserError):
    """A living process runs the task, and it is left to it."""


class Led(PenstockError):
    """A log has a leader that was not asked about yet."""

    def __init__(self, leader: ProcessReport) -> None:
        super().__init__(f"{described(leader)} leads this log")
        self.leader = leader


def leader_of(entries: Entries) -> ProcessReport | None:
    """Return who runs a task, by its recovery log; it may have been killed."""
    found = entries.get(LEADER)
    try:
        return None if found is None else _decode(found)
    except msgspec.MsgspecError:  # of another release
        return None


def described(leader: ProcessReport) -> str:
    """Return a process as people know it."""
    return f"penstock {leader.command}, {leader.name}"


def awaited(leader: ProcessReport) -> Awaited:
    """The end of what this process does with a task."""
    return Awaited(
        f"{described(leader)}, which runs it",
        "the task goes on by itself when that is done or has ended",
    )


def verdict(leader: ProcessReport, *, if_busy: IfBusy, takes_from_up: bool) -> IfBusy:
    """PURE: what to do about a task that this process runs, if it lives.

    A `penstock up` does not end, so that nobody waits for it.
    """
    if if_busy is IfBusy.TAKE_OVER:
        return IfBusy.TAKE_OVER
    if leader.command == "up":
        return IfBusy.TAKE_OVER if takes_from_up else IfBusy.REFUSE
    return if_busy


def claim(me: ProcessReport, but: str | None) -> Callable[[Entries], tuple[Op, ...]]:
    """Return what makes this process the leader, unless another one is: but for this one.

    Raises `Led`.
    """
    record: tuple[Op, ...] = (("put", LEADER, _encode(me)),)

    def decide(entries: Entries) -> tuple[Op, ...]:
        leader = leader_of(entries)
        if leader is not None and leader.id not in (me.id, but):
            raise Led(leader)
        return record

    return decide


def busy(task: str, leader: ProcessReport) -> TaskBusy:
    """The error of a task that is left to the process that runs it."""
    if leader.command == "up":
        return TaskBusy(
            f"penstock up runs {task}",
            where=leader.name,
            why="it processes whatever comes, and a task has one leader",
            fix="nothing is to be done: it does what this would do; --take-over runs it here",
        )
    return TaskBusy(
        f"{task} is being run by another penstock run",
        where=leader.name,
        why="two at once would end each other",
        fix="run it when that is done, or let it wait: penstock run --if-busy wait",
    )


def taken_over(task: str, by: ProcessReport | None) -> Fenced:
    """The error of a leader whose task another one has."""
    return Fenced(
        f"{task} was taken over by another penstock {by.command if by else 'run'}. "
        "Nothing is lost; do not run it twice at once.",
        where=by.name if by else None,
    )


class Watch:
    """Finds out whether the leader of a task lives; a task that was renamed has two logs."""

    def __init__(self, store: Consensus, *logs: str) -> None:
        self._store = store
        self._keys = [recovery_key(log) for log in logs]
        self._seen: tuple[str, float | None, list[int]] | None = None
        self._since = time.monotonic()

    async def is_alive(self, leader: ProcessReport) -> bool | None:
        """True if it is known to live, False if it is gone; None if that takes another look."""
        here = runs_tasks_here(leader)
        if here is not None:
            return here
        heard = (await load_reports(self._store)).processes.get(leader.id)
        heads = [await self._store.head(key, fresh=True) for key in self._keys]
        moved = [-1 if head is None else head.seqno for head in heads]
        seen = (leader.id, None if heard is None else heard.beat, moved)
        before, now = self._seen, time.monotonic()
        self._seen = seen
        if before is None or before[0] != leader.id:
            self._since = now
            return None
        if before[1] is not None and heard is None:
            return False  # it said that it ends
        if seen != before:
            self._since = now
            return True
        silent_s = UNHEARD_S if heard is None else SILENT_S
        return False if now - self._since > silent_s else None

    async def settled(self, leader: ProcessReport) -> bool:
        """Wait until it is known whether a process lives, and return it."""
        while (alive := await self.is_alive(leader)) is None:  # noqa: ASYNC110 - of others
            await asyncio.sleep(LOOK_S)
        return alive

    async def until_free(self, leader: ProcessReport) -> None:
        """Wait until this process leads no log of the task any more, or is gone."""
        while await self._leads(leader) and await self.is_alive(leader) is not False:  # noqa: ASYNC110 - of others
            await asyncio.sleep(LOOK_S)

    async def is_over(self, fenced: str, quiet_s: float) -> bool:
        """True if the leader that fenced this one runs the task no more.

        One that does not say who it is has ended when its log has not moved for `quiet_s`.
        """
        replica = await load_log(self._store, self._keys[0], RecoveryMachine())
        leader = leader_of(replica.state)
        if leader is not None and leader.id != fenced:
            return await self.is_alive(leader) is False
        seen, before, now = ("", None, [replica.seqno]), self._seen, time.monotonic()
        if seen != before:
            self._seen, self._since = seen, now
        return leader is None or now - self._since > quiet_s

    async def _leads(self, leader: ProcessReport) -> bool:
        for key in self._keys:
            found = leader_of((await load_log(self._store, key, RecoveryMachine())).state)
            if found is not None and found.id == leader.id:
                return True
        return False


async def release(store: Consensus, log: str, me: str) -> None:
    """Say that a process runs a task no more, if it is still the one that does.

    Only the process that leads the log calls this, after it has stopped writing to it; a newer
    leader has another entry, and nothing is written then.
    """
    led = await StateLog.open(store, recovery_key(log), RecoveryMachine())

    def decide(entries: Entries) -> tuple[Op, ...] | None:
        leader = leader_of(entries)
        return None if leader is None or leader.id != me else (("del", LEADER, b""),)

    await led.append(decide)
