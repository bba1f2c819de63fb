"""Writers of two collections that die between ACKs, and readers of both collections.

The default run is short; `PENSTOCK_CHAOS_SECONDS` sets the length of each seed, with more processes
and more seeds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from chaos import pair_writer
from chaos.pair_writer import PairWriter, replay
from journal.publishing import World, world
from penstock.model.frontier import Frontier
from penstock.shuffle.binding import Binding
from penstock.shuffle.client import RemoteSession
from penstock.shuffle.service import ShuffleService, serving
from penstock.shuffle.state import RoundLimits
from shuffle.following import (
    BOTH,
    NOW,
    ORDERS,
    PAYMENTS,
    Coordinator,
    Open,
    Restless,
    Seen,
    planner,
    repeated,
    session,
)

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))
LONG = SECONDS > 0
PROCESSES, SEEDS, DEATHS = (6, 5, 60) if LONG else (3, 1, 16)

SMALL = RoundLimits(records=64)
"""A reader takes only a few writers' transactions at a time, however far behind it is."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + SECONDS * 5)]

_processes = multiprocessing.get_context("forkserver")
# Slow imports happen once, in the fork server; tests are not on its path.
_processes.set_forkserver_preload(
    [
        "pandas",
        "penstock.consensus.committer.inprocess",
        "penstock.consensus.sqlite",
        "penstock.journal.reader",
        "penstock.journal.publisher",
        "penstock.shuffle.session",
    ]
)
Process = multiprocessing.process.BaseProcess
TransactionId = tuple[str, int]
"""A transaction: the name of its writer, and its number."""


class Fleet:
    """Running writers; a dead one is replaced by another after a while."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory = directory
        self.url = f"sqlite:///{directory / 'consensus.db'}"
        self.names: list[str] = []
        self.deaths = 0
        self._running: dict[str, Process] = {}
        self._rng = rng
        self._numbers: Iterator[int] = count()

    def start(self, predecessor: str | None = None) -> None:
        name = f"t{next(self._numbers)}"
        config = PairWriter(
            directory=self.directory,
            url=self.url,
            name=name,
            seed=self._rng.randrange(2**31),
            predecessor=predecessor,
        )
        process = _processes.Process(target=pair_writer.run, args=(config,), daemon=True)
        process.start()
        self.names.append(name)
        self._running[name] = process

    async def kill_and_replace(self) -> None:
        """Sometimes kill one, and replace the dead after a while in which ACKs are missing."""
        if self._rng.random() < 0.3:
            self._running[self._rng.choice(sorted(self._running))].kill()
        await asyncio.sleep(self._rng.uniform(0.05, 0.3))
        for name, process in list(self._running.items()):
            if process.exitcode is not None:
                assert process.exitcode in (-9, 137, 0), f"{name} ended with {process.exitcode}"
                del self._running[name]
                self.deaths += 1
                self.start(predecessor=name)

    async def stop(self) -> None:
        (self.directory / "stop").touch()
        for process in self._running.values():
            await asyncio.to_thread(process.join, 120)

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.join()

    def begun(self) -> dict[TransactionId, int]:
        """Return every transaction that was begun, with its documents per collection."""
        return {
            (name, int(number)): int(documents)
            for name, line in self._lines("begun")
            for number, documents in [line.split()]
        }

    def acknowledged(self) -> set[TransactionId]:
        return {(name, int(line)) for name, line in self._lines("acknowledged")}

    def _lines(self, kind: str) -> Iterator[tuple[str, str]]:
        for name in self.names:
            file = self.directory / f"{name}.{kind}"
            if file.exists():
                for line in file.read_text().splitlines():
                    yield name, line


def transaction_of(seen: Seen) -> TransactionId:
    name, number, *_ = seen.text.split()
    return name, int(number)


def torn(found: list[Seen], begun: dict[TransactionId, int]) -> list[TransactionId]:
    """Return transactions that are visible in part, in one collection or both."""
    there = Counter((transaction_of(seen), seen.binding) for seen in found)
    return [
        transaction
        for transaction in {transaction_of(seen) for seen in found}
        for binding in (0, 1)
        if there[transaction, binding] != begun[transaction]
    ]


async def follow(
    here: World,
    rng: random.Random,
    open_session: Open,
    fleet: Fleet,
    ended: asyncio.Event,
) -> Restless:
    """Read both collections while the fleet writes, and check every transaction."""

    def whole(found: list[Seen]) -> None:
        assert torn(found, fleet.begun()) == []

    restless = Restless(Coordinator(here), rng, whole)
    await restless.read(open_session, ended)
    return restless


@pytest.mark.parametrize("attempt", range(SEEDS))
async def test_readers_see_both_collections_of_a_transaction_together(
    tmp_path: Path, attempt: int
) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", random.SystemRandom().randrange(2**31)))
    rng = random.Random(seed + attempt)
    fleet = Fleet(tmp_path, rng)
    ended = asyncio.Event()

    async def resolve(name: str) -> Sequence[Binding]:
        return BOTH

    async with world(tmp_path, fleet.url) as here:

        async def write() -> None:
            end = time.monotonic() + SECONDS
            try:
                for _ in range(PROCESSES):
                    fleet.start()
                while fleet.deaths < DEATHS or time.monotonic() < end:
                    await fleet.kill_and_replace()
                await fleet.stop()
            finally:
                fleet.kill()
            for name in fleet.names:  # a successor may have died before it replayed them
                await replay(here, tmp_path / f"{name}.intents")
            ended.set()

        service = ShuffleService(planner(here), resolve, now=lambda: NOW, limits=SMALL)
        async with serving(service) as address, asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            local = tasks.create_task(
                follow(here, rng, lambda r: session(here, resume=r, limits=SMALL), fleet, ended)
            )
            distant = tasks.create_task(
                follow(here, rng, lambda r: remote(address, r), fleet, ended)
            )
        committed = {
            binding: Counter(
                (binding, journal, document["id"], document["text"])
                for journal, documents in (await here.read(spec.name)).items()
                for document in documents
            )
            for binding, spec in ((0, ORDERS), (1, PAYMENTS))
        }
    begun, acknowledged = fleet.begun(), fleet.acknowledged()
    summary = (
        f"seed {seed}, {fleet.deaths} deaths, {len(begun)} transactions begun, "
        f"{len(acknowledged)} acknowledged"
    )
    for kind, restless in (("here", local.result()), ("by gRPC", distant.result())):
        taken = restless.reader.taken
        summary += (
            f"; {kind} {restless.transactions} taken, {restless.recoveries} recovered, "
            f"{restless.reader.peeks} peeks"
        )
        assert repeated(taken) == [], summary
        assert torn(taken, begun) == [], summary
        assert acknowledged <= {transaction_of(seen) for seen in taken}, summary
        assert Counter(map(tuple, taken)) == committed[0] + committed[1], summary
    print(summary)  # noqa: T201
    assert len(acknowledged) > DEATHS, summary


@asynccontextmanager
async def remote(address: str, resume: Frontier) -> AsyncIterator[RemoteSession]:
    opened = await RemoteSession.open(address, "acme/both", resume=resume)
    try:
        yield opened
    finally:
        await opened.close()
