from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consensus.interposed import Crash, Fate, Interposed, memory_store
from consensus.ledger import CounterMachine, Ledger, LedgerMachine, RevisionMachine, author
from penstock.consensus import entries
from penstock.consensus.entries import NewerFormat
from penstock.consensus.replica import MARKS_MAX, Replica, RollupPolicy, compose
from penstock.consensus.statelog import (
    Command,
    Fenced,
    OutcomeForgotten,
    StateLog,
    Superseded,
    append_all,
    follow,
    load,
    newest_diff,
)
from penstock.consensus.store import CasResult, Consensus, Determinate, ErrorKind
from support.unreliable import UnreliableConsensus

Log = StateLog[Ledger, str]
Store = Consensus | Interposed | UnreliableConsensus
MACHINE = LedgerMachine()
OFTEN = RollupPolicy(diffs_min=4, diffs_max=8)


def always(diff: str) -> Callable[[Ledger], str]:
    return lambda _: diff


async def opened(store: Store, key: str = "k") -> Log:
    return await StateLog.open(store, key, MACHINE, policy=OFTEN)


async def led(store: Store, key: str = "k") -> Log:
    return await StateLog.lead(store, key, MACHINE, policy=OFTEN)


async def state_of(store: Store, key: str = "k") -> Ledger:
    return (await load(store, key, MACHINE)).state


# --------------------------------------------------------------------------------------- plainly


async def test_what_is_appended_is_loaded() -> None:
    async with memory_store() as store:
        assert await state_of(store) == ()
        log = await opened(store)
        for n in range(20):
            committed = await log.append(always(f"c{n}"))
            assert committed is not None
            assert (committed.seqno, committed.diff) == (n, f"c{n}")
            assert committed.state == log.state == await state_of(store)
        assert log.state == tuple(f"c{n}" for n in range(20))


async def test_a_loser_decides_again_on_the_new_state() -> None:
    async with memory_store() as store:
        one, two = await opened(store), await opened(store)
        await one.append(always("first"))
        decided_on: list[Ledger] = []

        def decide(state: Ledger) -> str:
            decided_on.append(state)
            return f"after {len(state)}"

        await two.append(decide)
        assert decided_on == [(), ("first",)]
        assert await state_of(store) == ("first", "after 1")


async def test_nothing_to_do_and_refusals_are_answers_about_the_current_state() -> None:
    async with memory_store() as store:
        one, two = await opened(store), await opened(store)
        await one.append(always("x"))
        assert await two.append(lambda state: "y" if state else None) is not None
        assert await one.append(lambda state: None if "y" in state else "z") is None

        def only_if_empty(state: Ledger) -> str:
            if state:
                raise ValueError("not empty")
            return "z"

        with pytest.raises(ValueError, match="not empty"):
            await (await opened(store)).append(only_if_empty)
        assert await state_of(store) == ("x", "y")


async def test_sixteen_writers_lose_nothing() -> None:
    async with memory_store() as store:
        logs = [await opened(store) for _ in range(16)]

        async def write(index: int, log: Log) -> None:
            for n in range(12):
                await log.append(always(f"{index}.{n}"))

        await asyncio.gather(*(write(index, log) for index, log in enumerate(logs)))
        state = await state_of(store)
        assert Counter(state) == Counter(f"{i}.{n}" for i in range(16) for n in range(12))
        for index in range(16):
            mine = [command for command in state if command.startswith(f"{index}.")]
            assert mine == [f"{index}.{n}" for n in range(12)]


# ----------------------------------------------------------------------------------- exactly once


def unreliable(inner: Consensus, seed: int, faults: float = 0.15) -> UnreliableConsensus:
    return UnreliableConsensus(inner, p_happen=1 - faults, p_timeout=faults, p_late=0.5, seed=seed)


_FATES = [Fate.REFUSE, Fate.LOSE_REQUEST, Fate.LOSE_REPLY, Fate.LATE]


