"""History: what it takes to restart a task that has committed 10,000 transactions.

The task's own leader makes the history: it reads each appended document from the journal, hints,
stages, commits at the endpoint, records, publishes statistics and their ACKs. Only its Spark jobs
are replaced (`JobsWithoutSpark`), since 10,000 jobs would take a quarter of an hour: a transaction
has one document, which is read and staged in this process. So the recovery log, the journals of
documents and of statistics, and the endpoint hold what 10,000 real transactions leave behind.

A restart begins with nothing open and ends when the task has caught up: it opens the store, loads
the catalog, builds the task, takes over its log, opens the endpoint and follows its journals.
There is nothing to read, so Spark does not start. We also measure `penstock run` as a process, most
of whose time is Python's own start.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from unittest import mock

from penstock.batch import make_world
from penstock.catalog import desired
from penstock.connectors.builtin import materialization
from penstock.errors import Bug
from penstock.journal.fragments import read_visible
from penstock.runtime.connector.materialize import Staged, Workers
from penstock.runtime.control import Control
from penstock.runtime.materialize import leader
from penstock.runtime.materialize.build import build
from penstock.runtime.materialize.project import project
from penstock.runtime.materialize.transaction import Transaction
from penstock.runtime.materialize.transaction_jobs import TransactionJobs
from penstock.runtime.supervise import supervise
from penstock_bench.events import (
    TASK,
    Appender,
    Events,
    apply_catalog,
    catalog_text,
    settings_in,
    sqlite_endpoint,
    sqlite_table,
)
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, seconds_of
from penstock_bench.processes import run
from penstock_bench.scale_runs import check_documents, open_store, penstock_run, run_until_caught_up

if TYPE_CHECKING:
    from penstock.journal.state import JournalState
    from penstock.runtime.materialize.jobs import StagedManifest

SHORT: Final = 10
ACCOUNTS: Final = 100
TRANSACTIONS_OF_A_WRITER: Final = 100
"""After that another producer takes over, as after a restart."""

_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a directory of our own in it


def measure(bench: Bench) -> Report:
    """Measure restarts after a long history and after a short one."""
    long = bench.size(full=10_000, quick=500)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        places = {count: Path(temp_dir) / str(count) for count in (SHORT, long)}
        for count, data in places.items():
            bench.say(f"committing {count:,} transactions")
            make_history(data, events_per_transaction(count))

        def restarted(count: int) -> Callable[[], None]:
            return lambda: restart(places[count])

        def ran(count: int) -> Callable[[], float]:
            return lambda: run(penstock_run(places[count])).seconds

        inside = bench.interleave(
            "restart", {str(count): seconds_of(restarted(count)) for count in places}
        )
        process = bench.interleave(
            "penstock run with nothing to do",
            {str(count): ran(count) for count in places},
            rounds=3,
        )
        for count, data in places.items():
            check_table(data, events_per_transaction(count))
    return Report(
        results=(
            *(
                Result(
                    name=f"restart after {count:,} transactions",
                    value=inside.median(str(count)) * 1000,
                    unit="ms",
                )
                for count in places
            ),
            *(
                Result(
                    name=f"penstock run with nothing to do after {count:,} transactions",
                    value=process.median(str(count)),
                    unit="s",
                )
                for count in places
            ),
        ),
        goals=(
            Goal(
                name=f"restart: after {SHORT:,} transactions / after {long:,}",
                measured=inside.ratio(str(SHORT), str(long)),
                goal=1 / 1.5,
            ),
        ),
        charts=(
            Chart(
                name="restart",
                title="Restart of a task",
                unit="ms",
                bars=tuple(
                    (f"{OURS}, after {count:,} transactions", inside.median(str(count)) * 1000)
                    for count in places
                ),
                note="From opening the store until the task has caught up; less is better.",
            ),
        ),
    )


def events_per_transaction(transactions: int) -> Events:
    """Make events that are each a transaction of their own."""
    return Events(transactions, transactions, accounts=ACCOUNTS)


def database(data: Path) -> Path:
    """Return the database that is the endpoint of a deployment's task."""
    return data / "accounts.db"


# ----------------------------------------------------------------------------------------- making


class JobsWithoutSpark(TransactionJobs):
    """Replaces a session's Spark jobs: stages documents in this process.

    Every transaction has one document, so there is nothing to combine.
    """

    async def _stage(
        self,
        txn: Transaction,
        workers: Workers,
        states: Mapping[str, JournalState],
        attempt: int,
    ) -> StagedManifest:
        from penstock.runtime.materialize.jobs import ShardCounts, StagedManifest

        staged: list[Staged] = []
        counted: list[ShardCounts] = []
        for binding, deliveries in txn.deliveries().items():
            target, plan = self._targets[binding].target, self._targets[binding].plan
            (rows,) = (rows for delivery in deliveries for rows in delivery.rows)
            (batch,) = read_visible(self._planner.blobs, rows, plan.columns)
            identity = self._identity(txn, attempt).attempt(binding, 0, 0)
            stager = workers.stager(identity)
            stager.store(binding, project(batch, plan.columns, target.fields))
            staged += stager.finish()
            counted.append(ShardCounts(binding=binding, shard=0, stored_docs=batch.num_rows))
        return StagedManifest(staged=tuple(staged), counted=tuple(counted))


def make_history(data: Path, events: Events) -> None:
    """Create a deployment whose task has committed each event in a transaction of its own."""
    with built_in_memory(data):
        asyncio.run(_make_history(data, events))


@contextlib.contextmanager
def built_in_memory(place: Path) -> Iterator[None]:
    """Create a directory that is in memory, if the system supports it, during the block.

    Six flushes to disk for each of 10,000 transactions would take minutes, and the resulting files
    are the same.
    """
    if not _MEMORY.is_dir():
        place.mkdir(parents=True)
        yield
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=_MEMORY) as memory:
        place.symlink_to(memory)
        yield
        place.unlink()
        shutil.copytree(memory, place)


async def _make_history(data: Path, events: Events) -> None:
    (data / "catalog.yaml").write_text(catalog_text(sqlite_endpoint(database(data))))
    settings = settings_in(data)
    async with open_store(settings) as store:
        spec = await apply_catalog(store, data / "catalog.yaml")
        catalog = await desired.load(store)
        (task,) = (each for each in catalog.materializations if each.name == TASK)
        built = await asyncio.to_thread(build, catalog, task, materialization)
        committed: asyncio.Queue[int] = asyncio.Queue()
        control = Control(on_progress=lambda done: committed.put_nowait(done.documents))
        with mock.patch.object(leader, "TransactionJobs", JobsWithoutSpark):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(supervise(built, make_world(settings, store), control))
                for first in range(0, events.files, TRANSACTIONS_OF_A_WRITER):
                    appender = Appender(store, settings, spec)
                    last = min(first + TRANSACTIONS_OF_A_WRITER, events.files)
                    for file in range(first, last):
                        await appender.append(events.batch(file))
                        if (documents := await committed.get()) != 1:
                            raise Bug(f"a transaction of one document has {documents}")
                control.stop()


# ------------------------------------------------------------------------------------- restarting


def restart(data: Path) -> None:
    """Start the task with nothing to read, and wait until it has caught up."""
    check_documents(asyncio.run(run_until_caught_up(data, [TASK])), 0)


def check_table(data: Path, events: Events) -> None:
    """Raise if the table differs from the oracle."""
    if wrong := sqlite_table(database(data)).wrong_rows(events.oracle):
        raise Bug(f"{wrong} rows are wrong after {events.files:,} transactions")
