"""A process that appends transactions until it is stopped or killed.

It records the transactions that it knows to be committed, one line each, in `<name>.acknowledged`.
Every second transaction commits through ACK intents, which are stored in `<name>.intents` before
they are written, and which the successor of a killed process replays.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path

from journal.publishing import World, batch, world
from penstock.journal.publisher import PublisherOptions
from penstock.journal.transaction import BatchLimits, Intents

DOCUMENTS = 7
"""Documents per transaction; they go to three partitions."""


@dataclass(frozen=True)
class Appender:
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


def run(appender: Appender) -> None:
    asyncio.run(_run(appender))


async def _run(appender: Appender) -> None:
    rng = random.Random(appender.seed)
    async with world(appender.directory, appender.url) as here:
        if appender.predecessor is not None:
            await replay(here, appender.file("intents", appender.predecessor))
        number = 0
        while not appender.stop.exists():
            await _append(here, appender, number, rng)
            number += 1


async def replay(here: World, stored: Path) -> None:
    """Write the intents that a process left behind, if any."""
    intents = await asyncio.to_thread(lambda: stored.read_bytes() if stored.exists() else None)
    if intents is not None:
        await here.publisher().write_intents(Intents.decode(intents))


async def _append(here: World, appender: Appender, number: int, rng: random.Random) -> None:
    # ACKs in different revisions are the hard case: only the intents keep them together.
    with_intents = number % 2 == 1
    limits = BatchLimits(journals=1) if with_intents and rng.random() < 0.5 else BatchLimits()
    noise = rng.randbytes(rng.choice((0, 4000))).hex()
    publisher = here.publisher(options=PublisherOptions(feed_bytes=1, limits=limits))
    documents = [
        {"id": i, "region": ("eu", "us", "ap")[i % 3], "text": f"{appender.name} {number} {noise}"}
        for i in range(DOCUMENTS)
    ]
    await publisher.publish(0, batch(documents[:4]))
    await publisher.publish(0, batch(documents[4:]))
    if with_intents:
        intents = await publisher.commit()
        partial = appender.file("partial")
        partial.write_bytes(intents.encode())
        partial.rename(appender.file("intents"))
        _note(appender, number)  # committed from here on, whatever happens
        await publisher.write_intents(intents)
    else:
        await publisher.commit_now()
        _note(appender, number)


def _note(appender: Appender, number: int) -> None:
    line = f"{number}\n".encode()
    handle = os.open(appender.file("acknowledged"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)