@settings(max_examples=settings().max_examples // 2)  # each waits for real
@given(st.integers(0, 2**32), st.sampled_from([0.05, 0.2]), st.booleans())
def test_with_an_unreliable_store_nothing_is_lost_or_doubled(
    seed: int, faults: float, led_by_one: bool
) -> None:
    async def story() -> None:
        async with memory_store() as inner:
            store = unreliable(inner, seed, faults)
            writers = [await led(store)] if led_by_one else [await opened(store) for _ in range(3)]

            async def write(index: int, log: Log) -> None:
                for n in range(5):
                    await log.append(always(f"{index}.{n}"))

            await asyncio.gather(*(write(index, log) for index, log in enumerate(writers)))
            await store.settle()
            wanted = Counter(f"{i}.{n}" for i in range(len(writers)) for n in range(5))
            assert Counter(await state_of(inner)) == wanted

    asyncio.run(story())


async def count_calls(act: Callable[[Interposed], object]) -> int:
    async with memory_store() as inner:
        store = Interposed(inner)
        await act(store)  # type: ignore[misc]
        return len(store.calls)


@pytest.mark.parametrize("fate", [Fate.CRASH_BEFORE, Fate.CRASH_AFTER, *_FATES])
async def test_any_fate_at_any_call_leaves_a_log_that_goes_on(fate: Fate) -> None:
    """Every store call of a life, take-over, commands and rollups, is the one that goes wrong."""

    async def live(store: Interposed, acknowledged: list[str]) -> None:
        log = await led(store)
        for n in range(10):
            await log.append(always(f"c{n}"))
            acknowledged.append(f"c{n}")

    total = await count_calls(lambda store: live(store, []))
    for target in range(total):
        async with memory_store() as inner:
            store = Interposed(inner, lambda n, _, at=target: fate if n == at else Fate.PASSES)
            acknowledged: list[str] = []
            try:
                await live(store, acknowledged)
            except Crash:
                pass
            else:
                assert fate not in (Fate.CRASH_BEFORE, Fate.CRASH_AFTER)
                assert len(acknowledged) == 10
            await store.settle()
            heir = await led(inner)
            commands = tuple(f"c{n}" for n in range(10))
            assert heir.state in (
                tuple(acknowledged),
                commands[: len(acknowledged) + 1],  # the one whose caller died
            )
            await heir.append(always("heir"))
            assert await state_of(inner) == (*heir.state[:-1], "heir")
            assert await state_of(inner) == heir.state


@pytest.mark.parametrize("led_by_one", [False, True])
async def test_a_command_cancelled_at_any_moment_lands_once_or_never(led_by_one: bool) -> None:
    """And the next command of that writer says so, or commits."""
    outcomes = set()
    for turns in itertools.count():
        async with memory_store() as store:
            log = await led(store) if led_by_one else await opened(store)
            for n in range(3):
                await log.append(always(f"c{n}"))
            running = asyncio.create_task(log.append(always("abandoned")))
            for _ in range(turns):
                await asyncio.sleep(0)
            if running.done():
                break
            running.cancel()
            await asyncio.wait([running])
            try:
                await log.append(always("next"))
            except Superseded:
                outcomes.add("superseded")
                assert await state_of(store) == ("c0", "c1", "c2", "abandoned")
                await log.append(always("next"))
                assert (await state_of(store))[-2:] == ("abandoned", "next")
            else:
                outcomes.add("dead")
                assert await state_of(store) == ("c0", "c1", "c2", "next")
            assert log.state == await state_of(store)
    assert outcomes == {"superseded", "dead"}


def once(fate: Fate) -> Callable[[int, str], Fate]:
    """`fate` for the first compare-and-set from here on."""
    left = iter([fate])
    return lambda _, name: next(left, Fate.PASSES) if name == "cas" else Fate.PASSES


async def test_a_late_entry_of_a_command_given_up_supersedes_the_next() -> None:
    async with memory_store() as inner:
        store = Interposed(inner, once(Fate.LATE))
        log = await opened(store)
        running = asyncio.create_task(log.append(always("abandoned")))
        await store.sent.wait()
        running.cancel()
        await asyncio.wait([running])
        await store.settle()
        with pytest.raises(Superseded, match="given up"):
            await log.append(always("next"))
        assert await state_of(inner) == ("abandoned",)


@pytest.mark.parametrize("fate", [Fate.LOSE_REPLY, Fate.LOSE_REQUEST])
async def test_a_writer_paused_for_ages_still_learns_the_fate_of_its_command(fate: Fate) -> None:
    """Its slot is truncated when it looks; the mark in the rollup is what tells."""
    async with memory_store() as inner:
        store = Interposed(inner, once(fate))
        log = await opened(store)
        store.resume.clear()
        running = asyncio.create_task(log.append(always("mine")))
        await store.sent.wait()
        other = await opened(inner)
        for n in range(60):
            await other.append(always(f"other {n}"))
        assert (await inner.scan("k", 0))[0].seqno > 1, "its slot is gone"
        store.resume.set()
        committed = await running
        assert committed is not None
        assert Counter(await state_of(inner))["mine"] == 1
        assert committed.seqno == (0 if fate is Fate.LOSE_REPLY else 60)


async def test_a_forgotten_outcome_is_not_guessed() -> None:
    async with memory_store() as inner:
        store = Interposed(inner, once(Fate.LOSE_REPLY))
        log = await opened(store)
        store.resume.clear()
        running = asyncio.create_task(log.append(always("mine")))
        await store.sent.wait()
        for n in range(MARKS_MAX):
            await (await opened(inner)).append(always(f"stranger {n}"))
        store.resume.set()
        with pytest.raises(OutcomeForgotten):
            await running
        await log.append(always("again"))
        assert (await state_of(inner))[-1] == "again"


# ---------------------------------------------------------------------------------------- leaders


async def test_a_new_leader_fences_the_old_one_and_has_all_it_committed() -> None:
    async with memory_store() as store:
        old = await led(store)
        await old.append(always("a"))
        new = await led(store)
        assert (old.leads, new.leads) == (1, 2)
        assert new.state == ("a",)
        with pytest.raises(Fenced, match="epoch 2 leads"):
            await old.append(always("zombie"))
        with pytest.raises(Fenced):
            await old.append(always("zombie again"))
        await new.append(always("b"))
        assert await state_of(store) == ("a", "b")


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 2**32))
def test_commits_of_an_epoch_precede_the_next_epoch(seed: int) -> None:
    async def story() -> None:
        rng = random.Random(seed)
        acknowledged: list[str] = []
        async with memory_store() as inner:
            store = unreliable(inner, seed)

            async def reign(name: int) -> None:
                await asyncio.sleep(rng.random() / 100)
                try:
                    log = await StateLog.lead(
                        store, "k", MACHINE, policy=RollupPolicy(diffs_min=1000)
                    )
                    for n in range(5):
                        await log.append(always(f"{name}.{n}"))
                        acknowledged.append(f"{name}.{n}")
                except Fenced:
                    pass

            await asyncio.gather(*(reign(name) for name in range(4)))
            await store.settle()
            log = [entries.decode(e.data, where="") for e in await inner.scan("k", 0)]
            epochs = [entry.epoch for entry in log]
            assert epochs == sorted(epochs)
            assert len({(entry.epoch, entry.writer) for entry in log}) == len(set(epochs))
            state = await state_of(inner)
            assert len(state) == len(set(state))
            assert set(acknowledged) <= set(state)

    asyncio.run(story())


