"""The checker accepts histories of a correct store, and finds every injected fault."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import random
from collections.abc import Sequence

import pytest

from chaos.workload import Client
from penstock.consensus.store import (
    SCAN_ALL,
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
)
from support.history import (
    Cas,
    Head,
    Op,
    Outcome,
    Scan,
    Stream,
    Truncate,
    Version,
)
from support.linearizability import Rule, check

STEPS = 5_000 if os.environ.get("PENSTOCK_CHAOS_SECONDS") else 1_000
"""Steps of each of twenty clients: 100,000 operations in `make chaos`, a fifth by default."""

COMMITTED, MISMATCH = CasResult.COMMITTED, CasResult.EXPECTATION_MISMATCH


class SimulatedStore:
    """A correct store: pauses at random, then performs each operation in one step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.logs: dict[str, list[VersionedData]] = {}
        self.floors: dict[str, int] = {}
        self.revision = 0

    async def pause(self) -> None:
        for _ in range(self.rng.choice((0, 1, 1, 2, 5))):
            await asyncio.sleep(0)

    def newest(self, key: str) -> int:
        return len(self.logs.get(key, ())) - 1

    def apply(self, key: str, new: VersionedData) -> None:
        self.logs.setdefault(key, []).append(dataclasses.replace(new, revision=self.revision))

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        await self.pause()
        found = self.logs[key][-1] if self.newest(key) >= 0 else None
        await self.pause()
        return found

    async def compare_and_set(self, key: str, new: VersionedData) -> CasResult:
        return await self.compare_and_set_all([(key, new)])

    async def compare_and_set_many(
        self, batch: Sequence[tuple[str, VersionedData]]
    ) -> list[CasResult | ConsensusError]:
        return [await self.compare_and_set_all([element]) for element in batch]

    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        await self.pause()
        if any(new.seqno != self.newest(key) + 1 for key, new in batch):
            return MISMATCH
        self.revision += 1
        for key, new in batch:
            self.apply(key, new)
        await self.pause()
        if self.rng.random() < 0.02:
            raise Indeterminate(ErrorKind.TIMEOUT, "the reply was lost")
        return COMMITTED

    async def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]:
        await self.pause()
        start = max(from_, self.floors.get(key, 0))
        return self.logs.get(key, [])[start : start + limit]

    async def truncate(self, key: str, seqno: int) -> int | None:
        await self.pause()
        if seqno > self.newest(key):
            raise Determinate(ErrorKind.TRUNCATE_BOUND, "above the head")
        floor = self.floors.get(key, 0)
        self.floors[key] = max(floor, seqno)
        return max(0, seqno - floor)


class ChecksThenInserts(SimulatedStore):
    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        if any(new.seqno != self.newest(key) + 1 for key, new in batch):
            return MISMATCH
        await self.pause()
        self.revision += 1
        for key, new in batch:
            log = self.logs.setdefault(key, [])
            log[new.seqno :] = [dataclasses.replace(new, revision=self.revision)]
        return COMMITTED


class AcknowledgesBeforeCommit(SimulatedStore):
    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        if len(batch) == 1 and self.rng.random() < 0.01:
            await self.pause()
            return COMMITTED if batch[0][1].seqno == self.newest(batch[0][0]) + 1 else MISMATCH
        return await super().compare_and_set_all(batch)


class CachesFreshReads(SimulatedStore):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.cache: dict[str, VersionedData | None] = {}

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        if key in self.cache and self.rng.random() < 0.1:
            await self.pause()
            return self.cache[key]
        self.cache[key] = await super().head(key, fresh=fresh)
        return self.cache[key]


class JoinsRunningReads(SimulatedStore):
    """A fresh read that joins a running one may return a state from before the read began."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.running: dict[str, asyncio.Task[VersionedData | None]] = {}

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        if key not in self.running:
            self.running[key] = asyncio.create_task(super().head(key, fresh=fresh))
        try:
            return await asyncio.shield(self.running[key])
        finally:
            self.running.pop(key, None)


class ResendsAfterTimeouts(SimulatedStore):
    """A transport that retries a compare-and-set reads its own success as a mismatch."""

    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        try:
            return await super().compare_and_set_all(batch)
        except Indeterminate:
            return await super().compare_and_set_all(batch)


class RejectsFast(SimulatedStore):
    """Answers from a remembered head that may be stale."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.memory: dict[str, int] = {}

    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        for key, new in batch:
            if self.rng.random() < 0.05 and new.seqno > self.memory.get(key, new.seqno) + 1:
                await self.pause()
                return MISMATCH
            if self.rng.random() < 0.2:
                self.memory[key] = self.newest(key)
        return await super().compare_and_set_all(batch)


