"""`penstock bench operate`: what it is like to keep `penstock up` running.

Everything is measured at a real `penstock up`, from outside:

- *Idle*: 1, 20 and 200 tasks that have caught up, of both domains: captures of files,
  materializations to SQLite, derivations in Spark SQL. We measure how much of a core its process
  tree takes, how much memory, and how many jobs of any kind Spark runs, by Spark's own event log.
- *Busy*: the same events in one collection with one task, and in 20 collections with a task each.
  Both are new tasks of a running `up`; the time counts from the apply to the last commit.
- *Apply*: a new task comes by `penstock apply`, beside 20 that run. The time to its first commit
  counts from the start of the command.
- *Run*: `penstock run` of 1,000 documents beside it, cold with `--own-spark`, and warm without. The
  tasks are disabled, so that `up` does not run them.
- *Forms*: a `penstock cluster` with 20 tasks of both domains, in one process and in a process for
  each domain. We measure the memory of its process tree.
- *Restart*: `kill -9`, documents for all tasks, and a new `up`. The time to the first commit, and
  until all tasks have caught up, counts from the start of the new process.

Times of commits are those that `up` gives at its admin address. All tables must be right.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from penstock.catalog.collection_lookup import find_collection
from penstock.errors import Bug
from penstock.model.json_order import Json
from penstock_bench import processes
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
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, Samples
from penstock_bench.running_up import Up
from penstock_bench.scale_runs import apply_catalog_text, open_store, penstock_run, task_config
from penstock_bench.scale_tasks import TASKS, TaskDeployment

IDLE_EVENTS: Final = 100
"""Events of each idle task, before it became idle."""
IDLE_CORES_MAX: Final = 0.03
CORES_MIN: Final = 1e-6

UNIFIED, SPLIT = "one process", "a process for each domain"
FORMS: Final = {UNIFIED: "--unified-runtime", SPLIT: "--no-unified-runtime"}
FORMS_RATIO_MIN: Final = 1.6

BUSY_SHARE_MIN: Final = 0.8
"""Of the throughput of one task."""
BUSY_ROUNDS: Final = 5
BUSY_POLL_S: Final = 0.5
"""An answer has a row for each task: asking often would cost what is measured."""

DOCUMENTS: Final = 1_000
APPLY_S_MAX: Final = 1.0
WARM_S_MAX: Final = 0.5
COLD, WARM = "cold", "warm"

_BY_REGION: Final = """\
select region, count(*) as events, sum(amount) as amount
from source
group by region
"""

_REGION_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["region", "events", "amount"],
    "additionalProperties": False,
    "reduce": {"strategy": "merge"},
    "properties": {
        "region": {"type": "string"},
        "events": {"type": "integer", "reduce": {"strategy": "sum"}},
        "amount": {"type": "integer", "reduce": {"strategy": "sum"}},
    },
}


def run(bench: Bench) -> Report:
    """Measure idle tasks, busy tasks, both forms of a cluster, and changes of what runs."""
    return Report.merge(
        (measure_idle(bench), measure_busy(bench), measure_forms(bench), measure_changes(bench))
    )


# ------------------------------------------------------------------------------------------- idle


@dataclass(frozen=True, slots=True)
class MixedTasks:
    """A deployment with tasks of all kinds: of three, each has its own collection of events.

    The first stores it, the second derives from it, and the third captures its events from a file;
    where there is no third, events are appended.
    """

    data: Path
    count: int

    @property
    def chains(self) -> range:
        return range((self.count + 2) // 3)

    @property
    def documents(self) -> dict[str, int]:
        """The documents that each task is to read."""
        return dict.fromkeys((_task_name(number) for number in range(self.count)), IDLE_EVENTS)

    def catalog(self) -> str:
        """Return the catalog."""
        events = yaml.safe_load(catalog_text({}))["collections"][COLLECTION]
        collections: dict[str, Json] = {_events(chain): events for chain in self.chains}
        captures: dict[str, Json] = {}
        materializations: dict[str, Json] = {}
        for number in range(self.count):
            name, chain = _task_name(number), number // 3
            if number % 3 == 0:
                endpoint = sqlite_endpoint(self._database(chain))
                materializations[name] = task_config(endpoint, _events(chain), TABLE)
            elif number % 3 == 1:
                collections[name] = _derivation(_events(chain))
            else:
                captures[name] = _capture(self._files(chain), _events(chain))
        whole: Json = {
            "collections": collections,
            "captures": captures,
            "materializations": materializations,
        }
        return yaml.safe_dump(whole, sort_keys=False)

    def fill(self) -> None:
        """Apply the catalog, and let the events of each collection arrive."""
        self.data.mkdir(parents=True)
        settings = settings_in(self.data)

        async def fill_() -> None:
            async with open_store(settings) as store:
                catalog = await apply_catalog_text(store, self.data, self.catalog())
                for chain in self.chains:
                    batch = self._share(chain).batch(0)
                    if self._is_captured(chain):
                        self._files(chain).mkdir(parents=True)
                        lines = (json.dumps(document) for document in batch.to_pylist())
                        (self._files(chain) / "events.jsonl").write_text("\n".join(lines))
                    else:
                        spec = find_collection(catalog, _events(chain))
                        await Appender(store, settings, spec).append(batch)

        asyncio.run(fill_())

    def check(self) -> None:
        """Raise if a table differs from the oracle."""
        for chain in self.chains:
            _check_table(self._database(chain), self._share(chain))

    def _is_captured(self, chain: int) -> bool:
        return 3 * chain + 2 < self.count

    def _share(self, chain: int) -> Events:
        return Events(IDLE_EVENTS, 1, seed=7 + chain)

    def _database(self, chain: int) -> Path:
        return self.data / f"{chain}.db"

    def _files(self, chain: int) -> Path:
        return self.data / "files" / str(chain)


def _task_name(number: int) -> str:
    kind = ("table", "regions", "files")[number % 3]
    return f"bench/{kind}-{number // 3}"


def _events(chain: int) -> str:
    return f"{COLLECTION}-{chain}"


def _derivation(source: str) -> Json:
    transform: Json = {
        "name": "fromEvents",
        "source": source,
        "shuffle": "any",
        "lambda": _BY_REGION,
    }
    derive: Json = {"using": {"spark": {}}, "transforms": [transform]}
    return {"key": ["/region"], "schema": _REGION_SCHEMA, "derive": derive}


def _capture(directory: Path, target: str) -> Json:
    connector: Json = {"image": "penstock/source-files", "config": {"path": str(directory)}}
    binding: Json = {"resource": {"path": "*.jsonl"}, "target": target}
    return {"endpoint": {"connector": connector}, "bindings": [binding]}


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleUsage:
    """What an idle `penstock up` used."""

    tasks: int
    start_s: float
    """From its start until all tasks had caught up."""
    for_s: float
    cores: float
    jobs: int
    memory_bytes: int


def measure_idle(bench: Bench) -> Report:
    """Measure what idle tasks cost, by their number."""
    for_s, settle_s = bench.size(full=60, quick=20), bench.size(full=20, quick=10)
    usages = []
    for count in (1, bench.size(full=20, quick=10), bench.size(full=200, quick=60)):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
            bench.say(f"{count} idle tasks for {for_s} s")
            tasks = MixedTasks(Path(temp_dir) / "data", count)
            usages.append(watch_idle(tasks, for_s, settle_s=settle_s))
    return idle_report(usages)


def watch_idle(tasks: MixedTasks, for_s: float, *, settle_s: float) -> IdleUsage:
    """Run all tasks until they have caught up, then measure what that process uses."""
    tasks.fill()
    events = tasks.data / "spark-events"
    events.mkdir()
    with Up.running(tasks.data, *_event_log(events)) as up:
        up.wait_until_read(tasks.documents)
        start_s = max(up.commits()) - up.began
        time.sleep(settle_s)
        jobs = count_jobs(events)
        watch = processes.Watch(up.process.pid)
        watch.sample()
        cpu_s = watch.usage.cpu_s
        time.sleep(for_s)
        watch.sample()
        jobs = count_jobs(events) - jobs
    tasks.check()
    return IdleUsage(
        tasks=tasks.count,
        start_s=start_s,
        for_s=for_s,
        cores=(watch.usage.cpu_s - cpu_s) / for_s,
        jobs=jobs,
        memory_bytes=watch.usage.peak_rss_bytes,
    )


def _event_log(directory: Path) -> Iterator[str]:
    """Give the options that make Spark write an event log, as lines of JSON."""
    conf = {
        "enabled": "true",
        "dir": directory.as_uri(),
        "compress": "false",
        "rolling.enabled": "false",
    }
    for key, value in conf.items():
        yield from ("--conf", f"spark.eventLog.{key}={value}")


def count_jobs(directory: Path) -> int:
    """Return the number of jobs that Spark has started, by its event log in this directory."""
    names = [
        json.loads(line)["Event"]
        for file in directory.glob("[!.]*")
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")  # the last one may be half written
    ]
    if "SparkListenerApplicationStart" not in names:
        raise Bug("Spark writes no event log, and its jobs cannot be counted")
    return names.count("SparkListenerJobStart")


def idle_report(usages: Sequence[IdleUsage]) -> Report:
    """Build the report on idle tasks; the goals are for the largest number of them."""
    most = max(usages, key=lambda usage: usage.tasks)
    return Report(
        results=tuple(result for usage in usages for result in _idle_results(usage)),
        goals=(
            Goal(
                name=f"{most.tasks} idle tasks: {IDLE_CORES_MAX:.0%} of a core / used",
                measured=IDLE_CORES_MAX / max(most.cores, CORES_MIN),
                goal=1.0,
            ),
            Goal(
                name=f"{most.tasks} idle tasks: 1 / (1 + Spark jobs)",
                measured=1 / (1 + most.jobs),
                goal=1.0,
            ),
        ),
        charts=tuple(
            Chart(
                name=name,
                title=title,
                unit=unit,
                bars=tuple((f"{OURS}, {_tasks(usage.tasks)}", value(usage)) for usage in usages),
                note="Less is better. The process, its JVM, and the one that warm commands are "
                "forked from.",
            )
            for name, title, unit, value in (
                ("idle-cpu", "penstock up with idle tasks", "% of one core", _percent),
                ("idle-memory", "Memory of penstock up with idle tasks", "MB RSS", _megabytes),
            )
        ),
    )


def _idle_results(usage: IdleUsage) -> Iterator[Result]:
    what = f"idle: {_tasks(usage.tasks)}"
    yield Result(name=f"{what}, CPU", value=_percent(usage), unit="% of one core")
    yield Result(name=f"{what}, jobs", value=usage.jobs, unit=f"Spark jobs in {usage.for_s:g} s")
    yield Result(name=f"{what}, memory", value=_megabytes(usage), unit="MB RSS")
    yield Result(name=f"{what}, from the start until caught up", value=usage.start_s, unit="s")


def _tasks(count: int) -> str:
    return f"{count} task{'s' if count != 1 else ''}"


def _percent(usage: IdleUsage) -> float:
    return 100 * usage.cores


def _megabytes(usage: IdleUsage) -> float:
    return usage.memory_bytes / 1e6


# ------------------------------------------------------------------------------------------- busy


def measure_busy(bench: Bench) -> Report:
    """Measure events per second of 20 tasks with a share each, and of one task with all."""
    events = bench.size(full=2_000_000, quick=200_000)
    with contextlib.ExitStack() as stack:
        temp_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
        deployments = {
            str(count): TaskDeployment(Path(temp_dir) / str(count), count, events)
            for count in (1, TASKS)
        }
        contestants: dict[str, Callable[[], float]] = {}
        for name, deployment in deployments.items():
            bench.say(f"writing {events:,} events for {_tasks(deployment.tasks)}")
            deployment.fill(rounds=0)
            up = stack.enter_context(Up.running(deployment.data))
            contestants[name] = busy_round(deployment, up)
        taken = bench.interleave(f"{events:,} events, busy tasks", contestants, rounds=BUSY_ROUNDS)
        for deployment in deployments.values():
            deployment.check()
    return busy_report(events, taken)


def busy_round(deployment: TaskDeployment, up: Up) -> Callable[[], float]:
    """Make a contestant: apply the tasks of one more round, and wait until they have caught up."""

    def once() -> float:
        names = deployment.names(deployment.rounds)
        began = time.time()
        deployment.apply(rounds=deployment.rounds + 1)
        counts = (share.count for share in deployment.shares)
        up.wait_until_read(dict(zip(names, counts, strict=True)), poll_s=BUSY_POLL_S)
        deployment.rounds += 1
        return max(up.commits()) - began

    return once


def busy_report(events: int, taken: Samples) -> Report:
    """Build the report on busy tasks, from the seconds by number of tasks."""
    rates = {count: events / taken.median(count) for count in taken.by_peer}
    return Report(
        results=tuple(
            Result(
                name=f"busy: {events:,} events, {_tasks(int(count))}",
                value=rate,
                unit="documents/s",
            )
            for count, rate in rates.items()
        ),
        goals=(
            Goal(
                name=f"busy: throughput of {TASKS} tasks / one",
                measured=taken.ratio("1", str(TASKS)),
                goal=BUSY_SHARE_MIN,
            ),
        ),
        charts=(
            Chart(
                name="busy",
                title=f"{events:,} events through busy tasks of penstock up",
                unit="documents/s",
                bars=tuple(
                    (f"{OURS}, {_tasks(int(count))}", rate) for count, rate in rates.items()
                ),
                note="More is better. From the apply of new tasks to their last commit.",
            ),
        ),
    )


# ------------------------------------------------------------------------------------------ forms


def measure_forms(bench: Bench) -> Report:
    """Measure the memory of a cluster in each form."""
    settle_s = bench.size(full=20, quick=5)
    used = {}
    for form in FORMS:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
            bench.say(f"a cluster with {TASKS} tasks: {form}")
            used[form] = watch_form(form, MixedTasks(Path(temp_dir) / "data", TASKS), settle_s)
    return forms_report(used)


def watch_form(form: str, tasks: MixedTasks, settle_s: float) -> int:
    """Run all tasks in a cluster of this form; return the most memory that it had."""
    tasks.fill()
    with Up.cluster(tasks.data, FORMS[form]) as up, processes.watching(up.process.pid) as watch:
        up.wait_until_read(tasks.documents)
        time.sleep(settle_s)
    tasks.check()
    return watch.usage.peak_rss_bytes


def forms_report(used: Mapping[str, int]) -> Report:
    """Build the report on both forms, from the bytes of each."""
    what = f"cluster with {TASKS} tasks"
    return Report(
        results=tuple(
            Result(name=f"{what}: {form}, memory", value=taken / 1e6, unit="MB RSS")
            for form, taken in used.items()
        ),
        goals=(
            Goal(
                name=f"{what}: memory, {SPLIT} / {UNIFIED}",
                measured=used[SPLIT] / used[UNIFIED],
                goal=FORMS_RATIO_MIN,
            ),
        ),
        charts=(
            Chart(
                name="forms",
                title=f"Memory of a {what}",
                unit="MB RSS",
                bars=tuple((f"{OURS}, {form}", taken / 1e6) for form, taken in used.items()),
                note="Less is better. The largest sum over all its processes.",
            ),
        ),
    )


# ------------------------------------------------------------- apply, run and restart beside tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A new task, both times from the start of `penstock apply`."""

    command_s: float
    """Until the command had ended."""
    first_s: float
    """Until the first commit of the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A start after `kill -9`, both times from the start of the process."""

    first_s: float
    """Until the first commit of any task."""
    all_s: float
    """Until all tasks had caught up."""


