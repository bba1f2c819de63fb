"""The interface of a capture connector, a source. Its promises: `penstock.runtime.connector`.

A session gives documents in **sequences**. A sequence ends with a checkpoint: what changes in the
connector's state by it. Restarting from a state gives every document after it, and none before it.
A transaction is one sequence or more, and commits their documents and states in one record; so a
source that can be read again from a cursor is read exactly once.

Few documents come with the sequence itself (`Given`). Many are read by Spark (`SparkRead`), in
tasks that make `Documents` of what they find. What is valid, what is redacted, and which journal a
document goes to, is the runtime's.

A source promises as well:

- `poll` returns within its `wait_s`, or as soon as there is something to give.
- `poll` and `acknowledge` are called from different threads, at the same time; each by one thread.
- What `acknowledge` tells the source is told again by the next session, from its state: a crash may
  come before it.
- A session of a preview changes nothing at the source that a run of the task would find.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeAlias

from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.model.schema import compiled
from penstock.model.spec import CollectionSpec, Frozen
from penstock.runtime.connector.common import Connector

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

WAIT_S: Final = 0.5
WAIT_S_MAX: Final = 10.0
"""Seconds that a poll may wait for something to give: at first, and while there is never anything.
`interrupt` ends the wait."""

GIVEN_BYTES_MAX: Final = 4 << 20
"""Bytes of documents up to which they come with their sequence; Spark reads what is more."""


@dataclass(frozen=True, kw_only=True)
class SourceBinding:
    """One binding as its connector sees it: a resource, and the collection that it fills."""

    index: int
    state_key: str
    """Under which the connector keeps this binding's part of its state; changes with a backfill."""
    resource: Frozen
    collection: CollectionSpec

    @cached_property
    def wants_meta(self) -> bool:
        """True if the collection's schema names `/_meta`: only then is it filled."""
        shape = compiled(self.collection.write_schema.text).shape
        return "_meta" in shape.objects.properties


# ------------------------------------------------------------------------------------- documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Something of the source that is no document at all: a row with too many fields."""

    origin: str
    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Some documents of one binding, in order: JSON texts, or columns."""

    texts: Sequence[bytes] | None = None
    columns: pyarrow.RecordBatch | None = None
    """Members as columns; NULL is a member that is absent."""
    meta: pyarrow.RecordBatch | None = None
    """The members of `/_meta`, row by row; needed only if the binding `wants_meta`."""
    origin: Callable[[int], str]
    """Where the document at a position comes from, for people: `orders.jsonl:17`."""
    broken: tuple[Broken, ...] = ()
    """Found among them, and handled as documents that do not fit the schema."""

    @property
    def count(self) -> int:
        if self.texts is not None:
            return len(self.texts)
        return 0 if self.columns is None else self.columns.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Documents that come with their sequence."""

    binding: int
    documents: Documents
    bytes: int


class SparkRead(Protocol):
    """Documents that Spark tasks read; picklable.

    A task may be run again, and must then find the same documents in the same order.
    """

    @property
    def binding(self) -> int: ...

    @property
    def bytes(self) -> int:
        """About the size of what is read."""
        ...

    @property
    def rows_max(self) -> tuple[int, ...] | None:
        """By partition of the frame, more rows than it has, if partitions are in order.

        Of documents of one key, the one in the later partition is the later one then. None: no two
        partitions have documents of one key.
        """
        ...

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the rows from which tasks read. Blocks, and runs no job."""
        ...

    def documents(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Documents]:
        """In a task: read the documents of one partition of the frame."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSequence:
    """Documents, and the checkpoint after them."""

    given: tuple[Given, ...] = ()
    reads: tuple[SparkRead, ...] = ()
    patches: tuple[Json, ...] = ()
    """How the connector's state changes: RFC 7396, in order."""
    schemas: Mapping[int, Json] = field(default_factory=dict)
    """What the source says about the documents of a binding: JSON Schemas."""

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.given) + sum(each.bytes for each in self.reads)

    @property
    def given_documents(self) -> int:
        return sum(each.documents.count for each in self.given)


class Idle(enum.Enum):
    """Why a poll gives no sequence."""

    PENDING = "not yet: more is to come of what was there when the session was opened"
    NOTHING = "everything that was there when the session was opened has been given"
    END = "this session gives nothing more; another one may, after the capture's interval"


Polled: TypeAlias = CaptureSequence | Idle


class CaptureSession(Protocol):
    """A source that is open."""

    def poll(self, wait_s: float) -> Polled:
        """Return the next sequence, or why there is none."""
        ...

    def acknowledge(self, sequences: int) -> None:
        """The next `sequences` of those that were given are committed: the source may forget them.

        They are counted in the order in which they were given.
        """
        ...

    def close(self) -> None:
        """Release everything; no other call follows, and none is under way but `poll`."""
        ...


# ---------------------------------------------------------------------------------------- source


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """A resource that the endpoint has, and the collection it might fill."""

    name: str
    """For the collection: a last part of its name."""
    resource: Json
    schema: Json
    """Of its documents."""
    key: tuple[str, ...]
    """JSON pointers."""
    disable: bool = False
    note: str | None = None
    """Something that a person should know before using it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a session begins with."""

    task: str
    bindings: tuple[SourceBinding, ...]
    state: Json
    """As the last committed transaction left it; `{}` at first."""
    interval_s: float = 300.0
    ends: bool = False
    """The session is closed as soon as it has `NOTHING` more: nobody waits for what is new."""
    preview: bool = False


class Capture(Connector, Protocol):
    """A source. Made from the endpoint's configuration; opens nothing by itself."""

    config_schema: ClassVar[ConfigSchema]
    resource_schema: ClassVar[ConfigSchema]

    def discover(self) -> Sequence[Discovered]:
        """Look at the endpoint, and return its resources."""
        ...

    def open(self, opening: Opening) -> CaptureSession:
        """Begin a session."""
        ...
