"""What every task of a deployment does, by what is recorded: for `penstock status`.

Nothing has to run for it. What is committed in collections, and how far tasks have read it, is in
the consensus store; processes that run tasks say there what they do (`runtime.reports`). What
follows from all that is decided by `runtime.diagnosis`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import wall_clock
from penstock.connectors import builtin
from penstock.consensus.statelog import load as load_log
from penstock.errors import PenstockError, UserError
from penstock.journal.journals import Journals
from penstock.journal.state import JournalState
from penstock.model.clock import Clock, Producer, duration, elapsed, to_unix
from penstock.model.spec import CaptureSpec, Catalog, MaterializationSpec
from penstock.retention import readings
from penstock.runtime import requests
from penstock.runtime.diagnosis import (
    Facts,
    Lag,
    OpenSpan,
    ProcessFacts,
    TaskCondition,
    Upstream,
    diagnose,
)
from penstock.runtime.graph import TaskNode, stages
from penstock.runtime.introspection import RATE_S, TaskReport
from penstock.runtime.kinds import (
    TaskSpec,
    does_nothing,
    kind_of,
    reads_of,
    runnable_tasks,
    shards_of,
    writes_of,
)
from penstock.runtime.ops import TaskKindName
from penstock.runtime.recovery import (
    LEADER,
    Generation,
    Layout,
    Recovered,
    RecoveryMachine,
    generations,
    log_name,
    recovery_key,
    split_state_key,
)
from penstock.runtime.reports import ProcessReport, Reported, is_alive, is_silent, load_reports
from penstock.shuffle.binding import Binding, derivation_bindings, materialization_bindings
from penstock.shuffle.lag import reading_lag

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TaskStatus:
    """A task, and what it does."""

    task: str
    kind: TaskKindName
    condition: TaskCondition
    lag: Lag | None
    """None if it is not known: of captures, and where the connector is not installed."""
    last_commit: float | None
    """Unix time."""
    report: TaskReport | None
    """What the process that runs it says of it."""
    process: ProcessFacts | None
    at: float
    holds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Collections with documents that only stay because the task has not read them: their
    retention, in seconds."""

    def __repr__(self) -> str:
        behind = "" if self.lag_docs is None else f", {self.lag_docs} documents behind"
        waits = f", waits for {self.waits_for}" if self.waits_for else ""
        return f"<{self.kind} {self.task}: {self.state}{behind}{waits}>"

    @property
    def state(self) -> str:
        return self.condition.state.value

    @property
    def waits_for(self) -> str | None:
        """What it waits for, if anything."""
        return self.condition.waits_for

    @property
    def lag_docs(self) -> int | None:
        """Documents that are committed in its sources, and that it has not committed."""
        return None if self.lag is None else self.lag.documents

    @property
    def lag_bytes(self) -> int | None:
        return None if self.lag is None else self.lag.bytes

    @property
    def lag_seconds(self) -> float | None:
        """The age of the oldest of them; 0 if there is none."""
        if self.lag is None:
            return None
        return 0.0 if self.lag.oldest is None else max(0.0, self.at - self.lag.oldest)

    @property
    def rates(self) -> tuple[float, float]:
        """Documents and bytes per second, over the last minute."""
        report = self.report
        alive = self.process is not None and self.process.alive
        if report is None or not alive or self.at - (report.committed or 0) > RATE_S:
            return 0.0, 0.0
        return report.documents_rate, report.bytes_rate

    def as_json(self) -> dict[str, Any]:
        """Return all of it for machines."""
        condition, report, lag = self.condition, self.report, self.lag
        alive = self.process is not None and self.process.alive
        running = report if alive else None
        documents_rate, bytes_rate = self.rates
        failure = None if report is None else report.failure
        return {
            "task": self.task,
            "kind": self.kind,
            "state": self.state,
            "sentence": condition.sentence,
            "waits_for": condition.waits_for,
            "since": _text(condition.since),
            "fix": condition.fix,
            "lag_documents": self.lag_docs,
            "lag_bytes": self.lag_bytes,
            "lag_seconds": self.lag_seconds,
            "lag_exact": None if lag is None else lag.exact,
            "documents_per_second": documents_rate,
            "bytes_per_second": bytes_rate,
            "last_commit": _text(self.last_commit),
            "phase": None if running is None else running.phase,
            "phase_since": None if running is None else _text(running.phase_since),
            "transaction_open_since": None if running is None else _text(running.opened),
            "transactions": 0 if running is None else running.transactions,
            "documents": 0 if running is None else running.documents,
            "process": None if self.process is None else self.process.name,
            "holds_retention": sorted(self.holds),
            "uncommitted": []
            if lag is None
            else [
                {**dataclasses.asdict(span), "since": _text(span.since), "last": _text(span.last)}
                for span in lag.open_spans
            ],
            "error": None
            if failure is None
            else {
                "what": failure.what,
                "where": failure.where,
                "why": failure.why,
                "fix": failure.fix,
                "causes": list(failure.causes),
                "at": _text(failure.at),
                "count": failure.count,
                "retry_at": _text(failure.retry_at),
            },
        }