async def test_a_lost_reply_is_not_a_fence() -> None:
    async with memory_store() as inner:
        store = Interposed(inner)
        log = await led(store)
        store.fate = lambda n, name: Fate.LOSE_REPLY if name == "cas" and n < 20 else Fate.PASSES
        await log.append(always("a"))
        await log.append(always("b"))
        assert await state_of(inner) == ("a", "b")


# ----------------------------------------------------------------------------------------- batches


async def test_several_logs_commit_together_under_one_revision() -> None:
    async with memory_store() as store:
        logs = [await opened(store, key) for key in ("b", "a", "c")]
        await (await opened(store, "a")).append(always("before"))

        def decide(key: str) -> Callable[[Ledger], str | None]:
            return lambda state: None if key == "c" else f"{key}{len(state)}"

        done = await append_all([Command(log, decide(log.key)) for log in logs])
        assert [each and each.diff for each in done] == ["b0", "a1", None]
        heads = [await store.head(key) for key in ("a", "b")]
        assert len({head.revision for head in heads if head is not None}) == 1
        assert await store.head("c") is None
        with pytest.raises(ValueError, match="twice"):
            await append_all([Command(logs[0], always("x")), Command(logs[0], always("y"))])


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 2**32))
def test_batches_are_whole_with_an_unreliable_store(seed: int) -> None:
    async def story() -> None:
        rng = random.Random(seed)
        async with memory_store() as inner:
            store = unreliable(inner, seed)

            async def write(name: int) -> None:
                logs = [await opened(store, key) for key in ("a", "b", "c")]
                for n in range(4):
                    some = rng.sample(logs, 2)
                    await append_all([Command(log, always(f"{name}.{n}")) for log in some])

            await asyncio.gather(*(write(name) for name in range(3)))
            await store.settle()
            everything = Counter[str]()
            for key in ("a", "b", "c"):
                everything.update(await state_of(inner, key))
            assert everything == Counter({f"{w}.{n}": 2 for w in range(3) for n in range(4)})

    asyncio.run(story())


