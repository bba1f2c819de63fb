"""Tasks: 20 of them in one process, at work and idle.

At work: the same number of events in 20 collections, with a task each, and in one collection with
one task, in this process and on the same Spark, to SQLite. Idle: a process of its own leads 20
tasks that have caught up, and whose Spark was used. What it and its JVM take of a core is measured,
and how many jobs of any kind Spark is given meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from penstock.bench import leading
from penstock.bench.events import (
    COLLECTION,
    TABLE,
    Appender,
    Events,
    catalog_text,
    settings_in,
    sqlite_endpoint,
    sqlite_table,
)
from penstock.bench.frame import Bench, Goal, Report, Result, seconds_of
from penstock.bench.processes import Watch, started
from penstock.bench.scale_runs import (
    applied,
    catalog_of,
    caught_up,
    check_documents,
    opened,
    task,
)
from penstock.catalog.lookup import find_collection
from penstock.errors import Bug, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.model.json_order import Json
    from penstock.runtime.materialize.work import Progress

TASKS: Final = 20
ROUNDS: Final = 3
IDLE_EVENTS: Final = 100
"""Of each task that is to be idle afterwards."""
IDLE_CORES_MAX: Final = 0.02
SETTLE_S: Final = 10.0
"""After the last transaction: logs are flushed, and the JVM has compiled what was used."""
ANSWER_S_MAX: Final = 300.0

_MODULE: Final = "penstock.bench.scale_tasks"


def measure(bench: Bench) -> Report:
    """Twenty tasks at work, and idle."""
    working, idle = measure_working(bench), measure_idle(bench)
    return Report(results=working.results + idle.results, goals=working.goals + idle.goals)


# ---------------------------------------------------------------------------------------- at work


def measure_working(bench: Bench) -> Report:
    """Events per second of 20 tasks with a share each, and of one task with all."""
    events = bench.size(full=2_000_000, quick=100_000)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        places = {count: Place(Path(scratch) / str(count), count, events) for count in (1, TASKS)}
        for place in places.values():
            bench.say(f"writing {events:,} events for {place.tasks} tasks")
            place.fill(times=1 + ROUNDS)

        def run(place: Place) -> Callable[[], float]:
            return seconds_of(lambda: place.run(bench.spark))

        taken = bench.interleave(
            f"{events:,} events",
            {str(count): run(place) for count, place in places.items()},
            rounds=ROUNDS,
        )
        for place in places.values():
            place.check()
    return Report(
        results=(
            *(
                Result(
                    name=f"{events:,} events, tasks in one process: {count}",
                    value=events / taken.median(str(count)),
                    unit="documents/s",
                )
                for count in places
            ),
            Result(
                name=f"throughput: {TASKS} tasks / one",
                value=taken.ratio("1", str(TASKS)),
                unit="ratio",
            ),
        )
    )


@dataclass(slots=True)
class Place:
    """Collections with a share of the events each; a task of each for every time that it is run."""

    data: Path
    tasks: int
    events: int
    times: int = 0
    shares: tuple[Events, ...] = field(init=False)

    def __post_init__(self) -> None:
        # In 20 transactions, whether these are of one collection or of 20.
        self.shares = tuple(
            Events(self.events // self.tasks, TASKS // self.tasks, seed=7 + number)
            for number in range(self.tasks)
        )

    def fill(self, *, times: int) -> None:
        """Append the events, and apply the tasks of so many times."""
        self.data.mkdir(parents=True)
        collection = yaml.safe_load(catalog_text({}))["collections"][COLLECTION]
        names = [f"{COLLECTION}-{number}" for number in range(self.tasks)]
        tasks: dict[str, Json] = {
            _task(time_, number): task(sqlite_endpoint(self._database(time_, number)), name, TABLE)
            for time_ in range(times)
            for number, name in enumerate(names)
        }
        text = catalog_of(dict.fromkeys(names, collection), tasks)

        async def fill_() -> None:
            settings = settings_in(self.data)
            async with opened(settings) as store:
                catalog = await applied(store, self.data, text)
                for name, share in zip(names, self.shares, strict=True):
                    appender = Appender(store, settings, find_collection(catalog, name))
                    for file in range(share.files):
                        await appender.append(share.batch(file))

        asyncio.run(fill_())

    def run(self, spark: Callable[[], SparkSession]) -> None:
        """Let the tasks of the next time catch up, all at once."""
        names = [_task(self.times, number) for number in range(self.tasks)]
        check_documents(asyncio.run(caught_up(self.data, names, spark)), self.events)
        self.times += 1

    def check(self) -> None:
        """Refuse tables that are not exactly what they should be."""
        for number, share in enumerate(self.shares):
            for time_ in range(self.times):
                if wrong := sqlite_table(self._database(time_, number)).wrong_rows(share.oracle):
                    raise Bug(f"{wrong:,} rows of task {number} are wrong")

    def _database(self, time_: int, number: int) -> Path:
        return self.data / f"{time_}-{number}.db"


def _task(time_: int, number: int) -> str:
    return f"bench/accounts-{time_}-{number}"


# ------------------------------------------------------------------------------------------- idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a process that has nothing to do was seen to do."""

    cores: float
    jobs: int


