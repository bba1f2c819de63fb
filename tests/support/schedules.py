"""PURE: random schedules of a simulated world, each told by a seed, and the least part that fails.

A schedule is a `Setting` (which collections, bindings and habits there are) and a list of steps,
each the name of an action and the seed of its chance. Steps do not refer to each other, and one
that is not possible does nothing. So a schedule that fails still is one without some of its steps,
and `shrink` leaves out whatever it can.

    check(seeds)            runs the schedules of some seeds, and explains the first that fails
    run(schedule(seed))     raises a Violation, or tells how much was done
    shrink(schedule(seed))  the same with no more steps than it takes to fail
    tell(schedule(seed))    what happens, line by line
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from penstock.model.clock import duration
from penstock.shuffle.state import RoundLimits, SessionState
from support import simulation
from support.shuffle_oracle import Violation
from support.simulated_bindings import Reads, bindings_of, is_partitioned
from support.simulated_task import Ended, OpenSession, Task
from support.simulated_writers import Writers
from support.simulation import Habits, World, chance

# ------------------------------------------------------------------------------------- schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a schedule happens."""

    collections: Mapping[str, Sequence[str]]
    """The journals that may be, by collection."""
    late: int
    """How many of these come late."""
    reads: Sequence[Reads]
    later: int
    """How many of these the task begins to read later."""
    index_gap: int
    habits: Habits
    limits: RoundLimits
    paces: bool = False
    """Journals are read at unrelated paces, which no session does."""


