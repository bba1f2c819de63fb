from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from penstock.errors import UserError
from penstock.runtime.connector.materialize import Pattern
from penstock.runtime.materialize.task import JOBS_MAX, ApplyMode, LeaderBinding, LeaderTask, Plan

LEADER, SPARK = ApplyMode.LEADER, ApplyMode.SPARK
REFUSED = None

TABLE: dict[tuple[Pattern, bool, ApplyMode], tuple[Plan, Plan] | None] = {
    # pattern, flush barrier, applies by: plan if the tail is done, plan while it is busy
    (Pattern.ENDPOINT, False, LEADER): (Plan.FUSED, Plan.FUSED),  # its tail is short
    (Pattern.ENDPOINT, False, SPARK): (Plan.FUSED, Plan.FUSED),
    (Pattern.ENDPOINT, True, LEADER): (Plan.BARRIER, Plan.BARRIER),
    (Pattern.ENDPOINT, True, SPARK): REFUSED,
    (Pattern.APPLY, False, LEADER): (Plan.FUSED, Plan.OVERLAP),
    (Pattern.APPLY, False, SPARK): (Plan.FUSED, Plan.FUSED),
    (Pattern.APPLY, True, LEADER): (Plan.BARRIER, Plan.BARRIER),
    (Pattern.APPLY, True, SPARK): REFUSED,
    (Pattern.DIRECT, False, LEADER): (Plan.BARRIER, Plan.BARRIER),
    (Pattern.DIRECT, False, SPARK): REFUSED,
    (Pattern.DIRECT, True, LEADER): (Plan.BARRIER, Plan.BARRIER),
    (Pattern.DIRECT, True, SPARK): REFUSED,
}


def task(pattern: Pattern, barrier: bool, mode: ApplyMode) -> LeaderTask:
    return LeaderTask(
        name="acme/view",
        bindings=(LeaderBinding(collection="acme/orders", state_key="orders"),),
        pattern=pattern,
        flush_barrier=barrier,
        apply_mode=mode,
    )


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(itertools.product(Pattern, (False, True), ApplyMode))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].name}-{row[1]}-{row[2].name}")
def test_plans_follow_from_what_a_connector_can_do_t50(
    row: tuple[Pattern, bool, ApplyMode],
) -> None:
    want = TABLE[row]
    if want is REFUSED:
        with pytest.raises(UserError, match="three Spark jobs"):
            task(*row)
        return
    planned = task(*row)
    assert (planned.plan(tail_done=True), planned.plan(tail_done=False)) == want
    applies = row[2] is SPARK
    assert all(len(plan.value) + applies <= JOBS_MAX for plan in want)


def test_a_tail_with_webhooks_is_worth_overlapping() -> None:
    calls = replace(task(Pattern.ENDPOINT, False, LEADER), has_triggers=True)
    assert calls.plan(tail_done=True) is Plan.FUSED
    assert calls.plan(tail_done=False) is Plan.OVERLAP


def test_only_a_barrier_stores_after_its_hint() -> None:
    assert [plan.stages for plan in Plan] == [True, True, False]


def test_a_task_has_shards() -> None:
    with pytest.raises(ValueError, match="a shard at least"):
        LeaderTask(name="t", bindings=(), shards=0, pattern=Pattern.APPLY)
