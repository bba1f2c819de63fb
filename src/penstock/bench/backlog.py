"""A backlog larger than memory, through the log of a session: what it takes of memory and disk.

A process of its own, with a small Spark, shuffles a backlog to the end: a session reads ahead into
a log with a small limit, and a consumer scans what the log has. The consumer takes its first
checkpoint only when reading has stopped at the limit, so that the limit is reached. Meanwhile this
process looks every now and then at what the whole family of processes holds: the driver's Python,
its JVM, the Python workers of that, and their files.

Memory is that of Spark's heap, `HEAP`, and the backlog 20 times as much, as documents are before
they are encoded and compressed; beside it goes a backlog of that memory itself. A quick run takes
for memory what Spark uses of its heap for rows: of what 300 MiB leave, the `FRACTION`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.bench.frame import Bench, Goal, Report, Result
from penstock.bench.stock import (
    PRODUCER,
    START,
    Stage,
    Stock,
    Sums,
    collection,
    read_to_the_end,
    staged,
    write,
)
from penstock.engine import EngineOptions, close_spark, open_spark
from penstock.errors import Unavailable
from penstock.journal.journals import creation
from penstock.journal.names import JournalName
from penstock.journal.state import AckRecord
from penstock.model.clock import Clock
from penstock.model.routing import split_shards
from penstock.shuffle.binding import ad_hoc_bindings
from penstock.shuffle.session import Session
from penstock.shuffle.state import Options
from penstock.wall_clock import now

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.journal.state import JournalState
    from penstock.shuffle.rounds import Round

HEAP: Final = 512 << 20
RESERVED: Final = 300 << 20
"""What Spark keeps of its heap for other things than rows."""
FRACTION: Final = 0.2
TIMES: Final = 20
SHARDS: Final = 2
ROUNDS: Final = 4
"""That fit the limit of the log."""

NOTE_BYTES: Final = 2048
TRANSACTION_BYTES: Final = 8 << 20
"""Before encoding; each is one fragment."""
JOURNALS: Final = 4

SAMPLE_S: Final = 0.1
ROLES: Final = ("driver", "jvm", "workers")


def measure(bench: Bench) -> Report:
    """Peaks of memory for backlogs of once and of 20 times the memory that Spark has."""
    if not Path("/proc/self/stat").exists():
        bench.say("there is no /proc: the memory of processes is not measured")
        return Report(results=())
    memory = bench.size(full=HEAP, quick=int((HEAP - RESERVED) * FRACTION))
    disk_limit = bench.size(full=512 << 20, quick=96 << 20)
    with tempfile.TemporaryDirectory() as scratch:
        once, times = (
            _shuffled(bench, Path(scratch) / f"{times}x", times * memory, disk_limit)
            for times in (1, TIMES)
        )
    what = f"backlog of {TIMES} x {memory >> 20} MiB"
    return Report(
        results=(
            Result(name=what, value=times.uncompressed / times.seconds / 1e6, unit="MB/s"),
            Result(name=f"{what}: stored", value=times.stored / 1e6, unit="MB"),
            Result(name=f"{what}: checkpoints", value=times.checkpoints, unit="checkpoints"),
            *(
                Result(
                    name=f"{name}, peak of the {role}", value=each.peaks[role] / 1e6, unit="MB RSS"
                )
                for role in ROLES
                for name, each in ((f"backlog of {memory >> 20} MiB", once), (what, times))
            ),
            Result(name=f"{what}: most in the log", value=times.peaks["log"] / 1e6, unit="MB"),
            Result(name=f"{what}: limit of the log", value=disk_limit / 1e6, unit="MB"),
            Result(
                name=f"{what}: most in Spark's own files",
                value=times.peaks["spark"] / 1e6,
                unit="MB",
            ),
        ),
        goals=(
            *(
                Goal(
                    name=f"peak of the {role}: backlog of {memory >> 20} MiB / {TIMES} times that",
                    measured=once.peaks[role] / times.peaks[role],
                    goal=0.8,
                )
                for role in ROLES
            ),
            Goal(
                name="log: (1.5 limit + round) / most on disk",
                measured=(disk_limit * 1.5 + disk_limit // ROUNDS) / times.peaks["log"],
                goal=1.0,
            ),
        ),
    )


# ------------------------------------------------------------------------------------- the parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is to shuffle."""

    data: str
    log: str
    spark: str
    documents: int
    stored: int
    disk_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffled:
    """What a process has shuffled, and what that took."""

    seconds: float
    checkpoints: int
    uncompressed: int
    stored: int
    peaks: Mapping[str, int]


def _shuffled(bench: Bench, data: Path, size: int, disk_limit: int) -> Shuffled:
    bench.say(f"writing a backlog of {size >> 20:,} MiB")
    data.mkdir()
    with staged(data) as (here, loop):
        written, stored = loop.run(_write(here, size))
    order = Order(
        data=str(data),
        log=str(data / "log"),
        spark=str(data / "spark"),
        documents=written.documents,
        stored=stored,
        disk_limit=disk_limit,
    )
    bench.say(f"shuffling {size >> 20:,} MiB with {HEAP >> 20} MiB of heap")
    told, peaks = _run(order)
    if Sums(told["documents"], told["checksum"]) != written:
        raise RuntimeError(f"{written} were written, and {told} found")
    return Shuffled(
        seconds=told["seconds"],
        checkpoints=told["checkpoints"],
        uncompressed=size,
        stored=stored,
        peaks=peaks,
    )


