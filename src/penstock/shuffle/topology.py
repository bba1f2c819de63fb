"""PURE: which journals a session reads, and what happens to reads as journals come and go.

Collections are followed one by one, so the session knows each of them up to a revision of its own.
What counts is the least of these: everything up to there is known of *every* journal, and nothing
beyond it is read, because a transaction of several collections would be seen in part.

What becomes of a journal, and of its reads:

    appears             is read from the first offset it retains, or where the checkpoint left off
    is truncated        reading goes on behind the gap, if there is one. If it was there when
                        reading began, hints below a *gap floor* are not waited for
    is dropped          its reads end. What they found is still reported and delivered
    is created again    is read anew, and without a checkpoint: that was of the dropped one
    ends before the     is waited for: metadata may lag behind a checkpoint, and offsets are never
    checkpoint          given twice
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.errors import Bug, PenstockError
from penstock.journal.selector import MisnamedJournal
from penstock.journal.state import JournalState, Status
from penstock.model.clock import Clock, Producer
from penstock.model.frontier import Frontier
from penstock.model.producer_frontier import ProducerFrontier
from penstock.shuffle.binding import Binding
from penstock.shuffle.history import History
from penstock.shuffle.reads import Read, RecoveryImpossible


class Topology:
    """The journals of a session's bindings, and their reads."""

    def __init__(self, bindings: Sequence[Binding], resume: Frontier, *, recovery: bool) -> None:
        """Each (journal, binding) of `resume` is resumed once; its entries are then used up.

        A recovery reads the journals with unresolved hints, and no others.
        """
        self.histories: dict[str, History] = {}
        self.reads: dict[tuple[str, int], Read] = {}
        self.notices: list[str] = []
        self.recovery = recovery
        self._bindings: dict[str, list[Binding]] = {}
        for binding in bindings:
            self._bindings.setdefault(binding.collection.name, []).append(binding)
        indexes = {binding.index for binding in bindings}
        self._entries = {
            (read.journal, read.binding): read.producers
            for read in resume
            if read.binding in indexes
        }
        self._goals = {
            key: goals for key, entries in self._entries.items() if (goals := _unresolved(entries))
        }
        self._revisions = dict.fromkeys(self._bindings, -1)
        self._readers: dict[str, list[Read]] = {}
        self._serial = 0
        self.lossy = False
        """Some journal is gone, or empty, or some of it was removed before it was read."""

    @property
    def collections(self) -> tuple[str, ...]:
        """Collections to follow."""
        return tuple(self._bindings)

    @property
    def unlisted(self) -> list[str]:
        """Collections that nothing is known of yet; before they are, nothing may be read."""
        return [name for name, revision in self._revisions.items() if revision < 0]

    @property
    def revision(self) -> int:
        """The revision up to which every journal is known; -1 before all are listed."""
        return min(self._revisions.values(), default=-1)

    def holds_anything(self, journal: str) -> bool:
        """True if there may be something to wait for in a journal."""
        history = self.histories.get(journal)
        return history is not None and history.holds_anything

    def may_commit(self, journal: str, binding: int, producer: Producer) -> bool:
        """True if a commit that was hinted at, and not read, has anything left to commit.

        The rows of a transaction are appended before its first ACK, and the reader of that ACK has
        read all journals of the cohort up to its revision. So where no span of the producer is
        open, nothing of the transaction is: it was removed, or never was.
        """
        return self.holds_anything(journal) and self.reads[journal, binding].is_open(producer)

    def readers(self, journal: str) -> Sequence[Read]:
        """The reads of a journal."""
        return self._readers.get(journal, ())

    def forget_pages(self, history: History) -> None:
        """Let go of the pages of a journal that all its reads are past."""
        positions = (read.position for read in self.readers(history.name))
        history.forget(min(positions, default=history.state.end))

    def learn(
        self, collection: str, revision: int, changed: Mapping[str, JournalState]
    ) -> list[Read]:
        """A collection is known up to `revision`; the reads that may have something new to read.

        The first time, `changed` is everything there is.
        """
        known = self._revisions.get(collection)
        if known is None or revision < known:
            raise Bug(
                f"revision {revision} of collection {collection} does not follow {known}",
                why="a session follows the collections of its bindings, forward",
            )
        moved: list[Read] = []
        for name, state in changed.items():
            moved += self._learn_journal(collection, name, state)
        self._revisions[collection] = revision
        if self.recovery:
            self._require_hinted()
        return moved

    def _learn_journal(self, collection: str, name: str, state: JournalState) -> Iterable[Read]:
        if not name:
            raise Bug(f"a journal of collection {collection} has no name")
        history = self.histories.get(name)
        if history is not None and history.state.generation == state.generation:
            return self._move(history, state)
        if history is not None:
            self._drop(history)
        if not state.readable:
            return ()
        if state.collection != collection:
            raise Bug(f"journal {name} of {state.collection} is listed for {collection}")
        return self._start(name, state, collection, again=history is not None)

    def _start(
        self, name: str, state: JournalState, collection: str, *, again: bool
    ) -> Iterable[Read]:
        history = self.histories[name] = History(name, state)
        reads = self._readers[name] = []
        for binding in self._bindings[collection]:
            key = (name, binding.index)
            if _reads(binding, name) and (not self.recovery or key in self._goals):
                read = self._start_read(history, binding)
                if again:
                    read.gap = False  # what was dropped was removed while it was read
                self.lossy = self.lossy or read.lossy
                self.reads[key] = read
                reads.append(read)
        if again:
            self.notices.append(f"journal {name} was created again, and is read from its beginning")
        return reads

    def _start_read(self, history: History, binding: Binding) -> Read:
        key = (history.name, binding.index)
        entries = self._entries.pop(key, ())
        floor = max((abs(entry.offset) for entry in entries), default=0)
        self._serial += 1
        read = Read(
            history,
            binding,
            serial=self._serial,
            entries=entries,
            goals=self._goals.get(key) if self.recovery else None,
        )
        if read.gap and floor:
            self.notices.append(
                f"journal {history.name}: offsets {floor} to {history.state.begin} were removed "
                f"before binding {binding.index} has read them; it continues after them"
            )
        return read

    def _move(self, history: History, state: JournalState) -> Iterable[Read]:
        before, reads = history.state, self._readers[history.name]
        if not state.readable:
            self._drop(history)
            return reads
        history.move(state)
        for read in reads:
            if read.position > before.end:  # metadata lagged behind the checkpoint
                read.place_bytes()
        self.lossy = self.lossy or not history.holds_anything
        if state.begin > before.begin:
            for read in reads:
                self._skip_removed(read)
        if history.has_pages:
            self.forget_pages(history)
        return reads

    def _skip_removed(self, read: Read) -> None:
        """Let a read go on behind what was removed before it came there."""
        position = read.position
        if read.skip_removed():
            self.lossy = True
            self.notices.append(
                f"journal {read.history.name}: offsets {position} to {read.position} were removed "
                f"while binding {read.binding.index} was reading; it continues after them"
            )

    def _drop(self, history: History) -> None:
        """A journal is gone, or was. Its reads keep what they know, which is still reported."""
        if not history.state.readable:
            return
        state = history.state
        history.state = JournalState(
            status=Status.DROPPED,
            collection=state.collection,
            generation=state.generation,
            begin=state.end,
            end=state.end,
        )
        self.lossy = True
        for read in self._readers[history.name]:
            if self.recovery:
                raise _impossible(read.key)
            self.notices.append(
                f"journal {history.name} was dropped, and binding {read.binding.index} does not "
                "read it any more"
            )

    def _require_hinted(self) -> None:
        if not self.unlisted:
            for key in self._goals:
                read = self.reads.get(key)
                if read is None or (read.lossy and not read.history.holds_anything):
                    raise _impossible(key)


def _impossible(key: tuple[str, int]) -> RecoveryImpossible:
    journal, binding = key
    return RecoveryImpossible(
        f"journal {journal} is gone, and an unfinished transaction has read it",
        where=f"binding {binding}",
        why="the transaction was prepared before a crash, and must be replayed exactly",
        fix="restore the journal; or reset this binding, which reads its source again",
    )


def _unresolved(entries: Iterable[ProducerFrontier]) -> dict[Producer, Clock]:
    return {entry.producer: entry.hinted_commit for entry in entries if entry.is_unresolved}


def _reads(binding: Binding, journal: str) -> bool:
    try:
        return binding.reads(journal)
    except MisnamedJournal as error:
        raise PenstockError(
            f"journal {journal} is not named as its collection is partitioned",
            where=f"binding {binding.index} of collection {binding.collection.name}",
            why=str(error),
            fix="reset the collection after its partition fields were changed",
        ) from error
