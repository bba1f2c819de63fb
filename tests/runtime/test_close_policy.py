from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import duration
from penstock.runtime.close_policy import UNBOUNDED, Band, ClosePolicy, Decision, Inputs

NARROW = Band(min=1, max=5)
POLICY = ClosePolicy(
    open_age=NARROW,
    last_close_age=NARROW,
    combiner_bytes=NARROW,
    read_bytes=NARROW,
    read_docs=NARROW,
)
OPEN = ClosePolicy(combiner_bytes=Band())
MID = Inputs(open_age=3, last_close_age=3, combiner_bytes=3, read_bytes=3, read_docs=3)
NOTHING = Inputs(open_age=0, last_close_age=0, combiner_bytes=0, read_bytes=0, read_docs=0)

EITHER, EXTEND, CLOSE, NEITHER = (True, True), (True, False), (False, True), (False, False)


def nudged(base: Inputs = MID, **change: int) -> Inputs:
    return replace(base, **change)


def allowed(decision: Decision) -> tuple[bool, bool]:
    return decision.may_extend, decision.may_close


@pytest.mark.parametrize(
    ("inputs", "policy", "want"),
    [
        pytest.param(MID, POLICY, EITHER, id="1 in every band: extend or close"),
        pytest.param(NOTHING, POLICY, EXTEND, id="2 all measures 0: extend"),
        pytest.param(nudged(combiner_bytes=10), POLICY, CLOSE, id="3 combiner full: close"),
        pytest.param(
            nudged(combiner_bytes=10, open_age=0), POLICY, CLOSE, id="4 full, too young: close"
        ),
        pytest.param(
            nudged(combiner_bytes=10, open_age=0, tail_done=False),
            POLICY,
            NEITHER,
            id="5 full, tail busy: wait",
        ),
        pytest.param(nudged(read_bytes=10, open_age=0), POLICY, CLOSE, id="6 bytes full: close"),
        pytest.param(nudged(read_docs=10, open_age=0), POLICY, CLOSE, id="7 docs full: close"),
        pytest.param(nudged(read_docs=0), POLICY, EXTEND, id="8 too few docs: extend"),
        pytest.param(
            nudged(read_docs=0, open_age=5), POLICY, CLOSE, id="9 too few docs, too old: close"
        ),
        pytest.param(nudged(open_age=1), POLICY, EITHER, id="10 exactly the minimum age: either"),
        pytest.param(nudged(open_age=5), POLICY, CLOSE, id="11 exactly the maximum age: close"),
        pytest.param(nudged(last_close_age=0), POLICY, EXTEND, id="12 just closed one: extend"),
        pytest.param(
            nudged(NOTHING, close_requested=True), POLICY, CLOSE, id="13 requested, all 0: close"
        ),
        pytest.param(
            nudged(close_requested=True, tail_done=False),
            POLICY,
            EXTEND,
            id="14 requested, tail busy: extend",
        ),
        pytest.param(
            nudged(close_requested=True, unresolved_hints=True),
            POLICY,
            EXTEND,
            id="15 requested, hints unresolved: extend",
        ),
        pytest.param(nudged(replay=True, open_age=0), POLICY, CLOSE, id="16 replay, young: close"),
        pytest.param(
            nudged(replay=True, unresolved_hints=True),
            POLICY,
            EXTEND,
            id="17 replay, hints unresolved: extend",
        ),
        pytest.param(nudged(stopping=True), POLICY, CLOSE, id="18 stopping: close"),
        pytest.param(
            nudged(stopping=True, tail_done=False),
            POLICY,
            EXTEND,
            id="19 stopping, tail busy: extend",
        ),
        pytest.param(nudged(unresolved_hints=True), POLICY, EXTEND, id="20 unresolved: extend"),
        pytest.param(
            nudged(unresolved_hints=True, combiner_bytes=10),
            POLICY,
            EXTEND,
            id="21 unresolved and full: extend",
        ),
        pytest.param(NOTHING, OPEN, EITHER, id="22 no bounds, all measures 0: either"),
        pytest.param(nudged(sealed=True), POLICY, CLOSE, id="23 sealed: close"),
        pytest.param(
            nudged(sealed=True, tail_done=False), POLICY, NEITHER, id="24 sealed, tail busy: wait"
        ),
    ],
)
def test_close_policy(inputs: Inputs, policy: ClosePolicy, want: tuple[bool, bool]) -> None:
    assert allowed(policy.decide(inputs)) == want


