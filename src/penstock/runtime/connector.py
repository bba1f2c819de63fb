"""What a materialization connector is: the interface, its obligations, and why they are so.

A connector knows one endpoint: its types, its DDL, how rows get there and how they become visible.
The runtime knows documents: which ones, in which order, reduced how, and when a transaction is
complete. The border between them is crossed in two places.

**In Spark tasks**, heavy work: `Loader` looks keys up, `Stager` puts rows where nobody looks at
them until the leader names them. A task may run twice, at once, or die anywhere; so what a stager
makes carries the name of its attempt (`Attempt.name`), and only what the winning attempt returned
(`Staged`) is ever used. The rest is garbage, which the next session removes when it is opened.

**On the leader**, once for all shards, whatever becomes visible. When, is the connector's pattern:

    ENDPOINT    the endpoint has transactions: `start_commit` writes all rows and the checkpoint in
                one of them, which checks the fence. The endpoint is the authority.
    APPLY       it can apply a named unit once: `start_commit` names the units in a state patch,
                which commits with the recovery log; `acknowledge` applies them, again if asked.
    DIRECT      neither: rows are visible as they are stored. At least once.

Obligations, whatever the pattern:

- `apply` can be repeated from any half-way point, and touches no data of unchanged bindings.
- `open` of an ENDPOINT raises the fence first and reads the checkpoint then; it refuses if a
  greater fence is there. Otherwise a predecessor that only slept could commit after the reading.
- `acknowledge` is the first call of every session, and idempotent. The catalog may have been edited
  since the transaction was committed: a unit that is named for a target which the task does not
  have now stays named until it has, or until its table has been emptied for another state key.
- `apply` knows from the endpoint itself under which state key a table was filled, whatever was
  applied last: a target may have been gone for a while.
- `start_commit` is never repeated blindly: after a lost connection, the stored checkpoint tells.
- `apply` refuses what would make rows wrong: a resource that another task fills, and one that has
  lost what was stored there. What `Task.resumed` says and what is there must fit each other.
- A `preview` changes nothing that a run of the task would find, whatever becomes of its process.
- Nothing of the configuration that is secret appears in an error, a log or a `repr`.

Methods block; the leader calls them in a thread, one at a time. A call must not outlast a stop: the
leader interrupts it from another thread (`interrupt`), and asks what it waits for (`waits_for`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from penstock.errors import PenstockError
from penstock.model.clock import Clock
from penstock.model.columns import Column
from penstock.model.json_order import Json
from penstock.model.reduce import Strategy
from penstock.model.spec import Frozen

if TYPE_CHECKING:
    import pyarrow


class ConnectorError(PenstockError):
    """The endpoint did not do what was asked. Transient ones are worth another session."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        transient: bool = False,
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.transient = transient


class FencedEndpoint(ConnectorError):
    """A newer session of this task has the endpoint: stop, and touch nothing more."""


class Pattern(enum.Enum):
    """Who decides that a transaction counts."""

    ENDPOINT = "the endpoint commits rows and checkpoint together"
    APPLY = "the recovery log commits, and named units are applied then"
    DIRECT = "rows are visible as they are stored"


# --------------------------------------------------------------------------------- what to store


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
    """It is never absent nor null."""
    default: bool | int | str | None = None
    """Of a key: what stands for a value that is absent."""
    reduction: Strategy = Strategy.LAST_WRITE_WINS
    """With push-down, how a stored value and a new one become one; NULL is no value."""

    @property
    def is_document(self) -> bool:
        return self.pointer == ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One binding as its connector sees it: a resource, and the columns of it."""

    binding: int
    state_key: str
    """Changes with a backfill: what is stored under another one is out of date."""
    collection: str
    path: tuple[str, ...]
    """Which resource of the endpoint: a schema and a table, say."""
    resource: Frozen
    fields: tuple[TargetField, ...]
    delta_updates: bool = False
    """Rows are appended as they are; nothing is loaded or updated."""
    pushdown: bool = False
    """The endpoint reduces: rows hold what is new, and nothing was loaded."""
    takeover: bool = False
    """The resource may be another task's: it is emptied, and is this one's from then on."""

    @property
    def key(self) -> tuple[TargetField, ...]:
        return tuple(field for field in self.fields if field.is_key)

    @property
    def document(self) -> TargetField | None:
        return next((field for field in self.fields if field.is_document), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A materialization as its connector sees it."""

    name: str
    config: Frozen = field(repr=False)
    """The endpoint's configuration; secrets in it are references (`runtime.secrets`)."""
    targets: tuple[Target, ...]
    renamed_from: str | None = None
    """What it was called before: what the endpoint keeps under that name is its own."""
    resumed: frozenset[int] = frozenset()
    """Bindings of which documents were stored before, as the recovery log remembers."""


DELETE = "_delete"
"""Column of rows to store: whether the document is to be removed. Boolean."""


# ----------------------------------------------------------------------------- negotiating fields


class Constraint(enum.Enum):
    """What a connector says of a field that it could store."""

    REQUIRED = "must be a column"
    RECOMMENDED = "is a column unless told otherwise"
    OPTIONAL = "is a column if it is asked for"
    FORBIDDEN = "cannot be a column"
    INCOMPATIBLE = "does not fit the column that is there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A constraint and its reason."""

    constraint: Constraint
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What `apply` did, for people, and how the connector's state changes by it."""

    description: str
    patches: tuple[Json, ...] = ()


