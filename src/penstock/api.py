"""Penstock from Python: what `penstock.open` returns.

    with penstock.open(data="./.penstock") as p:
        p.apply("catalog.yaml")
        p.append("acme/orders", [{"id": 1, "total": 9.5}])
        p.run()
        p.read("acme/orders").show()

Calls block. The stores live on an event loop in a thread of its own, so an open `Penstock` may be
used from any thread, a notebook's too. Spark starts with the first call that needs it, and it is
left running: there is one per process, and others may use it.

Opening creates nothing, and `apply` creates what is missing.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Protocol,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    overload,
)

from penstock import applying
from penstock.batch import TaskRun, open_world, run_graph, tasks_to_run
from penstock.catalog import desired
from penstock.catalog.append import append_documents
from penstock.catalog.build import build_valid
from penstock.catalog.collection_lookup import find_collection, salt_of
from penstock.catalog.desired import ApplyResult
from penstock.catalog.intake import Chunk, Intake
from penstock.connectors.builtin import BUILTIN
from penstock.consensus.open import open_consensus, sqlite_path
from penstock.deployment import check_not_lost, is_there, refuse_beside_up
from penstock.engine import EngineOptions, open_spark
from penstock.errors import PenstockError, Unavailable, UsageError, UserError
from penstock.journal.blobs import open_blobs
from penstock.journal.follower import LoopThread
from penstock.journal.frame_append import (
    DocumentsRefused,
    Stores,
    commit_frame,
    plan_frame,
    stage_frame,
)
from penstock.journal.inferred import all_inferred
from penstock.journal.journals import Journal, Journals
from penstock.journal.ownership import Ownership
from penstock.journal.schemas import Schemas, layout
from penstock.journal.selector import LabelSelector
from penstock.model.columns import Column
from penstock.model.spec import Catalog
from penstock.native.arrow_frames import record_batches
from penstock.native.python_values import to_lines
from penstock.runtime.kinds import shards_of
from penstock.settings import Settings
from penstock.status import TaskStatus, statuses

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

    from penstock.consensus.store import Consensus

__all__ = [
    "ApplyResult",
    "Documents",
    "DocumentsRefused",
    "Frame",
    "Penstock",
    "PenstockError",
    "TaskRun",
    "TaskStatus",
    "Unavailable",
    "UsageError",
    "UserError",
    "open",
]

T = TypeVar("T")

_Reading: TypeAlias = Callable[[Intake], Iterator[Chunk]]


class Frame(Protocol):
    """A table in memory or in Spark: pandas, Arrow, Polars and Spark have this method."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Documents: TypeAlias = "Iterable[Mapping[str, Any]] | Frame | pyarrow.RecordBatch"
"""What `Penstock.append` takes: several dicts, or a frame whose columns are members."""


