"""Journals by name: create, append, retire, load, list, follow.

A `Journals` is one process's way to all journals of a store. Each journal is a state log of its
own (`consensus.statelog`), so everything here is safe beside any number of other processes that do
the same: the loser of a race looks at the new state and decides again.

Two costs are worth knowing. Creating a journal, and appending to one that this process has written
to lately, is one compare-and-set; a first append also reads the log. `append_all` and `create_all`
are one store transaction for up to a thousand journals, and listing or following all of them is one
snapshot.

A cancelled call may leave an append behind that lands later, unnoticed. It is not taken back:
documents of a producer that are appended again are duplicates to every reader.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from penstock.consensus.replica import Replica, RollupPolicy
from penstock.consensus.replicas import Moved, follow_all, load_all
from penstock.consensus.statelog import (
    Command,
    Committed,
    StateLog,
    Superseded,
    append_all,
    load,
    newest_diff,
)
from penstock.consensus.store import ATOMIC_ELEMENTS_MAX, Consensus
from penstock.errors import UserError
from penstock.journal.codec import JournalMachine
from penstock.journal.names import (
    KEY_HASH_MAX,
    JournalName,
    collection_prefix,
    encode_value,
    journal_key,
    journal_of_key,
)
from penstock.journal.selector import EVERYTHING, LabelSelector
from penstock.journal.state import (
    UNKNOWN,
    Append,
    Compact,
    Create,
    Diff,
    Drop,
    JournalState,
    Page,
    Record,
    Refused,
    Retain,
    Status,
    apply,
)

HANDLES_MAX: Final = 4096
"""Journals whose state a process keeps at hand for its next append; each costs what it holds."""

_MACHINE: Final = JournalMachine()

Log = StateLog[JournalState, Diff]
JournalCommand = Command[JournalState, Diff]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A journal's state under its name."""

    name: str
    state: JournalState


