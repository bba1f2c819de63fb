"""Small transactions, one after the other, in one process; and the resources that it uses.

    python -m chaos.soak_process --data DIR --endpoint '{"image": …, "config": …}' --seconds 60

An appender and a leader share the process, and each append waits until it is in the table. Every
append has a new writer, whose position the task remembers, unless `--one-writer` is given. With
`--api` both go through `penstock.open`, so that every transaction is a session. Every few seconds
the process prints a line of JSON: memory, descriptors, threads, temporary files, and the size of
the stores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import penstock
from penstock.batch import make_world, tasks_to_run
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.connectors.builtin import capture, materialization
from penstock.consensus.open import open_consensus
from penstock.engine import EngineOptions, open_spark
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.schemas import Schemas, layout
from penstock.model.clock import Producer
from penstock.native.arrow import to_arrow
from penstock.runtime.control import Control, TransactionSummary
from penstock.runtime.kinds import Connect, build_task
from penstock.runtime.supervise import supervise
from penstock.settings import Settings
from penstock.wall_clock import now
from runtime.sessions import ACCOUNTS, accounts, task

DOCUMENTS = 20
"""Documents per transaction."""
KEYS = 50
"""Rows of the table, which does not grow."""


def resident_kb(pid: int | str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0


def jvm() -> int | None:
    """Return the process id of Spark's JVM, a child of this process."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name, fields = (entry / "stat").read_text().rsplit(")", 1)
            if name.endswith("(java") and int(fields.split()[1]) == os.getpid():
                return int(entry.name)
    return None


def size_of(directory: Path) -> tuple[int, int]:
    """Return the number of files, and their bytes."""
    files = size = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                files, size = files + 1, size + path.stat().st_size
    return files, size


def sample(data: Path, transactions: int, began: float) -> dict[str, Any]:
    gc.collect()
    java = jvm()
    return {
        "transactions": transactions,
        "seconds": round(time.monotonic() - began, 1),
        "python_kb": resident_kb("self"),
        "jvm_kb": resident_kb(java) if java else 0,
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - no directory entries
        "threads": threading.active_count(),
        "temporary_files": size_of(Path(tempfile.gettempdir()))[0],
        "staged_files": size_of(data / "between")[0]
        + sum(1 for _ in data.parent.rglob("*.staging/**/*.arrow")),
        "disk_bytes": size_of(data)[1],
    }


def catalog_of(data: Path, endpoint: dict[str, Any]) -> Path:
    views = task(
        endpoint["image"],
        endpoint["config"],
        [{"source": "acme/accounts", "resource": {"table": "accounts"}}],
        shards={"minTxnDuration": "0s", "maxTxnDuration": "1s"},
    )
    file = data.parent / "catalog.json"
    file.write_text(
        json.dumps(
            {"collections": {"acme/accounts": ACCOUNTS}, "materializations": {"acme/views": views}}
        )
    )
    return file


def soak_api(data: Path, endpoint: dict[str, Any], seconds: float, every_s: float) -> None:
    began = time.monotonic()
    sample_at, appended, transactions = began, 0, 0
    with penstock.open(data=data, master="local[2]") as here:
        here.apply(catalog_of(data, endpoint))
        while time.monotonic() - began < seconds:
            here.append("acme/accounts", accounts(appended, DOCUMENTS, keys=KEYS))
            appended += DOCUMENTS
            (run,) = here.run()
            if run.error is not None:
                raise run.error
            transactions += run.transactions
            if time.monotonic() >= sample_at:
                print(json.dumps(sample(data, transactions, began)), flush=True)  # noqa: T201
                sample_at = time.monotonic() + every_s
        print(json.dumps(sample(data, transactions, began)), flush=True)  # noqa: T201
    print(json.dumps({"appended": appended}), flush=True)  # noqa: T201


async def soak(
    data: Path, endpoint: dict[str, Any], seconds: float, every_s: float, *, one_writer: bool
) -> None:
    settings = Settings.resolve({"data": data}, {})
    store = await open_consensus(settings.consensus)
    await desired.apply(store, load_catalog([catalog_of(data, endpoint)], environ=None))
    catalog = await desired.load(store)
    (spec,) = tasks_to_run(catalog, ["acme/views"])
    built = await asyncio.to_thread(build_task, catalog, spec, Connect(capture, materialization))
    await asyncio.to_thread(open_spark, EngineOptions(master="local[2]"))

    transactions = 0
    moved = asyncio.Event()

    def progressed(progress: TransactionSummary) -> None:
        nonlocal transactions
        transactions += 1
        moved.set()

    control = Control(on_progress=progressed)
    leading = asyncio.create_task(supervise(built, make_world(settings, store), control))
    collection = catalog.collection("acme/accounts")
    assert collection is not None
    root = layout(collection.write_schema.text)
    journals, blobs, schemas = Journals(store), open_blobs(settings.blob), Schemas(store)
    began = time.monotonic()
    sample_at, appended = began, 0
    publisher: Publisher | None = None
    while time.monotonic() - began < seconds:
        if publisher is None or not one_writer:
            publisher = Publisher(
                journals, blobs, schemas, [Mapped(spec=collection)],
                producer=Producer.from_random(os.urandom(6)), now=now,
            )  # fmt: skip
        moved.clear()
        await publisher.publish(0, to_arrow(accounts(appended, DOCUMENTS, keys=KEYS), root))
        await publisher.commit_now()
        appended += DOCUMENTS
        waiting = asyncio.create_task(moved.wait())
        await asyncio.wait([waiting, leading], return_when=asyncio.FIRST_COMPLETED)
        if leading.done():
            leading.result()
        if time.monotonic() >= sample_at:
            print(json.dumps(sample(data, transactions, began)), flush=True)  # noqa: T201
            sample_at = time.monotonic() + every_s
    print(json.dumps(sample(data, transactions, began)), flush=True)  # noqa: T201
    control.stop()
    await leading
    await store.close()
    print(json.dumps({"appended": appended}), flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--endpoint", type=json.loads, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--api", action="store_true", help="append and run through penstock.open")
    parser.add_argument(
        "--one-writer", action="store_true", help="append all documents with one producer"
    )
    given = parser.parse_args()
    if given.api:
        soak_api(given.data, given.endpoint, given.seconds, given.every)
    else:
        asyncio.run(
            soak(
                given.data,
                given.endpoint,
                given.seconds,
                given.every,
                one_writer=given.one_writer,
            )
        )


if __name__ == "__main__":
    main()
