"""What the commands share that run tasks continuously: `penstock up` and `penstock cluster`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Final

from penstock.cli.apply import applied_first, summary
from penstock.cli.frame import stderr
from penstock.cli.run import install_imports
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.cli.tables import counted, size_text
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.runtime.control import TransactionSummary
    from penstock.runtime.introspection import TaskReport
    from penstock.runtime.session import World

_LOOK_S: Final = 1.0


@contextlib.asynccontextmanager
async def deployed(
    settings: Settings, *, command: str, create: bool, yes: bool = False
) -> AsyncIterator[Consensus]:
    """Within this, the process runs the tasks of its data directory; catalogs are applied first."""
    from penstock.deployment import running_up

    async with opened(settings, create=create) as store:
        with running_up(settings, command):
            if settings.catalog:
                applied = await applied_first(store, settings.catalog, yes=yes)
                stderr.print(summary(applied, dry_run=False), markup=False)
            yield store


async def world_of(settings: Settings, store: Consensus, *, install: bool) -> World:
    """Open what tasks need."""
    from penstock.batch import open_world
    from penstock.catalog import desired
    from penstock.scope import DomainThreads

    asyncio.get_running_loop().set_default_executor(DomainThreads())
    world = await open_world(settings, store, command="up")
    if install:
        await install_imports(await desired.load(store))
    return world


@contextlib.asynccontextmanager
async def spark(
    settings: Settings, world: World, stop: Callable[[], None], *, shared: bool = True
) -> AsyncIterator[None]:
    """Within this, Spark is there for tasks, and for other commands if it is shared.

    If its JVM ends, `stop` is called, and `SparkLost` is raised in the end: the next process has
    another one, and goes on.
    """
    from penstock.engine import SparkLost
    from penstock.warm.host import WarmHost

    warming = asyncio.create_task(_start_spark(world), name="Spark")
    watching = asyncio.create_task(_until_lost(stop), name="watching Spark")
    try:
        async with WarmHost(settings) if shared else contextlib.nullcontext():
            yield
    finally:
        for task in (warming, watching):
            task.cancel()
    if watching.done() and not watching.cancelled():
        raise SparkLost(
            "Spark's JVM has ended, and this process ends with it",
            why="it was killed, or ran out of memory",
            fix="start it again: every task continues after its last transaction. If it happens "
            "again, give it more memory: --conf spark.driver.memory=4g",
        )


async def _until_lost(stop: Callable[[], None]) -> None:
    """End all tasks at once when the JVM has ended: what they begin now cannot end well."""
    from penstock.engine import spark_is_lost

    while not spark_is_lost():  # noqa: ASYNC110 - a process that ends sets no event
        await asyncio.sleep(_LOOK_S)
    for _ in range(2):
        stop()


async def _start_spark(world: World) -> None:
    """Start Spark before a task asks for it: the first documents are not to wait for it."""
    from penstock.errors import PenstockError

    with contextlib.suppress(PenstockError):  # a task that needs it will say so
        await asyncio.to_thread(world.spark, 0)


@contextlib.contextmanager
def finishing(stop: Callable[[], None]) -> Iterator[None]:
    """Within this, the first signals let transactions come to their end."""

    def finish() -> None:
        stderr.print("finishing open transactions; Ctrl-C again to stop at once")
        stop()

    with stops.finishing(finish):
        yield


def print_transaction(report: TaskReport, progress: TransactionSummary) -> None:
    """Print a line for a transaction that was committed."""
    stderr.print(
        f"{report.task}: transaction {report.transactions}: "
        f"{counted(progress.documents, 'document')}, {size_text(progress.bytes)}, "
        f"{counted(progress.stored, 'row')}, {counted(progress.jobs, 'job')}, "
        f"{progress.seconds:.2f} s",
        markup=False,
    )
