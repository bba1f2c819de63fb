"""PURE: statements and verdicts that SQL databases have in common.

Identifiers are always quoted and values are always parameters, or data of a COPY: names come from
catalogs, and rows from anywhere. Statements that update call the target `t`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.connectors.sql.dialect import Dialect
from penstock.model.reduce import Strategy
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import (
    DELETE,
    Constraint,
    FieldVerdict,
    Target,
    TargetField,
)


def quoted(*names: str) -> str:
    """Return an identifier, qualified if there are several names."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def columns_of(target: Target) -> str:
    return ", ".join(quoted(field.name) for field in target.fields)


def key_of(target: Target) -> str:
    return ", ".join(quoted(field.name) for field in target.key)


def same_key(target: Target, one: str, other: str) -> str:
    """Return the condition that rows of two relations, named by aliases, have the same key."""
    return " AND ".join(
        f"{one}.{quoted(field.name)} = {other}.{quoted(field.name)}" for field in target.key
    )


def renamed(old: tuple[str, ...], new: tuple[str, ...]) -> list[str]:
    """Return the statements that give a table another name, in another schema perhaps."""
    statements = []
    if old[:-1] != new[:-1]:
        statements.append(f"ALTER TABLE {quoted(*old)} SET SCHEMA {quoted(*new[:-1])}")
    if old[-1] != new[-1]:
        at = quoted(*new[:-1], old[-1])
        statements.append(f"ALTER TABLE {at} RENAME TO {quoted(new[-1])}")
    return statements


# ---------------------------------------------------------------------------------------- updates


def on_conflict(target: Target, dialect: Dialect) -> str:
    """Return the clause that makes `INSERT INTO … AS t …` an update where the key exists.

    A row that has nothing but its key is updated too, with itself: so every row sent counts as
    stored, and one that does not count was left out.
    """
    sets = [
        f"{quoted(field.name)} = {_updated(field, target, dialect)}"
        for field in target.fields
        if not field.is_key
    ] or [f"{quoted(field.name)} = excluded.{quoted(field.name)}" for field in target.key[:1]]
    return f"ON CONFLICT ({key_of(target)}) DO UPDATE SET {', '.join(sets)}"


def _updated(field: TargetField, target: Target, dialect: Dialect) -> str:
    """Return the new value of a column. A NULL is no value, so the other one stands."""
    column = quoted(field.name)
    new, old = f"excluded.{column}", f"t.{column}"
    if not target.pushdown:
        return new
    match field.reduction:
        case Strategy.SUM:
            total = dialect.checked_sums.get(field.column.kind, "{0}").format(f"({old} + {new})")
            return f"COALESCE({total}, {new}, {old})"
        case Strategy.MINIMIZE | Strategy.MAXIMIZE as which:
            greatest = which is Strategy.MAXIMIZE
            return dialect.extreme(field, greatest=greatest, new=new, old=old)
        case Strategy.FIRST_WRITE_WINS:
            return f"COALESCE({old}, {new})"
        case _:
            return f"COALESCE({new}, {old})"


# ------------------------------------------------------------------------------------ row counts


def check_stored(target: Target, *, sent: int, stored: int, where: str) -> None:
    """Raise unless the table has taken every row: a row left out would be missing silently."""
    if stored != sent:
        raise ConnectorError(
            f"{sent} rows were sent to table {'.'.join(target.path)}, and it stored {stored}",
            where=where,
            why="a trigger, a rule or a constraint of the table leaves rows out; nothing of the "
            "transaction is stored",
            fix="let the table take every row, and filter in a view of it or in a derivation",
        )


def check_removed(target: Target, *, there: int, removed: int, where: str) -> None:
    """Raise unless every existing row was deleted, or shows its deletion."""
    if removed != there:
        raise ConnectorError(
            f"{there} rows of table {'.'.join(target.path)} were to be deleted, and {removed} were",
            where=where,
            why="a trigger or a rule of the table keeps rows; nothing of the transaction is stored",
            fix="let the table delete and update every row",
        )


# -------------------------------------------------------------------------------------- verdicts


def verdicts(fields: Sequence[TargetField], *, delta_updates: bool) -> dict[str, FieldVerdict]:
    """Judge fields as any table does: a primary key has a value in every row."""
    found = {
        field.name: FieldVerdict(
            constraint=Constraint.INCOMPATIBLE,
            reason="it may be absent or null, and a primary key may not: "
            "require the location in the schema, or give it a default",
        )
        for field in fields
        if field.is_key and not _always_there(field) and not delta_updates
    }
    for field in fields:
        if field.name == DELETE or "\0" in field.name:
            found[field.name] = FieldVerdict(
                constraint=Constraint.FORBIDDEN,
                reason="a column cannot be called that: give the location another name "
                "by a projection",
            )
    return found


def _always_there(field: TargetField) -> bool:
    """True if a key has a value in every row; a default stands for absent, and not for null."""
    return field.required or (field.default is not None and not field.column.nullable)


def misfit(table: str, is_: str, needed: str) -> FieldVerdict:
    """Return the verdict on a field whose live column cannot hold it."""
    return FieldVerdict(
        constraint=Constraint.INCOMPATIBLE,
        reason=f"the column of table {table} is {is_}, and {needed} is needed",
    )