def test_a_transaction_with_unresolved_hints_is_never_sealed() -> None:
    with pytest.raises(ValueError, match="never sealed"):
        nudged(sealed=True, unresolved_hints=True)


@pytest.mark.parametrize(
    ("open_age", "last_close_age", "want"),
    [
        pytest.param(0, 0, 1, id="to the minimum"),
        pytest.param(3, 3, 2, id="to the maximum"),
        pytest.param(1, 1, 4, id="exactly at a bound: to the next one"),
        pytest.param(5, 5, None, id="past all bounds: no timer"),
        pytest.param(5, 4, 1, id="the nearest of two"),
    ],
)
def test_a_timer_is_set_for_the_next_bound_of_time(
    open_age: int, last_close_age: int, want: int | None
) -> None:
    inputs = nudged(open_age=open_age, last_close_age=last_close_age)
    assert POLICY.decide(inputs).wake_after == want


def test_nothing_is_waited_for_where_there_is_no_bound() -> None:
    assert OPEN.decide(MID).wake_after is None


def test_a_task_says_how_long_its_transactions_take() -> None:
    policy = ClosePolicy.between(2, 60)
    assert policy.open_age == Band(min=duration(2), max=duration(60))
    assert policy.last_close_age == Band()


@pytest.mark.parametrize("bounds", [(-1, 5), (6, 5)])
def test_a_band_holds_something(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        Band(min=bounds[0], max=bounds[1])


measures = st.integers(0, 6)
bands = st.builds(
    lambda low, extra: Band(min=low, max=UNBOUNDED if extra == 6 else low + extra),
    st.integers(0, 4),
    measures,
)
policies = st.builds(
    ClosePolicy,
    open_age=bands,
    last_close_age=bands,
    combiner_bytes=bands,
    read_bytes=bands,
    read_docs=bands,
)
inputs_of_any_kind = st.builds(
    Inputs,
    open_age=measures,
    last_close_age=measures,
    combiner_bytes=measures,
    read_bytes=measures,
    read_docs=measures,
    unresolved_hints=st.just(False),
    replay=st.booleans(),
    sealed=st.booleans(),
    tail_done=st.booleans(),
    close_requested=st.booleans(),
    stopping=st.booleans(),
) | st.builds(
    Inputs,
    open_age=measures,
    last_close_age=measures,
    combiner_bytes=measures,
    read_bytes=measures,
    read_docs=measures,
    unresolved_hints=st.just(True),
    replay=st.booleans(),
    tail_done=st.booleans(),
    close_requested=st.booleans(),
    stopping=st.booleans(),
)


@given(policies, inputs_of_any_kind)
def test_the_strong_rules_hold_whatever_the_bands(policy: ClosePolicy, inputs: Inputs) -> None:
    decision = policy.decide(inputs)
    if inputs.unresolved_hints:
        assert allowed(decision) == EXTEND
    if not inputs.tail_done:
        assert not decision.may_close
    if inputs.close_requested and inputs.tail_done and not inputs.unresolved_hints:
        assert allowed(decision) == CLOSE
    assert decision.wake_after is None or decision.wake_after > 0


@given(policies, inputs_of_any_kind)
def test_a_transaction_can_always_do_something_or_has_something_to_wait_for(
    policy: ClosePolicy, inputs: Inputs
) -> None:
    decision = policy.decide(inputs)
    assert (
        decision.may_extend
        or decision.may_close
        or not inputs.tail_done
        or decision.wake_after is not None
        or inputs.sealed  # only a ripe transaction is sealed
    )
