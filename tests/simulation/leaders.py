"""Leaders of one task that compete, die and wake up late, over models of all that outlives them.

What survives is the `World`: the source, the recovery log, the endpoint, the stats journal and the
web hook. A `Process` is one life of a leader, a generator that stops before each single effect: to
kill it is to forget it, to pause it is not to advance it. The leader inside is the real one, and so
is everything that recovers.

The task sums amounts by key, into a table for each of its bindings. It loads what is stored, adds,
and stores: so whatever is lost, or done twice, or loaded too early, shows in the sums for ever.

Between two lives the catalog may be edited: bindings are disabled, moved, renamed and backfilled.
Each life has the catalog that it found when it began.
"""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

import msgspec

from penstock.journal.transaction import Intents
from penstock.model.clock import NEVER, Clock, Producer, duration, from_unix
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.hints import Commit
from penstock.model.json_order import Json
from penstock.model.producer_frontier import ProducerFrontier
from penstock.runtime.close_policy import Band, ClosePolicy
from penstock.runtime.connector.materialize import Pattern
from penstock.runtime.machine import Stopped
from penstock.runtime.materialize.fsm import start, step
from penstock.runtime.materialize.messages import (
    Acknowledge,
    BindingReport,
    CallTrigger,
    Flush,
    Flushed,
    Gather,
    Gathered,
    StartCommit,
    Store,
    Stored,
    TriggerCalled,
)
from penstock.runtime.materialize.task import LeaderBinding, LeaderTask
from penstock.runtime.patches import Patches, apply_patches
from penstock.runtime.protocol import (
    Acknowledged,
    Action,
    CloseRequested,
    Event,
    IntentsWritten,
    Persisted,
    PersistRecord,
    Sleep,
    StartedCommit,
    StatsWritten,
    Stop,
    StopRequested,
    Woken,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.reading import Idle
from penstock.runtime.recovery import (
    EndpointCheckpoint,
    Entries,
    Layout,
    Op,
    Persist,
    RecoveryMachine,
    reconcile,
)
from penstock.runtime.stats import Counts, rfc3339
from runtime.leading import checkpoint

JOURNALS = ("acme/orders/00", "acme/orders/80")
WRITER = Producer(1 << 40 | 7)
KEYS = (b"\x15\x01", b"\x15\x02", b"\x15\x03", b"\x15\x04")
STATS = "ops/stats/00"


class Fenced(Exception):
    """A newer leader is there."""


# ---------------------------------------------------------------------------------- what survives


@dataclass(frozen=True, slots=True)
class Document:
    """An amount for a key, in the order of writing; `clock` is that of its commit."""

    order: int
    clock: int
    key: bytes
    amount: int


@dataclass
class Source:
    """A writer that commits to one journal or both; all of it is there from the beginning."""

    documents: dict[str, list[Document]]
    commits: list[tuple[int, tuple[str, ...]]]
    """Clock, and the journals of it."""

    @classmethod
    def random(cls, rng: Random) -> Source:
        documents: dict[str, list[Document]] = {journal: [] for journal in JOURNALS}
        commits: list[tuple[int, tuple[str, ...]]] = []
        for n in range(1, rng.randint(3, 7)):
            journals = JOURNALS if rng.random() < 0.3 else (rng.choice(JOURNALS),)
            commits.append((n * 100, journals))
            for journal in journals:
                for _ in range(rng.choice((0, 1, 1, 2))):
                    order = sum(map(len, documents.values())) + 1
                    document = Document(order, n * 100, rng.choice(KEYS), rng.randint(1, 9))
                    documents[journal].append(document)
        return cls(documents, commits)

    @property
    def end(self) -> dict[str, int]:
        return {journal: clock for clock, journals in self.commits for journal in journals}

    def between(self, after: Mapping[str, int], through: Mapping[str, int]) -> Iterator[Document]:
        for journal, documents in self.documents.items():
            low, high = after.get(journal, 0), through.get(journal, 0)
            yield from (each for each in documents if low < each.clock <= high)

    def sums(self, through: Mapping[str, int]) -> Counter[bytes]:
        """What a table must hold that has everything through these commits."""
        sums: Counter[bytes] = Counter()
        for each in self.between({}, through):
            sums[each.key] += each.amount
        return sums

    def latest(self, through: Mapping[str, int]) -> dict[bytes, tuple[int, int]]:
        """The last amount of each key, and its place in the order of writing."""
        ordered = sorted(self.between({}, through), key=lambda each: each.order)
        return {each.key: (each.order, each.amount) for each in ordered}


@dataclass(frozen=True, slots=True)
class Bound:
    """A binding: all of the source, in a table."""

    table: str
    backfill: int = 0
    disabled: bool = False

    @property
    def state_key(self) -> str:
        return f"{self.table}.v{self.backfill}"


Catalog = tuple[Bound, ...]
BOTH: Catalog = (Bound("orders"), Bound("totals"))

Place = tuple[str, str]
"""A journal, and the state key of who reads it."""


@dataclass(frozen=True, slots=True)
class Appended:
    """A record, by whom it was appended, and what was committed when it was."""

    record: Persist
    layout: Layout
    entries: Entries
    """Of the log, with it."""


@dataclass
class RecoveryLog:
    """A log that takes a record only from whoever knows its end."""

    entries: Entries = field(default_factory=dict)
    length: int = 0
    epoch: int = 0
    history: list[Appended] = field(default_factory=list)

    def append(
        self, at: int, layout: Layout, record: Persist | tuple[Op, ...] | None = None
    ) -> int:
        """One record, or a new epoch; returns the new end."""
        if at != self.length:
            raise Fenced
        self.length += 1
        if record is None:
            self.epoch += 1
            return self.length
        ops = layout.encode(record, self.entries) if isinstance(record, Persist) else record
        decoded: tuple[Op, ...] = MACHINE.decode_diff(MACHINE.encode_diff(ops), MACHINE.format)
        self.entries = MACHINE.apply(self.entries, decoded, self.length)
        if isinstance(record, Persist):
            self.history.append(Appended(record, layout, self.entries))
        return self.length

    @property
    def whole(self) -> Layout:
        """Of all state keys that there ever were, whichever bindings there are now."""
        found = {key for _, key in (*kept(self.entries, b"FC:"), *kept(self.entries, b"FH:"))}
        return Layout(dict(enumerate(sorted(found))))


def kept(entries: Entries, prefix: bytes) -> dict[Place, int]:
    """The last commits under a prefix, whichever bindings there are now."""
    found: dict[Place, int] = {}
    for key, value in entries.items():
        if key.startswith(prefix):
            journal, state_key = key.removeprefix(prefix)[:-6].decode().split("\0")[:2]
            found[journal, state_key] = msgspec.msgpack.decode(value)[0]
    return found


def positions_of(frontier: Frontier, layout: Layout) -> dict[Place, int]:
    """The last commits of a frontier, by durable names."""
    return {
        (journal, layout.state_keys[binding]): commit
        for (journal, binding), commit in commits_of(frontier).items()
    }


MACHINE = RecoveryMachine()


@dataclass
class Table:
    """Sums by key."""

    state_key: str
    """Under which it was filled."""
    sums: dict[bytes, int] = field(default_factory=dict)
    applied: int = 0
    """The close clock of what was applied last."""
    latest: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Of a direct endpoint: the last amount of each key, and its place in the order of writing."""


Rows = dict[str, dict[bytes, int]]
"""Sums to be stored, by state key."""


@dataclass
class Endpoint:
    """Tables, by name."""

    tables: dict[str, Table] = field(default_factory=dict)
    fence: int = 0
    checkpoint: bytes | None = None
    units: dict[str, Rows] = field(default_factory=dict)
    """Staged, by the name of the attempt."""

    def raise_fence(self, epoch: int) -> None:
        if self.fence > epoch:
            raise Fenced
        self.fence = epoch

    def prepare(self, epoch: int, catalog: Catalog) -> None:
        """Make tables, and empty those that were filled under another state key."""
        self.raise_fence(epoch)
        for bound in catalog:
            there = self.tables.get(bound.table)
            if not bound.disabled and (there is None or there.state_key != bound.state_key):
                self.tables[bound.table] = Table(bound.state_key)

    def filled_under(self, state_key: str) -> Table | None:
        """The table that has what was stored under a state key, if it still has."""
        table = self.tables[state_key.rpartition(".v")[0]]
        return table if table.state_key == state_key else None

    def commit(self, epoch: int, rows: Rows, checkpoint: bytes) -> None:
        """One transaction: fence, rows, checkpoint."""
        if epoch != self.fence:
            raise Fenced
        for state_key, sums in rows.items():
            table = self.filled_under(state_key)
            assert table is not None, "whoever has the fence has its tables"
            table.sums.update(sums)
        self.checkpoint = checkpoint

    def apply(self, state_key: str, unit: str, close: int) -> None:
        """One transaction on one table: guard and rows."""
        table = self.filled_under(state_key)
        if table is not None and close > table.applied:
            table.applied = close
            table.sums.update(self.units[unit].get(state_key, {}))


@dataclass
class World:
    """All that is durable, and what is remembered of it to judge."""

    rng: Random
    pattern: Pattern
    shards: int
    elide_hints: bool
    flush_barrier: bool
    source: Source
    catalog: Catalog = BOTH
    log: RecoveryLog = field(default_factory=RecoveryLog)
    endpoint: Endpoint = field(default_factory=Endpoint)
    stats: list[tuple[str, Producer, int, int]] = field(default_factory=list)
    """Of the journal: ("doc" or "ack", producer, clock, close clock of the document)."""
    calls: list[bytes] = field(default_factory=list)
    known: dict[int, tuple[Clock, int]] = field(default_factory=dict)
    """By close clock, of the transactions that the log knows: when they opened, what they store."""
    time_s: float = 0.0
    producers: int = 0
    stamps: int = 0

    def now(self, skew_s: float) -> Clock:
        return Clock(from_unix(1_700_000_000) + round(duration(1) * (self.time_s + skew_s + 60)))


# ------------------------------------------------------------------------------------- a process


Read = tuple[str, int]
"""A journal, and the index of the binding that reads it."""


@dataclass
class Shuffle:
    """Checkpoints of the source, from where a task resumes; a replay gets what was hinted."""

    source: Source
    bindings: tuple[int, ...]
    resume: Frontier
    rng: Random
    peek: Frontier | None = None

    def __post_init__(self) -> None:
        self.at = commits_of(self.resume)
        self.replay = self.resume.unresolved_hints > 0
        self.exhausted = False

    def next(self) -> Frontier | None:
        """The next checkpoint, if there is one. Bindings that are behind catch up together."""
        if self.replay:
            return self._replayed()
        if self.peek is not None:
            whole, self.peek = self.peek, None
            return whole
        left = [commit for commit in self.source.commits if self._unread(*commit)]
        if not left:
            return None
        taken = left[: self.rng.choice((1, 1, 1, 2))]
        reached = {read: clock for clock, js in taken for read in self._unread(clock, js)}
        self.at.update(reached)
        whole = frontier_of(reached)
        if len(reached) > 1 and self.rng.random() < 0.5:
            seen, *others = sorted(reached)
            self.peek = whole
            hints = {read: reached[read] for read in others}
            return frontier_of({seen: reached[seen]}).reduce(frontier_of({}, hints=hints))
        return whole

    def _unread(self, clock: int, journals: tuple[str, ...]) -> list[Read]:
        reads = ((journal, binding) for journal in journals for binding in self.bindings)
        return [read for read in reads if self.at.get(read, 0) < clock]

    def _replayed(self) -> Frontier | None:
        if self.exhausted:
            return None
        self.exhausted = True
        hinted = {
            (read.journal, read.binding): int(entry.hinted_commit)
            for read in self.resume
            for entry in read.producers
            if entry.is_unresolved
        }
        return frontier_of(hinted, hints=hinted)


def frontier_of(commits: Mapping[Read, int], hints: Mapping[Read, int] | None = None) -> Frontier:
    """Of the one writer; `hints` are of commits that are announced."""
    return _frontier_of(tuple(commits.items()), tuple((hints or {}).items()))


@functools.cache
def _frontier_of(
    commits_made: tuple[tuple[Read, int], ...], hinted: tuple[tuple[Read, int], ...]
) -> Frontier:
    commits, hints = dict(commits_made), dict(hinted)
    return Frontier.of(
        JournalFrontier(
            journal=read[0],
            binding=read[1],
            producers=(
                ProducerFrontier(
                    producer=WRITER,
                    last_commit=Clock(commits.get(read, 0)),
                    hinted_commit=Clock(hints.get(read, 0)),
                    offset=-commits.get(read, 0),
                ),
            ),
        )
        for read in sorted({*commits, *hints})
    )


def commits_of(frontier: Frontier) -> dict[Read, int]:
    return {
        (read.journal, read.binding): max(int(entry.last_commit) for entry in read.producers)
        for read in frontier
    }


Steps = Generator[str, None, None]
"""Stops before each effect, and says which."""


class Process:
    """One life of a leader."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, Random(world.rng.random())
        self.skew_s = self.rng.choice((0.0, 0.0, -30.0, 30.0))
        world.producers += 1
        self.producer = Producer(1 << 40 | 1000 + world.producers)
        self.catalog = world.catalog
        self.active = {n: each for n, each in enumerate(self.catalog) if not each.disabled}
        self.layout = Layout({n: each.state_key for n, each in self.active.items()})
        self.shards = world.shards
        self.task = LeaderTask(
            name="acme/view",
            bindings=tuple(
                LeaderBinding(collection=f"acme/orders/{n}", state_key=each.state_key)
                for n, each in enumerate(self.catalog)
            ),
            shards=world.shards,
            pattern=world.pattern,
            flush_barrier=world.flush_barrier,
            has_triggers=True,
            elide_hints=world.elide_hints,
            policy=ClosePolicy(read_docs=Band(max=self.rng.choice((1, 1, 1, 4)))),
        )
        self.stop_after = self.rng.choice((0, 0, 0, 0, 2))
        self.is_idle = False
        self.about_to = "be born"
        self.staged: Rows = {}
        self.documents: dict[int, list[Document]] = {}
        self.unit = ""
        self.opened, self.closed = NEVER, 0
        self.position: dict[Read, int] = {}
        self.extents: dict[Read, int] = {}
        self.life = self._live()

    def advance(self) -> bool:
        """One effect further; whether it still lives."""
        try:
            self.about_to = next(self.life)
        except (StopIteration, Fenced):
            return False
        return True

    # Starting

    def _live(self) -> Steps:
        world = self.world
        at = world.log.length
        yield "take the epoch"
        self.end = world.log.append(at, self.layout)
        self.epoch = world.log.epoch
        if superseded := self.layout.supersede(world.log.entries):
            yield "supersede"
            self.end = world.log.append(self.end, self.layout, superseded)
        yield "apply the catalog"
        world.endpoint.prepare(self.epoch, self.catalog)
        opened: EndpointCheckpoint | None = None
        if world.pattern is Pattern.ENDPOINT:
            yield "fence the endpoint"
            world.endpoint.raise_fence(self.epoch)
            yield "read its checkpoint"
            if world.endpoint.fence != self.epoch:  # or a successor's would look like nobody's
                raise Fenced
            if world.endpoint.checkpoint is not None:
                opened = EndpointCheckpoint.decode(world.endpoint.checkpoint)
        commits = world.pattern is Pattern.ENDPOINT
        if self.end != world.log.length:
            raise Fenced
        recovered = self.layout.decode(world.log.entries)
        if (fold := reconcile(recovered, opened, endpoint_commits=commits)) is not None:
            yield "reconcile"
            self.end = world.log.append(self.end, self.layout, fold)
            recovered = self.layout.decode(world.log.entries)
            assert reconcile(recovered, opened, endpoint_commits=commits) is None
        self.state: Json = recovered.connector_state
        self.position = commits_of(recovered.committed_frontier)
        self.extents = dict(self.position)
        self.leader, actions = start(self.task, recovered, world.now(self.skew_s))
        self.shuffle = Shuffle(world.source, tuple(self.active), recovered.resume, self.rng)
        yield from self._lead(list(actions))

    def _lead(self, wanted: list[Action]) -> Steps:
        """Do what the leader wants, in any order that it allows, and tell it what came of it."""
        answers: list[Event] = []
        is_read = False
        while not any(isinstance(action, Stop) for action in wanted):
            wanted = [action for action in wanted if not isinstance(action, Sleep)]
            choices: list[str] = ["do"] * len(wanted) + ["tell"] * len(answers)
            if self.leader.wants_more and not is_read:
                choices.append("read")
            self.is_idle = not choices and self._is_quiescent()
            if not choices:
                yield "wait"
                self.world.time_s += 1.0
                answers.append(Woken())
                continue
            match self.rng.choice(choices):
                case "do":
                    action = wanted.pop(self.rng.randrange(len(wanted)))
                    answers += yield from self._perform(action)
                    continue
                case "tell":
                    event = answers.pop(self.rng.randrange(len(answers)))
                case _:
                    frontier = self.shuffle.next()
                    is_read = frontier is None
                    if frontier is None:
                        continue
                    event = checkpoint(frontier, docs=self.shards)
            wanted += self._tell(event)
            if self.rng.random() < 0.02:
                wanted += self._tell(CloseRequested())
            if self.stop_after and self.leader.transactions >= self.stop_after:
                self.stop_after = 0
                wanted += self._tell(StopRequested())

    def _is_quiescent(self) -> bool:
        """All is done. A replay is not: its session must end by itself, so that another begins."""
        has_nothing = self.leader.head == Idle() and self.leader.tail_done
        return has_nothing and not self.shuffle.replay

    def _tell(self, event: Event) -> list[Action]:
        if isinstance(self.leader.head, Stopped):
            return []
        self.world.time_s += 0.01
        self.leader, actions = step(self.leader, event, self.world.now(self.skew_s))
        return list(actions)

    # Effects

    def _perform(self, action: Action) -> Generator[str, None, list[Event]]:
        world = self.world
        match action:
            case Gather():
                return [Gathered()]
            case Flush():
                yield "load"
                return self._flush(action)
            case PersistRecord(seq_no=seq_no, record=record):
                yield "persist"
                self.end = world.log.append(self.end, self.layout, record)
                if close := record.hinted_close or record.committed_close:
                    world.known[close] = self.opened, sum(map(len, self.staged.values()))
                return [Persisted(seq_no)]
            case Store():
                if world.pattern is Pattern.DIRECT:
                    yield from self._store_directly()
                return [Stored()]
            case WriteStats():
                yield "publish stats"
                return [self._publish()]
            case StartCommit(close=close, checkpoint=checkpoint):
                patches: Patches = ()
                if world.pattern is Pattern.ENDPOINT:
                    yield "commit to the endpoint"
                    world.endpoint.commit(self.epoch, self.staged, checkpoint.encode())
                    check_endpoint(world)
                elif world.pattern is Pattern.APPLY:
                    files: Json = dict.fromkeys(self.staged, self.unit)
                    patches = ({"units": {f"{close:016x}": files}},) if files else ()
                return [StartedCommit(patches)]
            case Acknowledge(patches=patches):
                self.state = apply_patches(self.state, patches)
                done = yield from self._apply()
                self.state = apply_patches(self.state, done)
                return [Acknowledged(done)]
            case WriteIntents(intents=intents):
                yield "write intents"
                world.stats += [("ack", c.producer, int(c.clock), 0) for c in intents.commits]
                return [IntentsWritten()]
            case CallTrigger(params=params):
                yield "call the web hook"
                world.calls.append(params)
                return [TriggerCalled()]
            case _:
                raise AssertionError(action)

    def _flush(self, action: Flush) -> list[Event]:
        """Gather, load, reduce and stage: one job, of one attempt."""
        txn = action.txn
        self.unit = f"{self.epoch}/{txn.opened}"
        self.closed, self.opened = int(txn.closed), txn.opened
        self.staged, self.documents = {}, {}
        for read, commit in commits_of(txn.extents).items():
            self.extents[read] = max(commit, self.extents.get(read, 0))
        reports = tuple(self._reduce(n, txn.before.max_keys.get(n, b"")) for n in self.active)
        self.world.endpoint.units[self.unit] = dict(self.staged)
        self.position = dict(self.extents)
        patches: Patches = ({"staged": self.unit},) if self.rng.random() < 0.3 else ()
        return [Flushed(reports=reports, patches=patches)]

    def _reduce(self, binding: int, greatest: bytes) -> BindingReport:
        """What is stored of a binding: what its table has, and what is new."""
        after, through = (
            {journal: at for (journal, index), at in reads.items() if index == binding}
            for reads in (self.position, self.extents)
        )
        documents = self.documents[binding] = list(self.world.source.between(after, through))
        added: defaultdict[bytes, int] = defaultdict(int)
        for each in documents:
            added[each.key] += each.amount
        state_key = self.layout.state_keys[binding]
        there = self.world.endpoint.filled_under(state_key)
        stored = {} if there is None else there.sums
        loaded = {key: stored[key] for key in added if key <= greatest and key in stored}
        sums = {key: loaded.get(key, 0) + amount for key, amount in added.items()}
        if sums:
            self.staged[state_key] = sums
        return BindingReport(
            binding=binding,
            sourced=Counts(len(documents), 0),
            clock_min=Clock(min((d.clock for d in documents), default=0)),
            clock_max=Clock(max((d.clock for d in documents), default=0)),
            max_key=max((key for key in added if key > greatest), default=b""),
            loaded=Counts(len(loaded), 0),
            stored=Counts(len(sums), 0),
        )

    def _store_directly(self) -> Generator[str, None, None]:
        """Visible row by row, and only if newer than what is there."""
        for binding, documents in self.documents.items():
            newest = {each.key: each for each in sorted(documents, key=lambda d: d.order)}
            for each in newest.values():
                yield "store a row"
                table = self.world.endpoint.filled_under(self.layout.state_keys[binding])
                if table is not None:
                    row = each.order, each.amount
                    table.latest[each.key] = max(table.latest.get(each.key, (0, 0)), row)

    def _publish(self) -> StatsWritten:
        """A stats document, and the ACK that will make it count."""
        world = self.world
        world.stamps += 2
        world.stats.append(("doc", self.producer, world.stamps, self.closed))
        return StatsWritten(Intents((Commit(STATS, self.producer, Clock(world.stamps + 1)),)))

    def _apply(self) -> Generator[str, None, Patches]:
        """Apply what the state names, table by table; forget it then.

        What is named for a table that is not this task's now stays, until it is again or has been
        emptied.
        """
        endpoint = self.world.endpoint
        if self.world.pattern is not Pattern.APPLY:
            yield "acknowledge"
            return ()
        forget: dict[str, Json] = {}
        for close, files in sorted(units_of(self.state).items()):
            kept = dict(files)
            for state_key, unit in files.items():
                if endpoint.filled_under(state_key) is not None:
                    if state_key not in self.layout.state_keys.values():
                        continue
                    yield "apply to a table"
                    endpoint.apply(state_key, unit, int(close, 16))
                del kept[state_key]
            if kept != files:
                forget[close] = dict.fromkeys(files.keys() - kept.keys()) if kept else None
        return ({"units": forget},) if forget else ()


def units_of(state: Json) -> dict[str, dict[str, str]]:
    """The staged units that a connector's state names: by close clock, and then by state key."""
    units = state.get("units") if isinstance(state, dict) else None
    return dict(units) if isinstance(units, dict) else {}  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- judging


def check_endpoint(world: World) -> None:
    """An endpoint that commits by itself holds exactly what its own checkpoint stands for."""
    recovered = world.log.whole.decode(world.log.entries)
    assert world.endpoint.checkpoint is not None
    at = EndpointCheckpoint.decode(world.endpoint.checkpoint).close
    through = kept(world.log.entries, b"FC:")
    if at != recovered.committed_close:
        assert at == recovered.hinted_close, "an endpoint is ahead by the hinted one at most"
        hinted = kept(world.log.entries, b"FH:")
        through = {
            place: max(through.get(place, 0), hinted.get(place, 0)) for place in (*through, *hinted)
        }
    check_tables(world, through)


def check_tables(world: World, through: Mapping[Place, int]) -> None:
    """Every table holds what was read for it, also one that no binding fills now.

    Of that, some may still be staged: it is applied when the binding comes back.
    """
    units = units_of(world.log.whole.decode(world.log.entries).connector_state)
    for table in world.endpoint.tables.values():
        reached = {journal: at for (journal, key), at in through.items() if key == table.state_key}
        if world.pattern is Pattern.DIRECT:
            latest = world.source.latest(reached)
            assert all(table.latest[key] >= row for key, row in latest.items())
        else:
            sums = dict(table.sums)
            for close, files in sorted(units.items()):
                if int(close, 16) > table.applied and table.state_key in files:
                    sums |= world.endpoint.units[files[table.state_key]][table.state_key]
            assert sums == world.source.sums(reached), table.state_key


def check_history(world: World) -> None:
    """Commits follow each other without a gap or an overlap, under clocks that only grow."""
    records = [each.record for each in world.log.history]
    closes = [record.committed_close for record in records if record.committed_close]
    assert closes == sorted(set(closes))
    reached: Mapping[Place, int] = {}
    hinted: dict[Place, int] = {}
    for appended in world.log.history:
        record, layout = appended.record, appended.layout
        active = set(layout.state_keys.values())
        here = {place: at for place, at in hinted.items() if place[1] in active}
        if record.hinted_frontier is not None:
            again = positions_of(record.hinted_frontier, layout)
            assert not here or again == here, "what was hinted is replayed, no more, no less"
            hinted = again
        if not record.committed_close:
            continue
        after = kept(appended.entries, b"FC:")
        assert all(after[place] >= at for place, at in reached.items() if place in after)
        moved = {place: at for place, at in after.items() if at > reached.get(place, 0)}
        expected = {
            place: at
            for place, at in (hinted if record.commit_hinted else here).items()
            if not is_superseded(place[1], appended.entries)
        }
        assert not expected or moved == expected, "what was hinted is committed, no more, no less"
        hinted, reached = {}, after
        torn = [
            (clock, state_key)
            for clock, journals in world.source.commits
            for state_key in {key for _, key in reached}
            if len({reached.get((journal, state_key), 0) >= clock for journal in journals}) > 1
        ]
        assert not torn, "a transaction of the source is committed whole"


def is_superseded(state_key: str, entries: Entries) -> bool:
    """Whether the table has been emptied for a later backfill, or is about to be."""
    table, _, counter = state_key.rpartition(".v")
    return int(counter) < int.from_bytes(entries.get(f"VK:{table}".encode(), b""), "big")


def check_end(world: World) -> None:
    """Everything was read by who is there, and everything happened once."""
    check_history(world)
    recovered = world.log.whole.decode(world.log.entries)
    check_tables(world, kept(world.log.entries, b"FC:"))
    for bound in world.catalog:
        if bound.disabled:
            continue
        table = world.endpoint.tables[bound.table]
        assert table.state_key == bound.state_key
        if world.pattern is Pattern.DIRECT:
            assert table.latest == world.source.latest(world.source.end)
        else:
            assert table.sums == world.source.sums(world.source.end)
    waiting = {key for files in units_of(recovered.connector_state).values() for key in files}
    active = {bound.state_key for bound in world.catalog if not bound.disabled}
    assert not waiting & active, "what was applied is forgotten"

    records = [each.record for each in world.log.history]
    committed = [record for record in records if record.committed_close]
    counted = sorted(visible_stats(world))
    assert counted == sorted(int(record.committed_close) for record in committed)
    transactions = [world.known[record.committed_close] for record in committed]
    promised = {rfc3339(opened) for opened, stored in transactions if stored}
    called = {json.loads(params)["run_id"] for params in world.calls}
    assert called == promised, "every transaction that stored, and no other"


def visible_stats(world: World) -> Iterator[int]:
    """The close clocks of the stats documents that a reader sees."""
    pending: defaultdict[Producer, list[tuple[int, int]]] = defaultdict(list)
    acked: dict[Producer, int] = {}
    for what, producer, clock, close in world.stats:
        if what == "doc":
            pending[producer].append((clock, close))
        elif clock > acked.get(producer, 0):
            acked[producer] = clock
            yield from (each for at, each in pending.pop(producer, []) if at <= clock)
