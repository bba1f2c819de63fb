"""PURE: how much may be read ahead, and what if that is not enough.

Rows that were read and not yet processed are kept on disk, within a limit. Reading stops at the
limit and goes on below half of it, so that it does not stop and start with every transaction.

A stop can be for ever: the checkpoint that would free the disk may wait for commits that are still
to be read. So what is *hinted* may exceed the limit by half. Where that is not enough, a
`DeadlockWatch` tells a deadlock from a slow task, and ends the session with an error that says so.
"""

from __future__ import annotations

from penstock.errors import Bug, PenstockError
from penstock.shuffle.checkpoint import DISK_DEADLOCK_TICKS, TICK_S


class Pressure:
    """Bytes that are kept, and whether they are too many to read more."""

    __slots__ = ("_bytes", "_engaged", "_limit")

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a limit of {limit} bytes would never let anything be read")
        self._limit = limit
        self._bytes = 0
        self._engaged = False

    @property
    def bytes(self) -> int:
        """Kept now."""
        return self._bytes

    @property
    def limit(self) -> int:
        """At which reading stops."""
        return self._limit

    @property
    def engaged(self) -> bool:
        """Whether reading has stopped; between half of the limit and all of it, it depends."""
        return self._engaged

    def add(self, count: int) -> None:
        """So many bytes are kept from now on."""
        self._change(count)

    def release(self, count: int) -> None:
        """So many bytes are kept no longer."""
        self._change(-count)

    def _change(self, by: int) -> None:
        if self._bytes + by < 0:
            raise Bug(f"{-by} bytes were released, and only {self._bytes} were kept")
        self._bytes += by
        if self._bytes >= self._limit:
            self._engaged = True
        elif self._bytes * 2 < self._limit:
            self._engaged = False

    def allows(self, *, hinted: bool) -> bool:
        """Whether more may be read; `hinted` is what an unresolved checkpoint waits for."""
        return not self._engaged or (hinted and self._bytes * 2 < self._limit * 3)


class DiskDeadlock(PenstockError):
    """The disk is full of rows that wait for commits which are not read, as the disk is full."""


class DeadlockWatch:
    """Counts the ticks for which nothing could happen, and nothing did."""

    __slots__ = ("_stuck_ticks", "_unblocked")

    def __init__(self) -> None:
        self._stuck_ticks = 0
        self._unblocked = False

    def unblock(self) -> None:
        """Some lane could read again, be it for a moment: there is no deadlock at the next tick."""
        self._unblocked = True

    def tick(self, *, requested: bool, answerable: bool, blocked: bool, drained: bool) -> None:
        """Count a tick; raises DiskDeadlock after several of which each was stuck.

        That is: a checkpoint is `requested` and none is `answerable`, every lane is `blocked` by
        the disk, and what was handed out is `drained`, so that nobody is about to free any of it.
        """
        stuck = requested and not answerable and blocked and drained and not self._unblocked
        self._unblocked = False
        self._stuck_ticks = self._stuck_ticks + 1 if stuck else 0
        if self._stuck_ticks >= DISK_DEADLOCK_TICKS:
            raise DiskDeadlock(
                f"nothing could be read for {DISK_DEADLOCK_TICKS * TICK_S} seconds, "
                "as the disk limit is reached and no checkpoint is complete",
                why="the rows that were read ahead belong to a transaction that is not read whole",
                fix="raise the disk limit above the size of the largest transaction that this task "
                "reads, and start it again; it resumes where it was",
            )