async def test_rollups_that_do_not_fit_into_a_batch_follow_it() -> None:
    async with memory_store() as store:
        noisy = LedgerMachine(noise_bytes=3 << 20)
        logs = [
            await StateLog.open(store, key, noisy, policy=RollupPolicy(diffs_min=2))
            for key in ("a", "b")
        ]
        for n in range(2):
            await append_all([Command(log, always(f"{n}")) for log in logs])
        for log in logs:
            assert log.state == ("0", "1")
            assert log.replica.base >= 1
            assert await load(store, log.key, noisy) == log.replica


async def test_a_rollup_knows_the_revision_of_every_entry_it_replaces() -> None:
    machine = RevisionMachine()
    async with memory_store() as store:
        logs = [
            await StateLog.open(store, "k", machine, policy=OFTEN),
            await StateLog.open(store, "k", machine, policy=OFTEN),
        ]
        other = await opened(store, "other")
        committed: dict[str, int] = {}
        for n in range(25):
            await other.append(always("x"))  # so that revisions and sequence numbers differ
            await logs[n % 5 % 2].append(always(f"{n}"))
            head = await store.head("k", fresh=True)
            assert head is not None
            committed[f"{n}"] = head.revision
        replica = await load(store, "k", machine)
        assert replica.base > 0
        assert dict(replica.state) == committed


async def test_a_writer_reads_back_no_more_than_it_wrote() -> None:
    """However much the log holds: not the state, and no entry twice."""
    policy = RollupPolicy(diffs_min=8, diffs_max=10_000)
    machine = RevisionMachine()
    async with memory_store() as inner:
        store = Interposed(inner)
        log = await StateLog.open(store, "k", machine, policy=policy)
        for n in range(64):
            await log.append(always(f"{n}"))
        store.entries_read = 0
        for n in range(64, 128):
            await log.append(always(f"{n}"))
        assert store.entries_read <= 64 + 8
        assert await log.settled() == (await load(inner, "k", machine)).state


async def test_a_command_may_ask_for_the_state_in_its_entry() -> None:
    async with memory_store() as inner:
        store = Interposed(inner)
        log = await opened(store)
        await log.append(always("a"))
        [committed] = await append_all([Command(log, always("b"), roll_up=True)])
        assert committed is not None
        assert log.replica.base == committed.seqno
        store.entries_read = 0
        assert await state_of(store) == ("a", "b")
        assert store.entries_read == 2, "the head, and the same entry once more"


async def test_the_newest_diff_is_read_from_the_head_alone() -> None:
    async with memory_store() as inner:
        store = Interposed(inner, lambda n, _: Fate.REFUSE if n == 0 else Fate.PASSES)
        assert await newest_diff(store, "k", MACHINE) is None
        log = await led(inner)
        assert await newest_diff(store, "k", MACHINE) is None, "a change of epoch does nothing"
        for n in range(9):
            await log.append(always(f"c{n}"))
            assert await newest_diff(store, "k", MACHINE) == f"c{n}"
        assert set(store.calls) == {"head"}


# ------------------------------------------------------------------------------- reading, following