def measure_idle(bench: Bench) -> Report:
    """What 20 tasks cost that have nothing to do."""
    for_s = bench.size(full=30, quick=10)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        place = Place(Path(scratch) / "idle", TASKS, TASKS * IDLE_EVENTS)
        place.fill(times=1)
        bench.say(f"{TASKS} idle tasks for {for_s} s")
        rest = watch_idle(place, for_s)
        place.check()
    return Report(
        results=(
            Result(name=f"{TASKS} idle tasks", value=100 * rest.cores, unit="% of one core"),
            Result(name=f"{TASKS} idle tasks", value=rest.jobs, unit=f"Spark jobs in {for_s} s"),
        ),
        goals=(
            Goal(
                name=f"{TASKS} idle tasks: {IDLE_CORES_MAX:.0%} of a core / used",
                measured=IDLE_CORES_MAX / max(rest.cores, 1e-6),
                goal=1.0,
            ),
            Goal(
                name=f"{TASKS} idle tasks: 1 / (1 + Spark jobs)",
                measured=1 / (1 + rest.jobs),
                goal=1.0,
            ),
        ),
    )


def watch_idle(place: Place, for_s: float, *, settle_s: float = SETTLE_S) -> Rest:
    """Lead the tasks of a place in a process until they have caught up, and then look at it."""
    command: list[str | Path] = [sys.executable, "-m", _MODULE, "--data", place.data]
    with started(command, log=place.data / "log") as process, _listening(process) as told:
        documents = 0
        while documents < place.events:
            documents += told()["documents"]
        place.times = 1
        time.sleep(settle_s)
        before, cpu_s = _jobs(process, told), _cpu_s(process)
        time.sleep(for_s)
        used_s = _cpu_s(process) - cpu_s
        return Rest(cores=used_s / for_s, jobs=_jobs(process, told) - before)


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    watch = Watch(process.pid)
    watch.sample()
    return watch.usage.cpu_s


def _jobs(process: subprocess.Popen[bytes], told: Callable[[], dict[str, Any]]) -> int:
    """How many jobs Spark was given so far."""
    process.send_signal(signal.SIGUSR1)
    while "started" not in (said := told()):
        pass  # a transaction that was told of late
    return int(said["started"])


@contextlib.contextmanager
def _listening(process: subprocess.Popen[bytes]) -> Iterator[Callable[[], dict[str, Any]]]:
    """The lines of a process as they come; one that is silent for long is given up."""
    lines: queue.Queue[bytes] = queue.Queue()

    def listen() -> None:
        with contextlib.suppress(ValueError):  # closed when the process is ended
            for line in process.stdout or ():
                lines.put(line)
        lines.put(b"")

    def told() -> dict[str, Any]:
        with contextlib.suppress(queue.Empty):
            if line := lines.get(timeout=ANSWER_S_MAX):
                said: dict[str, Any] = json.loads(line)
                return said
        raise Unavailable("a process that leads tasks has ended, or says nothing")

    threading.Thread(target=listen, name="listen", daemon=True).start()
    yield told


async def lead(data: Path) -> None:
    """Lead all tasks; tell of transactions, and of all jobs of Spark when asked by SIGUSR1."""

    def tell(said: dict[str, int]) -> None:
        os.write(1, f"{json.dumps(said)}\n".encode())

    def progressed(progress: Progress) -> None:
        tell({"documents": progress.documents})

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: tell({"started": jobs_started()}))
    await leading.lead(settings_in(data), progressed)


def jobs_started() -> int:
    """How many jobs the Spark of this process was ever given."""
    from pyspark import SparkContext

    scheduler: Any = SparkContext.getOrCreate()._jsc.sc().dagScheduler()  # noqa: SLF001
    return int(scheduler.numTotalJobs())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=lead.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the deployment's directory")
    asyncio.run(lead(parser.parse_args(arguments).data))


if __name__ == "__main__":
    main()
