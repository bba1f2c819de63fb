"""A leader on a bench: events in, actions out, and nothing behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.journal.transaction import Intents
from penstock.model.clock import Clock, Producer, duration, from_unix
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.hints import Commit
from penstock.model.producer_frontier import ProducerFrontier
from penstock.runtime.connector.materialize import Pattern
from penstock.runtime.materialize.fsm import start, step
from penstock.runtime.materialize.messages import (
    Acknowledge,
    BindingReport,
    CallTrigger,
    Flush,
    Flushed,
    Gather,
    Gathered,
    Reports,
    StartCommit,
    Store,
    Stored,
    TriggerCalled,
)
from penstock.runtime.materialize.task import LeaderBinding, LeaderTask
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import (
    Acknowledged,
    Action,
    Event,
    IntentsWritten,
    Persisted,
    PersistRecord,
    Sleep,
    StartedCommit,
    StatsWritten,
    Stop,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.reading import CheckpointReady
from penstock.runtime.recovery import Persist, Recovered
from penstock.runtime.stats import Counts
from penstock.shuffle.delivery import Checkpoint

BEGIN_S = 1_700_000_000
WRITER = Producer(1 << 40 | 7)
LEADER = Producer(1 << 40 | 9)
JOURNAL = "acme/orders/pivot=00"
FRESH = Recovered()


def at(seconds: float) -> Clock:
    """A moment of the bench's time."""
    return Clock(from_unix(BEGIN_S) + round(duration(1) * seconds))


def a_task(**change: Any) -> LeaderTask:  # noqa: ANN401 - fields of the task
    defaults: dict[str, Any] = {
        "name": "acme/view",
        "build": "b1",
        "image": "penstock/materialize-fake",
        "bindings": (
            LeaderBinding(collection="acme/orders", state_key="orders"),
            LeaderBinding(collection="acme/orders", state_key="orders-again"),
            LeaderBinding(collection="acme/stock", state_key="stock"),
        ),
        "shards": 2,
        "pattern": Pattern.APPLY,
    }
    return LeaderTask(**{**defaults, **change})


def frontier(
    commit: int,
    *,
    hint: int = 0,
    journal: str = JOURNAL,
    binding: int = 0,
    behind: int = 0,
) -> Frontier:
    """What one writer has committed in one journal, perhaps with a hint of more."""
    entry = ProducerFrontier(
        producer=WRITER,
        last_commit=Clock(commit),
        hinted_commit=Clock(hint),
        offset=-commit,
    )
    return Frontier.of(
        [
            JournalFrontier(
                journal=journal, binding=binding, producers=(entry,), bytes_behind_delta=behind
            )
        ]
    )


@dataclass(frozen=True, kw_only=True)
class FakeCheckpoint(Checkpoint):
    """A checkpoint of documents that are not there: only how many they are, and their bytes."""

    deliveries: tuple[Any, ...] = ()
    docs: int = 0
    size: int = 0

    @property
    def documents(self) -> int:
        return self.docs

    @property
    def bytes(self) -> int:
        return self.size


def ready(
    commit: int,
    *,
    docs: int = 0,
    size: int = 0,
    **more: Any,  # noqa: ANN401 - as of `frontier`
) -> CheckpointReady:
    return checkpoint(frontier(commit, **more), docs=docs, size=size)


def checkpoint(read: Frontier, *, docs: int = 0, size: int = 0) -> CheckpointReady:
    return CheckpointReady(FakeCheckpoint(frontier=read, docs=docs, size=size))


def intents(clock: int) -> Intents:
    """The ACKs of a transaction that published its stats."""
    return Intents((Commit("ops/stats/00", LEADER, Clock(clock)),))


def report(
    binding: int = 0,
    *,
    shard: int = 0,
    sourced: int = 0,
    loaded: int = 0,
    stored: int = 0,
    clocks: tuple[int, int] = (0, 0),
    max_key: bytes = b"",
) -> BindingReport:
    """Counts of documents, each of ten bytes."""
    return BindingReport(
        binding=binding,
        shard=shard,
        sourced=Counts(sourced, sourced * 10),
        loaded=Counts(loaded, loaded * 10),
        stored=Counts(stored, stored * 10),
        clock_min=Clock(clocks[0]),
        clock_max=Clock(clocks[1]),
        max_key=max_key,
    )


def name(action: Action) -> str:
    """An action as the design's tables write it."""
    if isinstance(action, PersistRecord):
        return f"Persist({action.kind.name.lower().replace('_', '-')})"
    return type(action).__name__


def answer(
    action: Action, *, reports: Reports = (), patches: Mapping[str, Patches] | None = None
) -> Event | None:
    """What a bench without opinions says to an action; `patches` are by the action's name."""
    own = (patches or {}).get(name(action), ())
    match action:
        case Gather():
            return Gathered()
        case Flush():
            return Flushed(reports=reports, patches=own)
        case Store():
            return Stored()
        case StartCommit():
            return StartedCommit(own)
        case Acknowledge():
            return Acknowledged(own)
        case PersistRecord(seq_no=seq_no):
            return Persisted(seq_no)
        case WriteStats():
            return StatsWritten(Intents())
        case WriteIntents():
            return IntentsWritten()
        case CallTrigger():
            return TriggerCalled()
        case Sleep() | Stop():
            return None
        case _:
            raise AssertionError(action)


@dataclass
class Bench:
    """A leader, the time, and everything that it wanted so far."""

    task: LeaderTask = field(default_factory=a_task)
    recovered: Recovered = FRESH
    now_s: float = 0.0
    reports: Reports = ()
    patches: Mapping[str, Patches] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    unanswered: deque[Action] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.leader, actions = start(self.task, self.recovered, at(self.now_s))
        self._take(actions)

    def tell(self, *events: Event) -> list[str]:
        """Tell the leader, and return the names of what it wants done because of it."""
        names: list[str] = []
        for event in events:
            self.leader, actions = step(self.leader, event, at(self.now_s))
            self._take(actions)
            names += map(name, actions)
        return names

    def answer(self) -> list[str]:
        """Answer the oldest action that was not answered yet."""
        action = self.unanswered.popleft()
        said = answer(action, reports=self.reports, patches=self.patches)
        assert said is not None
        return self.tell(said)

    def settle(self, *, until: str = "") -> list[str]:
        """Answer until there is nothing to answer, or the next one to answer is `until`."""
        names: list[str] = []
        while self.unanswered and name(self.unanswered[0]) != until:
            names += self.answer()
        return names

    def transaction(self, *checkpoints: CheckpointReady, reports: Reports = ()) -> list[str]:
        """Tell of checkpoints, and answer everything."""
        self.reports = reports
        names: list[str] = []
        for each in checkpoints:
            names += self.tell(each)
            names += self.settle()
        return names

    def drop(self) -> None:
        """Forget the oldest action: the test tells its answers itself."""
        self.unanswered.popleft()

    def last(self, kind: type[Any]) -> Any:  # noqa: ANN401 - the test knows
        return [action for action in self.actions if isinstance(action, kind)][-1]

    def records(self, what: str = "") -> list[Persist]:
        """The records that were to be written, of one kind or of all."""
        return [
            action.record
            for action in self.actions
            if isinstance(action, PersistRecord) and name(action) == (what or name(action))
        ]

    def story(self) -> list[str]:
        return [name(action) for action in self.actions]

    def _take(self, actions: Sequence[Action]) -> None:
        self.actions += actions
        self.unanswered += [action for action in actions if answer(action) is not None]


def without(names: Iterable[str], *left_out: str) -> list[str]:
    return [each for each in names if each not in left_out]
