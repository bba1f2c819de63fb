"""A process that forks one publisher after the other, each to die at a crash point.

Reads a `Job` per line from stdin and prints how the publisher ended. Importing what a publisher
needs takes a second; forking it takes none.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import msgspec

from journal.publishing import batch, world
from penstock import failpoints
from penstock.journal.publisher import PublisherOptions
from penstock.journal.staging import stage_fragments
from penstock.journal.transaction import BatchLimits

STORED = failpoints.declare("test.stored", "the caller has stored the intents")
_NOISE = random.Random(9).randbytes(4096).hex()
DOCUMENTS = [{"id": i, "region": ("eu", "us", "ap")[i % 3], "text": _NOISE} for i in range(9)]
"""Three journals, three documents each, too large to be inline."""


class Job(msgspec.Struct):
    """One transaction: where, how it is committed, and where it dies."""

    directory: str
    url: str
    now: bool
    failpoint: str | None
    adopt: bool = False
    """Tasks write the documents, three at a time, and the publisher adopts them."""


def intents_file(directory: Path) -> Path:
    return directory / "intents"


async def transaction(job: Job) -> None:
    directory = Path(job.directory)
    # With intents, every journal is a store transaction of its own: more places to die at.
    limits = BatchLimits() if job.now else BatchLimits(journals=1)
    async with world(directory, job.url) as here:
        publisher = here.publisher(options=PublisherOptions(feed_bytes=1, limits=limits))
        failpoints.arm(job.failpoint)
        staging = await publisher.staging(0) if job.adopt else None
        for n in range(0, len(DOCUMENTS), 3):
            documents = batch(DOCUMENTS[n : n + 3])
            if staging is None:
                await publisher.publish(0, documents)
            else:
                await publisher.adopt(stage_fragments(staging, [documents]))
        if job.now:
            await publisher.commit_now()
            return
        intents = await publisher.commit()
        partial = intents_file(directory).with_suffix(".partial")
        partial.write_bytes(intents.encode())
        partial.rename(intents_file(directory))
        failpoints.hit(STORED)
        await publisher.write_intents(intents)


def main() -> None:
    decoder = msgspec.json.Decoder(Job)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            asyncio.run(transaction(decoder.decode(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
