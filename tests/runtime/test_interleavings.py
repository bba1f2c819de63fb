"""Answers in any order, checkpoints, requests and timers at any time: laws that hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import NEVER, Clock, duration
from penstock.model.frontier import EMPTY, Frontier
from penstock.runtime.close_policy import Band, ClosePolicy
from penstock.runtime.connector.materialize import Pattern
from penstock.runtime.materialize.fsm import start, step
from penstock.runtime.materialize.messages import (
    Acknowledge,
    Flush,
    Flushed,
    Store,
    Stored,
)
from penstock.runtime.materialize.task import LeaderTask
from penstock.runtime.materialize.transaction import Transaction
from penstock.runtime.protocol import (
    Acknowledged,
    Action,
    CloseRequested,
    Event,
    Persisted,
    PersistRecord,
    RecordKind,
    Sleep,
    StartedCommit,
    Stop,
    StopRequested,
    Woken,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.reading import CheckpointReady
from penstock.runtime.recovery import Persist, Recovered
from runtime.leading import a_task, answer, at, checkpoint, frontier, report

policies = st.builds(
    lambda least, most, docs: ClosePolicy(
        open_age=Band(min=duration(least), max=duration(least + most)),
        last_close_age=Band(min=duration(least)),
        read_docs=Band(min=docs, max=docs + 3),
    ),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(0, 2),
)
tasks = st.builds(
    a_task,
    shards=st.integers(1, 3),
    pattern=st.sampled_from(Pattern),
    flush_barrier=st.booleans(),
    has_triggers=st.booleans(),
    elide_hints=st.booleans(),
    drain=st.booleans(),
    transactions_max=st.sampled_from([0, 0, 0, 2]),
    policy=policies,
)


@dataclass
class Shuffle:
    """Hands out frontiers of one writer; some are peeks, which a later one completes."""

    commit: int = 0
    hinted: int = 0

    def next(self, data: st.DataObject) -> Frontier:
        if self.hinted:
            resolved = data.draw(st.booleans(), label="resolves the hint")
            self.commit = self.hinted if resolved else max(self.commit, self.hinted - 1)
            hint, self.hinted = self.hinted, 0 if resolved else self.hinted
            return frontier(self.commit, hint=hint)
        self.commit += data.draw(st.integers(1, 3))
        if data.draw(st.integers(0, 4), label="a peek if 0") == 0:
            self.hinted = self.commit + 2
        return frontier(self.commit, hint=self.hinted)


@dataclass
class World:
    """One session, what its outside still owes it, and what it was seen doing."""

    task: LeaderTask
    data: st.DataObject
    shuffle: Shuffle = field(default_factory=Shuffle)
    now_s: float = 0.0
    timer: Clock | None = None
    owed: list[Event] = field(default_factory=list)
    waiting: list[Frontier] = field(default_factory=list)
    """Checkpoints that the leader was given, and no transaction was flushed with yet."""
    flushed: Frontier | None = None
    """What the transaction under way must consist of."""
    hinted: Frontier | None = None
    writing: RecordKind | None = None
    """The record that is under way."""
    is_hinted: bool = False
    is_acknowledged: bool = False
    closes: list[Clock] = field(default_factory=list)
    commits: int = 0
    stopped: bool = False

    def __post_init__(self) -> None:
        self.leader, actions = start(self.task, Recovered(), at(0))
        assert isinstance(actions[0], Acknowledge), "first of all"
        self._take(actions)

    def tell(self, event: Event) -> None:
        match event:
            case Persisted():
                self.is_hinted |= self.writing is RecordKind.HINT
                self.writing = None
            case Acknowledged():
                self.is_acknowledged = True
            case CheckpointReady(read):
                self.waiting.append(read.frontier)
            case _:
                pass
        self.leader, actions = step(self.leader, event, at(self.now_s))
        self._take(actions)

    def _take(self, actions: tuple[Action, ...]) -> None:
        self.timer = None
        for action in actions:
            assert not self.stopped, "an action after Stop"
            assert self.timer is None, "an action after Sleep"
            self._check(action)
            self.owed += self._answers(action)

    def _answers(self, action: Action) -> list[Event]:
        stores, patches = self.data.draw(st.tuples(st.booleans(), st.booleans()), label="answers")
        said = ({"p": 1},) if patches else ()
        event = answer(
            action,
            reports=(report(sourced=2, stored=1, max_key=b"k"),) if stores else (),
            patches={"Flush": said, "Acknowledge": said, "StartCommit": said},
        )
        return [] if event is None else [event]

    def _owed(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.owed)

    def _check(self, action: Action) -> None:
        match action:
            case PersistRecord(kind=kind, record=record):
                assert self.writing is None, "one record at a time"
                self.writing = kind
                if kind is RecordKind.HINT:
                    assert not self._owed(Flushed), "the jobs are done"
                    self.hinted = record.hinted_frontier
                if kind is RecordKind.COMMIT:
                    assert not self._owed(StartedCommit), "what precedes the commit is done"
                    self._check_commit(record)
            case Flush(txn):
                assert self.is_acknowledged, "the last transaction was acknowledged"
                assert txn.closed > max(self.closes, default=NEVER)
                self.closes.append(txn.closed)
                self.is_hinted = False
                self.flushed = self._taken(txn)
            case Store():
                elides = self.task.elide_hints and self.task.pattern is Pattern.APPLY
                assert self.is_hinted or elides, "hinted before stored"
            case WriteStats():
                assert not self._owed(Stored), "what is stored directly is stored"
            case Acknowledge():
                assert self.writing is None, "the commit is durable"
                self.is_acknowledged = False
            case WriteIntents():
                assert self.is_acknowledged, "what it published follows what it stored"
            case Sleep(wake_after):
                assert wake_after > 0
                self.timer = wake_after
            case Stop():
                self.stopped = True
                assert not self.owed, "nothing is under way"
            case _:
                pass

    def _check_commit(self, record: Persist) -> None:
        assert self.flushed is not None
        assert record.committed_frontier == self.flushed, "what is committed is what was given"
        assert self.flushed.unresolved_hints == 0
        assert self.hinted in (None, self.flushed), "hint and commit are of the same extents"
        assert record.committed_close == self.closes[-1]
        self.commits += 1
        self.flushed, self.hinted = None, None

    def _taken(self, txn: Transaction) -> Frontier:
        """The checkpoints that a transaction took, which are the next ones, in order."""
        taken = [each.frontier for each in txn.checkpoints]
        assert taken
        assert taken == self.waiting[: len(taken)], "each checkpoint is taken once, in order"
        del self.waiting[: len(taken)]
        whole = EMPTY
        for read in taken:
            whole = whole.reduce(read)
            if not read.unresolved_hints:
                whole = whole.clear_discharged_hints()
        return whole

    def moves(self) -> list[str]:
        """What the outside can do that the leader waits for."""
        can = {
            "answer": bool(self.owed),
            "frontier": self.leader.wants_more,
            "time": self.timer is not None,
        }
        return [move for move, possible in can.items() if possible]

    def move(self, what: str) -> None:
        match what:
            case "answer":
                at_ = self.data.draw(st.integers(0, len(self.owed) - 1), label="who answers")
                self.tell(self.owed.pop(at_))
            case "frontier":
                self.tell(checkpoint(self.shuffle.next(self.data), docs=self.task.shards))
            case "time":
                assert self.timer is not None
                self.now_s += self.timer / duration(1) + 1e-6
                self.tell(Woken())
            case "close":
                self.tell(CloseRequested())
            case "stop":
                self.tell(StopRequested())


@given(tasks, st.data())
def test_the_laws_hold_in_any_order_and_a_session_always_ends(
    task: LeaderTask, data: st.DataObject
) -> None:
    world = World(task, data)
    for _ in range(data.draw(st.integers(0, 60), label="moves")):
        if world.stopped:
            break
        assert world.moves(), "a leader that waits for nothing"
        world.move(data.draw(st.sampled_from([*world.moves(), "close"])))
    if not world.stopped:
        world.move("stop")
    for _ in range(150):
        if world.stopped:
            break
        # Without new input, as soon as nothing waits for any: a stop must not need it.
        moves = [move for move in world.moves() if move != "frontier"] or ["frontier"]
        world.move(data.draw(st.sampled_from(moves)))
    assert world.stopped
    assert world.commits == world.leader.transactions
