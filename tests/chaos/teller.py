"""One process whose every transaction is of two collections, until it is stopped, or dies.

Which transactions it begins it writes down in `<name>.begun`, and which it knows to be committed in
`<name>.acknowledged`. Intents are stored in `<name>.intents` before they are written, and replayed
by whoever comes after a process that died.

It dies by being killed, or at a crash point of its own choice, which is mostly between two ACKs.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path

from journal.publishing import World, world
from penstock import failpoints
from penstock.journal.publisher import Options
from penstock.journal.transaction import Intents, Limits
from shuffle.following import publish, publisher

SPLIT_TRANSACTIONS = 0.6
CRASH_POINTS = ("publisher.acks", "publisher.acks", "publisher.rows", "publisher.flushed", None)


@dataclass(frozen=True)
class Teller:
    """Who writes, and where."""

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


def run(teller: Teller) -> None:
    asyncio.run(_run(teller))


async def _run(teller: Teller) -> None:
    rng = random.Random(teller.seed)
    async with world(teller.directory, teller.url) as here:
        if teller.predecessor is not None:
            await replay(here, teller.file("intents", teller.predecessor))
        if (point := rng.choice(CRASH_POINTS)) is not None:
            failpoints.arm(f"{point}:{rng.randint(1, 12)}")
        number = 0
        while not teller.stop.exists():
            await _tell(here, teller, number, rng)
            number += 1


async def replay(here: World, stored: Path) -> None:
    """Write the intents that a process left behind, if it did."""
    intents = await asyncio.to_thread(lambda: stored.read_bytes() if stored.exists() else None)
    if intents is not None:
        await publisher(here).write_intents(Intents.decode(intents))


async def _tell(here: World, teller: Teller, number: int, rng: random.Random) -> None:
    limits = Limits(journals=1) if rng.random() < SPLIT_TRANSACTIONS else Limits()
    to = publisher(here, Options(feed_bytes=1, limits=limits))
    noise = rng.randbytes(rng.choice((0, 4000))).hex()
    count = rng.randint(1, 6)
    _note(teller, "begun", f"{number} {count}")
    await publish(to, range(count), f"{teller.name} {number} {count} {noise}")
    if rng.random() < 0.2:
        await to.abort()  # a transaction that nobody will ever see
        return
    if limits == Limits() and rng.random() < 0.5:
        await to.commit_now()
    else:
        intents = await to.commit()
        partial = teller.file("partial")
        partial.write_bytes(intents.encode())
        partial.rename(teller.file("intents"))
        _note(teller, "acknowledged", str(number))  # committed from here on, whatever happens
        await to.write_intents(intents)
        return
    _note(teller, "acknowledged", str(number))


def _note(teller: Teller, kind: str, line: str) -> None:
    handle = os.open(teller.file(kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)
