"""Shards that answer in any order, frontiers, requests and timers at any time: laws that hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import NEVER, Clock, duration
from penstock.model.frontier import EMPTY, Frontier
from penstock.runtime.close_policy import Band, ClosePolicy
from penstock.runtime.connector import Pattern
from penstock.runtime.materialize.fsm import start, step
from penstock.runtime.materialize.messages import (
    Acknowledge,
    Acknowledged,
    Action,
    CloseRequested,
    Event,
    Flush,
    Flushed,
    FrontierReady,
    Load,
    Loaded,
    Rotate,
    Sleep,
    StartedCommit,
    Stop,
    StopRequested,
    Store,
    Stored,
    Woken,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.materialize.task import Task
from penstock.runtime.protocol import Kind, Persisted, PersistRecord
from penstock.runtime.recovery import Persist, Recovered
from runtime.leading import a_task, answers, at, frontier, report

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

    task: Task
    data: st.DataObject
    shuffle: Shuffle = field(default_factory=Shuffle)
    now_s: float = 0.0
    timer: Clock | None = None
    owed: list[Event] = field(default_factory=list)
    loaded: Frontier = field(default_factory=lambda: EMPTY)
    """What the open transaction was told to load."""
    hinted: Frontier | None = None
    writing: Kind | None = None
    """The record that is under way."""
    is_hinted: bool = False
    is_acknowledged: bool = False
    closes: list[Clock] = field(default_factory=list)
    commits: int = 0
    rotations: int = 0
    stopped: bool = False

    def __post_init__(self) -> None:
        self.leader, actions = start(self.task, Recovered(), at(0))
        assert isinstance(actions[0], Acknowledge), "O-1: first of all"
        self._take(actions)

    def tell(self, event: Event) -> None:
        match event:
            case Persisted():
                self.is_hinted |= self.writing is Kind.HINT
                self.writing = None
            case Acknowledged():
                self.is_acknowledged = not self._owed(Acknowledged)
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
        events = answers(
            action,
            self.task.shards,
            reports=(report(sourced=2, stored=1, max_key=b"k"),) if stores else (),
            patches={"Flush": said, "Acknowledge": said, "StartCommit": said},
        )
        return [replace(e, read_docs=1) if isinstance(e, Loaded) else e for e in events]

    def _owed(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.owed)

    def _check(self, action: Action) -> None:
        match action:
            case PersistRecord(kind=kind, record=record):
                assert self.writing is None, "I-5: one record at a time"
                self.writing = kind
                if kind is Kind.HINT:
                    assert not self._owed(Flushed), "I-2: every shard has flushed"
                    self.hinted = record.hinted_frontier
                if kind is Kind.COMMIT:
                    assert not self._owed(StartedCommit), "I-2: every shard has started"
                    self._check_commit(record)
            case Load(frontier=read):
                assert not self._owed(Loaded), "I-2: every shard has taken the last one in"
                self.loaded = self.loaded.reduce(read)
                if not read.unresolved_hints:
                    self.loaded = self.loaded.clear_discharged_hints()
            case Flush(close=close):
                assert self.is_acknowledged, "O-2: the last transaction was acknowledged"
                assert close > max(self.closes, default=NEVER)
                self.closes.append(close)
                self.is_hinted = False
            case Store():
                elides = self.task.elide_hints and self.task.pattern is Pattern.APPLY
                assert self.is_hinted or elides, "O-5: hinted before stored"
            case WriteStats():
                assert not self._owed(Stored), "I-2: every shard has stored"
            case Rotate():
                assert self.writing is None, "I-3: the commit is durable"
                self.rotations += 1
                self.is_acknowledged = False
            case WriteIntents():
                assert self.is_acknowledged, "G-3: what it published follows what it stored"
            case Sleep(wake_after):
                assert wake_after > 0
                self.timer = wake_after
            case Stop():
                self.stopped = True
                assert not self.owed, "S-3: nothing is under way"
            case _:
                pass

    def _check_commit(self, record: Persist) -> None:
        assert record.committed_frontier == self.loaded, "what is committed is what was loaded"
        assert self.loaded.unresolved_hints == 0
        assert self.hinted in (None, self.loaded), "hint and commit are of the same extents"
        assert record.committed_close == self.closes[-1]
        self.commits += 1
        self.loaded, self.hinted = EMPTY, None

    def moves(self) -> list[str]:
        """What the outside can do that the leader waits for."""
        can = {
            "answer": bool(self.owed),
            "frontier": self.leader.wants_frontier,
            "time": self.timer is not None,
        }
        return [move for move, possible in can.items() if possible]

    def move(self, what: str) -> None:
        match what:
            case "answer":
                at_ = self.data.draw(st.integers(0, len(self.owed) - 1), label="who answers")
                self.tell(self.owed.pop(at_))
            case "frontier":
                self.tell(FrontierReady(self.shuffle.next(self.data)))
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
    task: Task, data: st.DataObject
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
    assert world.commits - world.rotations in (0, 1)
