"""Tasks: 20 of them in one process, busy and idle.

Busy: the same number of events in 20 collections with a task each, and in one collection with one
task, in this process and on the same Spark, to SQLite. Idle: a separate process leads 20 tasks that
have caught up and have used Spark. We measure how much of a core it and its JVM take, and how many
jobs of any kind Spark runs meanwhile.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from penstock.catalog import desired
from penstock.catalog.collection_lookup import find_collection
from penstock.errors import Bug, Unavailable
from penstock_bench import leading
from penstock_bench.events import (
    COLLECTION,
    TABLE,
    Appender,
    Events,
    catalog_text,
    settings_in,
    sqlite_endpoint,
    sqlite_table,
)
from penstock_bench.frame import Bench, Goal, Report, Result, seconds_of
from penstock_bench.processes import Watch, running_process
from penstock_bench.scale_runs import (
    apply_catalog_text,
    catalog_of,
    check_documents,
    open_store,
    run_until_caught_up,
    task_config,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.model.json_order import Json
    from penstock.runtime.control import TransactionSummary

TASKS: Final = 20
ACCOUNTS: Final = 100_000
ROUNDS: Final = 3
IDLE_EVENTS: Final = 100
"""Events of each task before it becomes idle."""
IDLE_CORES_MAX: Final = 0.02
SETTLE_S: Final = 10.0
"""Time after the last transaction to flush logs and let the JVM finish compiling."""
ANSWER_S_MAX: Final = 300.0

_MODULE: Final = "penstock_bench.scale_tasks"


def measure(bench: Bench) -> Report:
    """Measure twenty tasks, busy and idle."""
    return Report.merge((measure_busy(bench), measure_idle(bench)))


# ------------------------------------------------------------------------------------------- busy


def measure_busy(bench: Bench) -> Report:
    """Measure events per second of 20 tasks with a share each, and of one task with all."""
    events = bench.size(full=2_000_000, quick=100_000)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        deployments = {
            count: TaskDeployment(Path(temp_dir) / str(count), count, events)
            for count in (1, TASKS)
        }
        for deployment in deployments.values():
            bench.say(f"writing {events:,} events for {deployment.tasks} tasks")
            deployment.fill(rounds=1 + ROUNDS)

        def run(deployment: TaskDeployment) -> Callable[[], float]:
            return seconds_of(lambda: deployment.run(bench.spark))

        taken = bench.interleave(
            f"{events:,} events",
            {str(count): run(deployment) for count, deployment in deployments.items()},
            rounds=ROUNDS,
        )
        for deployment in deployments.values():
            deployment.check()
    return Report(
        results=(
            *(
                Result(
                    name=f"{events:,} events, tasks in one process: {count}",
                    value=events / taken.median(str(count)),
                    unit="documents/s",
                )
                for count in deployments
            ),
            Result(
                name=f"throughput: {TASKS} tasks / one",
                value=taken.ratio("1", str(TASKS)),
                unit="ratio",
            ),
        )
    )


@dataclass(slots=True)
class TaskDeployment:
    """Collections with a share of the events each, and a task per collection and round.

    Each has its share of the accounts, too, so that all tables together are as large as one.
    """

    data: Path
    tasks: int
    events: int
    rounds: int = 0
    """Rounds whose tasks have caught up."""
    files: int = TASKS
    """Transactions in total, whether in one collection or in 20."""
    shares: tuple[Events, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shares = tuple(
            Events(
                self.events // self.tasks,
                self.files // self.tasks,
                accounts=ACCOUNTS // self.tasks,
                seed=7 + number,
            )
            for number in range(self.tasks)
        )

    def names(self, round_: int) -> list[str]:
        """Return the names of the tasks of a round, in the order of their shares."""
        return [f"bench/accounts-{round_}-{number}" for number in range(self.tasks)]

    def catalog(self, *, rounds: int, more: Mapping[str, Json] | None = None) -> str:
        """Return the catalog with the tasks of this many rounds, and with more tasks."""
        collection = yaml.safe_load(catalog_text({}))["collections"][COLLECTION]
        tasks: dict[str, Json] = {
            name: task_config(
                sqlite_endpoint(self._database(round_, number)), self.collection(number), TABLE
            )
            for round_ in range(rounds)
            for number, name in enumerate(self.names(round_))
        }
        collections = {self.collection(number): collection for number in range(self.tasks)}
        return catalog_of(collections, {**tasks, **(more or {})})

    def fill(self, *, rounds: int, more: Mapping[str, Json] | None = None) -> None:
        """Append the events, and apply the tasks of this many rounds."""
        self.apply(rounds=rounds, more=more)
        self.append(range(self.shares[0].files))

    def apply(self, *, rounds: int, more: Mapping[str, Json] | None = None) -> None:
        """Apply the tasks of this many rounds, and more tasks."""
        self.data.mkdir(parents=True, exist_ok=True)

        async def apply_() -> None:
            async with open_store(settings_in(self.data)) as store:
                text = self.catalog(rounds=rounds, more=more)
                await apply_catalog_text(store, self.data, text)

        asyncio.run(apply_())

    def append(self, files: Sequence[int]) -> None:
        """Append these files of each share, one transaction for each."""

        async def append_() -> None:
            settings = settings_in(self.data)
            async with open_store(settings) as store:
                catalog = await desired.load(store)
                for number, share in enumerate(self.shares):
                    spec = find_collection(catalog, self.collection(number))
                    appender = Appender(store, settings, spec)
                    for file in files:
                        await appender.append(share.batch(file))

        asyncio.run(append_())

    def run(self, spark: Callable[[], SparkSession]) -> None:
        """Run the tasks of the next round concurrently until all have caught up."""
        names = self.names(self.rounds)
        check_documents(asyncio.run(run_until_caught_up(self.data, names, spark)), self.events)
        self.rounds += 1

    def check(self) -> None:
        """Raise if a table differs from the oracle."""
        for number, share in enumerate(self.shares):
            for round_ in range(self.rounds):
                if wrong := sqlite_table(self._database(round_, number)).wrong_rows(share.oracle):
                    raise Bug(f"{wrong:,} rows of task {number} are wrong")

    @staticmethod
    def collection(number: int) -> str:
        """Return the name of the collection of a share."""
        return f"{COLLECTION}-{number}"

    def _database(self, round_: int, number: int) -> Path:
        return self.data / f"{round_}-{number}.db"


# ------------------------------------------------------------------------------------------- idle


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleUsage:
    """What an idle process used."""

    cores: float
    jobs: int


def measure_idle(bench: Bench) -> Report:
    """Measure what 20 idle tasks cost."""
    for_s = bench.size(full=30, quick=10)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        deployment = TaskDeployment(Path(temp_dir) / "idle", TASKS, TASKS * IDLE_EVENTS)
        deployment.fill(rounds=1)
        bench.say(f"{TASKS} idle tasks for {for_s} s")
        rest = watch_idle(deployment, for_s)
        deployment.check()
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


def watch_idle(
    deployment: TaskDeployment, for_s: float, *, settle_s: float = SETTLE_S
) -> IdleUsage:
    """Lead all tasks in a process until they have caught up, then measure what it uses."""
    command: list[str | Path] = [sys.executable, "-m", _MODULE, "--data", deployment.data]
    with (
        running_process(command, log=deployment.data / "log") as process,
        _line_reader(process) as next_line,
    ):
        documents = 0
        while documents < deployment.events:
            documents += next_line()["documents"]
        deployment.rounds = 1
        time.sleep(settle_s)
        before, cpu_s = _jobs(process, next_line), _cpu_s(process)
        time.sleep(for_s)
        used_s = _cpu_s(process) - cpu_s
        return IdleUsage(cores=used_s / for_s, jobs=_jobs(process, next_line) - before)


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    watch = Watch(process.pid)
    watch.sample()
    return watch.usage.cpu_s


def _jobs(process: subprocess.Popen[bytes], next_line: Callable[[], dict[str, Any]]) -> int:
    """Return the number of jobs that Spark has run so far."""
    process.send_signal(signal.SIGUSR1)
    while "started" not in (line := next_line()):
        pass  # a late report of a transaction
    return int(line["started"])


@contextlib.contextmanager
def _line_reader(process: subprocess.Popen[bytes]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Give a function that returns the next line of a process; it raises after a long silence."""
    lines: queue.Queue[bytes] = queue.Queue()

    def listen() -> None:
        with contextlib.suppress(ValueError):  # closed when the process ends
            for line in process.stdout or ():
                lines.put(line)
        lines.put(b"")

    def next_line() -> dict[str, Any]:
        with contextlib.suppress(queue.Empty):
            if line := lines.get(timeout=ANSWER_S_MAX):
                report: dict[str, Any] = json.loads(line)
                return report
        raise Unavailable("a process that leads tasks has ended, or reports nothing")

    threading.Thread(target=listen, name="listen", daemon=True).start()
    yield next_line


async def lead(data: Path) -> None:
    """Lead all tasks; report each transaction, and on SIGUSR1 the number of Spark jobs."""

    def print_line(line: dict[str, int]) -> None:
        os.write(1, f"{json.dumps(line)}\n".encode())

    def report_transaction(progress: TransactionSummary) -> None:
        print_line({"documents": progress.documents})

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: print_line({"started": jobs_started()}))
    await leading.lead(settings_in(data), report_transaction)


def jobs_started() -> int:
    """Return the number of jobs that this process's Spark has started."""
    from pyspark import SparkContext

    scheduler: Any = SparkContext.getOrCreate()._jsc.sc().dagScheduler()  # noqa: SLF001
    return int(scheduler.numTotalJobs())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=lead.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the deployment's directory")
    asyncio.run(lead(parser.parse_args(arguments).data))


if __name__ == "__main__":
    main()