async def test_opening_a_log_of_a_hundred_thousand_diffs_reads_little_of_it() -> None:
    policy = RollupPolicy()
    machine = CounterMachine()
    async with memory_store() as inner:
        replica = await load(inner, "k", machine)
        for _ in range(100):
            batch = []
            floor = None
            for n in range(1_000):
                attempt = compose(replica, author("w", replica.seqno + n), 1, policy=policy)
                batch.append(("k", attempt.new))
                floor = attempt.truncate_to or floor
                replica, _ = replica.advance(dataclasses.replace(attempt.new, revision=1))
            assert set(await inner.compare_and_set_many(batch)) == {CasResult.COMMITTED}
            assert floor is not None
            await inner.truncate("k", floor)
        store = Interposed(inner)
        assert (await load(store, "k", machine)).state == 100_000
        assert store.calls == ["head", "scan"]
        assert store.entries_read <= policy.diffs_min + 1
        assert len(await inner.scan("k", 0)) <= 2 * policy.diffs_min


async def test_following_equals_loading_at_every_entry() -> None:
    async with memory_store() as store:
        log = await opened(store)
        seen: list[Replica[Ledger, str]] = []
        diffs: dict[int, str | None] = {}

        async def watch() -> None:
            async for followed in follow(store, "k", MACHINE):
                seen.append(followed.replica)
                if not followed.jumped:
                    diffs[followed.replica.seqno] = followed.diff
                if followed.replica.seqno == 49:
                    return

        watching = asyncio.create_task(watch())
        loaded: dict[int, Replica[Ledger, str]] = {-1: log.replica}
        for n in range(50):
            await log.append(always(f"c{n}"))
            loaded[n] = await load(store, "k", MACHINE)
        await asyncio.wait_for(watching, 10)
        numbers = [replica.seqno for replica in seen]
        assert numbers == sorted(set(numbers))
        assert all(replica == loaded[replica.seqno] for replica in seen)
        assert diffs == {n: f"c{n}" for n in diffs}


async def test_a_follower_that_was_left_behind_jumps_and_goes_on() -> None:
    async with memory_store() as store:
        log = await opened(store)
        await log.append(always("c0"))
        following = follow(store, "k", MACHINE)
        first = await anext(following)
        assert first.jumped
        for n in range(1, 40):
            await log.append(always(f"c{n}"))
        assert (await store.scan("k", 0))[0].seqno > 1
        later = await anext(following)
        while later.replica.seqno < 39:
            later = await anext(following)
        assert later.replica == log.replica
        await following.aclose()  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------- newer, lost, gone


async def test_a_log_of_a_newer_release_can_be_read_and_not_written() -> None:
    async with memory_store() as store:
        old = await opened(store)
        await old.append(always("a"))
        new = await StateLog.open(store, "k", LedgerMachine(format=2), policy=OFTEN)
        await new.append(always("b"))
        reader = await opened(store)
        assert reader.state == ("a",)
        assert reader.replica.newer is not None
        for log in (reader, old):
            with pytest.raises(NewerFormat, match="newer release"):
                await log.append(always("c"))
        assert (await load(store, "k", LedgerMachine(format=2))).state == ("a", "b")
        following = follow(store, "k", MACHINE)
        with pytest.raises(NewerFormat):
            [each async for each in following]


async def test_a_store_that_went_back_is_noticed() -> None:
    async with memory_store() as old, memory_store() as new:
        log = await opened(old)
        await log.append(always("a"))
        log.store = new
        with pytest.raises(Determinate) as caught:
            await log.append(always("b"))
        assert caught.value.kind is ErrorKind.STORE_RESET
        assert await new.head("k") is None


async def test_an_error_that_will_come_again_is_not_retried() -> None:
    async with memory_store() as inner:
        store = Interposed(inner)
        log = await opened(store)
        store.fate = lambda _, __: Fate.REFUSE_FOR_GOOD
        with pytest.raises(Determinate) as caught:
            await log.append(always("a"))
        assert caught.value.kind is ErrorKind.PERMISSION_DENIED
        assert store.calls[-1:] == ["cas"]
        store.fate = lambda _, __: Fate.PASSES
        await log.append(always("b"))
        assert await state_of(inner) == ("b",)