class TearsBatches(SimulatedStore):
    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        if len(batch) == 1:
            return await super().compare_and_set_all(batch)
        results = await self.compare_and_set_many(batch)
        return COMMITTED if set(results) == {COMMITTED} else MISMATCH


class CreatesAgain(SimulatedStore):
    """Takes a key to be new if entry 0 is missing, although truncation may have removed it."""

    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        for key, new in batch:
            if new.seqno == 0 and self.floors.get(key, 0) > 0:
                self.logs[key], self.floors[key] = [], 0
        return await super().compare_and_set_all(batch)


class NumbersCarelessly(SimulatedStore):
    """Draws revisions before the transaction, so they are not in commit order."""

    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        self.revision += 1
        mine = self.revision
        await self.pause()
        if any(new.seqno != self.newest(key) + 1 for key, new in batch):
            return MISMATCH
        for key, new in batch:
            self.logs.setdefault(key, []).append(dataclasses.replace(new, revision=mine))
        return COMMITTED


class ForgetsTruncation(SimulatedStore):
    async def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]:
        if self.rng.random() < 0.05:
            await self.pause()
            return self.logs.get(key, [])[from_ : from_ + limit]
        return await super().scan(key, from_, limit)


async def history(store: SimulatedStore, *, seed: int, clients: int, steps: int) -> list[Op]:
    ops: list[Op] = []
    ticks = itertools.count()
    keys = [f"k{n}" for n in range(5)]

    async def run(client: Client) -> None:
        for _ in range(steps):
            await client.step()

    everyone = [
        Client(
            name=f"c{n}",
            stores=[("one", store)],
            keys=keys,
            rng=random.Random(seed * 1000 + n),
            record=ops.append,
            clock=lambda: next(ticks),
            counts=True,
        )
        for n in range(clients)
    ]
    await asyncio.gather(*(run(client) for client in everyone))
    reader = dataclasses.replace(everyone[0], name="reader")
    for key in keys:
        await reader.scan(key, 0, None)
    return ops


async def test_a_correct_store_has_no_violations_in_a_long_history() -> None:
    ops = await history(SimulatedStore(random.Random(1)), seed=1, clients=20, steps=STEPS)
    assert len(ops) >= STEPS * 20
    assert check(ops) == []


@pytest.mark.parametrize("seed", range(5))
async def test_a_correct_store_passes_the_exact_search_too(seed: int) -> None:
    ops = await history(SimulatedStore(random.Random(seed)), seed=seed, clients=6, steps=250)
    assert max(sum(op.key == key for op in ops) for key in {op.key for op in ops}) <= 1500
    assert check(ops) == []


@pytest.mark.parametrize(
    ("faulty", "rule"),
    [
        pytest.param(ChecksThenInserts, Rule.TWO_ENTRIES, id="check, then insert, without a lock"),
        pytest.param(AcknowledgesBeforeCommit, Rule.ORDER, id="acknowledged before it is durable"),
        pytest.param(CachesFreshReads, Rule.ORDER, id="a cache serves a fresh read"),
        pytest.param(JoinsRunningReads, Rule.ORDER, id="a fresh read joins one already running"),
        pytest.param(ResendsAfterTimeouts, Rule.PHANTOM, id="a transport resends"),
        pytest.param(RejectsFast, Rule.SPURIOUS_MISMATCH, id="a fast reject from memory"),
        pytest.param(TearsBatches, Rule.TORN_BATCH, id="an atomic batch in pieces"),
        pytest.param(CreatesAgain, Rule.TWO_ENTRIES, id="a truncated key is created again"),
        pytest.param(NumbersCarelessly, Rule.REVISION, id="revisions out of commit order"),
        pytest.param(ForgetsTruncation, Rule.FLOOR, id="truncated entries come back"),
    ],
)
@pytest.mark.parametrize("size", ["large", "small"])
async def test_each_fault_is_found(faulty: type[SimulatedStore], rule: Rule, size: str) -> None:
    """Large histories are checked by the bounds alone, small ones by the exact search too."""
    clients, steps = (12, 350) if size == "large" else (6, 250)
    ops = await history(faulty(random.Random(7)), seed=7, clients=clients, steps=steps)
    assert rule in {violation.rule for violation in check(ops)}


# ------------------------------------------------------------------------------- single decisions


def op(
    call: Cas | Head | Scan | Truncate,
    invoke: int,
    back: int,
    outcome: Outcome = Outcome.OK,
    *,
    via: str = "",
    key: str = "k",
) -> Op:
    return Op(process="p", key=key, invoke=invoke, back=back, outcome=outcome, call=call, via=via)


def cas(seqno: int, token: str) -> Cas:
    return Cas(seqno=seqno, token=token)


