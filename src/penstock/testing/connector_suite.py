"""A materialization without Spark: what any connector can be tested by.

Documents go the way they go in a Spark job, each step by its reference: fields are negotiated from
a catalog, documents of a key are combined by the model's reducer, stored ones are loaded and
reduced with them, rows are projected, staged and committed. So what a table holds in the end can be
held against the model, for any connector that has the interface.
"""

from __future__ import annotations

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
from penstock.model.reduce import combine, reduce_full
from penstock.model.schema import CompiledSchema, compiled
from penstock.model.spec import Endpoint
from penstock.native.arrow import to_arrow
from penstock.runtime.connector import Attempt, Materialization, Session, Staged, Task, Workers
from penstock.runtime.materialize.build import BoundTarget, Built, build
from penstock.runtime.materialize.fields import Mode
from penstock.runtime.materialize.project import project
from penstock.testing.reductions import partial

Document = dict[str, Any]
Connect = Callable[[Endpoint, str], Materialization]

_pa: Any = pyarrow
_attempts = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """A collection and the table it goes to."""

    schema: Document
    key: Sequence[str] = ("/k",)
    table: str = "t"
    resource: Document = field(default_factory=dict)
    fields: Document = field(default_factory=dict)
    backfill: int = 0
    takeover: bool = False


def built(
    directory: Path,
    binds: Sequence[Bind],
    connect: Connect,
    *,
    config: Document,
    name: str = "acme/views",
    renamed_from: str | None = None,
) -> Built:
    """A materialization of such bindings, negotiated with its endpoint."""
    names = [f"acme/c{index}" for index in range(len(binds))]
    catalog = {
        "collections": {
            each: {"key": list(bind.key), "schema": bind.schema}
            for each, bind in zip(names, binds, strict=True)
        },
        "materializations": {
            name: {
                **({} if renamed_from is None else {"renamedFrom": renamed_from}),
                "endpoint": {"connector": {"image": "penstock/test", "config": config}},
                "bindings": [
                    {
                        "source": each,
                        "resource": {"table": bind.table, **bind.resource},
                        "fields": {"recommended": True, **bind.fields},
                        "backfill": bind.backfill,
                        "takeover": bind.takeover,
                    }
                    for each, bind in zip(names, binds, strict=True)
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
class Run:
    """One session of a materialization."""

    built: Built
    session: Session
    epoch: int
    clock: int = 0

    @classmethod
    def start(
        cls,
        what: Built,
        *,
        epoch: int,
        last: Built | None = None,
        state: Json = None,
        resumed: bool | None = None,
    ) -> Run:
        """Apply and open, as a leader does.

        Everything goes on that was stored before, or nothing, if `resumed` says so. Else what has
        the same state key as in `last` does; without `last` everything, but in the first epoch.
        """
        before = None if last is None else last.task
        known = frozenset(
            target.binding
            for target in what.task.targets
            if resumed
            or (resumed is None and (_had(before, target.state_key) if before else epoch > 1))
        )
        what = what.resumed(known)
        what.connector.apply(what.task, before, state, epoch=epoch)
        return cls(what, what.connector.open(what.task, epoch=epoch, state=state), epoch)

    def transaction(self, *documents: Sequence[Document], through_pickle: bool = True) -> None:
        """Store documents of each binding, and commit."""
        self.commit(self.stage(*documents, through_pickle=through_pickle))

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
        for bound, some in zip(self.built.targets, documents, strict=True):
            rows = _rows(bound, some, workers, self.attempt())
            if rows:
                stager = workers.stager(self.attempt())
                stager.store(bound.target.binding, _projected(bound, rows))
                staged += stager.finish()
        return staged

    def attempt(self, *, shard: int = 0) -> Attempt:
        """An attempt that nobody else is."""
        return Attempt(
            task=self.built.name,
            epoch=self.epoch,
            transaction=Clock(1 + self.clock),
            job="0b0",
            shard=shard,
            attempt=next(_attempts),
        )

    def load(self, binding: int, keys: Sequence[Document]) -> list[Document]:
        """Stored documents by key."""
        bound = next(each for each in self.built.targets if each.target.binding == binding)
        return _loaded(bound, keys, self.session.workers, self.attempt())

    def close(self) -> None:
        self.session.close()


def _had(task: Task, state_key: str) -> bool:
    return any(target.state_key == state_key for target in task.targets)


def expected(bind: Bind, documents: Sequence[Document]) -> dict[str, Document]:
    """What the model makes of all documents: by key, without those that were deleted."""
    schema = compiled(canonical_json(bind.schema))
    found = {
        key: reduce_full(some, schema.active_rules)
        for key, some in by_key(bind.key, documents).items()
    }
    return {key: state for key, state in found.items() if isinstance(state, dict)}


def by_key(key: Sequence[str], documents: Sequence[Document]) -> dict[str, list[Json]]:
    """Documents by the text of their key, in their order."""
    found: dict[str, list[Json]] = {}
    for document in documents:
        values = [get(document, at) for at in key]
        text = canonical_json([None if value is ABSENT else value for value in values])
        found.setdefault(text, []).append(document)
    return found


_Rows = list[tuple[Document, bool]]


def _rows(
    bound: BoundTarget, documents: Sequence[Document], workers: Workers, attempt: Attempt
) -> _Rows:
    """What is stored of the documents: each with whether it is a deletion."""
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
            (_document(one), False) for some in groups.values() for one in partial(schema, some)
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
    bound: BoundTarget, keys: Sequence[Document], workers: Workers, attempt: Attempt
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