def _text(at: float | None) -> str | None:
    if at is None:
        return None
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def statuses(store: Consensus, catalog: Catalog, task: str | None = None) -> list[TaskStatus]:
    """Return what the tasks of a catalog do; or those of one name, with all that they depend on."""
    specs = runnable_tasks(catalog)
    known = [spec.name for spec in specs]
    if task is not None and task not in known:
        raise UserError(
            f"there is no task {task}",
            fix=f"one of {', '.join(known)}" if known else "apply a catalog with tasks",
        )
    wanted = specs if task is None else _above(specs, task)
    found = await _Gathering(store, catalog, wanted, await load_reports(store)).run()
    return [status for status in found if task in (None, status.task)]


def _above(specs: Sequence[TaskSpec], name: str) -> list[TaskSpec]:
    """Return the tasks of a name, and those whose output reaches them."""
    wanted = {at for at, spec in enumerate(specs) if spec.name == name}
    while True:
        reads = frozenset[str]().union(*(reads_of(specs[at]) for at in wanted))
        more = wanted | {at for at, spec in enumerate(specs) if writes_of(spec) & reads}
        if more == wanted:
            return [specs[at] for at in sorted(wanted)]
        wanted = more


class _Gathering:
    """Facts about tasks, gathered once."""

    def __init__(
        self, store: Consensus, catalog: Catalog, specs: Sequence[TaskSpec], reported: Reported
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._specs = specs
        self._reported = reported
        self._at = time.time()
        self._now = wall_clock.now()

    async def run(self) -> list[TaskStatus]:
        specs = self._specs
        stopped = await requests.all_stopped(self._store)
        recovered = await asyncio.gather(*map(self._recovered, specs))
        journals = await self._journals(frozenset[str]().union(*map(reads_of, specs)))
        holds = await self._holds()
        nodes = [TaskNode(name=s.name, reads=reads_of(s), writes=writes_of(s)) for s in specs]
        found: dict[int, TaskStatus] = {}
        for stage in stages(nodes):  # what a task waits for is known before it is asked about
            for at in stage.tasks:
                known, bindings = recovered[at]
                found[at] = self._status(
                    specs[at],
                    stopped=stopped.get(specs[at].name),
                    recovered=known,
                    lag=None if bindings is None else self._lag(bindings, known, journals),
                    upstream=self._upstream(at, found, stage.tasks),
                    holds=holds.get(specs[at].name, {}),
                )
        return [found[at] for at in range(len(specs))]

    async def _journals(self, collections: Iterable[str]) -> dict[str, dict[str, JournalState]]:
        journals, names = Journals(self._store), sorted(collections)
        listed = await asyncio.gather(*map(journals.list, names))
        return {
            name: {journal.name: journal.state for journal in found}
            for name, found in zip(names, listed, strict=True)
        }

    async def _holds(self) -> dict[str, dict[str, int]]:
        """Return by task the collections whose retention waits for it."""
        kept = {
            each.name: each.fragments.retention_s
            for each in self._catalog.collections
            if each.fragments.retention_s
        }
        found: dict[str, dict[str, int]] = {}
        if not kept:
            return found
        journals = await self._journals(kept)
        for name, some in (await readings(self._store, self._catalog, kept)).items():
            before = elapsed(self._now, duration(kept[name]))
            for reading in some:
                if reading.holds(journals[name], before):
                    found.setdefault(reading.task, {})[name] = kept[name]
        return found

    def _status(
        self,
        spec: TaskSpec,
        *,
        stopped: int | None,
        recovered: Recovered,
        lag: Lag | None,
        upstream: Sequence[Upstream],
        holds: Mapping[str, int],
    ) -> TaskStatus:
        kind = kind_of(spec)
        process, report = self._reported.of(kind, spec.name)
        about = None if process is None else self._process(process)
        facts = Facts(
            task=spec.name,
            kind=kind,
            disabled=shards_of(spec).disable,
            idle_by_design=does_nothing(spec),
            stopped=stopped,
            report=report,
            process=about,
            lag=lag,
            upstream=upstream,
        )
        return TaskStatus(
            task=spec.name,
            kind=kind,
            condition=diagnose(facts, self._at),
            lag=lag,
            last_commit=_unix(recovered.committed_close) if recovered.committed_close else None,
            report=report,
            process=about,
            at=self._at,
            holds=holds,
        )

    def _process(self, process: ProcessReport) -> ProcessFacts:
        alive = is_alive(process, self._at)
        return ProcessFacts(
            name=process.name,
            alive=alive,
            beat=process.beat,
            silent=alive and is_silent(process, self._at),
        )

    def _upstream(
        self, at: int, known: Mapping[int, TaskStatus], beside: Sequence[int]
    ) -> list[Upstream]:
        found = []
        reads = reads_of(self._specs[at])
        for other, status in known.items():
            shared = sorted(writes_of(self._specs[other]) & reads)
            state = status.condition.state
            if shared and other not in beside and not state.goes_on:
                found.append(
                    Upstream(
                        task=status.task,
                        collection=shared[0],
                        state=state,
                        status=status.condition,
                    )
                )
        return found

    async def _recovered(self, spec: TaskSpec) -> tuple[Recovered, Sequence[Binding] | None]:
        """Return what a task has committed, and what it reads; no bindings if that is unknown."""
        log = log_name(kind_of(spec), spec.name)
        entries = (await load_log(self._store, recovery_key(log), RecoveryMachine())).state
        unused = not entries.keys() - {LEADER}
        if unused and isinstance(spec, MaterializationSpec) and spec.renamed_from:
            old = recovery_key(log_name("materialization", spec.renamed_from))
            entries = (await load_log(self._store, old, RecoveryMachine())).state
        try:
            bindings = self._bindings(spec)
        except PenstockError:
            bindings = None  # its connector is not installed here, or refuses its configuration
        if bindings is not None:
            bindings = _current(bindings, generations(entries))
        keys = {binding.index: binding.state_key for binding in bindings or ()}
        return Layout(keys).decode(entries), bindings

    def _bindings(self, spec: TaskSpec) -> Sequence[Binding] | None:
        if isinstance(spec, CaptureSpec):
            return None
        if isinstance(spec, MaterializationSpec):
            connector = builtin.materialization(spec.endpoint, spec.name)
            return materialization_bindings(self._catalog, spec, path=connector.path)
        return derivation_bindings(self._catalog, spec)

    def _lag(
        self,
        bindings: Sequence[Binding],
        recovered: Recovered,
        journals: Mapping[str, Mapping[str, JournalState]],
    ) -> Lag:
        found = reading_lag(bindings, recovered.committed_frontier, journals, self._now)
        return Lag(
            documents=found.documents,
            bytes=found.bytes,
            oldest=None if found.oldest is None else _unix(found.oldest),
            exact=found.exact,
            held=found.held,
            held_since=None if found.held_since is None else _unix(found.held_since),
            due=None if found.due is None else _unix(found.due),
            open_spans=tuple(
                OpenSpan(
                    collection=each.collection,
                    producer=str(each.producer),
                    documents=each.documents,
                    since=_unix(each.first),
                    last=_unix(each.last),
                    writer=self._writer(each.producer),
                )
                for each in found.uncommitted
            ),
        )

    def _writer(self, producer: Producer) -> str | None:
        for process, report in self._reported.tasks.values():
            running = self._reported.processes.get(process)
            if report.producer == str(producer) and running and is_alive(running, self._at):
                return report.task
        return None


def _current(bindings: Sequence[Binding], known: Mapping[str, Generation]) -> tuple[Binding, ...]:
    """Return bindings under the generations that they have got to."""
    found = ((each, known.get(split_state_key(each.state_key)[0])) for each in bindings)
    return tuple(each if at is None else each.at_generation(at.current) for each, at in found)


def _unix(clock: Clock) -> float:
    seconds, nanos = to_unix(clock)
    return seconds + nanos / 1e9
