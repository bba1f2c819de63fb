from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consensus.backend import CommitOutcome, Traits, Unit
from penstock.consensus.coalesce import GroupCommit, GroupCommitOptions, plan_batch
from penstock.consensus.memory import MemoryBackend
from penstock.consensus.store import (
    CasResult,
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
)

V = VersionedData
COMMITTED = CasResult.COMMITTED
MISMATCH = CasResult.EXPECTATION_MISMATCH


def unit(keys: str, seqno: int = 0, size: int = 1) -> Unit:
    return tuple((key, V(seqno, bytes(size))) for key in keys)


@pytest.mark.parametrize(
    ("waiting", "busy", "want"),
    [
        pytest.param(["a", "b", "c"], "", [0, 1, 2], id="everything that waits"),
        pytest.param(["a", "a", "a"], "", [0, 1, 2], id="a chain of one key"),
        pytest.param(["a", "b", "a"], "a", [1], id="a busy key waits, others do not"),
        pytest.param(["ab", "b", "c"], "a", [2], id="a unit behind a waiting one is not overtaken"),
        pytest.param(["a", "b", "c", "d", "e"], "", [0, 1, 2, 3], id="at most four elements"),
        pytest.param(["abc", "de", "f"], "", [0], id="a unit is not split, nor overtaken"),
        pytest.param(["abcdef", "g"], "", [0], id="a unit above the limit goes alone"),
        pytest.param(["a"], "a", [], id="nothing may go"),
        pytest.param([], "", [], id="nothing waits"),
    ],
)
def test_which_units_share_a_transaction(waiting: list[str], busy: str, want: list[int]) -> None:
    options = GroupCommitOptions(elements_max=4)
    assert plan_batch([unit(keys) for keys in waiting], set(busy), options) == want


def test_bytes_limit_a_batch_and_a_large_unit_goes_alone() -> None:
    options = GroupCommitOptions(bytes_max=10)
    waiting = [unit("a", size=6), unit("b", size=4), unit("c", size=1)]
    assert plan_batch(waiting, set(), options) == [0, 1]
    assert plan_batch([unit("a", size=99), unit("b")], set(), options) == [0]


@given(
    st.lists(st.text("abcd", min_size=1, max_size=3).map(lambda s: "".join(sorted(set(s))))),
    st.sets(st.sampled_from("abcd")),
    st.integers(0, 6),
)
def test_no_unit_overtakes_another_of_the_same_key(
    waiting: list[str], busy: set[str], elements_max: int
) -> None:
    options = GroupCommitOptions(elements_max=elements_max)
    chosen = plan_batch([unit(keys) for keys in waiting], busy, options)
    for position in chosen:
        assert not busy & set(waiting[position])
        for earlier in range(position):
            if set(waiting[earlier]) & set(waiting[position]):
                assert earlier in chosen
    if elements_max == 0:
        assert len(chosen) <= 1
    free = [i for i, keys in enumerate(waiting) if not busy & set(keys)]
    assert bool(chosen) == any(
        not any(set(waiting[e]) & set(waiting[i]) for e in range(i)) for i in free
    )


class ScriptedBackend(MemoryBackend):
    """A memory store that records transactions, and waits and fails as a test demands."""

    traits = Traits(name="scripted", cache_heads=False, foreign_poll_s=1, commit_concurrency=1)

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Callable[[Sequence[Unit]], BaseException | None] = lambda units: None

    async def commit(self, units: Sequence[Unit]) -> CommitOutcome:
        self.batches.append([key for unit in units for key, _ in unit])
        await self.gate.wait()
        if error := self.fault(units):
            raise error
        return await super().commit(units)


async def test_a_lone_caller_does_not_wait_and_a_crowd_shares() -> None:
    backend = ScriptedBackend()
    group = GroupCommit(backend)
    assert await group.commit(unit("a")) is COMMITTED
    assert backend.batches == [["a"]]
    backend.gate.clear()
    first = asyncio.create_task(group.commit(unit("b")))
    await asyncio.sleep(0.01)
    rest = [asyncio.create_task(group.commit(unit(key))) for key in "cdefg"]
    await asyncio.sleep(0.01)
    assert group.queue_depth == 5
    backend.gate.set()
    assert await asyncio.gather(first, *rest) == [COMMITTED] * 6
    assert backend.batches == [["a"], ["b"], list("cdefg")]


async def test_off_means_one_transaction_each_in_order() -> None:
    backend = ScriptedBackend()
    group = GroupCommit(backend, GroupCommitOptions(elements_max=0))
    outcomes = await group.commit_each([unit("a", n) for n in range(4)])
    assert outcomes == [COMMITTED] * 4
    assert backend.batches == [["a"]] * 4


