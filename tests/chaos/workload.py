"""Random clients of a consensus store that record everything they did and saw."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from penstock.consensus.store import (
    SCAN_ALL,
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
    VersionedData,
)
from support.history import Cas, Head, Op, Outcome, Scan, Truncate, Version

T = TypeVar("T")


class Store(Protocol):
    """The part of `Consensus` that the workload uses."""

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None: ...
    async def compare_and_set(self, key: str, new: VersionedData) -> CasResult: ...
    async def compare_and_set_many(
        self, batch: Sequence[tuple[str, VersionedData]]
    ) -> list[CasResult | ConsensusError]: ...
    async def compare_and_set_all(
        self, batch: Sequence[tuple[str, VersionedData]]
    ) -> CasResult: ...
    async def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]: ...
    async def truncate(self, key: str, seqno: int) -> int | None: ...


class StoreReset(Exception):
    """The store was recreated: the client stops, as an application must."""


@dataclasses.dataclass
class Client:
    """One sequential client: one operation at a time, each with a unique token."""

    name: str
    stores: Sequence[tuple[str, Store]]
    """Connections to the store, by committer; each operation picks one."""
    keys: Sequence[str]
    rng: random.Random
    record: Callable[[Op], None]
    clock: Callable[[], int] = time.monotonic_ns
    patience_s: float = 5
    counts: bool = False
    """True if the reported number of truncated entries is exact: a transport may resend."""

    def __post_init__(self) -> None:
        self.believed: dict[str, int] = dict.fromkeys(self.keys, -1)
        self.count = 0

    async def step(self) -> None:
        """Perform one operation, from the mix that finds most faults."""
        key = self.rng.choice(self.keys)
        head = self.believed[key]
        kind = self.rng.random()
        if kind < 0.45:
            await self.cas(key, head + 1)
        elif kind < 0.55:
            await self.cas(key, max(0, head + 1 + self.rng.choice((-3, -2, -1, 1, 2))))
        elif kind < 0.58:
            await self.cas(key, 0)
        elif kind < 0.73:
            await self.read_head(key, fresh=True)
        elif kind < 0.78:
            await self.read_head(key, fresh=False)
        elif kind < 0.88:
            limit = self.rng.choice((None, None, 3, 20))
            await self.scan(key, max(0, head - self.rng.choice((0, 5, 50))), limit)
        elif kind < 0.92:
            await self.truncate(key, max(0, head - self.rng.choice((-1, 0, 1, 5, 20))))
        else:
            chosen = self.rng.sample(self.keys, min(len(self.keys), self.rng.randint(2, 6)))
            await self.cas_batch(chosen, atomic=kind >= 0.96)

    async def cas(self, key: str, seqno: int) -> None:
        token = self._token()
        via, store = self._pick_store()
        entry = VersionedData(seqno, token.encode())
        invoke = self.clock()
        outcome, result = await self._ask(store.compare_and_set(key, entry))
        outcome = _of_cas(outcome, result)
        self._note(key, invoke, outcome, Cas(seqno=seqno, token=token), via)
        await self._learn(key, seqno, outcome)

    async def cas_batch(self, keys: Sequence[str], *, atomic: bool) -> None:
        via, store = self._pick_store()
        calls = [(key, Cas(seqno=self.believed[key] + 1, token=self._token())) for key in keys]
        batch = [(key, VersionedData(call.seqno, call.token.encode())) for key, call in calls]
        invoke = self.clock()
        if atomic:
            name = self._token()
            outcome, answer = await self._ask(store.compare_and_set_all(batch))
            outcomes = [_of_cas(outcome, answer)] * len(batch)
            calls = [
                (key, Cas(seqno=call.seqno, token=call.token, batch=name)) for key, call in calls
            ]
        else:
            outcome, answers = await self._ask(store.compare_and_set_many(batch))
            outcomes = [outcome] * len(batch)
            if answers is not None:
                outcomes = [_of_element(each) for each in answers]
        for (key, call), each in zip(calls, outcomes, strict=True):
            self._note(key, invoke, each, call, via)
        for (key, call), each in zip(calls, outcomes, strict=True):
            await self._learn(key, call.seqno, each)

    async def read_head(self, key: str, *, fresh: bool) -> None:
        via, store = self._pick_store()
        invoke = self.clock()
        outcome, entry = await self._ask(store.head(key, fresh=fresh))
        if outcome is Outcome.OK:
            seen = None if entry is None else _version(entry)
            self._note(key, invoke, outcome, Head(fresh=fresh, seen=seen), via)
            self.believed[key] = -1 if entry is None else entry.seqno

    async def scan(self, key: str, from_: int, limit: int | None) -> None:
        via, store = self._pick_store()
        invoke = self.clock()
        outcome, entries = await self._ask(
            store.scan(key, from_, SCAN_ALL if limit is None else limit)
        )
        if outcome is Outcome.OK and entries is not None:
            seen = tuple(_version(entry) for entry in entries)
            self._note(key, invoke, outcome, Scan(from_=from_, limit=limit, seen=seen), via)
            if seen:
                self.believed[key] = max(self.believed[key], seen[-1].seqno)

    async def truncate(self, key: str, seqno: int) -> None:
        via, store = self._pick_store()
        invoke = self.clock()
        outcome, deleted = await self._ask(store.truncate(key, seqno))
        self._note(
            key,
            invoke,
            outcome,
            Truncate(seqno=seqno, deleted=deleted if self.counts else None),
            via,
        )

    async def _learn(self, key: str, seqno: int, outcome: Outcome) -> None:
        """Keep the believed head mostly right: a loser reads, as state logs do."""
        if outcome is Outcome.OK:
            self.believed[key] = seqno
        elif outcome is not Outcome.FAILED and self.rng.random() < 0.9:
            await self.read_head(key, fresh=self.rng.random() < 0.7)

    async def _ask(self, call: Awaitable[T]) -> tuple[Outcome, T | None]:
        try:
            async with asyncio.timeout(self.patience_s):
                return Outcome.OK, await call
        except TimeoutError:
            return Outcome.UNKNOWN, None
        except ConsensusError as error:
            if error.kind is ErrorKind.STORE_RESET:
                raise StoreReset(str(error)) from error
            if error.kind is ErrorKind.TRUNCATE_BOUND:
                return Outcome.MISMATCH, None
            return (Outcome.FAILED if isinstance(error, Determinate) else Outcome.UNKNOWN), None

    def _note(
        self, key: str, invoke: int, outcome: Outcome, call: Cas | Head | Scan | Truncate, via: str
    ) -> None:
        self.record(
            Op(
                process=self.name,
                key=key,
                invoke=invoke,
                back=self.clock(),
                outcome=outcome,
                call=call,
                via=via,
            )
        )

    def _pick_store(self) -> tuple[str, Store]:
        return self.rng.choice(self.stores)

    def _token(self) -> str:
        self.count += 1
        return f"{self.name}-{self.count}"


def _of_cas(outcome: Outcome, result: CasResult | None) -> Outcome:
    return Outcome.MISMATCH if result is CasResult.EXPECTATION_MISMATCH else outcome


def _of_element(answer: CasResult | ConsensusError) -> Outcome:
    match answer:
        case CasResult.COMMITTED:
            return Outcome.OK
        case CasResult.EXPECTATION_MISMATCH:
            return Outcome.MISMATCH
        case Determinate():
            return Outcome.FAILED
        case _:
            return Outcome.UNKNOWN


def _version(entry: VersionedData) -> Version:
    return Version(entry.seqno, entry.data.decode(), entry.revision)
