"""Leaders of one task that compete, die and wake up late, over models of all that outlives them.

What survives is the `World`: the source, the recovery log, the endpoint, the stats journal and the
web hook. A `Process` is one life of a leader, a generator that stops before each single effect: to
kill it is to forget it, to pause it is not to advance it. The leader inside is the real one, and so
is everything that recovers.

The task sums amounts by key. It loads what is stored, adds, and stores: so whatever is lost, or
done twice, or loaded too early, shows in the sums for ever.
"""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from penstock.journal.transaction import Intents
from penstock.model.clock import NEVER, Clock, Producer, duration, from_unix
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.hints import Commit
from penstock.model.json_order import Json
from penstock.model.producer_frontier import ProducerFrontier
from penstock.runtime.close_policy import Band, ClosePolicy
from penstock.runtime.connector import Pattern
from penstock.runtime.materialize.fsm import start, step
from penstock.runtime.materialize.messages import (
    Acknowledge,
    Acknowledged,
    Action,
    BindingReport,
    CallTrigger,
    CloseRequested,
    Event,
    Flush,
    Flushed,
    FrontierReady,
    Gather,
    Gathered,
    IntentsWritten,
    Load,
    Loaded,
    Rotate,
    Sleep,
    StartCommit,
    StartedCommit,
    StatsWritten,
    Stop,
    StopRequested,
    Store,
    Stored,
    TriggerCalled,
    Woken,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.materialize.state import Idle, Stopped
from penstock.runtime.materialize.task import Binding, Task
from penstock.runtime.patches import Patches, apply_patches
from penstock.runtime.protocol import Persisted, PersistRecord
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

JOURNALS = ("acme/orders/00", "acme/orders/80")
WRITER = Producer(1 << 40 | 7)
KEYS = (b"\x15\x01", b"\x15\x02", b"\x15\x03", b"\x15\x04")
STATS = "ops/stats/00"
TABLES = 2
LAYOUT = Layout({0: "orders"})


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

    def latest(self) -> dict[bytes, tuple[int, int]]:
        """The last amount of each key, and its place in the order of writing."""
        ordered = sorted(self.between({}, self.end), key=lambda each: each.order)
        return {each.key: (each.order, each.amount) for each in ordered}


@dataclass
class RecoveryLog:
    """A log that takes a record only from whoever knows its end."""

    entries: Entries = field(default_factory=dict)
    length: int = 0
    epoch: int = 0
    history: list[Persist] = field(default_factory=list)

    def append(self, at: int, record: Persist | None) -> int:
        """One record, or a new epoch; returns the new end."""
        if at != self.length:
            raise Fenced
        self.length += 1
        if record is None:
            self.epoch += 1
        else:
            ops: tuple[Op, ...] = MACHINE.decode_diff(
                MACHINE.encode_diff(LAYOUT.encode(record)), MACHINE.format
            )
            self.entries = MACHINE.apply(self.entries, ops, self.length)
            self.history.append(record)
        return self.length


MACHINE = RecoveryMachine()


@dataclass
class Endpoint:
    """Tables of sums. Keys are spread over the tables."""

    tables: list[dict[bytes, int]] = field(default_factory=lambda: [{} for _ in range(TABLES)])
    fence: int = 0
    checkpoint: bytes | None = None
    units: dict[str, dict[bytes, int]] = field(default_factory=dict)
    """Staged, by the name of the attempt."""
    applied: list[int] = field(default_factory=lambda: [0] * TABLES)
    """Of each table, the close clock of what was applied last."""
    latest: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Of a direct endpoint: the last amount of each key, and its place in the order of writing."""

    def rows(self) -> dict[bytes, int]:
        return {key: value for table in self.tables for key, value in table.items()}

    def load(self, key: bytes) -> int | None:
        return self.tables[table_of(key)].get(key)

    def commit(self, epoch: int, rows: Mapping[bytes, int], checkpoint: bytes) -> None:
        """One transaction: fence, rows, checkpoint."""
        if epoch != self.fence:
            raise Fenced
        for key, value in rows.items():
            self.tables[table_of(key)][key] = value
        self.checkpoint = checkpoint

    def apply(self, table: int, unit: str, close: int) -> None:
        """One transaction on one table: guard and rows."""
        if close > self.applied[table]:
            self.applied[table] = close
            rows = self.units[unit]
            self.tables[table].update({k: v for k, v in rows.items() if table_of(k) == table})


def table_of(key: bytes) -> int:
    return key[-1] % TABLES


@dataclass
class World:
    """All that is durable, and what is remembered of it to judge."""

    rng: Random
    pattern: Pattern
    shards: int
    elide_hints: bool
    flush_barrier: bool
    source: Source
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


@dataclass
class Shuffle:
    """Checkpoints of the source, from where a task resumes; a replay gets what was hinted."""

    source: Source
    resume: Frontier
    rng: Random
    peek: Frontier | None = None

    def __post_init__(self) -> None:
        self.at = commits_of(self.resume)
        self.replay = self.resume.unresolved_hints > 0
        self.exhausted = False

    def next(self) -> Frontier | None:
        """The next checkpoint, if there is one."""
        if self.replay:
            return self._replayed()
        if self.peek is not None:
            whole, self.peek = self.peek, None
            return whole
        left = [(c, j) for c, j in self.source.commits if any(self.at.get(x, 0) < c for x in j)]
        if not left:
            return None
        taken = left[: self.rng.choice((1, 1, 1, 2))]
        reached = {journal: clock for clock, journals in taken for journal in journals}
        self.at.update(reached)
        whole = frontier_of(reached)
        if len(reached) > 1 and self.rng.random() < 0.5:
            first, second = sorted(reached)
            self.peek = whole
            seen = frontier_of({first: reached[first]})
            return seen.reduce(frontier_of({}, hints={second: reached[second]}))
        return whole

    def _replayed(self) -> Frontier | None:
        if self.exhausted:
            return None
        self.exhausted = True
        hinted = {
            read.journal: int(entry.hinted_commit)
            for read in self.resume
            for entry in read.producers
            if entry.is_unresolved
        }
        return frontier_of(hinted, hints=hinted)


def frontier_of(commits: Mapping[str, int], hints: Mapping[str, int] | None = None) -> Frontier:
    """Of the one writer; `hints` are of commits that are announced."""
    return _frontier_of(tuple(commits.items()), tuple((hints or {}).items()))


@functools.cache
def _frontier_of(
    commits_made: tuple[tuple[str, int], ...], hinted: tuple[tuple[str, int], ...]
) -> Frontier:
    commits, hints = dict(commits_made), dict(hinted)
    return Frontier.of(
        JournalFrontier(
            journal=journal,
            producers=(
                ProducerFrontier(
                    producer=WRITER,
                    last_commit=Clock(commits.get(journal, 0)),
                    hinted_commit=Clock(hints.get(journal, 0)),
                    offset=-commits.get(journal, 0),
                ),
            ),
        )
        for journal in sorted({*commits, *hints})
    )


def commits_of(frontier: Frontier) -> dict[str, int]:
    return {
        read.journal: max(int(entry.last_commit) for entry in read.producers) for read in frontier
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
        self.task = Task(
            name="acme/view",
            bindings=(Binding(collection="acme/orders", state_key="orders"),),
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
        self.staged: dict[bytes, int] = {}
        self.documents: list[Document] = []
        self.unit = ""
        self.opened, self.closed = NEVER, 0
        self.position: dict[str, int] = {}
        self.extents: dict[str, int] = {}
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
        at, entries = world.log.length, world.log.entries
        yield "take the epoch"
        self.end = world.log.append(at, None)
        self.epoch = world.log.epoch
        recovered = LAYOUT.decode(entries)
        opened: EndpointCheckpoint | None = None
        if world.pattern is Pattern.ENDPOINT:
            yield "fence the endpoint"
            if world.endpoint.fence > self.epoch:
                raise Fenced
            world.endpoint.fence = self.epoch
            yield "read its checkpoint"
            if world.endpoint.fence != self.epoch:  # or a successor's would look like nobody's
                raise Fenced
            if world.endpoint.checkpoint is not None:
                opened = EndpointCheckpoint.decode(world.endpoint.checkpoint)
        commits = world.pattern is Pattern.ENDPOINT
        if (fold := reconcile(recovered, opened, endpoint_commits=commits)) is not None:
            yield "reconcile"
            self.end = world.log.append(self.end, fold)
            recovered = LAYOUT.decode(world.log.entries)
            assert reconcile(recovered, opened, endpoint_commits=commits) is None
        self.state: Json = recovered.connector_state
        self.position = commits_of(recovered.committed_frontier)
        self.extents = dict(self.position)
        self.leader, actions = start(self.task, recovered, world.now(self.skew_s))
        resume = self.leader.replay or recovered.committed_frontier
        self.shuffle = Shuffle(world.source, resume, self.rng)
        yield from self._lead(list(actions))

    def _lead(self, wanted: list[Action]) -> Steps:
        """Do what the leader wants, in any order that it allows, and tell it what came of it."""
        answers: list[Event] = []
        is_read = False
        while not any(isinstance(action, Stop) for action in wanted):
            wanted = [action for action in wanted if not isinstance(action, Sleep)]
            choices: list[str] = ["do"] * len(wanted) + ["tell"] * len(answers)
            if self.leader.wants_frontier and not is_read:
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
                    event = FrontierReady(frontier)
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
        world, everyone = self.world, range(self.world.shards)
        match action:
            case Load(frontier=frontier):
                for journal, commit in commits_of(frontier).items():
                    self.extents[journal] = max(commit, self.extents.get(journal, 0))
                return [Loaded(shard=shard, read_docs=1) for shard in everyone]
            case Gather():
                return [Gathered()]
            case Flush():
                yield "load"
                return self._flush(action)
            case PersistRecord(seq_no=seq_no, record=record):
                yield "persist"
                self.end = world.log.append(self.end, record)
                if close := record.hinted_close or record.committed_close:
                    world.known[close] = self.opened, len(self.staged)
                return [Persisted(seq_no)]
            case Store():
                if world.pattern is Pattern.DIRECT:
                    yield from self._store_directly()
                return [Stored(shard=shard) for shard in everyone]
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
                    patches = ({"units": {self.unit: int(close)}},)
                return self._once(StartedCommit, patches)
            case Acknowledge(patches=patches):
                self.state = apply_patches(self.state, patches)
                done = yield from self._apply()
                self.state = apply_patches(self.state, done)
                return self._once(Acknowledged, done)
            case WriteIntents(intents=intents):
                yield "write intents"
                world.stats += [("ack", c.producer, int(c.clock), 0) for c in intents.commits]
                return [IntentsWritten()]
            case CallTrigger(params=params):
                yield "call the web hook"
                world.calls.append(params)
                return [TriggerCalled()]
            case Rotate():
                return []
            case Sleep() | Stop():
                raise AssertionError(action)

    def _once(self, kind: type[StartedCommit | Acknowledged], patches: Patches) -> list[Event]:
        """One call answers for all shards; its patches are the first one's."""
        return [kind(shard=n, patches=() if n else patches) for n in range(self.world.shards)]

    def _flush(self, action: Flush) -> list[Event]:
        """Gather, load, reduce and stage: one job, of one attempt."""
        world = self.world
        self.documents = list(world.source.between(self.position, self.extents))
        added: defaultdict[bytes, int] = defaultdict(int)
        for each in self.documents:
            added[each.key] += each.amount
        greatest = action.max_keys.get(0, b"")
        self.staged, loaded = {}, 0
        for key, amount in added.items():
            before = world.endpoint.load(key) if key <= greatest else None
            loaded += before is not None
            self.staged[key] = (before or 0) + amount
        self.closed = int(action.close)
        self.unit = f"{self.epoch}/{action.transaction}"
        world.endpoint.units[self.unit] = dict(self.staged)
        self.opened = action.transaction
        report = BindingReport(
            binding=0,
            sourced=Counts(len(self.documents), 0),
            clock_min=Clock(min((d.clock for d in self.documents), default=0)),
            clock_max=Clock(max((d.clock for d in self.documents), default=0)),
            max_key=max((key for key in added if key > greatest), default=b""),
            loaded=Counts(loaded, 0),
            stored=Counts(len(self.staged), 0),
        )
        self.position = dict(self.extents)
        patches: Patches = ({"staged": self.unit},) if self.rng.random() < 0.3 else ()
        return [
            Flushed(shard=n, reports=() if n else (report,), patches=() if n else patches)
            for n in range(world.shards)
        ]

    def _store_directly(self) -> Generator[str, None, None]:
        """Visible row by row, and only if newer than what is there."""
        newest = {each.key: each for each in sorted(self.documents, key=lambda d: d.order)}
        for each in newest.values():
            yield "store a row"
            latest = self.world.endpoint.latest
            latest[each.key] = max(latest.get(each.key, (0, 0)), (each.order, each.amount))

    def _publish(self) -> StatsWritten:
        """A stats document, and the ACK that will make it count."""
        world = self.world
        world.stamps += 2
        world.stats.append(("doc", self.producer, world.stamps, self.closed))
        return StatsWritten(Intents((Commit(STATS, self.producer, Clock(world.stamps + 1)),)))

    def _apply(self) -> Generator[str, None, Patches]:
        """Apply what the state names, table by table; forget it then."""
        if self.world.pattern is not Pattern.APPLY:
            yield "acknowledge"
            return ()
        units = units_of(self.state)
        for unit, close in sorted(units.items(), key=lambda pair: pair[1]):
            for table in range(TABLES):
                yield "apply to a table"
                self.world.endpoint.apply(table, unit, close)
        forget: Json = {"units": dict.fromkeys(units)}
        return (forget,) if units else ()


def units_of(state: Json) -> dict[str, int]:
    """The staged units that a connector's state names, with the close clock of each."""
    units = state.get("units") if isinstance(state, dict) else None
    return dict(units) if isinstance(units, dict) else {}  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- judging


def check_endpoint(world: World) -> None:
    """An endpoint that commits by itself holds exactly what its own checkpoint stands for."""
    recovered = LAYOUT.decode(world.log.entries)
    assert world.endpoint.checkpoint is not None
    at = EndpointCheckpoint.decode(world.endpoint.checkpoint).close
    through = recovered.committed_frontier
    if at != recovered.committed_close:
        assert at == recovered.hinted_close, "an endpoint is ahead by the hinted one at most"
        through = through.reduce(recovered.hinted_frontier)
    assert world.endpoint.rows() == world.source.sums(commits_of(through))


def check_history(world: World) -> None:
    """Commits follow each other without a gap or an overlap, under clocks that only grow."""
    closes = [record.committed_close for record in world.log.history if record.committed_close]
    assert closes == sorted(set(closes))
    reached: dict[str, int] = {}
    hinted: dict[str, int] = {}
    for record in world.log.history:
        if record.hinted_frontier is not None:
            again = commits_of(record.hinted_frontier)
            assert not hinted or again == hinted, "what was hinted is replayed, no more, no less"
            hinted = again
        if record.committed_frontier is None:
            continue
        moved = commits_of(record.committed_frontier)
        assert not hinted or moved == hinted, "what was hinted is committed, no more, no less"
        hinted = {}
        assert all(commit > reached.get(journal, 0) for journal, commit in moved.items())
        reached.update(moved)
        torn = [
            clock
            for clock, journals in world.source.commits
            if len({reached.get(journal, 0) >= clock for journal in journals}) > 1
        ]
        assert not torn, "a transaction of the source is committed whole"


def check_end(world: World) -> None:
    """Everything was read, and everything happened once."""
    check_history(world)
    recovered = LAYOUT.decode(world.log.entries)
    assert commits_of(recovered.committed_frontier) == world.source.end
    if world.pattern is Pattern.DIRECT:
        assert world.endpoint.latest == world.source.latest()
    else:
        assert world.endpoint.rows() == world.source.sums(world.source.end)
    assert not units_of(recovered.connector_state), "what was applied is forgotten"

    committed = [record for record in world.log.history if record.committed_close]
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
