"""A materialization without Spark, to test any sink.

Documents go the way they go in a Spark job, each step by its reference: fields are negotiated from
a catalog, documents of a key are combined by the model's reducer, stored ones are loaded and
reduced with them, rows are projected, staged and committed. So the rows of a table can be compared
with the model, for any sink.
"""

from __future__ import annotations

import abc
import itertools
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow

from penstock.catalog.build import load_catalog
from penstock.errors import Bug
from penstock.model.clock import Clock
from penstock.model.json_order import ABSENT, Json, canonical_json
from penstock.model.pointer import get
from penstock.model.reduce import combine, reduce_full, why_not_combined
from penstock.model.schema import CompiledSchema, compiled
from penstock.model.spec import Endpoint, Frozen
from penstock.native.arrow import to_arrow
from penstock.runtime.connector.common import SparkAttempt
from penstock.runtime.connector.materialize import (
    Materialization,
    Rebuilds,
    SinkSession,
    SinkTask,
    Staged,
    Workers,
)
from penstock.runtime.materialize.build import BoundTarget, MaterializationTask, build
from penstock.runtime.materialize.fields import Mode
from penstock.runtime.materialize.project import project

Document = dict[str, Any]
Connect = Callable[[Endpoint, str], Materialization]

_pa: Any = pyarrow
_attempts = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """A collection, and the table it goes to."""

    schema: Document
    key: Sequence[str] = ("/k",)
    projections: Document = field(default_factory=dict)
    table: str = "t"
    resource: Document = field(default_factory=dict)
    fields: Document = field(default_factory=dict)
    backfill: int = 0
    takeover: bool = False


def build_sink(
    directory: Path,
    binds: Sequence[Bind],
    connect: Connect,
    *,
    config: Document,
    name: str = "acme/views",
    renamed_from: str | None = None,
) -> MaterializationTask:
    """Build a materialization of these bindings, negotiated with its endpoint."""
    names = [f"acme/c{index}" for index in range(len(binds))]
    catalog = {
        "collections": {
            collection: {
                "key": list(bind.key),
                "schema": bind.schema,
                "projections": bind.projections,
            }
            for collection, bind in zip(names, binds, strict=True)
        },
        "materializations": {
            name: {
                **({} if renamed_from is None else {"renamedFrom": renamed_from}),
                "endpoint": {"connector": {"image": "penstock/test", "config": config}},
                "bindings": [
                    {
                        "source": collection,
                        "resource": {"table": bind.table, **bind.resource},
                        "fields": {"recommended": True, **bind.fields},
                        "backfill": bind.backfill,
                        "takeover": bind.takeover,
                    }
                    for collection, bind in zip(names, binds, strict=True)
                ],
            }
        },
    }
    path = directory / f"catalog{next(_attempts)}.json"
    path.write_text(json.dumps(catalog))
    loaded = load_catalog([path], environ=None)
    (spec,) = loaded.materializations
    return build(loaded, spec, connect)


