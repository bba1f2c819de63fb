"""PURE: statements that SQL endpoints have in common.

Identifiers are always quoted and values are always parameters: names come from catalogs, and rows
from anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.model.reduce import Strategy
from penstock.runtime.connector import DELETE, Constraint, Target, TargetField, Verdict

CHECKPOINTS = "penstock_checkpoints"
"""The table of fences and checkpoints, one row per task."""


def quoted(*names: str) -> str:
    """An identifier, qualified if there are several names."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def columns_of(target: Target) -> str:
    return ", ".join(quoted(field.name) for field in target.fields)


def key_of(target: Target) -> str:
    return ", ".join(quoted(field.name) for field in target.key)


def verdicts(fields: Sequence[TargetField]) -> dict[str, Verdict]:
    """What any table thinks of fields: a primary key has a value in every row."""
    return {
        field.name: Verdict(
            constraint=Constraint.INCOMPATIBLE,
            reason="it may be absent or null, and a primary key may not: "
            "require the location in the schema, or give it a default",
        )
        for field in fields
        if field.is_key and not field.required
    }


def on_conflict(target: Target, *, table: str, least: str, greatest: str) -> str:
    """What follows `INSERT …` to make it an update where the key is there already.

    `least` and `greatest` are the endpoint's functions of two values.
    """
    kept = f"ON CONFLICT ({key_of(target)}) DO "
    sets = [
        f"{quoted(field.name)} = {_updated(field, target, table, least, greatest)}"
        for field in target.fields
        if not field.is_key
    ]
    return kept + (f"UPDATE SET {', '.join(sets)}" if sets else "NOTHING")


def _updated(field: TargetField, target: Target, table: str, least: str, greatest: str) -> str:
    column = quoted(field.name)
    new, old = f"excluded.{column}", f"{table}.{column}"
    if not target.pushdown:
        return new
    match field.reduction:
        case Strategy.SUM:
            return f"COALESCE({old} + {new}, {new}, {old})"
        case Strategy.MINIMIZE:
            return f"COALESCE({least}({old}, {new}), {new}, {old})"
        case Strategy.MAXIMIZE:
            return f"COALESCE({greatest}({old}, {new}), {new}, {old})"
        case Strategy.FIRST_WRITE_WINS:
            return f"COALESCE({old}, {new})"
        case _:
            return f"COALESCE({new}, {old})"


def stored_columns(target: Target) -> list[str]:
    """The columns of staged rows, in their order."""
    return [*(field.name for field in target.fields), DELETE]
