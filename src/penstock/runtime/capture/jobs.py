"""The documents of a capture's transaction: taken in, and published unseen.

What came with the sequences is taken in by the leader. What Spark is to read is one job for each
binding: its tasks read, validate, redact and stage fragments, which the leader adopts
(`reading_tasks.py`). Documents that the schema refuses stop the transaction, are skipped, or are
published to `ops/quarantine`, as the binding says.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import UserError
from penstock.journal.inferred import learn
from penstock.journal.schemas import layout
from penstock.model.clock import Clock
from penstock.model.json_order import Json
from penstock.model.observed import Observed, observe, widen
from penstock.model.schema import compiled
from penstock.native.arrow import to_arrow, to_json
from penstock.native.take import Taken, Taker
from penstock.runtime import ops
from penstock.runtime.capture.transaction import BindingCounts, CaptureTransaction
from penstock.runtime.connector.capture import Documents, Given, SparkRead
from penstock.runtime.job_runner import JobRunner
from penstock.runtime.stats import Counts, rfc3339
from penstock.runtime.waiting import in_thread

if TYPE_CHECKING:
    from penstock.journal.publisher import Publisher
    from penstock.runtime.capture.build import CapturedBinding, CaptureTask
    from penstock.runtime.capture.reading_tasks import ReadReport
    from penstock.runtime.control import Control
    from penstock.runtime.session import TaskPublisher, World

_log = logging.getLogger("penstock.runtime")

REFUSALS_SHOWN: Final = 20
"""Refused documents that are reported; a transaction that they stop does not look for more."""

TAKEN_BYTES: Final = 4 << 20
"""Bytes of documents that are taken in at once: enough for columns, and little memory."""

PREVIEWED_MAX: Final = 100
"""Documents that a preview shows of what Spark reads."""


class DocumentsRefused(UserError):
    """Some documents do not fit the schema of their collection, and nothing was captured."""


@dataclasses.dataclass(slots=True)
class _Count:
    """What a binding has captured in a transaction so far."""

    docs: int = 0
    bytes: int = 0
    refused: int = 0
    seen: Observed | None = None
    """The schema of the documents, if it is asked for."""

    def see(self, seen: Observed | None) -> None:
        if seen is not None:
            self.seen = seen if self.seen is None else widen(self.seen, seen)


class CaptureJobs:
    """Publishes the documents of one session's transactions."""

    def __init__(
        self,
        task: CaptureTask,
        world: World,
        control: Control,
        publisher: TaskPublisher,
        *,
        epoch: int,
    ) -> None:
        self._task = task
        self._world = world
        self._control = control
        self._publisher: Publisher | None = publisher.publisher
        """None in a preview."""
        self._takers = {
            binding.index: Taker(compiled(binding.collection.write_schema.text), salt=binding.salt)
            for binding in task.bindings
        }
        self._runner = JobRunner(
            task.name,
            (),
            world.planner,
            world.spark,
            epoch=epoch,
            local_dir=world.local_dir,
            control=control,
            waits_for=task.connector.waits_for,
        )

    def finish(self) -> int:
        """Return the number of jobs of the last transaction, and count anew."""
        jobs, self._runner.jobs_run = self._runner.jobs_run, 0
        return jobs

    async def publish(self, txn: CaptureTransaction) -> Mapping[int, BindingCounts]:
        """Publish the documents of a transaction, and return what each binding captured."""
        counts: dict[int, _Count] = {}
        given: list[Given] = []
        for sequence in txn.sequences:
            if sequence.reads:
                # What came before is earlier, key by key.
                await self._take_all(given, txn, counts)
                given = []
            for read in sequence.reads:
                await self._read(read, txn, counts.setdefault(read.binding, _Count()))
            given.extend(sequence.given)
        await self._take_all(given, txn, counts)
        await self._learn(txn, counts)
        return {
            at: BindingCounts(
                written=Counts(docs=count.docs, bytes=count.bytes), refused=count.refused
            )
            for at, count in counts.items()
        }

    async def _learn(self, txn: CaptureTransaction, counts: Mapping[int, _Count]) -> None:
        """Widen inferred schemas, before documents that they describe are committed."""
        sourced = {at: said for each in txn.sequences for at, said in each.schemas.items()}
        for at in counts.keys() | sourced.keys():
            binding = self._task.binding(at)
            seen = counts[at].seen if at in counts else None
            if binding.infers and self._publisher is not None:
                store = self._world.planner.journals.store
                await learn(store, binding.collection.name, seen=seen, sourced=sourced.get(at))

    # ------------------------------------------------------------------------------ in the leader

    async def _take_all(
        self, given: Sequence[Given], txn: CaptureTransaction, counts: dict[int, _Count]
    ) -> None:
        for binding, documents in _merged(given):
            await self._take(binding, documents, txn, counts.setdefault(binding, _Count()))

    async def _take(
        self, at: int, documents: Documents, txn: CaptureTransaction, count: _Count
    ) -> None:
        binding = self._task.binding(at)
        taken = await in_thread(lambda: take(self._takers[at], documents))
        many = len(taken.refused) + len(documents.broken)
        count.refused += many
        if many:
            self._refuse(binding, refusal_lines(taken, documents), many)
            if binding.on_invalid == "quarantine":
                await self._quarantine(quarantined(binding, taken, documents, txn.closed))
        count.docs += taken.rows.num_rows
        count.bytes += taken.rows.nbytes
        if binding.infers:
            count.see(observed(taken, self._takers[at]))
        if self._publisher is None:
            self._show(binding, to_json(taken.rows, self._takers[at].root))
        else:
            await self._publisher.publish(binding.target, taken.rows)

    def _refuse(self, binding: CapturedBinding, lines: Sequence[str], many: int) -> None:
        """Stop at refused documents, or go on without them, as the binding says."""
        shown = "\n        ".join(lines[:REFUSALS_SHOWN])
        some = "1 document does" if many == 1 else f"{many} documents do"
        if binding.on_invalid == "stop":
            raise DocumentsRefused(
                f"nothing was captured: {some} not fit the schema of {binding.collection.name}",
                where=f"capture {self._task.name}",
                why=shown,
                fix="correct them at the source, let the schema admit them, or go on without them: "
                "onInvalid: skip, or quarantine",
            )
        what = "skipped" if binding.on_invalid == "skip" else "put into ops/quarantine"
        _log.warning(
            "%s: %s not fit the schema of %s, and %s %s: %s",
            self._task.name,
            some,
            binding.collection.name,
            "was" if many == 1 else "were",
            what,
            lines[0] if lines else "",
        )

    async def _quarantine(self, documents: list[dict[str, Json]]) -> None:
        if self._publisher is not None:
            root = layout(ops.QUARANTINE.write_schema.text)
            await self._publisher.publish(self._task.quarantine, to_arrow(documents, root))

    def _show(self, binding: CapturedBinding, texts: Iterable[str]) -> None:
        for text in texts:
            self._control.on_document(binding.collection.name, text)

    # ---------------------------------------------------------------------------------- by Spark

    async def _read(self, read: SparkRead, txn: CaptureTransaction, count: _Count) -> None:
        binding = self._task.binding(read.binding)
        await self._runner.start(read.bytes)
        publisher = self._publisher
        staging = None if publisher is None else await publisher.staging(binding.target)
        quarantine = None
        if publisher is not None and binding.on_invalid == "quarantine":
            quarantine = await publisher.staging(self._task.quarantine)

        def run() -> ReadReport:
            from penstock.runtime.capture.reading_tasks import ReadingTask, run_read

            return run_read(
                self._runner.spark,
                ReadingTask(
                    read=read,
                    binding=binding,
                    staging=staging,
                    quarantine=quarantine,
                    at=txn.closed,
                ),
            )

        report = await self._runner.attempt(lambda _: self._runner.in_spark(run))
        count.refused += report.refused
        if report.refused:
            self._refuse(binding, report.lines, report.refused)
        self._show(binding, report.shown)
        for staged in report.staged:
            if publisher is not None:
                await publisher.adopt(staged)
        count.docs += report.docs
        count.bytes += report.bytes
        count.see(report.seen)


