"""PURE: when progress becomes a checkpoint: whole transactions, offered lane by lane.

What reads report moves through the stages of its lane's `CheckpointPipeline`:

    progressed    read, and beyond what the pending checkpoint commits to; waits for its turn
    unresolved    the pending checkpoint: some commits were hinted of it that were not read yet
    ready         complete, and not asked for yet
    consumed      handed out by `Checkpoints.answer`

**Why progress waits its turn.** New progress brings new hints. If it joined the pending checkpoint,
one busy producer could keep that from ever being complete. So a pending checkpoint is a boundary:
a delta that stays within it (is *accounted for*) is ratcheted in, with its true offsets. The first
one that does not *freezes* the ratchet, and from there on the pending checkpoint takes from deltas
nothing but the commits it waits for. It is complete when its writers have finished the transactions
that it has begun to show, whatever else they do.

**Why hints are pruned late.** A hint may become stale while it waits, and hints of two journals for
each other cancel out. So the hints of what has progressed are pruned as a whole, when it becomes
the pending checkpoint.

Invariants, of a lane and between calls:

- `unresolved` is empty, or has unresolved hints.
- Every delta is in exactly one of the stages, except for commits that a frozen `unresolved` has
  taken from it: these are in both, and joining them again changes nothing. So the sum of all that
  is taken is the sum of all that was reported, and bytes are counted once.
- What is handed out only grows: the last commit of an entry never goes back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from penstock.errors import Bug, PenstockError
from penstock.model.completed import Completed, first_unaccounted, prune_hints
from penstock.model.frontier import EMPTY, Frontier
from penstock.shuffle.binding import Lane

TICK_S: Final = 60
"""The interval at which a session counts what does not move."""

HINT_TIMEOUT_TICKS: Final = 15
"""Ticks that a requested checkpoint may wait for hinted commits without coming any closer."""


class Stalled(PenstockError):
    """Commits were announced by other journals, and have not come for a long time."""


class CheckpointPipeline:
    """The stages of one lane.

    A *recovery* replays one checkpoint: the hints that it resumes with. What comes after stays in
    `progressed` for ever, because the next session reads it again.
    """

    __slots__ = (
        "_completed",
        "_frozen",
        "_recovery",
        "_stalled_ticks",
        "anchored",
        "progressed",
        "ready",
        "ready_dirty",
        "unresolved",
        "unresolved_dirty",
    )

    def __init__(self, resume: Frontier, *, recovery: bool) -> None:
        self.progressed = EMPTY
        self.unresolved = resume.project_unresolved_hints() if resume.unresolved_hints else EMPTY
        self.ready = EMPTY
        self.anchored = bool(self.unresolved)
        """A transaction has seen, or is bound to see, `unresolved`, and ends when it is ready."""
        self.unresolved_dirty = False
        """`unresolved` has come closer since it was last shown."""
        self.ready_dirty = False
        """`ready` has grown since it was last shown."""
        self._recovery = recovery
        self._completed = Completed.of(resume)
        self._frozen = False
        self._stalled_ticks = 0

    def on_progressed(self, delta: Frontier) -> None:
        """Account for what reads report. Each delta comes once, and continues the one before."""
        if delta.gap_floors and not self._recovery:
            self._raise_floors(delta)
        if self.unresolved and not self._frozen:
            if first_unaccounted(self.unresolved, delta, self._completed) is None:
                self._ratchet(delta)
                return
            self._frozen = True
        if self.unresolved:
            self._resolve(delta)
        self.progressed = _join(self.progressed, delta)
        self._advance()

    def _raise_floors(self, delta: Frontier) -> None:
        """Stop waiting for what was removed before it could be read.

        A recovery does not: it must end up with exactly the commits that it was given.
        """
        self._completed = self._completed.raise_floors(delta.gap_floors)
        self._prune()

    def discharge(self, removed: Frontier) -> None:
        """Account for commits that are known to be removed before they could be read.

        They leave no trace in checkpoints: a recovery would look for them.
        """
        ledger = self._completed.ledger.reduce(removed)
        self._completed = replace(self._completed, ledger=ledger)
        self._prune()
        self._advance()

    def _prune(self) -> None:
        pruned = self._pruned(self.unresolved)
        if pruned.unresolved_hints < self.unresolved.unresolved_hints:
            self._come_closer(pruned)

    def _ratchet(self, delta: Frontier) -> None:
        delta = self._pruned(delta)
        joined = _join(self.unresolved, delta)
        if delta:
            self._come_closer(joined)
        else:
            self.unresolved = joined  # nothing but floors

    def _resolve(self, delta: Frontier) -> None:
        resolved = self.unresolved.resolve_hints(delta)
        if resolved.advanced:
            self._come_closer(resolved.frontier)

    def _come_closer(self, unresolved: Frontier) -> None:
        self.unresolved = unresolved
        if unresolved.unresolved_hints:
            self.unresolved_dirty = True
            self._stalled_ticks = 0
        else:
            self._promote()

    def _promote(self) -> None:
        if self.unresolved:
            self._completed = self._completed.update(self.unresolved)
            self.ready_dirty = True
        self.ready = _join(self.ready, self.unresolved)
        self.unresolved = EMPTY
        self.anchored = self.unresolved_dirty = False

    def _advance(self) -> None:
        if self._recovery or self.unresolved or not self.progressed:
            return
        progressed, self.progressed = self.progressed, EMPTY
        self._frozen = False
        self._come_closer(self._pruned(progressed))

    def _pruned(self, frontier: Frontier) -> Frontier:
        if not frontier.unresolved_hints:
            return frontier
        return prune_hints(frontier, self._completed).frontier

    # Answers

    def show(self) -> Frontier:
        """This lane's part of a peek: nothing of a pending checkpoint, unless it is anchored.

        So a transaction never waits for hints that it has not seen.
        """
        self.ready_dirty = False
        if not self.anchored:
            return self.ready
        self.unresolved_dirty = False
        return _join(self.ready, self.unresolved)

    def take(self) -> Frontier:
        """Take what is ready; it counts as consumed."""
        taken, self.ready, self.ready_dirty = self.ready, EMPTY, False
        return taken

    def tick(self, *, requested: bool) -> int:
        """Ticks, with a request outstanding, in which no hint has moved."""
        if not self.unresolved:
            self._stalled_ticks = 0
        elif requested:
            self._stalled_ticks += 1
        return self._stalled_ticks


class Checkpoints:
    """The checkpoints of a session: one request at a time, answered from all lanes together.

    An answer without unresolved hints was *taken*: a transaction that got it may commit. One with
    some is a *peek*: the transaction may read ahead, and is bound to the lane that it has seen the
    pending checkpoint of (the lane is *anchored*), until that is ready and taken.
    """

    def __init__(self, lanes: Sequence[Lane], resume: Frontier) -> None:
        """Start from the `resume` checkpoint; bindings of it that no lane has are left alone."""
        if any(a.priority <= b.priority for a, b in pairwise(lanes)):
            raise ValueError(f"lanes come by descending priority, and these do not: {lanes}")
        self._lanes = tuple(lanes)
        self._bindings = [frozenset(lane.bindings) for lane in lanes]
        parts = [resume.retain_bindings(bindings.__contains__) for bindings in self._bindings]
        self.recovery: Final = any(part.unresolved_hints for part in parts)
        """One checkpoint is replayed, exactly, and then nothing comes any more. Decided once."""
        self._pipelines = [CheckpointPipeline(part, recovery=self.recovery) for part in parts]
        self._requested = False

    @property
    def requested(self) -> bool:
        """A request is outstanding."""
        return self._requested

    def request(self) -> None:
        """Ask for the next checkpoint; one request is outstanding at a time."""
        if self._requested:
            raise Bug("a checkpoint was requested while a request is outstanding")
        self._requested = True

    def on_progressed(self, lane: int, delta: Frontier) -> None:
        """Account for a delta of the lane with this index."""
        strangers = {binding for _, binding in delta.table.keys} - self._bindings[lane]
        if strangers:
            raise Bug(
                f"bindings {sorted(strangers)} progressed in a lane that they are not of",
                where=_name(self._lanes[lane]),
            )
        self._pipelines[lane].on_progressed(delta)

    def discharge(self, removed: Frontier) -> None:
        """Stop waiting for the last commits of `removed`, which can no longer be read."""
        for bindings, pipeline in zip(self._bindings, self._pipelines, strict=True):
            if part := removed.retain_bindings(bindings.__contains__):
                pipeline.discharge(part)

    def would_answer(self) -> bool:
        """True if a request, made now or before, is answered at once."""
        lanes = self._pipelines
        if any(lane.anchored for lane in lanes):
            return any(
                lane.ready_dirty or (lane.anchored and lane.unresolved_dirty) for lane in lanes
            )
        return any(lane.ready or lane.unresolved for lane in lanes)

    def answer(self) -> Frontier | None:
        """Answer the outstanding request, if there is anything to answer; never with nothing.

        Bytes are reported once, when they are taken.
        """
        if not self._requested or not self.would_answer():
            return None
        if not any(lane.anchored or lane.ready for lane in self._pipelines):
            next(lane for lane in self._pipelines if lane.unresolved).anchored = True
        if any(lane.anchored for lane in self._pipelines):
            answer = _join_all(lane.show() for lane in self._pipelines).without_bytes()
        else:
            answer = _join_all(lane.take() for lane in self._pipelines)
        self._requested = False
        return answer

    def unresolved(self) -> Frontier:
        """Everything that pending checkpoints of all lanes wait for; it is best read first."""
        waiting = (lane.unresolved for lane in self._pipelines if lane.unresolved)
        return _join_all(unresolved.project_unresolved_hints() for unresolved in waiting)

    def tick(self) -> list[str]:
        """Count a tick, and warn of what has not moved since the one before last.

        Raises Stalled when a lane has waited too long, whatever the others do.
        """
        warnings = []
        for lane, pipeline in zip(self._lanes, self._pipelines, strict=True):
            ticks = pipeline.tick(requested=self._requested)
            if not self._requested or ticks < 2:
                continue
            if ticks >= HINT_TIMEOUT_TICKS:
                raise _stalled(lane, pipeline.unresolved)
            first, *_ = pipeline.unresolved.describe_unresolved().splitlines()
            count = pipeline.unresolved.unresolved_hints
            warnings.append(
                f"{_name(lane)} has waited {_minutes(ticks)} for commits that were announced by "
                f"other journals, {count} in all; the first: {first}"
            )
        return warnings


def _stalled(lane: Lane, unresolved: Frontier) -> Stalled:
    waits = _minutes(HINT_TIMEOUT_TICKS)
    return Stalled(
        f"a checkpoint has waited {waits} for commits that were announced and do not come",
        where=_name(lane),
        why="other journals say that these were committed:\n"
        + _indented(unresolved.describe_unresolved()),
        fix="start the writers of these journals again, which append what their transactions "
        "lack; then start this task again, which resumes where it was",
    )


def _indented(lines: str) -> str:
    return "\n".join(f"        {line}" for line in lines.splitlines())


def _name(lane: Lane) -> str:
    bindings = ", ".join(map(str, lane.bindings))
    return f"the lane of priority {lane.priority} (bindings {bindings})"


def _minutes(ticks: int) -> str:
    return f"{ticks * TICK_S // 60} minutes"


def _join(a: Frontier, b: Frontier) -> Frontier:
    """`reduce`, at no cost where a stage is empty, as most are most of the time."""
    if a is EMPTY:
        return b
    return a if b is EMPTY else a.reduce(b)


def _join_all(frontiers: Iterable[Frontier]) -> Frontier:
    return functools.reduce(_join, frontiers, EMPTY)