@dataclass(frozen=True, slots=True)
class Step:
    """An action, and the seed of its chance."""

    action: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All that happens, until everybody finishes."""

    seed: int
    setting: Setting
    steps: tuple[Step, ...]


class Simulation:
    """A world, its writers, and a task."""

    def __init__(
        self, setting: Setting, open_session: OpenSession, story: list[str] | None
    ) -> None:
        self.world = World(setting.collections, setting.habits)
        self.world.story = story
        for name in list(self.world.collection_of)[: len(self.world.collection_of) - setting.late]:
            simulation.create_journal(self.world, name)
        self.writers = Writers(self.world)
        self.task = Task(
            self.world,
            self.writers,
            bindings_of(setting.reads, gap=setting.index_gap),
            setting.limits,
            later=setting.later,
            open_session=open_session,
            paces=setting.paces,
        )

    def write_some(self, rng: Random) -> None:
        """What writers do when nothing disturbs them, all at once."""
        writers = self.writers
        usual = (writers.write, writers.write, writers.close, writers.acknowledge)
        rare = (writers.write_outside, writers.roll_back, writers.repeat, writers.recover)
        for _ in range(rng.randint(2, 8)):
            rng.choice(rare if rng.random() < 0.2 else usual)(rng)

    def read_some(self, rng: Random) -> None:
        """What a task does when nothing disturbs it: a few steps of its usual circle."""
        task = self.task
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.8:
                task.learn(rng)
            task.request(rng)
            task.advance(rng)
            if rng.random() < 0.7:
                task.answer(rng)

    def end_transaction(self, rng: Random) -> None:
        """Prepare, commit, and perhaps crash in between."""
        self.task.prepare(rng)
        if rng.random() < 0.3:
            self.read_some(rng)
        if rng.random() < 0.5:
            self.task.crash(rng)
        else:
            self.task.commit(rng)


_Perform = Callable[[Simulation, Random], None]


def _on_world(action: simulation.Action) -> _Perform:
    return lambda simulated, rng: action(simulated.world, rng)


_WRITING: Final[Mapping[str, _Perform]] = {
    "write some": lambda s, rng: s.write_some(rng),
    "write": lambda s, rng: s.writers.write(rng),
    "write outside": lambda s, rng: s.writers.write_outside(rng),
    "repeat": lambda s, rng: s.writers.repeat(rng),
    "close": lambda s, rng: s.writers.close(rng),
    "acknowledge": lambda s, rng: s.writers.acknowledge(rng),
    "recover writer": lambda s, rng: s.writers.recover(rng),
    "crash writer": lambda s, rng: s.writers.crash(rng),
    "roll back": lambda s, rng: s.writers.roll_back(rng),
    "roll back deep": lambda s, rng: s.writers.roll_back_deep(rng),
    "acknowledge partly": lambda s, rng: s.writers.acknowledge_partly(rng),
}

_READING: Final[Mapping[str, _Perform]] = {
    "read some": lambda s, rng: s.read_some(rng),
    "learn": lambda s, rng: s.task.learn(rng),
    "advance": lambda s, rng: s.task.advance(rng),
    "answer": lambda s, rng: s.task.answer(rng),
    "end transaction": lambda s, rng: s.end_transaction(rng),
    "prepare": lambda s, rng: s.task.prepare(rng),
    "commit": lambda s, rng: s.task.commit(rng),
    "crash task": lambda s, rng: s.task.crash(rng),
    "tick": lambda s, rng: s.task.tick(rng),
}

_KEEPING: Final[Mapping[str, _Perform]] = {
    "create": _on_world(simulation.create),
    "compact": _on_world(simulation.compact),
    "seal": _on_world(simulation.seal),
    "wait": _on_world(simulation.wait),
    "retain": _on_world(simulation.retain),
    "drop": _on_world(simulation.drop),
}

ACTIONS: Final[Mapping[str, _Perform]] = {**_WRITING, **_READING, **_KEEPING}

_WEIGHTS: Final = {
    "write some": 10,
    "write": 6,
    "write outside": 2,
    "repeat": 2,
    "close": 4,
    "acknowledge": 3,
    "recover writer": 3,
    "crash writer": 1,
    "roll back": 3,
    "roll back deep": 0.5,
    "acknowledge partly": 1,
    "read some": 14,
    "learn": 4,
    "advance": 3,
    "answer": 2,
    "end transaction": 8,
    "prepare": 1,
    "commit": 2,
    "crash task": 3,
    "tick": 0.5,
    "create": 1,
    "compact": 1,
    "seal": 0.7,
    "wait": 3,
}

_THEMES: Final[Sequence[Mapping[str, float]]] = (
    {},
    {"repeat": 10, "crash task": 6},
    {"roll back": 8, "roll back deep": 8, "close": 14, "crash task": 6},
    {"crash task": 8, "end transaction": 14, "read some": 20},
    {"learn": 14, "read some": 8},
    {"acknowledge": 5, "crash writer": 2, "recover writer": 3, "write": 10, "crash task": 4},
    {"retain": 6, "drop": 1.5, "create": 3, "crash task": 3},
)
"""What a schedule has more of than others: what is rare must meet what is rare."""

_SKEW_S: Final = (-7200, -40, 20, 3600, 50 * 3600)
_SKEW_S_REMOVING: Final = (-250, -40, 20, 250)
"""Within GAP_MARGIN of each other: beyond it, nobody can tell what was removed by its clock."""


def schedule(seed: int) -> Schedule:
    """The schedule of a seed; always the same."""
    rng = chance(seed)
    theme = rng.choice(_THEMES)
    weights = {**_WEIGHTS, **theme}
    names = rng.choices(list(weights), list(weights.values()), k=rng.choice((8, 12, 18, 30)))
    return Schedule(
        seed=seed,
        setting=_setting(rng, theme),
        steps=tuple(Step(name, rng.getrandbits(32)) for name in names),
    )


def _setting(rng: Random, theme: Mapping[str, float]) -> Setting:
    collections: dict[str, Sequence[str]] = {}
    for name in ("a/one", "a/two-by-region", "b/three")[: rng.choice((1, 2, 2, 2, 3))]:
        parts = ("region=eu/", "region=us/") if is_partitioned(name) else ("",)
        journals = [f"{name}/{part}pivot={pivot}" for pivot in ("00", "80") for part in parts]
        collections[name] = journals[: rng.choice((1, 1, 2, 2, 3))]
    names = list(collections)
    one_cohort = rng.random() < 0.5
    reads = []
    for at in range(rng.choice((1, 2, 2, 3, 3, 4))):
        collection = names[at] if at < len(names) and rng.random() < 0.6 else rng.choice(names)
        reads.append(
            Reads(
                collection=collection,
                priority=0 if one_cohort else rng.choice((0, 0, 1)),
                read_delay=0 if one_cohort else rng.choice((0, 0, duration(2), duration(90))),
                region=rng.choice((None, "eu")) if is_partitioned(collection) else None,
            )
        )
    return Setting(
        collections=collections,
        late=rng.choice((0, 0, 1)) if sum(map(len, collections.values())) > 1 else 0,
        reads=tuple(reads),
        later=rng.choice((0, 0, 1)) if len(reads) > 1 else 0,
        index_gap=rng.choice((1, 1, 3)),
        habits=Habits(
            rows_max=rng.choice((1, 3, 3, 5)),
            split=0.9 if "acknowledge" in theme else rng.choice((0, 0.4, 0.8)),
            repeat=rng.choice((0, 0.25, 0.6)),
            interleave=rng.choice((0, 0.2)),
            skew=rng.choice((0, 0.5)),
            skew_s=_SKEW_S_REMOVING if "retain" in theme else _SKEW_S,
            contradict=0.5 if rng.random() < 0.03 and "retain" not in theme else 0,
        ),
        limits=RoundLimits(
            bytes=rng.choice((1, 30, 100, 2 << 30)), records=rng.choice((1, 3, 50_000))
        ),
    )


# ----------------------------------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How much a run has tried."""

    documents: int = 0
    transactions: int = 0
    recoveries: int = 0
    refused: int = 0
    """Schedules that ended because a journal, or a recovery, was rightly refused."""

    def __add__(self, other: Done) -> Done:
        return Done(
            documents=self.documents + other.documents,
            transactions=self.transactions + other.transactions,
            recoveries=self.recoveries + other.recoveries,
            refused=self.refused + other.refused,
        )