def open(  # noqa: A001 - it is called as penstock.open
    data: str | Path | None = None,
    *,
    consensus: str | None = None,
    blob: str | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> Penstock:
    """Open a deployment: a data directory, or the stores it consists of.

    What is not given comes from PENSTOCK_… variables, a penstock.toml here, or the default, as on
    the command line. `master` and `conf` are Spark's, if this process starts it.

    Nothing is created: in a directory without a deployment, `Penstock.apply` starts one, and every
    other call is an error.
    """
    flags = {
        "data": None if data is None else Path(data),
        "consensus": consensus,
        "blob": blob,
        "master": master,
        "conf": conf,
    }
    return Penstock(Settings.resolve(flags, os.environ))


class Penstock:
    """An open deployment. Close it, or use it in a `with` block."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._opening = threading.Lock()
        self._opened: _Opened | None = None
        self._closed = False
        with _python_words():
            check_not_lost(settings)
        self._blobs = open_blobs(settings.blob)
        self._thread = LoopThread("penstock")
        try:
            if is_there(settings):
                self._open()
        except BaseException:
            self._thread.close()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._opened else "not applied yet"
        return f"<Penstock {self._settings.data}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the stores; once is enough. Spark goes on."""
        with self._opening:
            if self._closed:
                return
            self._closed = True
            try:
                if self._opened is not None:
                    self._thread.run(self._opened.store.close())
            finally:
                self._thread.close()

    @property
    def spark(self) -> SparkSession:
        """The process's SparkSession, started if there is none."""
        return open_spark(EngineOptions(master=self._settings.master, conf=self._settings.conf))

    def apply(self, *catalogs: str | os.PathLike[str], remove: bool = False) -> ApplyResult:
        """Check catalogs and record them as the desired state.

        Together they are the whole catalog. Tasks and collections that they leave out are removed
        if `remove` is True; otherwise `RemovalRefused` is raised, and nothing is applied.

        Creates the deployment if there is none.
        """
        if not catalogs:
            raise UsageError("no catalog is given", fix='for example p.apply("catalog.yaml")')
        paths = [Path(path) for path in catalogs]
        there = self._here(create=False)
        inferred = {} if there is None else self._run_on(all_inferred(there.store))
        given = build_valid(paths, environ=os.environ, connectors=BUILTIN, inferred=inferred)
        store = self._here(create=True).store
        return self._run_on(
            applying.apply(
                store,
                given,
                files=[str(path.resolve()) for path in paths],
                may_remove=None if remove else (),
            )
        )

    def append(
        self, collection: str, documents: Documents, *, redact_salt: str | None = None
    ) -> int:
        """Append documents as one transaction, and return how many they were.

        `documents` are several dicts, or a frame, whose columns become members: of pandas, Arrow or
        Polars, or a Spark DataFrame, which is written by Spark's tasks. Dates, decimals, UUIDs and
        numpy values take the form that the schema asks for. A null of a frame is an absent member,
        or null where the schema requires the member and allows null.

        If one document does not fit the collection's schema, nothing is appended. `redact_salt`, in
        base64, is needed if the schema hashes values and no task of the catalog has one.
        """
        _check_several(collection, documents)
        catalog = self._catalog()
        spec = find_collection(catalog, collection)
        given = redact_salt or os.environ.get("PENSTOCK_REDACT_SALT")
        if _is_spark_frame(documents):
            with _python_words():
                salt = salt_of(spec, catalog, given)
            stores = self._stores
            write = self._run_on(plan_frame(stores, spec, salt))
            parts = stage_frame(documents, write)  # in this thread: its Spark properties count
            return self._run_on(commit_frame(stores, spec, parts))
        read = _reading(documents, layout(spec.write_schema.text))
        return self._run_on(_append(self._stores, catalog, collection, read, given))

    def run(self, *tasks: str, shards: int | None = None) -> tuple[TaskRun, ...]:
        """Run the tasks of the catalog, or those named, until all of them have caught up.

        What is there when it is called is processed when it returns, through all derivations. One
        task that fails does not stop another: all are run, and then the first error is raised.
        """
        catalog, store = self._catalog(), self._here().store
        return self._run_on(_run(self._settings, store, catalog, tasks, shards))

    def status(self) -> tuple[TaskStatus, ...]:
        """What every task of the catalog does, wherever it runs; and why it waits, if it does."""

        catalog, store = self._catalog(), self._here().store

        async def look() -> tuple[TaskStatus, ...]:
            return tuple(await statuses(store, catalog))

        return self._run_on(look())

    def read(
        self,
        collection: str,
        *,
        selector: str = "",
        columns: Sequence[str] | None = None,
        meta: bool = False,
        keep_text: bool = False,
    ) -> DataFrame:
        """The documents that are committed now, as a DataFrame without order.

        `selector` chooses journals by their labels (region=eu), `columns` top-level columns; with
        `meta`, each document has its clock, producer and flags. Members that the schema does not
        name are JSON text in the map `_x`. Strings with `format: date-time`, `date`, `number` and
        `integer` are TIMESTAMP, DATE and DECIMAL; with `keep_text`, the strings that were appended.
        """
        from penstock.journal.scan import read_collection

        chosen, stores = LabelSelector.parse(selector), self._stores
        spec = find_collection(self._catalog(), collection)
        return self._run_on(
            read_collection(
                self.spark,
                stores.journals,
                self._blobs,
                stores.schemas,
                spec,
                selector=chosen,
                columns=columns,
                meta=meta,
                keep_text=keep_text,
            )
        )

    def journals(self, collection: str | None = None, *, selector: str = "") -> tuple[Journal, ...]:
        """The journals of a collection, or of all, as of one revision."""
        chosen = LabelSelector.parse(selector)
        return self._run_on(self._stores.journals.list(collection, chosen))

    # ----------------------------------------------------------------------------------- details

    @overload
    def _here(self) -> _Opened: ...
    @overload
    def _here(self, *, create: Literal[True]) -> _Opened: ...
    @overload
    def _here(self, *, create: Literal[False]) -> _Opened | None: ...

    def _here(self, *, create: bool | None = None) -> _Opened | None:
        """The stores; by default, they have to be there."""
        with self._opening:
            if self._closed:
                raise UsageError(
                    "this Penstock is closed",
                    where=str(self._settings.data),
                    fix="use it inside of its with block, or call penstock.open again",
                )
            if self._opened is None and (create or is_there(self._settings)):
                self._open()
            if self._opened is None and create is None:
                raise UserError(
                    "there is no deployment here",
                    where=str(sqlite_path(self._settings.consensus).absolute()),
                    fix='start one: p.apply("catalog.yaml"); or open another: penstock.open(…)',
                )
            return self._opened

    def _open(self) -> None:
        store: Consensus = self._thread.run(open_consensus(self._settings.consensus))
        journals = Journals(store)
        stores = Stores(
            journals=journals,
            blobs=self._blobs,
            schemas=Schemas(store),
            ownership=Ownership(journals, self._blobs),
        )
        self._opened = _Opened(store, stores)

    @property
    def _stores(self) -> Stores:
        return self._here().stores

    def _run_on(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for what the stores do."""
        with _python_words():
            return self._thread.run(work)

    def _catalog(self) -> Catalog:
        return self._run_on(desired.load(self._here().store))


async def _run(
    settings: Settings,
    store: Consensus,
    catalog: Catalog,
    names: Sequence[str],
    shards: int | None,
) -> tuple[TaskRun, ...]:
    specs = tasks_to_run(catalog, names)
    led = [spec.name for spec in specs if not shards_of(spec).disable]
    refuse_beside_up(settings, led)
    world = await open_world(settings, store)
    outcomes = await run_graph(catalog, specs, world, shards=shards)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return tuple(outcomes)


async def _append(
    stores: Stores, catalog: Catalog, collection: str, read: _Reading, salt: str | None
) -> int:
    appended = await append_documents(
        stores.journals,
        stores.blobs,
        stores.schemas,
        stores.ownership,
        catalog,
        collection,
        read,
        redact_salt=salt,
    )
    return appended.documents


def _reading(documents: Any, root: Column) -> _Reading:  # noqa: ANN401 - what `append` takes
    """Read documents or a frame; an iterable is used up here, in the thread of its owner."""
    batches = record_batches(documents)
    if batches is not None:
        return lambda intake: intake.read_frame(batches)
    lines = to_lines(documents, root)
    return lambda intake: intake.read(io.BytesIO(lines), "document")


@dataclass(frozen=True, slots=True)
class _Opened:
    """The stores of a deployment that is there."""

    store: Consensus
    stores: Stores


def _check_several(collection: str, documents: object) -> None:
    """Refuse what is not several documents, and say how to write that."""
    many = f'p.append("{collection}", [document])'
    if isinstance(documents, Mapping):
        raise UsageError("append takes several documents, and this is one", fix=many)
    if isinstance(documents, str | bytes):
        raise UsageError(
            "append takes documents, and this is text",
            fix="a document is a dict: [json.loads(line) for line in text.splitlines()]",
        )
    if not isinstance(documents, Iterable) and not hasattr(documents, "__arrow_c_stream__"):
        raise UsageError(
            f"append takes documents, and this is of type {type(documents).__name__}",
            fix=f"dicts, or a frame of pandas, Arrow or Spark: {many}",
        )


def _is_spark_frame(documents: object) -> TypeGuard[DataFrame]:
    if "pyspark.sql" not in sys.modules:
        return False
    from pyspark.sql import DataFrame

    if not isinstance(documents, DataFrame):
        return False
    if documents.isStreaming:
        raise UsageError(
            "append takes documents that are there, and this frame is a stream",
            fix='df.writeStream.format("penstock").option("collection", …)',
        )
    return True


_OPTIONS: Final = {
    "--redact-salt": "redact_salt=…",
    "--data, --blob or --consensus": "data, blob or consensus",
    "; --take-over runs it here": "",
}


@contextlib.contextmanager
def _python_words() -> Iterator[None]:
    """Errors that tell of options of commands, in the words of Python."""
    try:
        yield
    except desired.NothingApplied as error:
        raise desired.NothingApplied(error.what, fix='p.apply("catalog.yaml")') from None
    except PenstockError as error:
        if error.fix is not None:
            for option, words in _OPTIONS.items():
                error.fix = error.fix.replace(option, words)
        raise