@dataclass(slots=True)
class SinkRun:
    """One session of a materialization."""

    built: MaterializationTask
    session: SinkSession
    epoch: int
    clock: int = 0

    @classmethod
    def start(
        cls,
        what: MaterializationTask,
        *,
        epoch: int,
        last: MaterializationTask | None = None,
        state: Json = None,
        resumed: bool | None = None,
    ) -> SinkRun:
        """Apply and open, as a leader does.

        `resumed` says whether the recovery log knows of stored documents. By default it does for
        bindings with the state key that they have in `last`; without `last`, after epoch 1.
        """
        before = None if last is None else last.sink_task
        known = frozenset(
            target.binding
            for target in what.sink_task.targets
            if resumed
            or (resumed is None and (_had(before, target.state_key) if before else epoch > 1))
        )
        what = what.resumed(known)
        what.connector.apply(what.sink_task, before, state, epoch=epoch)
        return cls(what, what.connector.open(what.sink_task, epoch=epoch, state=state), epoch)

    def transaction(self, *documents: Sequence[Document], through_pickle: bool = True) -> None:
        """Store documents of each binding, and commit; they are all there are for a rebuild."""
        self.commit(self.stage(*documents, through_pickle=through_pickle))
        self.swap()

    def swap(self) -> None:
        """End a rebuild, if there is one, as the leader does when all documents are stored."""
        if isinstance(self.session, Rebuilds) and self.session.rebuilding:
            self.session.swap()
            self.session.close()
            task = self.built.sink_task
            self.session = self.built.connector.open(task, epoch=self.epoch, state=None)

    def commit(self, staged: Sequence[Staged], checkpoint: bytes | None = None) -> Sequence[Json]:
        self.clock += 1
        checkpoint = checkpoint or f"{self.epoch}/{self.clock}".encode()
        return self.session.start_commit(Clock(self.clock), staged, checkpoint, ())

    def stage(self, *documents: Sequence[Document], through_pickle: bool = True) -> list[Staged]:
        """Combine, load, reduce, project and stage; through a pickle, as into a Spark task."""
        workers = self.session.workers
        if through_pickle:
            workers = pickle.loads(pickle.dumps(workers))  # noqa: S301 - made on the line above
        staged: list[Staged] = []
        for bound, wanted in zip(self.built.targets, documents, strict=True):
            rows = _rows(bound, wanted, workers, self.attempt())
            if rows:
                stager = workers.stager(self.attempt())
                stager.store(bound.target.binding, _projected(bound, rows))
                staged += stager.finish()
        return staged

    def attempt(self, *, shard: int = 0) -> SparkAttempt:
        """Return a new attempt."""
        return SparkAttempt(
            task=self.built.name,
            epoch=self.epoch,
            transaction=Clock(1 + self.clock),
            job="0b0",
            shard=shard,
            attempt=next(_attempts),
        )

    def load(self, binding: int, keys: Sequence[Document]) -> list[Document]:
        """Look stored documents up by key."""
        bound = next(each for each in self.built.targets if each.target.binding == binding)
        return _loaded(bound, keys, self.session.workers, self.attempt())

    def close(self) -> None:
        self.session.close()


def _had(task: SinkTask, state_key: str) -> bool:
    return any(target.state_key == state_key for target in task.targets)


def expected(bind: Bind, documents: Sequence[Document]) -> dict[str, Document]:
    """Reduce all documents as the model does: by key, without those that were deleted."""
    schema = compiled(canonical_json(bind.schema))
    found = {
        key: reduce_full(some, schema.active_rules)
        for key, some in by_key(bind.key, documents).items()
    }
    return {key: state for key, state in found.items() if isinstance(state, dict)}


def by_key(key: Sequence[str], documents: Sequence[Document]) -> dict[str, list[Json]]:
    """Group documents by the text of their key, in order."""
    found: dict[str, list[Json]] = {}
    for document in documents:
        values = [get(document, at) for at in key]
        text = canonical_json([None if value is ABSENT else value for value in values])
        found.setdefault(text, []).append(document)
    return found


_Rows = list[tuple[Document, bool]]


def _rows(
    bound: BoundTarget, documents: Sequence[Document], workers: Workers, attempt: SparkAttempt
) -> _Rows:
    """Reduce documents to the rows to store, each with whether it is a deletion."""
    schema: CompiledSchema = bound.plan.schema
    lookup = schema.active_rules
    groups = by_key(bound.plan.key, documents)
    if bound.mode is Mode.LOAD:
        stored = _loaded(bound, [_document(some[0]) for some in groups.values()], workers, attempt)
        before = by_key(bound.plan.key, stored)
        return [
            _reduced(
                reduce_full(some, lookup, stored=next(iter(before.get(key, ())), ABSENT)), some[-1]
            )
            for key, some in groups.items()
        ]
    if bound.mode is Mode.DELTA:
        return [
            (_document(one), False)
            for some in groups.values()
            for one in reduce_partially(schema, some)
        ]
    return [(_document(combine(some, lookup)), False) for some in groups.values()]


def _reduced(state: Json | Any, last: Json) -> tuple[Document, bool]:  # noqa: ANN401 - or ABSENT
    return (_document(last), True) if state is ABSENT else (_document(state), False)