def run(
    what: Schedule,
    *,
    open_session: OpenSession = SessionState,
    story: list[str] | None = None,
) -> Done:
    """Do everything, then let everybody finish; raises Violation."""
    simulated = Simulation(what.setting, open_session, story)
    refused = 0
    try:
        for step in what.steps:
            simulated.world.tell(step.action)
            ACTIONS[step.action](simulated, chance(step.seed))
        simulated.world.tell("the end")
        rng = chance(what.seed)
        simulated.writers.settle(rng)
        simulated.task.drain(rng)
    except Ended as ended:
        simulated.world.tell(str(ended))
        refused = 1
    task = simulated.task
    return Done(
        documents=sum(len(task.ledger.taken(binding.index)) for binding in task.bindings),
        transactions=task.transactions,
        recoveries=task.recoveries,
        refused=refused,
    )


def check(seeds: Iterable[int]) -> Done:
    """Run the schedules of some seeds. The first that fails is shrunk, and told in the error."""
    total = Done()
    for seed in seeds:
        what = schedule(seed)
        try:
            total += run(what)
        except Violation as violation:
            raise AssertionError(f"{violation}\n\n{tell(shrink(what))}") from violation
    return total


def failure(what: Schedule, open_session: OpenSession = SessionState) -> Violation | None:
    """How a schedule fails, if it does."""
    try:
        run(what, open_session=open_session)
    except Violation as violation:
        return violation
    return None


def shrink(what: Schedule, open_session: OpenSession = SessionState) -> Schedule:
    """A part of a failing schedule that fails in the same way, and none of whose steps can go."""
    first = failure(what, open_session)
    if first is None:
        raise ValueError(f"schedule {what.seed} does not fail")
    size = len(what.steps) // 2
    while size:
        for fewer in _without(what, size):
            found = failure(fewer, open_session)
            if type(found) is type(first):
                what = fewer
                break
        else:
            size //= 2
    return what


def _without(what: Schedule, size: int) -> Iterator[Schedule]:
    for at in range(0, len(what.steps), size):
        yield replace(what, steps=what.steps[:at] + what.steps[at + size :])


def tell(what: Schedule, open_session: OpenSession = SessionState) -> str:
    """What happens in a schedule, for somebody who wants to understand why it fails."""
    story = [f"schedule {what.seed}: {what.setting}"]
    try:
        run(what, open_session=open_session, story=story)
    except Violation as violation:
        story.append(f"{type(violation).__name__}: {violation}")
    return "\n".join(story)
