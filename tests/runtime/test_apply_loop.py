from __future__ import annotations

import pytest

from penstock.errors import PenstockError
from penstock.model.json_order import Json
from penstock.runtime.apply_loop import (
    Action,
    Apply,
    ApplyLoop,
    Converged,
    NotConverged,
    begin,
    step,
)
from penstock.runtime.connector.common import Applied
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import OutOfTurn, Persisted, PersistRecord, RecordKind
from penstock.runtime.recovery import Persist

OLD, NEW = b'{"v":1}', b'{"v":2}'


def run(
    *answers: Patches, last_applied: bytes | None = OLD, state: Json = None
) -> tuple[ApplyLoop, list[Action]]:
    """A loop whose connector gives these answers, and whose log takes every record."""
    loop, action = begin(spec=NEW, last_applied=last_applied, state=state or {}, seq_no=4)
    told, actions = iter(answers), []
    following: Action | None = action
    while following is not None:
        actions.append(following)
        match following:
            case Apply():
                event = Applied(description="did it", patches=next(told))
                loop, following = step(loop, event)
            case PersistRecord(seq_no=seq_no):
                loop, following = step(loop, Persisted(seq_no))
    return loop, actions


def record(seq_no: int, persist: Persist) -> PersistRecord:
    return PersistRecord(seq_no=seq_no, kind=RecordKind.APPLY, record=persist)


def test_nothing_is_persisted_if_the_spec_is_the_same_t7() -> None:
    loop, actions = run((), last_applied=NEW, state={"x": 1})
    assert actions == [Apply(last_applied=NEW, state={"x": 1})]
    assert loop == Converged(state={"x": 1}, seq_no=4)


@pytest.mark.parametrize("last_applied", [OLD, None], ids=["changed", "first time"])
def test_a_new_spec_is_persisted_alone_t8(last_applied: bytes | None) -> None:
    loop, actions = run((), last_applied=last_applied)
    assert actions == [
        Apply(last_applied=last_applied, state={}),
        record(5, Persist(last_applied=NEW)),
    ]
    assert loop == Converged(state={}, seq_no=5)


def test_patches_are_durable_before_the_next_call_and_the_spec_comes_last_t9() -> None:
    loop, actions = run(({"a": 1},), (None, {"b": 2}), ())
    assert actions == [
        Apply(last_applied=OLD, state={}),
        record(5, Persist(patches=({"a": 1},))),
        Apply(last_applied=OLD, state={"a": 1}),
        record(6, Persist(patches=(None, {"b": 2}))),
        Apply(last_applied=OLD, state={"b": 2}),
        record(7, Persist(last_applied=NEW)),
    ]
    assert loop == Converged(state={"b": 2}, seq_no=7)


def test_patches_of_an_unchanged_spec_are_persisted_and_the_spec_is_not() -> None:
    _, actions = run(({"a": 1},), (), last_applied=NEW)
    assert [type(action) for action in actions] == [Apply, PersistRecord, Apply]


def test_a_connector_that_never_has_enough_fails_after_the_third_call_t10() -> None:
    with pytest.raises(NotConverged, match="apply did not converge"):
        run(({"a": 1},), ({"a": 2},), ({"a": 3},), ({"a": 4},))


def applying() -> ApplyLoop:
    return begin(spec=NEW, last_applied=OLD, state={})[0]


def persisting() -> ApplyLoop:
    return step(applying(), Applied(description=""))[0]


@pytest.mark.parametrize(
    ("loop", "event", "expected"),
    [
        pytest.param(applying(), Persisted(1), "Applied", id="a record, for an answer"),
        pytest.param(applying(), None, "Applied", id="the end, for an answer"),
        pytest.param(persisting(), Persisted(2), "Persisted of record 1", id="another record"),
        pytest.param(
            persisting(), Applied(description=""), "Persisted of record 1", id="a second answer"
        ),
        pytest.param(persisting(), None, "Persisted of record 1", id="the end, for a record"),
        pytest.param(
            Converged(state={}, seq_no=1), Persisted(1), "nothing", id="anything, at the end"
        ),
    ],
)
def test_what_comes_out_of_turn_is_an_error_that_says_what_was_expected_t11(
    loop: ApplyLoop, event: Applied | Persisted | None, expected: str
) -> None:
    with pytest.raises(OutOfTurn) as raised:
        step(loop, event)
    assert isinstance(raised.value, PenstockError)
    assert expected in (raised.value.why or "")
