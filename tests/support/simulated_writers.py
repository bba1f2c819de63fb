"""PURE: the writers of a simulated world, who do everything that writers may do, or suffer.

Transactions over several journals, whose ACKs share a revision or do not; rows outside of
transactions; rollbacks; repetitions of what was appended before; two producers in one fragment;
clocks that are wrong; crashes between any two appends; and recoveries from intents.

They keep the rules of `journal.publisher`, for readers rely on them: nothing of the next
transaction before the last ACK of this one, and nothing ever again from a producer that has left
something behind which it cannot undo. Rows that were rolled back do not arrive once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from random import Random
from typing import Final

from penstock.journal.state import AckRecord, Record, Status
from penstock.model.clock import Clock, Flag, Producer, duration
from penstock.model.hints import Commit, write_acks
from support.shuffle_oracle import Doc, Stamp, Written
from support.simulation import World, short, some

_WRITERS_MAX: Final = 3
_REPEATABLE_MAX: Final = 6

_Acks = dict[str, tuple[AckRecord, ...]]


@dataclass(eq=False, slots=True, kw_only=True)
class Writer:
    """One producer at work."""

    producer: Producer
    skew: int
    clock: int = 0
    spans: dict[str, list[Stamp]] = field(default_factory=dict)
    """What is written of its transaction, by journal."""
    commits: dict[str, list[Clock]] = field(default_factory=dict)
    """By journal, oldest first: a rollback names the last one of the journal."""
    repeatable: dict[str, list[Stamp]] = field(default_factory=dict)
    """Rows that may arrive once more, as a retry does that did not hear of its success."""
    closing: Transaction | None = None
    retired: bool = False

    @property
    def is_free(self) -> bool:
        """Whether it may write."""
        return not self.retired and self.closing is None

    def stamp(self, kind: Flag, now: Clock) -> Stamp:
        """The next row's, or ACK's."""
        self.clock = max(self.clock + 1, now + self.skew)
        return Stamp(self.producer, kind, Clock(self.clock))

    def remember(self, journal: str, rows: Iterable[Stamp]) -> None:
        """Those of the rows that are its own, and new, belong to its transaction."""
        own = [row for row in rows if row.producer == self.producer]
        span = self.spans.setdefault(journal, [])
        known = max(self.commits.get(journal, [Clock(0)]))
        for row in own:
            if row.clock > max(known, span[-1].clock if span else 0):
                span.append(row)
        repeatable = self.repeatable.setdefault(journal, [])
        repeatable.extend(own)
        del repeatable[:-_REPEATABLE_MAX]

    def forget(self, journal: str) -> None:
        """The journal is gone, and what was written there."""
        self.spans.pop(journal, None)
        self.commits.pop(journal, None)
        self.repeatable.pop(journal, None)


@dataclass(eq=False, slots=True, kw_only=True)
class Transaction:
    """Intents that are durable, and how far they are written."""

    writers: tuple[Writer, ...]
    acks: _Acks
    parts: list[_Acks]
    """What is still to be written, each under a revision of its own."""
    hinted: bool
    """ACKs name each other; if they do not, they stay under one revision."""
    crashed: bool = False
    """Nothing happens until somebody recovers it."""


class Writers:
    """All writers of a world; its methods are actions."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.all: list[Writer] = []
        self._transactions = 0
        world.on_drop.append(self._forget)

    def _forget(self, journal: str) -> None:
        for writer in self.all:
            writer.forget(journal)

    def _free(self) -> list[Writer]:
        return [writer for writer in self.all if writer.is_free]

    def _pick(self, rng: Random) -> Writer:
        free = self._free()
        if free and (len(free) >= _WRITERS_MAX or rng.random() < 0.85):
            return rng.choice(free)
        skewed = rng.random() < self.world.habits.skew
        seconds = rng.choice(self.world.habits.skew_s) if skewed else 0
        writer = Writer(
            producer=Producer(Producer.MULTICAST | (len(self.all) + 1)),
            skew=duration(seconds) if seconds > 0 else -duration(-seconds),
        )
        self.all.append(writer)
        return writer

    # Rows

    def write(self, rng: Random) -> None:
        """Rows of a transaction, to one journal or to several."""
        world, writer = self.world, self._pick(rng)
        names = some(rng, world.readable(), 3)
        if rng.random() < 0.5:  # where it has written before
            names = [name for name in names if name in writer.repeatable] or names
        others = []
        if rng.random() < world.habits.interleave:
            others = some(rng, [other for other in self._free() if other is not writer])
        together: dict[str, list[Record]] = {}
        for name in names:
            rows = self._rows(rng, writer, name, Flag.CONTINUE_TXN)
            for other in others:
                rows = _mixed(rng, rows, self._rows(rng, other, name, Flag.CONTINUE_TXN))
            if not world.admits(name, rows):
                continue
            for each in (writer, *others):
                each.remember(name, rows)
            together[name] = [world.fragment(rows)]
            if rng.random() < 0.5:
                world.append(together)
                together = {}
        if together:
            world.append(together)

    def write_outside(self, rng: Random) -> None:
        """Rows outside of transactions, where their producer has no span."""
        world, writer = self.world, self._pick(rng)
        free = [name for name in world.readable() if name not in writer.spans]
        if rng.random() < world.habits.contradict:
            free = world.readable()
        for name in some(rng, free):
            rows = self._rows(rng, writer, name, Flag.OUTSIDE_TXN)
            if world.admits(name, rows):
                repeatable = writer.repeatable.setdefault(name, [])
                repeatable.extend(rows)
                del repeatable[:-_REPEATABLE_MAX]
                writer.commits.setdefault(name, []).append(max(row.clock for row in rows))
                world.append({name: [world.fragment(rows)]})

    def repeat(self, rng: Random) -> None:
        """A fragment, or a part of it, arrives once more, however late."""
        world = self.world
        for writer in some(rng, [writer for writer in self.all if writer.repeatable]):
            for name in some(rng, list(writer.repeatable)):
                rows = _repetition(rng, writer, name, Flag.OUTSIDE_TXN)
                status = world.journals[name].state.status
                if rows and status is Status.ACTIVE and world.admits(name, rows):
                    world.append({name: [world.fragment(rows)]})

    def _rows(self, rng: Random, writer: Writer, name: str, kind: Flag) -> list[Stamp]:
        """New rows, perhaps among repetitions, perhaps repeated themselves."""
        world = self.world
        rows = [writer.stamp(kind, world.now) for _ in range(rng.randint(1, world.habits.rows_max))]
        if rng.random() < world.habits.repeat:
            again = _repetition(rng, writer, name, kind)
            rows = [*again, *rows] if rng.random() < 0.7 else [*rows, *again]
            if rng.random() < 0.3:
                rows = [*rows, *rows[-rng.randint(1, len(rows)) :]]
        return rows

    # Closing

    def close(self, rng: Random) -> None:
        """Commit a transaction, perhaps one of two writers: durable intents, then first ACKs."""
        world = self.world
        open_ = [writer for writer in self._free() if writer.spans]
        writers = some(rng, open_, 2 if rng.random() < 0.2 else 1)
        if not writers:
            return
        last: dict[str, Sequence[Record]] = {}
        if rng.random() < 0.3:  # the last rows travel with the first ACKs
            for name in some(rng, list(writers[0].spans)):
                rows = self._rows(rng, writers[0], name, Flag.CONTINUE_TXN)
                if world.admits(name, rows):
                    writers[0].remember(name, rows)
                    last[name] = [world.fragment(rows)]
        if rng.random() < 0.1:  # a journal that it has nothing for
            for name in some(rng, world.readable()):
                writers[0].spans.setdefault(name, [])
        transaction = self._intents(rng, tuple(writers))
        if last:
            acks = transaction.parts.pop(0)
            joined = {name: [*last.get(name, ()), *acks.get(name, ())] for name in {**last, **acks}}
            world.append(joined)
            _finish(transaction)
        elif rng.random() < 0.8:
            self._acknowledge(transaction)

    def _intents(self, rng: Random, writers: tuple[Writer, ...]) -> Transaction:
        world = self.world
        commits: list[Commit] = []
        docs: list[Doc] = []
        for writer in writers:
            stamp = writer.stamp(Flag.ACK_TXN, world.now)
            for name, span in writer.spans.items():
                commits.append(Commit(name, writer.producer, stamp.clock))
                docs += (Doc(name, writer.producer, row.clock) for row in span)
                writer.commits.setdefault(name, []).append(stamp.clock)
            writer.spans = {}
        split = rng.random() < world.habits.split
        unhinted = split and rng.random() < world.habits.unhinted
        hinted = not unhinted and (split or rng.random() < 0.7)
        acks = _acks(commits, hinted=hinted)
        parts = [acks]
        if split:
            names = rng.sample(list(acks), len(acks))
            size = rng.randint(1, 2)
            parts = [
                {name: acks[name] for name in names[at : at + size]}
                for at in range(0, len(names), size)
            ]
        transaction = Transaction(writers=writers, acks=acks, parts=parts, hinted=hinted)
        self._transactions += 1
        stamps = ", ".join(f"{c.journal} {short(c.producer, c.clock)}" for c in commits)
        written = Written(
            name=f"T{self._transactions} ({stamps})",
            docs=tuple(docs),
            clock=min(commit.clock for commit in commits),
            commits=tuple(Doc(each.journal, each.producer, each.clock) for each in commits),
            whole=len(parts) == 1 or not unhinted,
        )
        world.written.update(dict.fromkeys(docs, written))
        for writer in writers:
            writer.closing = transaction
        world.tell(f"  intents of {written.name}, in {len(parts)} parts")
        return transaction

    def _acknowledge(self, transaction: Transaction) -> None:
        """Write the next part; ACKs to journals that are gone are left out."""
        part = transaction.parts.pop(0)
        acks = {n: acks for n, acks in part.items() if self.world.journals[n].state.readable}
        self.world.unacknowledged |= part.keys() - acks.keys()
        if acks:
            self.world.append(acks)
        _finish(transaction)

    def acknowledge(self, rng: Random) -> None:
        """Go on with a transaction that is half acknowledged."""
        for transaction in some(rng, [each for each in self._closing() if not each.crashed]):
            self._acknowledge(transaction)

    def recover(self, rng: Random) -> None:
        """Write the intents of a crashed transaction: what is missing, or everything once more."""
        for transaction in some(rng, [each for each in self._closing() if each.crashed]):
            if rng.random() < 0.5 and transaction.hinted:
                transaction.parts = [{name: acks} for name, acks in transaction.acks.items()]
            elif rng.random() < 0.5:
                transaction.parts = [transaction.acks]
            while transaction.parts:
                self._acknowledge(transaction)

    def _closing(self) -> list[Transaction]:
        found = (writer.closing for writer in self.all if writer.closing is not None)
        return list(dict.fromkeys(found))

    # Failing

    def crash(self, rng: Random) -> None:
        """A writer dies. Its intents, if there are any, are recovered; spans stay open for ever."""
        for writer in some(rng, [writer for writer in self.all if not writer.retired]):
            writers: tuple[Writer, ...] = (writer,)
            if writer.closing is not None:
                writer.closing.crashed = True
                writers = writer.closing.writers
            for each in writers:
                each.retired = True
                self.world.tell(f"  P{each.producer & 0xFFFF} crashed")

    def roll_back(self, rng: Random, *, deep: bool = False) -> None:
        """Discard a transaction. Who cannot undo all of it may never write again."""
        writers = [writer for writer in self._free() if writer.spans]
        if deep:
            writers = [w for w in writers if any(len(w.commits.get(n, ())) > 1 for n in w.spans)]
        for writer in some(rng, writers):
            acks: dict[str, list[Record]] = {}
            for name in list(writer.spans):
                commits = writer.commits.get(name, [])
                if not commits:
                    writer.retired = True
                    continue
                if deep and len(commits) > 1:
                    del commits[-1]
                clock = commits[-1]
                if not self.world.admits(name, [Stamp(writer.producer, Flag.ACK_TXN, clock)]):
                    writer.retired = True
                    continue
                discarded = set(writer.spans.pop(name))
                kept = [row for row in writer.repeatable.get(name, ()) if row not in discarded]
                writer.repeatable[name] = [] if deep else kept
                acks[name] = [AckRecord(producer=writer.producer, clock=clock)]
            if acks:
                self.world.append(acks)

    def roll_back_deep(self, rng: Random) -> None:
        """Discard a transaction, and deny the one before: the writer has lost its intents."""
        self.roll_back(rng, deep=True)

    def acknowledge_partly(self, rng: Random) -> None:
        """What no publisher does: an ACK in the middle of a span."""
        if rng.random() < self.world.habits.contradict:
            for writer in some(rng, [writer for writer in self._free() if writer.spans]):
                for name, span in writer.spans.items():
                    if len(span) > 1:
                        ack = AckRecord(producer=writer.producer, clock=span[0].clock)
                        self.world.append({name: [ack]})
                        return

    def settle(self, rng: Random) -> None:
        """Everybody finishes: intents are written, and what has none is committed or left."""
        for writer in self._free():
            if not writer.spans or rng.random() < 0.5:
                writer.retired = True
        while any(not writer.retired and writer.closing is None for writer in self.all):
            self.close(rng)
            for writer in self.all:
                writer.retired |= writer.closing is None and not writer.spans
        for transaction in self._closing():
            while transaction.parts:
                self._acknowledge(transaction)


