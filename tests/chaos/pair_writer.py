"""A process whose transactions each write two collections, until it is stopped or dies.

It records the transactions that it begins in `<name>.begun`, and those that it knows to be
committed in `<name>.acknowledged`. ACK intents are stored in `<name>.intents` before they are
written, and the successor of a dead process replays them.

It dies by being killed, or at a failpoint that it picks at random, mostly between two ACKs.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path

from journal.publishing import World, world
from penstock import failpoints
from penstock.journal.publisher import PublisherOptions
from penstock.journal.transaction import BatchLimits, Intents
from shuffle.following import publish, publisher

SPLIT_TRANSACTIONS = 0.6
CRASH_POINTS = ("publisher.acks", "publisher.acks", "publisher.rows", "publisher.flushed", None)


@dataclass(frozen=True)
class PairWriter:
    """The configuration of one process."""

    directory: Path
    url: str
    name: str
    seed: int
    predecessor: str | None = None

    @property
    def stop(self) -> Path:
        return self.directory / "stop"

    def file(self, kind: str, name: str | None = None) -> Path:
        return self.directory / f"{name or self.name}.{kind}"


def run(writer: PairWriter) -> None:
    asyncio.run(_run(writer))


async def _run(writer: PairWriter) -> None:
    rng = random.Random(writer.seed)
    async with world(writer.directory, writer.url) as here:
        if writer.predecessor is not None:
            await replay(here, writer.file("intents", writer.predecessor))
        if (point := rng.choice(CRASH_POINTS)) is not None:
            failpoints.arm(f"{point}:{rng.randint(1, 12)}")
        number = 0
        while not writer.stop.exists():
            await _write_transaction(here, writer, number, rng)
            number += 1


async def replay(here: World, stored: Path) -> None:
    """Write the intents that a process left behind, if any."""
    intents = await asyncio.to_thread(lambda: stored.read_bytes() if stored.exists() else None)
    if intents is not None:
        await publisher(here).write_intents(Intents.decode(intents))


async def _write_transaction(
    here: World, writer: PairWriter, number: int, rng: random.Random
) -> None:
    limits = BatchLimits(journals=1) if rng.random() < SPLIT_TRANSACTIONS else BatchLimits()
    to = publisher(here, PublisherOptions(feed_bytes=1, limits=limits))
    noise = rng.randbytes(rng.choice((0, 4000))).hex()
    count = rng.randint(1, 6)
    _note(writer, "begun", f"{number} {count}")
    await publish(to, range(count), f"{writer.name} {number} {count} {noise}")
    if rng.random() < 0.2:
        await to.abort()  # a transaction that no reader will ever see
        return
    if limits == BatchLimits() and rng.random() < 0.5:
        await to.commit_now()
    else:
        intents = await to.commit()
        partial = writer.file("partial")
        partial.write_bytes(intents.encode())
        partial.rename(writer.file("intents"))
        _note(writer, "acknowledged", str(number))  # committed from here on, whatever happens
        await to.write_intents(intents)
        return
    _note(writer, "acknowledged", str(number))


def _note(writer: PairWriter, kind: str, line: str) -> None:
    handle = os.open(writer.file(kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)
