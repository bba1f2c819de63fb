"""The interface of a materialization connector, a sink. Its promises: `penstock.runtime.connector`.

In Spark tasks a `Loader` looks up stored documents and a `Stager` stages rows where no reader sees
them. On the leader a session commits what was staged.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

from penstock.model.clock import Clock
from penstock.model.columns import Column
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.model.reduce import Strategy
from penstock.model.spec import Frozen
from penstock.runtime.connector.common import Applied, Connector, ConnectorError, SparkAttempt

if TYPE_CHECKING:
    import pyarrow


class FencedEndpoint(ConnectorError):
    """A newer session of this task holds the endpoint: stop, and touch nothing more."""


class Pattern(enum.Enum):
    """Where a transaction is decided."""

    ENDPOINT = "the endpoint commits rows and checkpoint together"
    APPLY = "the recovery log commits, and named units are applied then"
    DIRECT = "rows are visible as they are stored"


# -------------------------------------------------------------------------------------- targets


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetField:
    """A column of a target."""

    name: str
    pointer: str
    """The location it shows; empty for the whole document."""
    column: Column
    """Its type. Containers and the whole document arrive as JSON text."""
    is_key: bool = False
    required: bool = False
    """True if it is never absent or null."""
    default: bool | int | str | None = None
    """Stands for a key value that is absent."""
    reduction: Strategy = Strategy.LAST_WRITE_WINS
    """With push-down, how the stored value and a new one become one; NULL is no value."""

    @property
    def is_document(self) -> bool:
        return self.pointer == ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One binding as its connector sees it: a resource and its columns."""

    binding: int
    state_key: str
    """Changes with a backfill: rows stored under another state key are out of date."""
    collection: str
    path: tuple[str, ...]
    """The resource of the endpoint: a schema and a table, say."""
    resource: Frozen
    fields: tuple[TargetField, ...]
    delta_updates: bool = False
    """Rows are appended as they are; nothing is loaded or updated."""
    pushdown: bool = False
    """The endpoint reduces: rows hold only what is new, and nothing was loaded."""
    takeover: bool = False
    """The resource may belong to another task: it is filled again, and is this task's from then."""
    renamed_from: tuple[str, ...] | None = None
    """The path that the resource had before: it is renamed, and keeps its rows."""

    @property
    def key(self) -> tuple[TargetField, ...]:
        return tuple(field for field in self.fields if field.is_key)

    @property
    def document(self) -> TargetField | None:
        return next((field for field in self.fields if field.is_document), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTask:
    """A materialization as its connector sees it."""

    name: str
    config: Frozen = field(repr=False)
    """The endpoint's configuration; secrets in it are references (`runtime.secrets`)."""
    targets: tuple[Target, ...]
    renamed_from: str | None = None
    """The task's former name: what the endpoint keeps under that name belongs to this task."""
    resumed: frozenset[int] = frozenset()
    """Bindings whose documents were stored before, according to the recovery log."""


DELETE = "_delete"
"""Boolean column of the rows to store: true if the document is to be removed."""


# ----------------------------------------------------------------------------- negotiating fields


class Constraint(enum.Enum):
    """A connector's opinion on a field that it could store."""

    REQUIRED = "must be a column"
    RECOMMENDED = "is a column unless told otherwise"
    OPTIONAL = "is a column if it is asked for"
    FORBIDDEN = "cannot be a column"
    INCOMPATIBLE = "does not fit the column that is there"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldVerdict:
    """A constraint and its reason."""

    constraint: Constraint
    reason: str


# ------------------------------------------------------------------------------- schema changes


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChange:
    """The effect of a changed target on one column of its table, or on all of its rows."""

    column: str | None = None
    """None: it is about the rows as a whole."""
    was: str | None = None
    """The type of the column before; None if there was none."""
    now: str | None = None
    """The type that it needs; None if it is filled no more."""
    rebuild: bool
    """True if the table must be filled again; otherwise it is altered in place."""
    says: str
    """For people: "bigint becomes double precision"."""


@runtime_checkable
class Foresees(Protocol):
    """A sink that knows, without its endpoint, what a change of a target does to the table."""

    def offline(self) -> Materialization:
        """Return the same connector, whose `validate` does not ask the endpoint."""
        ...

    def foresee(self, was: Target, now: Target) -> Sequence[TableChange]:
        """Compare a target as it was applied last with the one to be applied."""
        ...


@runtime_checkable
class Rebuilds(Protocol):
    """A session that fills tables again beside the ones that readers see."""

    @property
    def rebuilding(self) -> frozenset[int]:
        """The bindings whose rows go to a shadow table, until `swap`."""
        ...

    def swap(self) -> None:
        """Replace the rows of those tables by what their shadows hold, for all at once.

        The session is not used any more after that.
        """
        ...


# ------------------------------------------------------------------------------------- in tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Rows that an attempt has staged, complete and durable."""

    binding: int
    shard: int
    at: str
    """Where they are: a path, a table; only the connector interprets it."""
    rows: int
    bytes: int


class Stager(Protocol):
    """Stages the rows of one shard; one per attempt."""

    def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
        """Take rows of a target: its fields by name, then `DELETE`.

        Keys are unique, except for a target with `delta_updates`. Whether a key is stored already
        is for the endpoint to find out.
        """
        ...

    def finish(self) -> Sequence[Staged]:
        """Make the rows durable and describe them. They are not visible, before or after."""
        ...

    def discard(self) -> None:
        """Give up, best effort: a later sweep removes what is left behind."""
        ...


class Loader(Protocol):
    """Looks up stored documents; one per attempt."""

    def load(self, binding: int, keys: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
        """Yield the documents of those keys that exist, once each, as JSON text in one column."""
        ...

    def close(self) -> None: ...


class Workers(Protocol):
    """The part that goes into Spark tasks: small, picklable, without connections or secrets."""

    def stager(self, attempt: SparkAttempt) -> Stager: ...

    def loader(self, attempt: SparkAttempt) -> Loader: ...


# --------------------------------------------------------------------------------- on the leader


class SinkSession(Protocol):
    """An endpoint, opened for one session of a task."""

    @property
    def checkpoint(self) -> bytes | None:
        """The checkpoint that an ENDPOINT's last committed transaction stored with its rows."""
        ...

    @property
    def workers(self) -> Workers: ...

    def flush(self, patches: Sequence[Json]) -> Sequence[Json]:
        """Note that a transaction has loaded everything. `patches` are the last `acknowledge`'s.

        The patches returned are durable even if the transaction is not: they may state intentions.
        """
        ...

    def start_commit(
        self, close: Clock, staged: Sequence[Staged], checkpoint: bytes, patches: Sequence[Json]
    ) -> Sequence[Json]:
        """Release what was staged, as the pattern says; return patches of the connector's state.

        `patches` are those that `flush` returned in this transaction.
        """
        ...

    def acknowledge(self, patches: Sequence[Json]) -> Sequence[Json]:
        """Learn that the transaction counts. `patches` are `start_commit`'s; none at first."""
        ...

    def close(self) -> None: ...


class Materialization(Connector, Protocol):
    """A sink: a connector that stores the documents of collections in its endpoint."""

    config_schema: ClassVar[ConfigSchema]
    """What it accepts as the configuration of its endpoint."""
    resource_schema: ClassVar[ConfigSchema]
    """What it accepts as the resource of a binding."""

    @property
    def pattern(self) -> Pattern: ...

    @property
    def flush_barrier(self) -> bool:
        """True if the patches of `flush` must be durable before any row is stored."""
        ...

    def can_reduce(self, field: TargetField) -> bool:
        """True if the endpoint's own update does `field.reduction`, exactly as Spark does."""
        ...

    def path(self, resource: Json) -> tuple[str, ...]:
        """Return the resource of the endpoint that a binding names; raises `UserError`."""
        ...

    def location(self, resource: Json) -> tuple[str, ...]:
        """Return what tells a resource from those of any endpoint, as far as the config says.

        Equal if it is certainly the same one: `penstock check` refuses two tasks that share it.
        """
        ...

    def delta_updates(self, resource: Json) -> bool:
        """True if a binding asks for rows as they are."""
        ...

    def validate(
        self,
        path: tuple[str, ...],
        fields: Sequence[TargetField],
        *,
        delta_updates: bool,
        state_key: str,
    ) -> Mapping[str, FieldVerdict]:
        """Compare the fields of a binding with the endpoint; return verdicts by field name.

        A table filled under another state key does not count: `apply` will empty it.
        """
        ...

    def apply(self, task: SinkTask, last: SinkTask | None, state: Json, *, epoch: int) -> Applied:
        """Bring the endpoint's resources to what the task needs; `last` is what was applied before.

        A target whose state key differs from the last one's is filled again: a backfill. Its rows
        go, or stay until the session's `swap` (`Rebuilds`). An ENDPOINT raises its fence before
        that, or a predecessor could still store rows of the past.
        """
        ...

    def open(self, task: SinkTask, *, epoch: int, state: Json) -> SinkSession:
        """Begin a session, and remove what earlier ones have left staged."""
        ...

    def preview(self, paths: Sequence[tuple[str, ...]]) -> AbstractContextManager[Self]:
        """Within this, the same connector with resources of its own at the same endpoint.

        They have the shape of those at `paths`, without their rows, and a checkpoint of their own;
        two previews at once do not share any. All of it is removed at the end. The next preview
        removes the remains of one whose process was killed, and never what is still in use.
        """
        ...