async def _write(here: Stage, size: int) -> tuple[Sums, int]:
    """A backlog of many transactions, one after the other in a few journals."""
    each = TRANSACTION_BYTES // NOTE_BYTES
    count = max(JOURNALS, -(-size // TRANSACTION_BYTES))
    stock = Stock(documents=count * each, lots=count, parts=count, note_bytes=NOTE_BYTES)
    spec = collection(BACKLOG, by="lot")
    names = [JournalName.of(spec.name, {"lot": number}) for number in range(JOURNALS)]
    await here.schemas.put(spec.write_schema)
    await here.journals.create_all({name: creation(name) for name in names})
    written, stored = Sums(), 0
    for number, ids in enumerate(stock.pieces("lot")):
        name = names[number % JOURNALS]
        fragment, sums = await asyncio.to_thread(write, here, spec, name, stock, ids)
        ack = AckRecord(producer=PRODUCER, clock=Clock(START + ids.stop - 1))
        await here.journals.append(str(name), [fragment, ack])
        written += sums
        stored += fragment.bytes
    return written, stored


def _run(order: Order) -> tuple[dict[str, int], dict[str, int]]:
    """What the process says in the end, and the peaks of what it held meanwhile."""
    command = [sys.executable, "-m", "penstock.bench.backlog", json.dumps(asdict(order))]
    peaks = dict.fromkeys((*ROLES, "log", "spark"), 0)
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said)  # noqa: S603
        try:
            while process.poll() is None:
                held = {
                    **resident(process.pid),
                    "log": bytes_below(Path(order.log)),
                    "spark": bytes_below(Path(order.spark)),
                }
                peaks = {name: max(peaks[name], held[name]) for name in peaks}
                time.sleep(SAMPLE_S)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        answer = said.read().decode()
    if process.returncode:
        raise Unavailable("the process that shuffles a backlog has failed", why=answer)
    told: dict[str, int] = json.loads(answer)
    return told, peaks


def resident(pid: int) -> dict[str, int]:
    """Bytes of memory that a process and its descendants hold, by what they are."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended since
                # pid (name) state parent …, and a name may have spaces and parentheses
                head, _, rest = (entry / "stat").read_text().rpartition(")")
                children.setdefault(int(rest.split()[1]), []).append(int(entry.name))
                names[int(entry.name)] = head.partition("(")[2]
    held = dict.fromkeys(ROLES, 0)
    below = [pid]
    while below:
        each = below.pop()
        below += children.get(each, ())
        role = "driver" if each == pid else "jvm" if names.get(each) == "java" else "workers"
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{each}/statm").read_text().split()[1])
            held[role] += pages * os.sysconf("SC_PAGE_SIZE")
    return held


def bytes_below(directory: Path) -> int:
    """Of all files in a directory and below; those that go meanwhile do not count."""
    total = 0
    for above, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                total += (Path(above) / name).stat().st_size
    return total


# -------------------------------------------------------------------------------------- the child

BACKLOG: Final = "bench/backlog"


def main(argument: str) -> None:
    """Shuffle what `Order` says, and say what was found."""
    order = Order(**json.loads(argument))
    spark = open_spark(
        EngineOptions(
            master="local[2]",
            app_name="penstock-bench-backlog",
            conf={
                "spark.driver.memory": f"{HEAP >> 20}m",
                # The heap is as large as it is, used or not: what grows would be something else.
                "spark.driver.extraJavaOptions": f"-Xms{HEAP >> 20}m -XX:+AlwaysPreTouch",
                "spark.memory.fraction": str(FRACTION),
                "spark.local.dir": order.spark,
            },
        )
    )
    try:
        began = time.monotonic()
        found, checkpoints = asyncio.run(_shuffle(spark, order))
        told = {**asdict(found), "checkpoints": checkpoints, "seconds": time.monotonic() - began}
    finally:
        close_spark()
    sys.stdout.write(json.dumps(told))


async def _shuffle(spark: SparkSession, order: Order) -> tuple[Sums, int]:
    from penstock.shuffle.log import Log, SliceLog
    from penstock.shuffle.slice import Slice

    class Filling(SliceLog):
        """Tells when so many bytes, as they are stored in journals, were staged."""

        def __init__(self, log: Log, slice_: Slice, *, until: int) -> None:
            super().__init__(log, slice_)
            self.filled = asyncio.Event()
            self._lacking = until

        async def stage(self, round_: Round, states: Mapping[str, JournalState]) -> None:
            await super().stage(round_, states)
            self._lacking -= round_.bytes
            if self._lacking <= 0:
                self.filled.set()

    bindings, routing = ad_hoc_bindings(collection(BACKLOG, by="lot")), split_shards(SHARDS)
    found, checkpoints = Sums(), 0
    async with Stage.opened(Path(order.data)) as here:
        slice_ = Slice(spark, here.planner, bindings, routing)
        log = await Log.open(spark, Path(order.log), epoch=1, shards=SHARDS)
        staging = Filling(log, slice_, until=min(order.disk_limit, order.stored))
        session = await Session.open(
            here.planner,
            bindings,
            routing=routing,
            log=staging,
            options=Options(
                disk_limit=order.disk_limit,
                round_max_bytes=order.disk_limit // ROUNDS,
                read_ahead=True,
            ),
            now=now,
        )
        try:
            await staging.filled.wait()
            while found.documents < order.documents:
                checkpoint = await session.next_checkpoint()
                async with log.scan(checkpoint.deliveries) as frame:
                    found += await asyncio.to_thread(read_to_the_end, frame, "d0")
                session.consumed(checkpoint)
                checkpoints += 1
        finally:
            await session.close()
    return found, checkpoints


if __name__ == "__main__":
    main(sys.argv[1])
