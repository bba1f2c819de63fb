"""The part of a database that the SQL sink depends on: a connection and a dialect.

A database is two classes: a `Dialect`, which says how its SQL is spelled, which types hold which
fields and how to read the shape of a live table; and a subclass of `SqlSink`, which connects to it.
A dialect has no state, opens nothing, and goes into Spark tasks.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from penstock.model.columns import Kind
from penstock.runtime.connector.materialize import TargetField


class SqlCursor(Protocol):
    """The result of a statement, as every driver of Python has it."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...  # noqa: ANN401 - a row of any types, or None

    def fetchmany(self, size: int, /) -> list[Any]: ...

    def fetchall(self) -> list[Any]: ...


class SqlConnection(Protocol):
    """A connection that begins no transaction by itself."""

    def run(self, statement: str, values: Sequence[Any] = (), /) -> SqlCursor:
        """Execute a statement, whose parameters are written as the dialect's `mark` says."""
        ...


class Fit(enum.Enum):
    """The relation of a live column to a field."""

    HOLDS = "it holds every value as it is"
    WIDENS = "it does once its type is widened, which keeps the values in it"
    CONVERTS = "its type can be changed if this task has filled it: documents read as its values do"
    FAILS = "it cannot hold the values"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveColumn:
    """A column of a table that exists."""

    type: str
    not_null: bool = False
    has_default: bool = False
    """True if it gets a value where an INSERT names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTable:
    """A table that exists."""

    columns: Mapping[str, LiveColumn]
    """By name, as `Dialect.fold` writes it."""
    unique: frozenset[frozenset[str]] = frozenset()
    """Sets of columns, folded, that ON CONFLICT accepts: no two rows have the same values there."""
    kind: str = "table"
    """Anything else, a view say, cannot be a target."""
    flaw: tuple[str, str] | None = None
    """A property that keeps it from being a target, and why it does."""
    identity: int | None = None
    """Tells tables of one name apart, if the database can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTypes:
    """The types of the columns of Penstock's own tables."""

    text: str = "text"
    integer: str = "bigint"
    boolean: str = "boolean"
    binary: str
    instant: str


class Dialect(abc.ABC):
    """The differences of a database. Attributes have the values that most databases need."""

    mark: ClassVar[str] = "?"
    """A parameter; `{n}` in it stands for its number. Shared statements use each one in order."""
    begin: ClassVar[str] = "BEGIN"
    """Begins a transaction that may write, and whose COMMIT is durable."""
    ddl_lock: ClassVar[str | None] = None
    """Within a transaction: makes tasks that create tables at the same time stand in line."""
    can_alter: ClassVar[bool] = True
    """True if ALTER TABLE changes types, drops NOT NULL and adds keys."""
    table_options: ClassVar[str] = ""
    """Follows the columns in CREATE TABLE."""
    least: ClassVar[str] = "LEAST"
    greatest: ClassVar[str] = "GREATEST"
    """Functions of two values."""
    checked_sums: ClassVar[Mapping[Kind, str]] = {}
    """By kind of column: makes a sum, `{0}`, fail where it leaves the range of its values."""
    record_types: ClassVar[RecordTypes]
    record_key: ClassVar[tuple[str, ...]] = ("name",)
    """Columns of the ownership records for the parts of a path."""
    same_name: ClassVar[str] = ""
    """Follows a comparison of names, where the database does not compare them letter by letter."""

    def fold(self, name: str) -> str:
        """Return the same text for all spellings of one column."""
        return name

    def forbids(self, name: str) -> str | None:
        """Return why a column cannot have this name."""
        return None

    @abc.abstractmethod
    def type_of(self, field: TargetField) -> str:
        """Return the type of a field's column, spelled as `look` reports it."""

    @abc.abstractmethod
    def fit(self, field: TargetField, live: str) -> Fit:
        """Compare a field with a column of type `live`."""

    @abc.abstractmethod
    def orders(self, field: TargetField) -> bool:
        """True if least and greatest values of the field's column are those of the model."""

    def extreme(self, field: TargetField, *, greatest: bool, new: str, old: str) -> str:
        """Return the lesser or the greater of two values of the field's column, if it `orders`.

        A NULL is no value, so the other one stands.
        """
        function = self.greatest if greatest else self.least
        return f"COALESCE({function}({new}, {old}), {new}, {old})"

    @abc.abstractmethod
    def look(self, connection: SqlConnection, path: tuple[str, ...]) -> LiveTable | None:
        """Read the shape of what is at `path`; None if nothing is."""

    def marks(self, count: int) -> list[str]:
        """Return the first `count` parameters of a statement."""
        return [self.mark.format(n=n) for n in range(1, count + 1)]