def measure_changes(bench: Bench) -> Report:
    """Measure what people do beside 20 tasks that run: apply, run, and start again."""
    rounds, restarts = bench.size(full=7, quick=5), bench.size(full=3, quick=2)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        beside = Beside(Path(temp_dir) / "data", TASKS, restarts=restarts, runs=2 * (rounds + 1))
        beside.apply()
        with beside.started() as up:
            bench.say(f"penstock apply of a new task beside {TASKS}")
            applied = [beside.apply_task(up) for _ in range(rounds + 1)][1:]
            ran = bench.interleave(
                f"penstock run of {DOCUMENTS:,} documents",
                {COLD: lambda: beside.run_task(COLD), WARM: lambda: beside.run_task(WARM)},
                rounds=rounds,
            )
        restarted = []
        for number in range(restarts):
            bench.say(f"kill -9 and restart: {number + 1} of {restarts}")
            restarted.append(beside.restart())
        beside.check()
    return changes_report(applied, ran, restarted)


class Beside:
    """A deployment with tasks that `penstock up` runs, and what else is done with it."""

    def __init__(self, data: Path, tasks: int, *, restarts: int, runs: int) -> None:
        files = 1 + restarts
        events = tasks * files * DOCUMENTS
        self._tasks = TaskDeployment(data, tasks, events, files=tasks * files)
        share = self._tasks.shares[0]
        self._first = Events(DOCUMENTS, 1, accounts=share.accounts, seed=share.seed)
        """What is in the first collection until the first restart."""
        self._to_run = [f"bench/run-{number}" for number in range(runs)]
        """Tasks that `up` does not run: they are disabled."""
        self._ran = 0
        self._added: list[str] = []
        self._appended = 0

    def apply(self) -> None:
        """Apply the tasks."""
        self._tasks.apply(rounds=1, more=self._more())
        self._tasks.rounds = 1

    @contextlib.contextmanager
    def started(self) -> Iterator[Up]:
        """Append documents for all tasks, and run `penstock up`.

        The block begins when they are read, and ends with `kill -9`.
        """
        self._append()
        with Up.running(self._tasks.data) as up:
            up.wait_until_read(dict.fromkeys(self._tasks.names(0), DOCUMENTS))
            yield up

    def apply_task(self, up: Up) -> Applied:
        """Apply one new task, on the first collection."""
        name = f"bench/new-{len(self._added)}"
        self._added.append(name)
        data = self._tasks.data
        (data / "catalog.yaml").write_text(self._tasks.catalog(rounds=1, more=self._more()))
        began = time.time()
        applied = processes.run(_penstock_apply(data))
        up.wait_until_read({name: DOCUMENTS})
        _check_table(self._database(name), self._first)
        return Applied(command_s=applied.seconds, first_s=min(up.commits(name)) - began)

    def run_task(self, how: str) -> float:
        """Run the next disabled task by `penstock run`, and return the seconds that it took."""
        name = self._to_run[self._ran]
        self._ran += 1
        options = ["--own-spark"] if how == COLD else []
        ran = processes.run([*penstock_run(self._tasks.data, name), *options])
        if sum(task["documents"] for task in ran.output["tasks"]) != DOCUMENTS:
            raise Bug(f"{name} has not read {DOCUMENTS:,} documents", why=str(ran.output))
        if (ran.output["peak_rss_spark_bytes"] is None) is (how == COLD):
            raise Bug(f"a {how} run has used the wrong Spark")
        _check_table(self._database(name), self._first)
        return ran.seconds

    def restart(self) -> Restart:
        """Start `penstock up` on new documents for all tasks, and kill it when they are read."""
        with self.started() as up:
            commits = up.commits()
        return Restart(first_s=min(commits) - up.began, all_s=max(commits) - up.began)

    def check(self) -> None:
        """Raise if a table of a task that `up` runs differs from the oracle."""
        self._tasks.check()

    def _append(self) -> None:
        self._tasks.append([self._appended])
        self._appended += 1

    def _more(self) -> Mapping[str, Json]:
        return {
            **{name: self._config(name, disable=False) for name in self._added},
            **{name: self._config(name, disable=True) for name in self._to_run},
        }

    def _config(self, name: str, *, disable: bool) -> Json:
        source = self._tasks.collection(0)
        config = task_config(sqlite_endpoint(self._database(name)), source, TABLE)
        return {**config, "shards": {"disable": disable}}

    def _database(self, name: str) -> Path:
        return self._tasks.data / f"{name.rpartition('/')[2]}.db"


