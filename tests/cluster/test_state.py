"""The machine of a cluster's log: laws, then stories."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import state as cluster_state
from penstock.cluster.state import (
    Change,
    Claim,
    ClusterMachine,
    ClusterState,
    Command,
    CommandOutcome,
    Compact,
    Diff,
    Open,
    Put,
    Reconcile,
    object_id,
    reconcile,
    step,
)
from penstock.model.domain import Domain
from support.strategies_cluster import batches, commands, diffs, domains, histories

MACHINE = ClusterMachine()


def fold(history: Sequence[Diff], state: ClusterState | None = None) -> ClusterState:
    return functools.reduce(lambda s, d: step(s, d)[0], history, state or ClusterState())


def contents(state: ClusterState, domain: Domain) -> dict[str, str]:
    return {each.id: each.digest for each in state.objects_of(domain)}


def capture(name: str, digest: str = "1") -> Put:
    return Put(kind="capture", name=name, digest=digest)


def opened(domain: Domain = Domain.STORAGE) -> Open:
    return Open(domain=domain, nonce=b"n", holder="me")


OfDomain: TypeAlias = Open | Reconcile | Change

# ----------------------------------------------------------------------------------------- laws


@given(histories)
def test_whoever_reads_the_log_has_the_same_state_and_ids(history: list[Diff]) -> None:
    """Read diff by diff, or from a rollup in the middle: the encodings change nothing."""
    whole = fold(history)
    for cut in range(len(history) + 1):
        rolled_up = MACHINE.decode_state(MACHINE.encode_state(fold(history[:cut])), 1, 0)
        rest = [MACHINE.decode_diff(MACHINE.encode_diff(diff), 1) for diff in history[cut:]]
        after = fold(rest, rolled_up)
        assert after == whole
        assert list(after.dropped) == list(whole.dropped)  # the order in which they are forgotten


@given(histories)
def test_ids_are_given_once_and_only_grow(history: list[Diff]) -> None:
    state, given_ids = ClusterState(), set[int]()
    for diff in history:
        before, (state, _) = state, step(state, diff)
        assert state.next_id >= before.next_id
        known = {each.dataflow_id for each in before.objects.values()}
        new = {each.dataflow_id for each in state.objects.values()} - known
        assert not new & given_ids
        assert all(before.next_id <= each < state.next_id for each in new)
        given_ids |= new
        running = [each.dataflow_id for each in state.objects.values()]
        assert len(set(running)) == len(running)  # across both domains
        assert not state.objects.keys() & state.dropped.keys()


@given(histories, diffs)
def test_what_an_old_session_says_has_no_effect(history: list[Diff], diff: OfDomain) -> None:
    state = fold(history)
    after, outcomes = step(state, diff)
    if not isinstance(diff, Open) and diff.epoch != state.epoch_of(diff.domain):
        assert after == state
        assert set(outcomes) <= {CommandOutcome.FENCED}
    else:
        assert CommandOutcome.FENCED not in outcomes


@given(histories, diffs)
def test_a_domain_changes_nothing_of_the_other(history: list[Diff], diff: OfDomain) -> None:
    state = fold(history)
    after, _ = step(state, diff)
    other = next(domain for domain in Domain if domain is not diff.domain)
    assert after.objects_of(other) == state.objects_of(other)
    assert after.sessions.get(other) == state.sessions.get(other)


@given(histories)
def test_a_claim_has_a_number_of_its_own_and_changes_nothing_else(history: list[Diff]) -> None:
    state = fold(history)
    after, outcomes = step(state, Claim(holder="newest"))
    assert (after.claim, after.claimed_by, outcomes) == (state.claim + 1, "newest", ())
    undone = msgspec.structs.replace(after, claim=state.claim, claimed_by=state.claimed_by)
    assert undone == state
    assert state.claim == sum(isinstance(diff, Claim) for diff in history)


@given(st.lists(commands), st.lists(commands), st.randoms())
def test_the_order_between_domains_decides_on_ids_only(
    storage: list[Command], compute: list[Command], random: object
) -> None:
    """Two sessions, interleaved in any way: each keeps its order, and gets what it said."""
    opens = [opened(domain) for domain in Domain]
    said = {
        Domain.STORAGE: [Change(domain=Domain.STORAGE, epoch=1, commands=(c,)) for c in storage],
        Domain.COMPUTE: [Change(domain=Domain.COMPUTE, epoch=1, commands=(c,)) for c in compute],
    }
    order = [Domain.STORAGE] * len(storage) + [Domain.COMPUTE] * len(compute)
    random.shuffle(order)  # type: ignore[attr-defined]
    queues = {domain: iter(diffs) for domain, diffs in said.items()}
    mixed = fold([*opens, *(next(queues[domain]) for domain in order)])
    for domain in Domain:
        alone = fold([*opens, *said[domain]])
        assert contents(mixed, domain) == contents(alone, domain)


@given(histories, domains, batches)
def test_reconciling_again_changes_nothing(
    history: list[Diff], domain: Domain, batch: tuple[Command, ...]
) -> None:
    once, _ = reconcile(fold(history), domain, batch)
    assert reconcile(once, domain, batch)[0] == once


@given(histories, domains, batches)
def test_reconciling_equals_starting_over(
    history: list[Diff], domain: Domain, batch: tuple[Command, ...]
) -> None:
    state = fold(history)
    after, _ = reconcile(state, domain, batch)
    blank, _ = reconcile(ClusterState(), domain, batch)
    assert contents(after, domain) == contents(blank, domain)
    for each in after.objects_of(domain):
        before = state.objects.get(each.id)
        kept = before is not None and before.digest == each.digest
        assert kept == (before is not None and before.dataflow_id == each.dataflow_id)


@given(histories, domains)
def test_a_batch_of_what_runs_keeps_every_id(history: list[Diff], domain: Domain) -> None:
    state = fold(history)
    batch = [
        Put(kind=each.kind, name=each.name, digest=each.digest) for each in state.objects_of(domain)
    ]
    after, outcomes = reconcile(state, domain, batch)
    assert after == state
    assert set(outcomes) <= {CommandOutcome.KEPT}


@given(histories, domains, batches)
def test_every_command_has_an_outcome(
    history: list[Diff], domain: Domain, batch: tuple[Command, ...]
) -> None:
    state = fold(history)
    assert len(reconcile(state, domain, batch)[1]) == len(batch)
    diff = Change(domain=domain, epoch=state.epoch_of(domain), commands=batch)
    after, outcomes = step(state, diff)
    assert (after == state) == (CommandOutcome.APPLIED not in outcomes)


# -------------------------------------------------------------------------------------- stories


def test_a_restart_gives_no_id_and_an_alteration_gives_one() -> None:
    state = fold([opened(), Change(domain=Domain.STORAGE, epoch=1, commands=(capture("x"),))])
    assert state.objects["capture/x"].dataflow_id == 1
    again = fold(
        [opened(), Reconcile(domain=Domain.STORAGE, epoch=2, batch=(capture("x"),))], state
    )
    assert again.objects == state.objects
    altered = Change(domain=Domain.STORAGE, epoch=2, commands=(capture("x", "2"),))
    assert fold([altered], again).objects["capture/x"].dataflow_id == 2


def test_a_batch_that_creates_and_drops_runs_nothing() -> None:
    drop = Compact(id=object_id("capture", "x"))
    state, outcomes = reconcile(ClusterState(), Domain.STORAGE, [capture("x"), drop])
    assert not state.objects
    assert state.next_id == 1
    assert outcomes == (CommandOutcome.DROPPED, CommandOutcome.UNKNOWN)
    late = step(state, Change(domain=Domain.STORAGE, epoch=0, commands=(drop,)))
    assert late == (state, (CommandOutcome.DROPPED,))


@pytest.mark.parametrize("since", [None, 7])
def test_a_late_command_about_a_dropped_object_is_told_from_one_about_nothing(
    since: int | None,
) -> None:
    """Dropped by name, dropped by a batch that does not mention it, dropped twice, never there."""
    session: list[Diff] = [
        opened(),
        Change(domain=Domain.STORAGE, epoch=1, commands=(capture("x"),)),
    ]
    by_name = Change(domain=Domain.STORAGE, epoch=1, commands=(Compact(id="capture/x"),))
    by_batch = Reconcile(domain=Domain.STORAGE, epoch=1, batch=())
    for drop in (by_name, by_batch):
        state = fold([*session, drop])
        late = tuple(Compact(id=f"capture/{name}", since=since) for name in "xy")
        after, outcomes = step(state, Change(domain=Domain.STORAGE, epoch=1, commands=late))
        assert after == state
        assert outcomes == (CommandOutcome.DROPPED, CommandOutcome.UNKNOWN)


def test_since_only_rises_and_outlives_an_alteration() -> None:
    x = "capture/x"
    said = (
        capture("x"), Compact(id=x, since=5), Compact(id=x, since=4), Compact(id=x, since=5),
        capture("x", "2"),
    )  # fmt: skip
    state, outcomes = step(fold([opened()]), Change(domain=Domain.STORAGE, epoch=1, commands=said))
    assert state.objects[x].since == 5
    assert [each.name for each in outcomes] == [
        "APPLIED", "APPLIED", "REGRESSION", "KEPT", "APPLIED",
    ]  # fmt: skip


def test_tasks_of_two_kinds_may_share_a_name_and_not_a_domain() -> None:
    derived = Put(kind="derivation", name="x", digest="1")
    state = fold(
        [opened(), Change(domain=Domain.STORAGE, epoch=1, commands=(capture("x"), derived))]
    )
    assert list(state.objects) == ["capture/x"]
    foreign = Change(domain=Domain.COMPUTE, epoch=0, commands=(Compact(id="capture/x"),))
    assert step(state, foreign) == (state, (CommandOutcome.FOREIGN,))


def test_dropped_objects_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_state, "DROPPED_MAX", 2)
    put = tuple(capture(name) for name in "xyz")
    drop = tuple(Compact(id=f"capture/{name}") for name in "xyz")
    state = fold([opened(), Change(domain=Domain.STORAGE, epoch=1, commands=(*put, *drop))])
    assert list(state.dropped) == ["capture/y", "capture/z"]