def _acks(commits: Sequence[Commit], *, hinted: bool) -> _Acks:
    return {
        name: tuple(
            AckRecord(
                producer=ack.commit.producer,
                clock=ack.commit.clock,
                hints=ack.hints if hinted else (),
            )
            for ack in group
        )
        for name, group in groupby(write_acks(commits), key=lambda ack: ack.commit.journal)
    }


def _finish(transaction: Transaction) -> None:
    if not transaction.parts:
        for writer in transaction.writers:
            writer.closing = None


def _repetition(rng: Random, writer: Writer, name: str, kind: Flag) -> list[Stamp]:
    """Rows of earlier on; those outside of transactions only where no span is open."""
    rows = writer.repeatable.get(name, [])
    if kind is Flag.CONTINUE_TXN or name in writer.spans or writer.closing is not None:
        rows = [row for row in rows if row.kind is Flag.CONTINUE_TXN]
    if not rows:
        return []
    begin = rng.randrange(len(rows))
    return rows[begin : begin + rng.randint(1, len(rows))]


def _mixed(rng: Random, ones: Sequence[Stamp], others: Sequence[Stamp]) -> list[Stamp]:
    """Rows of two producers, each in its order."""
    queues = [list(ones), list(others)]
    mixed = []
    while any(queues):
        mixed.append(rng.choice([queue for queue in queues if queue]).pop(0))
    return mixed
