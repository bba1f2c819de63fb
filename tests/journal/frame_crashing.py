"""A process that forks one driver of a stream after the other, each to die at a crash point.

Reads a `Job` per line from stdin and prints how the driver ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import pyarrow as pa

from journal.crashing import DOCUMENTS
from journal.publishing import ORDERS, World, world
from penstock import failpoints
from penstock.journal.frame_append import (
    FramePart,
    FrameWrite,
    Stores,
    StreamBatch,
    commit_frame,
    plan_frame,
    stage_rows,
)
from penstock.journal.ownership import Ownership


class Job(msgspec.Struct):
    """One batch of a query, which three tasks write, and where its driver dies."""

    directory: str
    url: str
    number: int
    failpoint: str | None


def stores_of(here: World) -> Stores:
    ownership = Ownership(here.journals, here.blobs)
    return Stores(
        journals=here.journals, blobs=here.blobs, schemas=here.schemas, ownership=ownership
    )


def staged(write: FrameWrite, *tasks: list[dict[str, object]]) -> list[FramePart]:
    """The reports of tasks, one for each list of rows, as they reach the driver."""
    return [
        FramePart.decode(
            stage_rows(write, [pa.RecordBatch.from_pylist(rows)], task=n, query="q").encode()
        )
        for n, rows in enumerate(tasks)
    ]


async def batch_of_stream(job: Job) -> None:
    async with world(Path(job.directory), job.url) as here:
        failpoints.arm(job.failpoint)
        stores = stores_of(here)
        write = await plan_frame(stores, ORDERS, b"")
        parts = staged(write, DOCUMENTS[:3], DOCUMENTS[3:6], DOCUMENTS[6:])
        await commit_frame(stores, ORDERS, parts, batch=StreamBatch("q", job.number))


def main() -> None:
    decoder = msgspec.json.Decoder(Job)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            asyncio.run(batch_of_stream(decoder.decode(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