def _penstock_apply(data: Path) -> list[str | Path]:
    return [sys.executable, "-m", "penstock", "apply", data / "catalog.yaml", "--data", data]


def _check_table(database: Path, events: Events) -> None:
    if wrong := sqlite_table(database).wrong_rows(events.oracle):
        raise Bug(f"{wrong:,} rows in {database.name} are wrong")


def changes_report(
    applied: Sequence[Applied], ran: Samples, restarted: Sequence[Restart]
) -> Report:
    """Build the report on changes of what runs."""
    first_s = statistics.median(each.first_s for each in applied)
    figures = (
        ("apply: from its start to the first commit of a new task", first_s),
        (
            "apply: from its end to the first commit of a new task",
            statistics.median(each.first_s - each.command_s for each in applied),
        ),
        (f"run: {DOCUMENTS:,} documents, {COLD}", ran.median(COLD)),
        (f"run: {DOCUMENTS:,} documents, {WARM}", ran.median(WARM)),
        (
            "restart: after kill -9, to the first commit",
            statistics.median(each.first_s for each in restarted),
        ),
        (
            f"restart: after kill -9, until {TASKS} tasks have caught up",
            statistics.median(each.all_s for each in restarted),
        ),
    )
    return Report(
        results=tuple(Result(name=name, value=value, unit="s") for name, value in figures),
        goals=(
            Goal(
                name=f"apply: {APPLY_S_MAX:g} s / from its start to the first commit",
                measured=APPLY_S_MAX / first_s,
                goal=1.0,
            ),
            Goal(
                name=f"run: {WARM_S_MAX:g} s / {DOCUMENTS:,} documents, {WARM}",
                measured=WARM_S_MAX / ran.median(WARM),
                goal=1.0,
            ),
        ),
        charts=(
            Chart(
                name="run",
                title=f"penstock run of {DOCUMENTS:,} documents",
                unit="s",
                bars=tuple((f"{OURS}, {how}", ran.median(how)) for how in (COLD, WARM)),
                note="Less is better. Warm: with the Spark of a penstock up that runs.",
            ),
        ),
    )