# ------------------------------------------------------------------------------------- in tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Who runs a piece of work: unique for every try of it, whoever started it."""

    task: str
    epoch: int
    transaction: Clock
    """The clock at which it opened."""
    job: str
    shard: int
    attempt: int

    @property
    def name(self) -> str:
        """For tables and directories: digits, lower-case letters and underscores."""
        return f"{self.epoch}_{self.transaction:x}_{self.job}_{self.shard}_{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Rows that an attempt has put aside, complete and durable."""

    binding: int
    shard: int
    at: str
    """Where: a path, a table; for the connector to understand."""
    rows: int
    bytes: int


class Stager(Protocol):
    """Puts the rows of one shard aside; one per attempt."""

    def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
        """Rows of a target: its fields by name, then `DELETE`. Keys are unique, but of a target
        with `delta_updates`; whether a key is stored already is for the endpoint to find out."""
        ...

    def finish(self) -> Sequence[Staged]:
        """Make it durable, and say what there is. Nothing was visible before, nor is now."""
        ...

    def discard(self) -> None:
        """Give up, best effort: what is left behind is swept later."""
        ...


class Loader(Protocol):
    """Looks up what is stored; one per attempt."""

    def load(self, binding: int, keys: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
        """The documents of those keys that exist, once each, as JSON text in one column."""
        ...

    def close(self) -> None: ...


class Workers(Protocol):
    """What goes into Spark tasks: small, picklable, without open connections or secrets."""

    def stager(self, attempt: Attempt) -> Stager: ...

    def loader(self, attempt: Attempt) -> Loader: ...


# --------------------------------------------------------------------------------- on the leader


class Session(Protocol):
    """An endpoint, opened for one session of a task."""

    @property
    def checkpoint(self) -> bytes | None:
        """Of an ENDPOINT: what the last transaction that it committed stored with its rows."""
        ...

    @property
    def workers(self) -> Workers: ...

    def flush(self, patches: Sequence[Json]) -> Sequence[Json]:
        """Everything of a transaction was loaded. `patches` are those of the last `acknowledge`.

        What is returned is durable even if the transaction is not: it may say what is intended.
        """
        ...

    def start_commit(
        self, close: Clock, staged: Sequence[Staged], checkpoint: bytes, patches: Sequence[Json]
    ) -> Sequence[Json]:
        """Release what was staged, as the pattern says; patches of the connector's state.

        `patches` are those that `flush` returned in this transaction.
        """
        ...

    def acknowledge(self, patches: Sequence[Json]) -> Sequence[Json]:
        """The transaction counts. `patches` are those of `start_commit`; none at first."""
        ...

    def close(self) -> None: ...


class Materialization(Protocol):
    """A connector. Made with the endpoint's configuration; opens nothing by being made."""

    @property
    def pattern(self) -> Pattern: ...

    def can_reduce(self, field: TargetField) -> bool:
        """Whether the endpoint's own update does `field.reduction`, exactly as Spark does."""
        ...

    @property
    def flush_barrier(self) -> bool:
        """Whether patches of `flush` must be durable before anything is stored."""
        ...

    def path(self, resource: Json) -> tuple[str, ...]:
        """Which resource of the endpoint a binding means; raises `UserError`."""
        ...

    def location(self, resource: Json) -> tuple[str, ...]:
        """What tells a resource from those of any endpoint, as far as the configuration does.

        Equal if it is certainly the same one: `penstock check` refuses two tasks that share it.
        """
        ...

    def delta_updates(self, resource: Json) -> bool:
        """Whether a binding asks for rows as they are."""
        ...

    def interrupt(self) -> None:
        """Let whatever call is under way, of a session too, raise soon, and do nothing else.

        Called from another thread, again and again until the call has ended. How it ended, the next
        session finds out: an ENDPOINT may have committed.
        """
        ...

    def waits_for(self) -> str | None:
        """What the call that is under way, or a Spark task, waits for: a lock, and who has it.

        None if it works. Called from another thread; may ask the endpoint, for a second or two.
        """
        ...

    def check(self) -> None:
        """Whether the endpoint can be reached and used; raises `ConnectorError` that says why."""
        ...

    def validate(
        self,
        path: tuple[str, ...],
        fields: Sequence[TargetField],
        *,
        delta_updates: bool,
        state_key: str,
    ) -> Mapping[str, Verdict]:
        """What the endpoint thinks of the fields of a binding, by name; looks at what is there.

        What is there under another state key does not count: `apply` will empty it.
        """
        ...

    def apply(self, task: Task, last: Task | None, state: Json, *, epoch: int) -> Applied:
        """Bring the endpoint's resources to what the task needs; `last` is what was applied before.

        A target whose state key differs from the last one's is emptied: a backfill. An ENDPOINT
        raises its fence before that, or a predecessor could still store what belongs to the past.
        """
        ...

    def open(self, task: Task, *, epoch: int, state: Json) -> Session:
        """Begin a session; see the obligations above."""
        ...

    def preview(self, paths: Sequence[tuple[str, ...]]) -> AbstractContextManager[Self]:
        """Within this, the same connector for resources of its own at the same endpoint.

        They are made like those at `paths` are, without their rows, and beside a checkpoint of
        their own: two previews at once are apart as well. All of it is removed at the end. What a
        preview leaves whose process was killed, the next one removes; never what is still in use.
        """
        ...