def saw(*versions: tuple[int, str]) -> tuple[Version, ...]:
    return tuple(Version(seqno, token) for seqno, token in versions)


A = op(cas(0, "a"), 0, 10)
B = op(cas(1, "b"), 20, 30)
AT_A = Head(fresh=True, seen=Version(0, "a"))
AT_B = Head(fresh=True, seen=Version(1, "b"))


@pytest.mark.parametrize(
    ("ops", "rules"),
    [
        pytest.param([A, B, op(AT_B, 40, 50)], set(), id="in order: possible"),
        pytest.param([A, B, op(AT_A, 25, 50)], set(), id="a read beside the commit: either"),
        pytest.param(
            [A, B, op(AT_A, 31, 50)], {Rule.ORDER}, id="an old head after the acknowledgement"
        ),
        pytest.param(
            [A, op(cas(1, "b"), 20, 30, Outcome.UNKNOWN), op(AT_A, 31, 50), op(AT_B, 60, 70)],
            set(),
            id="an unknown commit may land later",
        ),
        pytest.param(
            [A, op(cas(1, "b"), 20, 30, Outcome.UNKNOWN), op(AT_B, 31, 35), op(AT_A, 40, 50)],
            {Rule.ORDER},
            id="but having landed, it stays",
        ),
        pytest.param(
            [A, op(cas(1, "b"), 20, 30, Outcome.FAILED), op(AT_B, 31, 35)],
            {Rule.PHANTOM},
            id="a determinate failure did not happen",
        ),
        pytest.param(
            [A, op(cas(1, "b"), 20, 30, Outcome.MISMATCH), op(AT_A, 40, 50)],
            {Rule.SPURIOUS_MISMATCH},
            id="a mismatch without a reason",
        ),
        pytest.param(
            [
                A,
                op(cas(1, "b"), 20, 30, Outcome.MISMATCH),
                op(cas(1, "c"), 25, 35, Outcome.UNKNOWN),
                op(AT_A, 40, 50),
            ],
            {Rule.SPURIOUS_MISMATCH},
            id="a mismatch proves that the unknown one was there",
        ),
        pytest.param(
            [A, B, op(Scan(from_=0, seen=saw((0, "a"), (1, "b"))), 40, 50)], set(), id="a scan"
        ),
        pytest.param(
            [A, B, op(Scan(from_=0, seen=saw((1, "b"))), 40, 50)],
            {Rule.HOLE},
            id="an entry vanished that nobody truncated",
        ),
        pytest.param(
            [
                A,
                B,
                op(Truncate(seqno=1), 31, 60, Outcome.UNKNOWN),
                op(Scan(from_=0, seen=saw((1, "b"))), 40, 50),
                op(Scan(from_=0, seen=saw((0, "a"), (1, "b"))), 55, 58),
            ],
            {Rule.FLOOR},
            id="a truncated entry came back",
        ),
        pytest.param(
            [A, B, op(Truncate(seqno=1, deleted=3), 40, 50)],
            {Rule.NOT_LINEARIZABLE},
            id="a truncation that miscounts",
        ),
        pytest.param(
            [A, B, op(Head(fresh=False, seen=Version(0, "a")), 40, 50, via="two")],
            set(),
            id="a stale head through a committer that knew no better",
        ),
        pytest.param(
            [A, B, op(Head(fresh=False, seen=Version(0, "a")), 40, 50)],
            {Rule.STALE_HEAD},
            id="a stale head through the committer that committed the next",
        ),
    ],
)
def test_each_rule_is_decided_on_a_minimal_history(ops: list[Op], rules: set[Rule]) -> None:
    found = {violation.rule for violation in check(ops)}
    if rules - {Rule.STALE_HEAD}:  # only the committer's promise excludes it
        assert Rule.NOT_LINEARIZABLE in found, "the exact search agrees"
    assert found - {Rule.NOT_LINEARIZABLE} == rules - {Rule.NOT_LINEARIZABLE}


@pytest.mark.parametrize(
    ("stream", "holds"),
    [
        pytest.param(saw((0, "a"), (1, "b")), True, id="every entry in order"),
        pytest.param(saw((0, "a"), (0, "a"), (1, "b")), True, id="repetition is allowed"),
        pytest.param(saw((1, "b")), False, id="a gap at the start: registered too late"),
        pytest.param(saw((0, "a")), False, id="the last commit was never delivered"),
        pytest.param(saw((0, "a"), (1, "x")), False, id="not what the log has"),
    ],
)
def test_streams_must_be_complete_and_in_order(stream: tuple[Version, ...], holds: bool) -> None:
    seen = Stream(process="s", key="k", from_=0, seen=stream, waited_for=1)
    assert (check([A, B], [seen]) == []) is holds