async def test_a_poisonous_unit_fails_alone() -> None:
    backend = ScriptedBackend()
    backend.fault = lambda units: (
        Determinate(ErrorKind.INTERNAL, "poison")
        if any(key == "x" for unit in units for key, _ in unit)
        else None
    )
    outcomes = await GroupCommit(backend).commit_each([unit(key) for key in "abxcd"])
    assert [o is COMMITTED for o in outcomes] == [True, True, False, True, True]
    assert isinstance(outcomes[2], Determinate)
    assert backend.batches == [list("abxcd"), *[[key] for key in "abxcd"]]


async def test_a_chain_survives_isolation_in_order() -> None:
    backend = ScriptedBackend()
    backend.fault = lambda units: (
        Determinate(ErrorKind.CONFLICT, "again") if len(units) > 1 else None
    )
    outcomes = await GroupCommit(backend).commit_each([unit("a", n) for n in (0, 2, 1, 1)])
    assert outcomes == [COMMITTED, MISMATCH, COMMITTED, MISMATCH]


@pytest.mark.parametrize("kind", [ErrorKind.UNAVAILABLE, ErrorKind.UNDEFINED_TABLE])
async def test_a_store_that_is_away_is_asked_once_for_all(kind: ErrorKind) -> None:
    backend = ScriptedBackend()
    backend.fault = lambda units: Determinate(kind, "away")
    outcomes = await GroupCommit(backend).commit_each([unit(key) for key in "abc"])
    assert [isinstance(o, Determinate) and o.kind is kind for o in outcomes] == [True] * 3
    assert len(backend.batches) == 1


async def test_a_store_that_goes_away_during_isolation_is_not_asked_for_the_rest() -> None:
    backend = ScriptedBackend()
    kinds = iter([ErrorKind.CONFLICT, ErrorKind.UNAVAILABLE])
    backend.fault = lambda units: Determinate(next(kinds), "away")
    outcomes = await GroupCommit(backend).commit_each([unit(key) for key in "abc"])
    assert [isinstance(o, Determinate) and o.kind for o in outcomes] == [ErrorKind.UNAVAILABLE] * 3
    assert backend.batches == [["a", "b", "c"], ["a"]]


async def test_a_backend_that_breaks_leaves_the_outcome_open_and_the_queue_working() -> None:
    backend = ScriptedBackend()
    faults = iter([RuntimeError("bug")])
    backend.fault = lambda units: next(faults, None)
    group = GroupCommit(backend)
    outcomes = await group.commit_each([unit("a"), unit("b")])
    assert all(isinstance(o, Indeterminate) and "bug" in o.message for o in outcomes)
    assert await group.commit(unit("a")) is COMMITTED


async def test_cancelling_a_caller_does_not_cancel_its_append() -> None:
    backend = ScriptedBackend()
    backend.gate.clear()
    group = GroupCommit(backend)
    callers = [asyncio.create_task(group.commit(unit(key))) for key in "ab"]
    await asyncio.sleep(0.01)
    late = asyncio.create_task(group.commit(unit("a", 1)))
    await asyncio.sleep(0.01)
    for task in (*callers, late):
        task.cancel()
    await asyncio.wait([*callers, late])
    backend.gate.set()
    await group.close()
    assert await backend.heads(["a", "b"]) == {"a": 1, "b": 0}


async def test_closing_finishes_waiting_units_and_refuses_new_ones() -> None:
    backend = ScriptedBackend()
    backend.gate.clear()
    group = GroupCommit(backend)
    running = asyncio.create_task(group.commit(unit("a")))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(group.commit(unit("a", 1)))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(group.close())
    await asyncio.sleep(0.01)
    with pytest.raises(Determinate) as caught:
        await group.commit(unit("b"))
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    backend.gate.set()
    await closing
    assert await asyncio.gather(running, waiting) == [COMMITTED, COMMITTED]


async def test_transactions_at_once_never_share_a_key() -> None:
    class Watched(ScriptedBackend):
        traits = Traits(name="watched", cache_heads=False, foreign_poll_s=1, commit_concurrency=3)

        def __init__(self) -> None:
            super().__init__()
            self.running: set[str] = set()
            self.most = 0

        async def commit(self, units: Sequence[Unit]) -> CommitOutcome:
            keys = {key for unit in units for key, _ in unit}
            assert not keys & self.running
            self.running |= keys
            self.most = max(self.most, len(self.running))
            for _ in range(3):
                await asyncio.sleep(0)
            self.running -= keys
            return await super().commit(units)

    backend = Watched()
    group = GroupCommit(backend, GroupCommitOptions(elements_max=2))

    async def write(key: str) -> None:
        for n in range(20):
            assert await group.commit(unit(key, n)) is COMMITTED

    await asyncio.gather(*[write(key) for key in "abcdefgh"])
    assert backend.most > 2


@pytest.mark.parametrize("options", [{"elements_max": -1}, {"bytes_max": 0}, {"concurrency": 0}])
def test_options_that_cannot_work_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot work"):
        GroupCommitOptions(**options)  # type: ignore[arg-type]
