"""Many processes append to one collection, and are killed at random moments.

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
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from chaos import appender
from chaos.appender import DOCUMENTS, Appender, replay
from journal.publishing import world

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))
LONG = SECONDS > 0
PROCESSES, SEEDS, KILLS = (20, 5, 20) if LONG else (6, 1, 12)

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
    ]
)
Process = multiprocessing.process.BaseProcess


class Fleet:
    """Running appenders; a killed one is replaced by another, which replays its intents."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory = directory
        self.url = f"sqlite:///{directory / 'consensus.db'}"
        self.names: list[str] = []
        self.running: dict[str, Process] = {}
        self._rng = rng
        self._numbers: Iterator[int] = count()

    def start(self, predecessor: str | None = None) -> None:
        name = f"a{next(self._numbers)}"
        config = Appender(
            directory=self.directory,
            url=self.url,
            name=name,
            seed=self._rng.randrange(2**31),
            predecessor=predecessor,
        )
        process = _processes.Process(target=appender.run, args=(config,), daemon=True)
        process.start()
        self.names.append(name)
        self.running[name] = process

    def kill_one(self) -> None:
        victim = self._rng.choice(sorted(self.running))
        process = self.running.pop(victim)
        process.kill()
        process.join()
        self.start(predecessor=victim)

    def stop(self) -> list[int | None]:
        (self.directory / "stop").touch()
        for process in self.running.values():
            process.join(120)
        return [process.exitcode for process in self.running.values()]

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.join()

    def acknowledged(self) -> set[tuple[str, int]]:
        return {
            (name, int(line))
            for name in self.names
            if (file := self.directory / f"{name}.acknowledged").exists()
            for line in file.read_text().splitlines()
        }


@pytest.mark.parametrize("attempt", range(SEEDS))
async def test_acknowledged_appends_are_stored_once_and_none_is_stored_in_part(
    tmp_path: Path, attempt: int
) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", random.SystemRandom().randrange(2**31)))
    rng = random.Random(seed + attempt)
    fleet = Fleet(tmp_path, rng)
    kills, end = 0, time.monotonic() + SECONDS
    try:
        for _ in range(PROCESSES):
            fleet.start()
        while kills < KILLS or time.monotonic() < end:
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            await asyncio.to_thread(fleet.kill_one)
            kills += 1
        ended = await asyncio.to_thread(fleet.stop)
    finally:
        fleet.kill()
    summary = f"seed {seed}, {kills} kills"
    assert set(ended) == {0}, f"{ended}; {summary}"
    async with world(tmp_path, fleet.url) as here:
        for name in fleet.names:  # a successor may have been killed before it replayed them
            await replay(here, tmp_path / f"{name}.intents")
        found = await here.read()
        written = sum(map(len, (await here.read(uncommitted=True)).values()))
    seen = Counter(
        (*_transaction_of(document["text"]), document["id"])
        for documents in found.values()
        for document in documents
    )
    transactions = Counter((name, number) for name, number, _ in seen.elements())
    acknowledged = fleet.acknowledged()
    summary += f", {len(transactions)} transactions, {written - seen.total()} documents left open"
    print(summary)  # noqa: T201
    assert len(acknowledged) > KILLS, summary
    assert [key for key, times in seen.items() if times > 1] == [], summary
    assert [key for key, rows in transactions.items() if rows != DOCUMENTS] == [], summary
    assert acknowledged - transactions.keys() == set(), summary


def _transaction_of(text: str) -> tuple[str, int]:
    name, number, *_ = text.split()
    return name, int(number)
