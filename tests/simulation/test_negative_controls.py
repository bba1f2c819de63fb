"""What the simulator is worth: sessions that are wrong on purpose, and are found out.

A checker that never fails proves nothing. Here each session lacks one rule, and some schedule must
show it, within a few of the seeds that the suite tries anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from msgspec import structs

from penstock.model.clock import Clock, Producer
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.hints import HintIndex
from penstock.model.sequence import ProducerState
from penstock.shuffle.binding import Binding
from penstock.shuffle.delivery import Checkpoint, Delivery, Outbox
from penstock.shuffle.reads import Read, ReadFold
from penstock.shuffle.state import RoundLimits, SessionState
from penstock.shuffle.topology import Topology
from support.schedules import Schedule, failure, run, schedule, shrink, tell
from support.shuffle_oracle import Disordered, Torn, Violation
from support.simulated_task import OpenSession

SEEDS = range(1_000)
TRIES = 250


def is_any(_what: Schedule) -> bool:
    return True


def reads_several_together(what: Schedule) -> bool:
    """Several collections in one cohort: the task always hears of some later than of others."""
    reads = what.setting.reads
    cohorts = {(each.priority, each.read_delay) for each in reads}
    return len(cohorts) == 1 and len({each.collection for each in reads}) > 1


def crashes_often(what: Schedule) -> bool:
    return sum(step.action == "crash task" for step in what.steps) > 2


def found_by(
    open_session: OpenSession = SessionState, suits: Callable[[Schedule], bool] = is_any
) -> tuple[Schedule, Violation]:
    """The first schedule that shows that a session is wrong, among those where it may."""
    for what in islice(filter(suits, map(schedule, SEEDS)), TRIES):
        if violation := failure(what, open_session):
            return what, violation
    pytest.fail("no schedule has found out")


# -------------------------------------------------------------------------------------- sessions


class Careless(SessionState):
    """loses a delivery"""

    def answer(self) -> Checkpoint | None:
        checkpoint = super().answer()
        if checkpoint is not None and len(checkpoint.deliveries) > 2:
            object.__setattr__(checkpoint, "deliveries", checkpoint.deliveries[1:])
        return checkpoint


class Forgetful(SessionState):
    """begins anew instead of resuming"""

    def __init__(
        self, bindings: Sequence[Binding], *, resume: Frontier, limits: RoundLimits
    ) -> None:
        recovery = resume if resume.unresolved_hints else EMPTY
        super().__init__(bindings, resume=recovery, limits=limits)


class Hintless(SessionState):
    """takes no hints from ACKs"""

    def __init__(
        self, bindings: Sequence[Binding], *, resume: Frontier, limits: RoundLimits
    ) -> None:
        super().__init__(bindings, resume=resume, limits=limits)
        self._context = replace(self._context, hints=HintIndex(()))


class Hasty(SessionState):
    """takes peeks for checkpoints"""

    def answer(self) -> Checkpoint | None:
        checkpoint = super().answer()
        if checkpoint is not None:
            settled = checkpoint.frontier.clear_discharged_hints()
            object.__setattr__(checkpoint, "frontier", settled)
        return checkpoint


class Eager(SessionState):
    """reads each collection as far as that one is known"""

    def __init__(
        self, bindings: Sequence[Binding], *, resume: Frontier, limits: RoundLimits
    ) -> None:
        super().__init__(bindings, resume=resume, limits=limits)
        self._topology.__class__ = _Newest


class _Newest(Topology):
    @property
    def revision(self) -> int:
        return max(self._revisions.values(), default=-1)


@pytest.mark.parametrize(
    ("open_session", "suits", "offence"),
    [
        pytest.param(Careless, is_any, Violation, id="loses a delivery"),
        pytest.param(Forgetful, is_any, Violation, id="begins anew instead of resuming"),
        pytest.param(Hintless, is_any, Torn, id="takes no hints"),
        pytest.param(Hasty, is_any, Violation, id="takes peeks for checkpoints"),
        pytest.param(
            Eager,
            reads_several_together,
            Torn,
            id="reads each collection as far as that one is known",
        ),
    ],
)
def test_a_session_is_found_out_that(
    open_session: OpenSession, suits: Callable[[Schedule], bool], offence: type[Violation]
) -> None:
    _, violation = found_by(open_session, suits)
    assert isinstance(violation, offence)


# ------------------------------------------------------------------------------------------ rules


def _reports_commits_only(told: Callable[[Read], JournalFrontier]) -> Callable[[Read], Any]:
    def report(read: Read) -> JournalFrontier:
        found = told(read)
        return structs.replace(found, producers=tuple(e for e in found.producers if not e.is_open))

    return report


def _never_replays(_real: object) -> Callable[..., Any]:
    def replay(
        self: ReadFold, producer: Producer, state: ProducerState, _end: int
    ) -> ProducerState:
        self.states[producer] = structs.replace(state, gapped=False)
        return self.states[producer]

    return replay


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        pytest.param(Read, "report", _reports_commits_only, id="open spans are not reported"),
        pytest.param(ReadFold, "_replay", _never_replays, id="gapped spans are not replayed"),
        pytest.param(
            ReadFold,
            "_deliver_span",
            lambda real: (
                lambda self, producer, commit, level: (
                    real(self, producer, commit, level) if commit % 7 else None
                )
            ),
            id="some spans are not delivered",
        ),
    ],
)
def test_a_rule_is_missed_if(
    where: object, name: str, wrong: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, wrong(getattr(where, name)))
    found_by(suits=crashes_often)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param(
            "take",
            lambda real: lambda self, record, level: real(self, record),
            id="by clock",
        ),
        pytest.param(
            "_announced_level",
            lambda _real: lambda _self, _ack: None,
            id="by the ACK of each journal",
        ),
    ],
)
def test_an_order_is_found_out_that_is(
    name: str, wrong: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadFold, name, wrong(getattr(ReadFold, name)))
    _, violation = found_by()
    assert isinstance(violation, Disordered)


def test_repetitions_are_missed_if_clocks_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_seen(_state: ProducerState) -> Clock:
        return Clock(0)

    monkeypatch.setattr("penstock.shuffle.reads.seen_through", nothing_seen)
    found_by()


def test_a_delivery_that_the_outbox_drops_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Outbox.put

    def dropping(self: Outbox, deliveries: Sequence[Delivery]) -> None:
        put(self, [each for each in deliveries if each.commit % 5])

    monkeypatch.setattr(Outbox, "put", dropping)
    found_by()


# -------------------------------------------------------------------------------------- shrinking


def test_a_failing_schedule_shrinks_to_a_story() -> None:
    what, violation = found_by(Hintless)
    least = shrink(what, Hintless)
    assert type(failure(least, Hintless)) is type(violation)
    assert 0 < len(least.steps) < len(what.steps)
    for at in range(len(least.steps)):
        fewer = replace(least, steps=least.steps[:at] + least.steps[at + 1 :])
        assert type(failure(fewer, Hintless)) is not type(violation)
    story = tell(least, Hintless)
    assert story.splitlines()[-1].startswith("Torn: cohort")
    assert "ACK P" in story
    run(what)  # which is the session's fault, and not the schedule's