# ------------------------------------------------------------------------- in leaders and in tasks


def take(taker: Taker, documents: Documents) -> Taken:
    """Take documents in, whatever form they have."""
    if documents.texts is not None:
        return taker.take_texts(documents.texts, documents.meta)
    if documents.columns is not None:
        return taker.take_columns(documents.columns, documents.meta)
    return taker.take_texts((), None)


def observed(taken: Taken, taker: Taker) -> Observed | None:
    """Return the schema of documents as they are stored; None if there are none."""
    documents = [msgspec.json.decode(text) for text in to_json(taken.rows, taker.root)]
    return observe(documents) if documents else None


def refusal_lines(taken: Taken, documents: Documents) -> list[str]:
    """A line `origin: pointer: what is wrong` for each of the first refused documents."""
    broken = [f"{each.origin}: {each.reason}" for each in documents.broken]
    return broken + [
        f"{documents.origin(each.at)}: {'; '.join(map(str, each.violations))}"
        for each in taken.refused[:REFUSALS_SHOWN]
    ]


def quarantined(
    binding: CapturedBinding, taken: Taken, documents: Documents, at: Clock
) -> list[dict[str, Json]]:
    """Refused documents as those of `ops/quarantine`.

    Without their text if the schema hides something: what is hidden in a refused one is not known.
    """
    refused = [
        (documents.origin(each.at), each.text, [str(violation) for violation in each.violations])
        for each in taken.refused
    ]
    refused += [(each.origin, each.text, [each.reason]) for each in documents.broken]
    found: list[dict[str, Json]] = []
    for origin, text, reasons in refused:
        document: dict[str, Json] = {
            "shard": {"kind": "capture", "name": binding.task},
            "ts": rfc3339(at),
            "collection": binding.collection.name,
            "origin": origin,
            "reasons": list(reasons),
        }
        if not binding.hides:
            document["text"] = text
        found.append(document)
    return found


def _merged(given: Sequence[Given]) -> Iterator[tuple[int, Documents]]:
    """Documents of one binding together, in order: a batch costs more than a document."""
    for at, group in itertools.groupby(
        sorted(given, key=lambda each: each.binding), key=lambda each: each.binding
    ):
        waiting: list[Documents] = []
        size = 0
        for each in group:
            joins = each.documents.texts is not None and not each.documents.broken
            if waiting and (not joins or size + each.bytes > TAKEN_BYTES):
                yield at, _joined(waiting)
                waiting, size = [], 0
            if joins:
                waiting.append(each.documents)
                size += each.bytes
            else:
                yield at, each.documents
        if waiting:
            yield at, _joined(waiting)


def _joined(some: Sequence[Documents]) -> Documents:
    import pyarrow as pa

    if len(some) == 1:
        return some[0]
    starts = list(itertools.accumulate((each.count for each in some), initial=0))

    def origin(at: int) -> str:
        which = bisect.bisect_right(starts, at) - 1
        return some[which].origin(at - starts[which])

    metas = [each.meta for each in some if each.meta is not None]
    meta = None
    if len(metas) == len(some):
        table = pa.Table.from_batches(metas).combine_chunks()
        meta = table.to_batches()[0] if table.num_rows else metas[0]
    texts = [text for each in some for text in each.texts or ()]
    return Documents(texts=texts, meta=meta, origin=origin)
