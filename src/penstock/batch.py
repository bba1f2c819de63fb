"""Runs tasks until they have caught up, for `penstock run` and `Penstock.run`, or on and on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from penstock import wall_clock
from penstock.catalog.schema_bundle import with_inferred
from penstock.connectors import builtin
from penstock.consensus.statelog import Fenced
from penstock.engine import EngineOptions, Lifetime, open_spark
from penstock.errors import Bug, PenstockError, UserError
from penstock.journal.blobs import open_blobs
from penstock.journal.follower import current_revision
from penstock.journal.inferred import inferred
from penstock.journal.journals import Journals
from penstock.journal.ownership import Ownership
from penstock.journal.planning import Planner
from penstock.journal.schemas import Schemas
from penstock.model.domain import domain_of
from penstock.model.observed import Observed
from penstock.model.spec import Catalog, CollectionSpec, Endpoint, Frozen, MaterializationSpec
from penstock.runtime import requests
from penstock.runtime.awaited import ENDPOINT, IN_REPORT, STORE, Awaited
from penstock.runtime.connector.capture import Capture
from penstock.runtime.connector.common import Connector
from penstock.runtime.connector.materialize import Materialization
from penstock.runtime.control import Control, StoppedEarly, TransactionSummary
from penstock.runtime.diagnosis import time_text
from penstock.runtime.graph import Stage, TaskNode, stages
from penstock.runtime.history import History, load_history
from penstock.runtime.introspection import Command, Introspection
from penstock.runtime.kinds import (
    Connect,
    TaskDisabled,
    TaskSpec,
    build_task,
    does_nothing,
    kind_of,
    reads_of,
    runnable_tasks,
    shards_of,
    writes_of,
)
from penstock.runtime.leadership import RELEASE_S, IfBusy, release
from penstock.runtime.recovery import log_name
from penstock.runtime.refusals import RefusedDocument
from penstock.runtime.reports import reporting
from penstock.runtime.session import RunnableTask, World
from penstock.runtime.supervise import Patience, is_transient, one_line, supervise
from penstock.runtime.task_log import LEVELS, task_log
from penstock.runtime.waiting import interruptible
from penstock.scope import Work, working_for
from penstock.servicekit.logs import fields

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.consensus.store import Consensus
    from penstock.settings import Settings

_log = logging.getLogger("penstock.runtime")

_WAIT_S: Final = 0.5
_WAIT_S_MAX: Final = 30.0

SHORT_BYTES: Final = 32 << 20
"""Stored documents up to which a run that ends is over before well compiled code pays: 2,000,000
small ones, of 10 MiB, took 17 s instead of 23 without, and 20,000,000 took 50 s instead of 37."""

FAILED_TASK: Final = "failed_task"
"""The attribute of log records that say that a task has failed."""

FAILURES_MAX: Final = 5
"""Sessions in a row that may fail for want of an endpoint before a batch run gives up."""

UNREAD_S_MAX: Final = 60.0
"""Seconds for which they may, if none of them reads anything."""


@dataclass(slots=True, kw_only=True)
class TaskRun:
    """The outcome of running one task."""

    task: str
    transactions: int = 0
    documents: int = 0
    bytes: int = 0
    """Read, as they are stored."""
    stored: int = 0
    jobs: int = 0
    jobs_per_transaction_max: int = 0
    seconds: float = 0.0
    stopped: bool = False
    """It was asked to stop, and may not have caught up."""
    error: PenstockError | None = None

    def add(self, progress: TransactionSummary) -> None:
        """Count a transaction."""
        self.transactions += 1
        self.documents += progress.documents
        self.bytes += progress.bytes
        self.stored += progress.stored
        self.jobs += progress.jobs
        self.jobs_per_transaction_max = max(self.jobs_per_transaction_max, progress.jobs)


@dataclass(slots=True)
class StopHandle:
    """Stops runs that are under way."""

    _controls: list[Control] = field(default_factory=list)

    stopping: bool = False

    def add(self, control: Control) -> None:
        """Let it be stopped, too: at once, if a stop was asked for before it began."""
        self._controls.append(control)
        if self.stopping:
            control.stop()

    def stop(self) -> None:
        """End each at its next transaction boundary; asked for once more, at once."""
        self.stopping = True
        for control in self._controls:
            control.stop()


def tasks_to_run(catalog: Catalog, names: Sequence[str] = ()) -> list[TaskSpec]:
    """Return the tasks named, which must be there, or all that are not disabled.

    A name that tasks of several kinds share is that of all of them.
    """
    tasks = runnable_tasks(catalog)
    by_name = {spec.name: spec for spec in tasks}
    for name in names:
        if name not in by_name:
            raise UserError(
                f"there is no task {name} to run",
                fix=f"one of {', '.join(by_name)}" if by_name else "the catalog has no task",
            )
    if names:
        return [spec for spec in tasks if spec.name in names]
    return [spec for spec in tasks if not shards_of(spec).disable and not _does_nothing(spec)]


def _does_nothing(spec: TaskSpec) -> bool:
    """True for what `check` warns of. A materialization says so itself when it is run."""
    return does_nothing(spec) and not isinstance(spec, MaterializationSpec)


def make_world(
    settings: Settings, store: Consensus, *, ends: bool = False, command: Command = "run"
) -> World:
    """Where leaders live, as these settings say; `ends` if Spark does, with what is there now."""
    options = EngineOptions(master=settings.master, conf=settings.conf)

    def start(waiting_bytes: int) -> SparkSession:
        lifetime = Lifetime.SHORT if waiting_bytes <= SHORT_BYTES else Lifetime.BATCH
        return open_spark(replace(options, lifetime=lifetime if ends else Lifetime.LONG))

    return World(
        planner=Planner(
            journals=Journals(store), blobs=open_blobs(settings.blob), schemas=Schemas(store)
        ),
        spark=start,
        now=wall_clock.now,
        entropy=os.urandom,
        local_dir=(settings.data / "between").resolve(),
        introspection=Introspection(time.time, command=command),
    )


async def open_world(
    settings: Settings, store: Consensus, *, ends: bool = False, command: Command = "run"
) -> World:
    """`make_world` for tasks that are to run: its blob store is the one of this consensus store."""
    world = make_world(settings, store, ends=ends, command=command)
    await Ownership(world.planner.journals, world.planner.blobs).check()
    return world


async def run_graph(
    catalog: Catalog,
    specs: Sequence[TaskSpec],
    world: World,
    *,
    shards: int | None = None,
    stop: StopHandle | None = None,
    if_busy: IfBusy = IfBusy.WAIT,
    takes_from_up: bool = False,
    on_progress: Callable[[TaskRun, TransactionSummary], None] = lambda _, __: None,
) -> list[TaskRun]:
    """Run tasks until all have caught up with what is there now, and with each other.

    A task starts when those whose output it reads have caught up. One that fails stops no other:
    the tasks that read its output go on with what it has published. Tasks that read each other's
    output in a circle are run until none of them finds anything new. `if_busy` says what is done
    about a task that a living process runs.
    """
    store = world.planner.journals.store
    nodes = [TaskNode(name=s.name, reads=reads_of(s), writes=writes_of(s)) for s in specs]
    runs = [TaskRun(task=spec.name) for spec in specs]
    first = await current_revision(store)
    graph = stages(nodes)

    async def once(at: int, revision: int) -> TaskRun:
        return await run_until(
            catalog,
            specs[at],
            world,
            revision,
            shards=shards,
            stop=stop,
            if_busy=if_busy,
            takes_from_up=takes_from_up,
            on_progress=on_progress,
            run=runs[at],
        )

    async def run_stage(stage: Stage) -> None:
        await asyncio.gather(*(running[up] for up in stage.after))
        revision = await current_revision(store) if stage.after else first
        first_round = True
        while True:
            before = sum(runs[at].documents for at in stage.tasks)
            await asyncio.gather(*(once(at, revision) for at in stage.tasks))
            idle = sum(runs[at].documents for at in stage.tasks) == before
            # Before it reads anything, a first round shows what was committed before a crash.
            done = not stage.circular or (idle and not first_round)
            if done or any(runs[at].error or runs[at].stopped for at in stage.tasks):
                return
            first_round = False
            revision = await current_revision(store)

    for spec in specs:
        world.introspection.task(kind_of(spec), spec.name)  # it waits for its turn
    running: list[asyncio.Task[None]] = []
    async with reporting(store, world.introspection), asyncio.TaskGroup() as group:
        for stage in graph:  # upstream stages come first, so those that it waits for are there
            running.append(group.create_task(run_stage(stage)))  # noqa: PERF401
    return runs


async def run_until(
    catalog: Catalog,
    spec: TaskSpec,
    world: World,
    revision: int,
    *,
    shards: int | None = None,
    stop: StopHandle | None = None,
    if_busy: IfBusy = IfBusy.TAKE_OVER,
    takes_from_up: bool = False,
    on_progress: Callable[[TaskRun, TransactionSummary], None] = lambda _, __: None,
    run: TaskRun | None = None,
) -> TaskRun:
    """Run a task until it has stored what was committed up to `revision`.

    A task that `penstock task stop` keeps from running is left alone, with a word. Its errors are
    part of what became of it, and are not raised. `run` is added to, if given.
    """
    run = run or TaskRun(task=spec.name)

    def progressed(progress: TransactionSummary) -> None:
        run.add(progress)
        on_progress(run, progress)

    control = Control(
        until_revision=revision,
        on_progress=progressed,
        if_busy=if_busy,
        takes_from_up=takes_from_up,
        activity=world.introspection.task(kind_of(spec), spec.name),
    )
    if stop is not None:
        stop.add(control)
    began = time.monotonic()
    try:
        await keep_running(catalog, spec, world, control, shards=shards, failures_max=FAILURES_MAX)
    except StoppedEarly:
        pass
    except Exception as error:
        run.error = what_went_wrong(spec, error)
    finally:
        if run.error is not None:
            control.activity.fails(run.error, retry_in_s=None)
        control.activity.ends()
        run.seconds += time.monotonic() - began
        run.stopped = control.is_stopping()
    return run


async def keep_running(
    catalog: Catalog,
    spec: TaskSpec,
    world: World,
    control: Control,
    *,
    shards: int | None = None,
    failures_max: int | None = None,
    dataflow_id: int | None = None,
) -> None:
    """Build a task and run it as `control` says; raises what needs a person, and `StoppedEarly`.

    `failures_max` failures in a row are too many, of those that may mend themselves.
    """
    with working_for(Work(domain_of(kind_of(spec)), dataflow_id)):
        if not await control.stoppable(_may_run(spec, world, control)):
            return
        control.activity.starts()
        fenced = False
        async with _kept_log(spec, world):
            try:
                await _kept_running(catalog, spec, world, control, shards, failures_max)
            except PenstockError as error:
                fenced = isinstance(error, Fenced)
                if not isinstance(error, StoppedEarly):
                    _log.error("%s: %s", spec.name, one_line(error), extra=_remedy(error))
                raise
            finally:
                if not fenced:
                    await _released(spec, world)


async def _kept_running(
    catalog: Catalog,
    spec: TaskSpec,
    world: World,
    control: Control,
    shards: int | None,
    failures_max: int | None,
) -> None:
    patience = Patience(
        failures_max=failures_max, unread_s_max=None if failures_max is None else UNREAD_S_MAX
    )
    while True:
        known = await _learnt(catalog, world)
        catalog = _with_inferred(catalog, known)
        try:
            building = _built(catalog, spec, shards, world, control, patience)
            task = await control.stoppable(building)
            await supervise(task, world, control, patience)
        except TaskDisabled as disabled:
            if control.until_revision is None:
                raise  # it is tried again in a while
            _log.warning("%s; %s", disabled.what, disabled.fix)
            return
        except RefusedDocument:
            if await _learnt(catalog, world) == known:
                raise
            _log.info("%s: continues with a wider schema", spec.name)
        else:
            return


def _kept_log(spec: TaskSpec, world: World) -> contextlib.AbstractAsyncContextManager[None]:
    """From the first moment: what keeps a task from being built is in its log, too."""
    return task_log(
        world.planner,
        kind=kind_of(spec),
        task=spec.name,
        level=LEVELS[shards_of(spec).log_level],
        now=world.now,
        entropy=world.entropy,
    )


def _remedy(error: PenstockError) -> dict[str, object]:
    """What else an error says, and that this is the end of its task: a view may show it better."""
    told = {name: text for name in ("where", "fix") if (text := getattr(error, name))}
    return {**fields(**told), FAILED_TASK: True}


async def _released(spec: TaskSpec, world: World) -> None:
    """Let others run the task; whoever waits for it would notice the end of this process, too."""
    store, log = world.planner.journals.store, log_name(kind_of(spec), spec.name)
    with contextlib.suppress(TimeoutError, PenstockError):
        async with asyncio.timeout(RELEASE_S):
            await release(store, log, world.introspection.id)


def what_went_wrong(spec: TaskSpec, error: Exception) -> PenstockError:
    """Return the error of a task for people: a mistake of ours in one must not end the others."""
    if isinstance(error, PenstockError):
        return error
    _log.error("%s: an unexpected error", spec.name, exc_info=error)
    return Bug(
        f"an unexpected error: {type(error).__name__}: {error}",
        where=f"task {spec.name}",
        fix="report it, with the log; the task continues after its last transaction",
    )


async def _may_run(spec: TaskSpec, world: World, control: Control) -> bool:
    """False if somebody keeps the task from running; one that runs for ever waits until it may."""
    store = world.planner.journals.store
    with control.waits.on(spec.name, STORE):
        since = await requests.stopped_since(store, spec.name)
    if since is None:
        return True
    control.activity.ends()
    _log.warning(
        "%s: not run: it was stopped at %s; penstock task start %s lets it run",
        spec.name,
        time_text(since),
        spec.name,
    )
    if control.until_revision is None:
        await requests.until_started(store, spec.name)
        return True
    control.stop_for_now()
    return False


async def _learnt(catalog: Catalog, world: World) -> dict[str, Observed]:
    """Return the schemas of documents so far, of collections that are read by them."""
    names = [each.name for each in catalog.collections if each.reads_inferred]
    return await inferred(world.planner.journals.store, names)


def _with_inferred(catalog: Catalog, learnt: Mapping[str, Observed]) -> Catalog:
    def learned(spec: CollectionSpec) -> CollectionSpec:
        if spec.name not in learnt:
            return spec
        schema = with_inferred(spec.read_schema.value, learnt[spec.name])
        return replace(spec, read_schema=Frozen(schema))

    return replace(catalog, collections=tuple(map(learned, catalog.collections)))


async def _built(
    catalog: Catalog,
    spec: TaskSpec,
    shards: int | None,
    world: World,
    control: Control,
    patience: Patience,
) -> RunnableTask:
    """Build a task; again in a while, if its endpoint cannot be asked just now."""
    failures, began = 0, time.monotonic()
    while True:
        try:
            history = None
            if isinstance(spec, MaterializationSpec):
                store = world.planner.journals.store
                history = await load_history(store, spec.name, spec.renamed_from)
            return await build_stoppably(catalog, spec, control, shards=shards, history=history)
        except PenstockError as error:
            failures += 1
            if not is_transient(error) or patience.is_over(failures, time.monotonic() - began):
                raise
            again = "%s: %s; trying again"
            _log.warning(again, spec.name, error.what, extra={IN_REPORT: True})
            wait_s = min(_WAIT_S * 2 ** (failures - 1), _WAIT_S_MAX)
            control.activity.fails(error, count=failures, retry_in_s=wait_s)
            await asyncio.sleep(wait_s)
            control.activity.starts()


async def build_stoppably(
    catalog: Catalog,
    spec: TaskSpec,
    control: Control,
    *,
    shards: int | None = None,
    name: str | None = None,
    connector: Materialization | None = None,
    history: History | None = None,
) -> RunnableTask:
    """Build a task, which asks its endpoint; the log says so if that takes long."""
    made: list[Connector] = []

    def capture(endpoint: Endpoint, task: str) -> Capture:
        connected = builtin.capture(endpoint, task)
        made.append(connected)
        return connected

    def materialization(endpoint: Endpoint, task: str) -> Materialization:
        connected = connector or builtin.materialization(endpoint, task)
        made.append(connected)
        return connected

    def interrupt() -> None:
        for each in made:
            each.interrupt()

    def look() -> Awaited | None:
        found = next(filter(None, (each.waits_for() for each in made)), None)
        return None if found is None else Awaited(found, ENDPOINT.fix)

    connect = Connect(capture, materialization)
    with control.waits.on(spec.name, ENDPOINT, look):
        return await interruptible(
            lambda: build_task(catalog, spec, connect, shards=shards, name=name, history=history),
            interrupt,
        )
