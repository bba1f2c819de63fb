"""PURE: statements that SQL endpoints have in common.

Identifiers are always quoted and values are always parameters, or data of a COPY: names come from
catalogs, and rows from anywhere. Statements that update call the target `t`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.errors import UserError
from penstock.model.columns import Kind
from penstock.model.json_order import Json
from penstock.model.reduce import Strategy
from penstock.runtime.connector import (
    DELETE,
    ConnectorError,
    Constraint,
    Target,
    TargetField,
    Verdict,
)

CHECKPOINTS: Final = "penstock_checkpoints"
"""The table of fences and checkpoints, one row per task."""

TABLES: Final = "penstock_tables"
"""The table that remembers under which state key each target was filled."""


FENCED: Final = (
    "let the other one run; if there is none, another data directory has run a task of this name "
    "here: give one of them another name and other tables"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Where SQL differs from SQL."""

    least: str
    greatest: str
    """Functions of two values."""
    checked_sums: Mapping[Kind, str]
    """By kind of column: what makes a sum, `{0}`, fail where it leaves the range of its values."""
    bytewise: str = ""
    """What makes text compare by its bytes, if it does not by itself."""


def quoted(*names: str) -> str:
    """An identifier, qualified if there are several names."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def columns_of(target: Target) -> str:
    return ", ".join(quoted(field.name) for field in target.fields)


def key_of(target: Target) -> str:
    return ", ".join(quoted(field.name) for field in target.key)


def same_key(target: Target, one: str, other: str) -> str:
    """That rows of two relations, by their aliases, have the same key."""
    return " AND ".join(
        f"{one}.{quoted(field.name)} = {other}.{quoted(field.name)}" for field in target.key
    )


# ---------------------------------------------------------------------------------------- updates


def on_conflict(target: Target, dialect: Dialect) -> str:
    """What follows `INSERT INTO … AS t …` to make it an update where the key is there already.

    A row that has nothing but its key is updated too, by itself: so every row that is sent counts
    as one that is stored, and one that does not was left out.
    """
    sets = [
        f"{quoted(field.name)} = {_updated(field, target, dialect)}"
        for field in target.fields
        if not field.is_key
    ] or [f"{quoted(field.name)} = excluded.{quoted(field.name)}" for field in target.key[:1]]
    return f"ON CONFLICT ({key_of(target)}) DO UPDATE SET {', '.join(sets)}"


def _updated(field: TargetField, target: Target, dialect: Dialect) -> str:
    """The new value of a column. A NULL is no value, so the other one stands."""
    column = quoted(field.name)
    new, old = f"excluded.{column}", f"t.{column}"
    if not target.pushdown:
        return new
    match field.reduction:
        case Strategy.SUM:
            total = dialect.checked_sums.get(field.column.kind, "{0}").format(f"({old} + {new})")
            return f"COALESCE({total}, {new}, {old})"
        case Strategy.MINIMIZE | Strategy.MAXIMIZE as which:
            extreme = dialect.least if which is Strategy.MINIMIZE else dialect.greatest
            how = dialect.bytewise if field.column.kind is Kind.STRING else ""
            return f"COALESCE({extreme}({old}{how}, {new}{how}), {new}, {old})"
        case Strategy.FIRST_WRITE_WINS:
            return f"COALESCE({old}, {new})"
        case _:
            return f"COALESCE({new}, {old})"


# ----------------------------------------------------------------------------- what came of rows


def check_stored(target: Target, *, sent: int, stored: int, where: str) -> None:
    """That a table has taken every row: what it leaves out would be missing, and nobody told."""
    if stored != sent:
        raise ConnectorError(
            f"{sent} rows were sent to table {'.'.join(target.path)}, and it stored {stored}",
            where=where,
            why="a trigger, a rule or a constraint of the table leaves rows out; nothing of the "
            "transaction is stored",
            fix="let the table take every row, and filter in a view of it or in a derivation",
        )


def check_removed(target: Target, *, there: int, removed: int, where: str) -> None:
    """That every row is deleted, or shows the deletion, that was there to be."""
    if removed != there:
        raise ConnectorError(
            f"{there} rows of table {'.'.join(target.path)} were to be deleted, and {removed} were",
            where=where,
            why="a trigger or a rule of the table keeps rows; nothing of the transaction is stored",
            fix="let the table delete and update every row",
        )


# ------------------------------------------------------------------------ what is asked of a table


def verdicts(fields: Sequence[TargetField], *, delta_updates: bool) -> dict[str, Verdict]:
    """What any table thinks of fields: a primary key has a value in every row."""
    found = {
        field.name: Verdict(
            constraint=Constraint.INCOMPATIBLE,
            reason="it may be absent or null, and a primary key may not: "
            "require the location in the schema, or give it a default",
        )
        for field in fields
        if field.is_key and not _always_there(field) and not delta_updates
    }
    for field in fields:
        if field.name == DELETE or "\0" in field.name:
            found[field.name] = Verdict(
                constraint=Constraint.FORBIDDEN,
                reason="a column cannot be called that: give the location another name "
                "by a projection",
            )
    return found


def _always_there(field: TargetField) -> bool:
    """Whether a key has a value in every row; a default stands for absent, and not for null."""
    return field.required or (field.default is not None and not field.column.nullable)


def misfit(table: str, is_: str, needed: str) -> Verdict:
    """The verdict on a field whose column is there, and is something else."""
    return Verdict(
        constraint=Constraint.INCOMPATIBLE,
        reason=f"the column of table {table} is {is_}, and {needed} is needed",
    )


# ----------------------------------------------------------------------------------- configuration


def check_members(
    given: Json, known: Sequence[str], *, required: Sequence[str], where: str, example: str
) -> dict[str, Json]:
    """An object of a catalog with the members that it may have; raises `UserError`.

    Values stay out of messages: some are secrets.
    """
    if not isinstance(given, dict):
        raise UserError("an object is expected", where=where, fix=example)
    if unknown := sorted(given.keys() - set(known)):
        raise UserError(
            f"{', '.join(unknown)} is not understood",
            where=where,
            why=f"known are {', '.join(known)}",
            fix=example,
        )
    for name in required:
        if not isinstance(given.get(name), str) or not given[name]:
            raise UserError(f"{name} is missing, or not a text", where=where, fix=example)
    return given


def flag(given: dict[str, Json], name: str, *, where: str) -> bool:
    """A member that is true or false, and false if it is not there."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"{name} is neither true nor false", where=where, fix=f"{name}: true")
    return value


def text(given: dict[str, Json], name: str, *, where: str, default: str | None = None) -> str:
    """A member that is a text, and not an empty one."""
    value = given.get(name, default)
    if not isinstance(value, str) or not value:
        raise UserError(f"{name} is not a text", where=where, fix=f'{name}: "…"')
    return value