def _document(value: Json) -> Document:
    if not isinstance(value, dict):
        raise Bug("a document is an object")
    return value


def _projected(bound: BoundTarget, rows: _Rows) -> pyarrow.RecordBatch:
    root = bound.plan.columns
    deleted = _pa.array([is_deleted for _, is_deleted in rows], _pa.bool_())
    batch = to_arrow([document for document, _ in rows], root)
    return project(batch, root, bound.target.fields, deleted=deleted)


def _loaded(
    bound: BoundTarget, keys: Sequence[Document], workers: Workers, attempt: SparkAttempt
) -> list[Document]:
    target, root = bound.target, bound.plan.columns
    batch: Any = project(to_arrow(keys, root), root, target.key)
    loader = workers.loader(attempt)
    try:
        return [
            json.loads(str(text))
            for answer in loader.load(target.binding, batch.select(batch.schema.names[:-1]))
            for text in answer.column(0).to_pylist()
        ]
    finally:
        loader.close()


def reduce_partially(schema: CompiledSchema, documents: Sequence[Json]) -> list[Json]:
    """Reduce the documents of one key as far as a partial reduction can."""
    if why_not_combined(schema.shape) is not None:
        return list(documents)
    return [combine(documents, schema.active_rules)]


# ----------------------------------------------------------------------------------------- places


@dataclass
class SinkPlace(abc.ABC):
    """A real endpoint, and a way to look into it as its users do."""

    directory: Path
    """For files of the test; empty at first."""
    config: Document = field(init=False)
    """The endpoint's configuration."""
    secrets: Sequence[str] = field(init=False, default=())
    """Secrets that the configuration refers to."""
    runs: list[SinkRun] = field(init=False, default_factory=list)

    @abc.abstractmethod
    def connect(self, endpoint: Endpoint, where: str) -> Materialization:
        """Make the connector."""

    @abc.abstractmethod
    def rows(self, table: str = "t") -> list[dict[str, Any]]:
        """Return the rows of a table, by column."""

    @abc.abstractmethod
    def snapshot(self) -> Any:  # noqa: ANN401 - compared, and nothing else
        """Return all that a run of a task would find: tables, rows, checkpoints."""

    @abc.abstractmethod
    def previews(self) -> list[str]:
        """Return the names of whatever previews have made and not removed."""

    def connector(self) -> Materialization:
        endpoint = Endpoint(kind="connector", config=Frozen(self.config))
        return self.connect(endpoint, "materialization acme/views")

    def close(self) -> None:
        """Close all sessions."""
        for run in self.runs:
            run.close()


class SqlPlace(SinkPlace):
    """A database. Its unquoted table and column names, types and statements are those of SQL."""

    table_options = ""
    """Follows the columns in CREATE TABLE, to make a table that the sink accepts."""

    @abc.abstractmethod
    def execute(self, statement: str) -> list[Any]:
        """Execute a statement as another user of the database; return its rows."""

    @abc.abstractmethod
    def columns(self, table: str = "t") -> dict[str, str]:
        """Return the types of a table's columns."""


def start(
    place: SinkPlace,
    *binds: Bind,
    epoch: int = 1,
    last: SinkRun | None = None,
    name: str = "acme/views",
    renamed_from: str | None = None,
    resumed: bool | None = None,
    **config: Any,  # noqa: ANN401 - any JSON value
) -> SinkRun:
    """Build, apply and open a session; `SinkPlace.close` closes it."""
    what = build_sink(
        place.directory,
        binds,
        place.connect,
        config=place.config | config,
        name=name,
        renamed_from=renamed_from,
    )
    before = None if last is None else last.built
    run = SinkRun.start(what, epoch=epoch, last=before, resumed=resumed)
    place.runs.append(run)
    return run


def merging_schema(required: Sequence[str] = ("k",), /, **properties: Document) -> Document:
    """Return the schema of a closed object that merges, as push-down needs it."""
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": {"k": {"type": "integer"}, **properties},
        "reduce": {"strategy": "merge"},
    }