class MissingJournal(UserError):
    """There is no such journal, or not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """Records that are part of their journal now, with the offsets they got.

    Their revision is `UNKNOWN`: a writer learns it by reading back, which `load` and `follow` do.
    """

    records: tuple[Record, ...]
    begin: int
    end: int


def creation(
    name: JournalName,
    *,
    labels: Mapping[str, str] | None = None,
    key_end: int = KEY_HASH_MAX,
) -> Create:
    """Return the diff that creates this journal; its partition values are labels as well."""
    values = {field: encode_value(value) for field, value in name.partitions}
    return Create(
        collection=name.collection,
        labels=tuple(sorted({**(labels or {}), **values}.items())),
        key_begin=name.key_begin,
        key_end=key_end,
    )


class Journals:
    """All journals of one store; used on the event loop of that store."""

    def __init__(
        self,
        store: Consensus,
        *,
        policy: RollupPolicy = RollupPolicy(),  # noqa: B008 - frozen
        handles_max: int = HANDLES_MAX,
    ) -> None:
        self.store = store
        self._policy = policy
        self._handles_max = handles_max
        self._handles: OrderedDict[str, Log] = OrderedDict()

    # --------------------------------------------------------------------------------- reading

    async def load(self, name: str) -> JournalState:
        """The journal as it is now, with the revision of every record."""
        replica = await load(self.store, journal_key(name), _MACHINE)
        if not replica.state.readable:
            raise await self._missing(name, replica.state)
        return replica.state

    async def exists(self, name: str) -> bool:
        """True if there is such a journal; its content is not read.

        Everything but a `Drop` happens to a journal that is there, and leaves it there.
        """
        diff = await newest_diff(self.store, journal_key(name), _MACHINE)
        if diff is not None:
            return not isinstance(diff, Drop)
        # No entry at all, or one that is a rollup and nothing else, which is rare.
        return (await load(self.store, journal_key(name), _MACHINE)).state.readable

    async def list(
        self, collection: str | None = None, selector: LabelSelector = EVERYTHING
    ) -> tuple[Journal, ...]:
        """The journals of a collection, or of all collections below a name, in the order of names.

        All of them as of one revision.
        """
        loaded = await load_all(self.store, _prefix(collection), _MACHINE)
        return tuple(
            Journal(name=journal_of_key(key), state=replica.state)
            for key, replica in sorted(loaded.replicas.items())
            if replica.state.readable and selector.matches(replica.state.labels)
        )

    async def follow(
        self, collection: str | None = None
    ) -> AsyncGenerator[Moved[JournalState], None]:
        """Follow all journals of a collection, by name.

        Dropped ones are among them, as such: they may be created again. After each `Moved` the
        states are exactly those as of its revision (`consensus.replicas`).
        """
        async with aclosing(follow_all(self.store, _prefix(collection), _MACHINE)) as moves:
            async for moved in moves:
                named = {journal_of_key(key): state for key, state in moved.changed.items()}
                yield replace(moved, changed=named)

    # --------------------------------------------------------------------------------- writing

    async def create(
        self,
        name: JournalName,
        *,
        labels: Mapping[str, str] | None = None,
        key_end: int = KEY_HASH_MAX,
    ) -> JournalState:
        """The journal, created if it does not exist; refused if it exists and is another.

        It is read to compare them; `exists` is cheaper where that is not needed.
        """
        [state] = await self.create_all({name: creation(name, labels=labels, key_end=key_end)})
        return state

    async def create_all(self, creations: Mapping[JournalName, Create]) -> tuple[JournalState, ...]:
        """`create` of many at once, in few store transactions."""
        todo = ((str(name), create) for name, create in creations.items())
        states: tuple[JournalState, ...] = ()
        while batch := tuple(islice(todo, ATOMIC_ELEMENTS_MAX)):
            commands = [Command(self.log(n), _creates(n, create)) for n, create in batch]
            await _land(commands)
            states += tuple(command.log.state for command in commands)
        return states

    async def append(self, name: str, records: Iterable[Record]) -> Appended:
        """Add records to a journal."""
        return (await self.append_all({name: tuple(records)}))[name]

    async def append_all(
        self, parts: Mapping[str, Sequence[Record]], *, also: Sequence[Command[Any, Any]] = ()
    ) -> dict[str, Appended]:
        """Add records to several journals: to all of them, under one revision, or to none.

        Within the limits of `Consensus.compare_and_set_all`; a part without records stays out.
        Commands on other logs may be part of it; one that refuses keeps all the others out.
        """
        parts = {name: records for name, records in parts.items() if records}
        commands = [
            Command(self.log(name), _on_readable(name, Append(records=tuple(records))))
            for name, records in parts.items()
        ]
        committed = await self._commit(commands, also)
        return {
            name: _appended(done, len(records))
            for (name, records), done in zip(parts.items(), committed, strict=True)
            if done is not None
        }

    async def retain(self, name: str, offset: int) -> JournalState:
        """Forget the records before `offset`; garbage collection takes the files."""
        [state] = await self.retain_all({name: Retain(offset=offset)})
        return state

    async def retain_all(
        self, cuts: Mapping[str, Retain], divided: Mapping[str, Page] | None = None
    ) -> tuple[JournalState, ...]:
        """Cut journals at exactly these offsets: all of them, under one revision, or none.

        `divided` are the pages of which the pages of cuts are the rest. Refused if a journal cannot
        be cut there any more: its records were sealed, or a page was merged with others. Within
        the limits of `Consensus.compare_and_set_all`.
        """
        divided = divided or {}
        commands = [
            Command(self.log(name), _cuts(name, cut, divided.get(name)), roll_up=True)
            for name, cut in cuts.items()
        ]
        await self._commit(commands)
        return tuple(command.log.state for command in commands)

    async def compact(self, name: str, compact: Compact) -> JournalState:
        """The rows of some fragments have moved into one object."""
        return await self._change(name, compact)

    async def drop(self, name: str) -> JournalState:
        """End a journal; its offsets are not given again, also if it is created anew."""
        return await self._change(name, Drop(), unless=lambda s: s.status is Status.DROPPED)

    # --------------------------------------------------------------------------------- details

    def log(self, name: str) -> Log:
        """A writer's handle on one journal, for batches with other logs (`statelog.append_all`).

        It starts out knowing nothing: a command that the journal's real state does not allow is
        decided again after reading it. Two coroutines get the same handle, and queue up on it.
        """
        log = self._handles.pop(name, None)
        if log is None:
            replica = Replica.empty(journal_key(name), _MACHINE)
            log = StateLog(store=self.store, replica=replica, policy=self._policy)
        self._handles[name] = log
        if len(self._handles) > self._handles_max:
            self._handles.popitem(last=False)
        return log

    async def _change(
        self,
        name: str,
        diff: Diff,
        *,
        unless: Callable[[JournalState], bool] = lambda _: False,
    ) -> JournalState:
        command: JournalCommand = Command(self.log(name), _on_readable(name, diff, unless))
        await self._commit([command])
        return command.log.state

    async def _commit(
        self, commands: Sequence[JournalCommand], also: Sequence[Command[Any, Any]] = ()
    ) -> Sequence[Committed[JournalState, Diff] | None]:
        """Commit commands on journals that must exist, and others beside them."""
        try:
            return (await _land([*commands, *also]))[: len(commands)]
        except Refused as refused:
            names = [journal_of_key(command.log.key) for command in commands]
            for name, command in zip(names, commands, strict=True):
                if not command.log.state.readable:
                    raise await self._missing(name, command.log.state) from refused
            where = names[0] if len(names) == 1 else f"one of {len(names)} journals"
            raise Refused(refused.what, where=refused.where or where, why=refused.why) from refused

    async def _missing(self, name: str, state: JournalState) -> MissingJournal:
        names = [journal.name for journal in await self.list()]
        near = difflib.get_close_matches(name, names, n=3)
        dropped = state.status is Status.DROPPED
        return MissingJournal(
            f"the journal {name} {'was dropped' if dropped else 'does not exist'}",
            fix=f"did you mean {' or '.join(near)}?" if near else "list them: penstock journals",
        )


async def _land(
    commands: Sequence[Command[Any, Any]],
) -> Sequence[Committed[JournalState, Diff] | None]:
    """`append_all`, past what cancelled callers of the same handles have left behind."""
    while True:
        try:
            return await append_all(commands)
        except Superseded:
            continue  # an earlier command of another caller landed; this one has done nothing yet


def _prefix(collection: str | None) -> str:
    return journal_key("") if collection is None else collection_prefix(collection)


def _on_readable(
    name: str, diff: Diff, unless: Callable[[JournalState], bool] = lambda _: False
) -> Callable[[JournalState], Diff | None]:
    """`diff` for a journal that exists; nothing, if it is in the wanted state already."""

    def decide(state: JournalState) -> Diff | None:
        if unless(state):
            return None
        if not state.readable:
            raise Refused(f"the journal is {state.status.value}", where=name)
        return diff

    return decide


def _cuts(name: str, cut: Retain, divided: Page | None) -> Callable[[JournalState], Retain | None]:
    def decide(state: JournalState) -> Retain | None:
        if not state.readable:
            raise Refused(f"the journal is {state.status.value}", where=name)
        if state.begin >= cut.offset:
            return None
        # A page says where rows are. Had a compactor moved them meanwhile, it would be wrong.
        moved = divided is not None and divided not in state.pages
        if moved or apply(state, cut, UNKNOWN).begin != cut.offset:
            raise Refused("the records have changed", where=name)
        return cut

    return decide


def _creates(name: str, create: Create) -> Callable[[JournalState], Create | None]:
    def decide(state: JournalState) -> Create | None:
        if not state.readable:
            return create
        there = Create(
            collection=state.collection,
            labels=state.labels,
            key_begin=state.key_begin,
            key_end=state.key_end,
        )
        if there == create:
            return None
        raise Refused(
            "the journal exists, and is another",
            where=name,
            why=f"it is {_spec(there)}; {_spec(create)} was asked for",
        )

    return decide


def _spec(create: Create) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in create.labels) or "no labels"
    return f"{labels}, hashes {create.key_begin:08x} to {create.key_end:08x}"


def _appended(committed: Committed[JournalState, Diff], count: int) -> Appended:
    records = committed.state.records[-count:]
    return Appended(records=records, begin=records[0].begin, end=records[-1].end)
