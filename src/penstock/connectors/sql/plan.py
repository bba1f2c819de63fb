"""PURE: the statements that bring a live table to its target.

`plan` decides from the shape that `Dialect.look` read, and changes nothing; the caller executes the
steps in one transaction. So a decision is tested without a database, and half a plan never happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.connectors.sql.dialect import Dialect, Fit, LiveColumn, LiveTable
from penstock.connectors.sql.statements import key_of, quoted
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import Target, TargetField


@dataclass(frozen=True, slots=True, kw_only=True)
class DdlStep:
    """Statements, and a description of their effect for people."""

    statements: tuple[str, ...]
    says: str


def plan(
    dialect: Dialect,
    target: Target,
    live: LiveTable | None,
    *,
    before: Target | None,
    emptied: bool,
) -> Iterator[DdlStep]:
    """Yield the steps to a table that fits its target; columns that others added stay.

    `before` is the target as it was applied last; `emptied` is true if its rows are out of date.
    Raises `ConnectorError` where only a person can decide.
    """
    return _Planner(dialect, target).steps(live, before, emptied)


def check_kind(path: tuple[str, ...], live: LiveTable) -> None:
    """Raise unless it is a table: a view filters rows out, and anything else may lose them."""
    if live.kind != "table":
        raise ConnectorError(
            f"{'.'.join(path)} is there, and is not a table but a {live.kind}",
            fix="give the binding another table, or drop what is there",
        )


@dataclass(frozen=True, slots=True)
class _Planner:
    dialect: Dialect
    target: Target

    @property
    def name(self) -> str:
        return ".".join(self.target.path)

    @property
    def table(self) -> str:
        return quoted(*self.target.path)

    def steps(
        self, live: LiveTable | None, before: Target | None, emptied: bool
    ) -> Iterator[DdlStep]:
        if live is not None:
            check_kind(self.target.path, live)
        if live is not None and emptied:
            if live.flaw is None and self.fits_key(live):
                yield DdlStep(
                    statements=(self.dialect.empty.format(self.table),),
                    says=f"emptied {self.name} for a backfill",
                )
                # In an empty table a column can be made anew; grants and other indexes stay.
                misfits = [f for f in self.target.fields if self.fit(f, live) is Fit.FAILS]
                yield from map(self.remade, misfits)
                live = replace(live, columns={**live.columns, **self.made(misfits)})
            else:
                yield DdlStep(
                    statements=(f"DROP TABLE {self.table}",),
                    says=f"dropped {self.name}: it does not fit",
                )
                live = None
        if live is None:
            yield DdlStep(statements=(self.created(),), says=f"created {self.name}")
            return
        self.check(live)
        for field in self.target.fields:
            yield from self.column(field, live)
        yield from self.left_over(live, before)

    # Keys

    @property
    def key(self) -> frozenset[str]:
        return frozenset(self.dialect.fold(field.name) for field in self.target.key)

    def fits_key(self, live: LiveTable) -> bool:
        """True if the table tells rows apart as the target needs, by columns that hold the key."""
        if self.target.delta_updates:
            return not any(columns <= self.key for columns in live.unique)
        return self.key in live.unique and all(
            self.fit(field, live) is not Fit.FAILS for field in self.target.key
        )

    def check(self, live: LiveTable) -> None:
        another = "raise `backfill` to make it anew, or give another table"
        names = ", ".join(field.name for field in self.target.key)
        if live.flaw is not None:
            what, why = live.flaw
            raise ConnectorError(f"table {self.name} is there, and {what}", why=why, fix=another)
        if not self.target.delta_updates and self.key not in live.unique:
            add = f"ALTER TABLE {self.table} ADD PRIMARY KEY ({key_of(self.target)})"
            raise ConnectorError(
                f"table {self.name} is there, and has no unique index of its key ({names})",
                why="rows are updated by their key",
                fix=f"{add}, {another}" if self.dialect.can_alter else another,
            )
        if self.target.delta_updates and not self.fits_key(live):
            raise ConnectorError(
                f"table {self.name} has a unique index of its key ({names})",
                why="with delta updates it gets several rows of one key",
                fix=f"drop the index, {another}",
            )

    # Columns

    def fit(self, field: TargetField, live: LiveTable) -> Fit:
        there = live.columns.get(self.dialect.fold(field.name))
        return Fit.HOLDS if there is None else self.dialect.fit(field, there.type)

    def is_not_null(self, field: TargetField) -> bool:
        """A value that is required today may be optional tomorrow: NOT NULL must be revocable."""
        if field.is_key and not self.target.delta_updates:
            return True
        return field.required and self.dialect.can_alter

    def created(self) -> str:
        columns = [
            f"{quoted(field.name)} {self.dialect.type_of(field)}"
            f"{' NOT NULL' if self.is_not_null(field) else ''}"
            for field in self.target.fields
        ]
        if not self.target.delta_updates:
            columns.append(f"PRIMARY KEY ({key_of(self.target)})")
        return f"CREATE TABLE {self.table} ({', '.join(columns)}){self.dialect.table_options}"

    def made(self, fields: list[TargetField]) -> dict[str, LiveColumn]:
        return {
            self.dialect.fold(field.name): LiveColumn(type=self.dialect.type_of(field))
            for field in fields
        }

    def remade(self, field: TargetField) -> DdlStep:
        column, needed = quoted(field.name), self.dialect.type_of(field)
        return DdlStep(
            statements=(
                f"ALTER TABLE {self.table} DROP COLUMN {column}",
                f"ALTER TABLE {self.table} ADD COLUMN {column} {needed}",
            ),
            says=f"{self.name}.{field.name} is {needed} now",
        )

    def column(self, field: TargetField, live: LiveTable) -> Iterator[DdlStep]:
        column, needed = quoted(field.name), self.dialect.type_of(field)
        there = live.columns.get(self.dialect.fold(field.name))
        if there is None:
            # Without NOT NULL: rows that exist have no value yet.
            yield DdlStep(
                statements=(f"ALTER TABLE {self.table} ADD COLUMN {column} {needed}",),
                says=f"added {self.name}.{field.name}",
            )
            return
        match self.dialect.fit(field, there.type):
            case Fit.WIDENS:
                yield DdlStep(
                    statements=tuple(self.widened(field.name, needed)),
                    says=f"widened {self.name}.{field.name} from {there.type} to {needed}",
                )
            case Fit.FAILS:
                change = f"ALTER TABLE {self.table} ALTER COLUMN {column} TYPE {needed} USING …"
                raise ConnectorError(
                    f"column {self.name}.{field.name} is {there.type}, and {needed} is needed",
                    why="the table was made by something else, or the schema has changed",
                    fix="exclude the field, raise `backfill` to fill the table anew, or "
                    + (f"change it: {change}" if self.dialect.can_alter else "give another table"),
                )
            case Fit.HOLDS:
                pass
        if there.not_null and self.dialect.can_alter and not self.is_not_null(field):
            yield self.nullable(field.name)

    def widened(self, name: str, needed: str) -> Iterator[str]:
        alter, column = f"ALTER TABLE {self.table}", quoted(name)
        if self.dialect.can_alter:
            yield f"{alter} ALTER COLUMN {column} TYPE {needed}"
            return
        new = quoted(f"penstock_{name}")
        yield f"{alter} ADD COLUMN {new} {needed}"
        yield f"UPDATE {self.table} SET {new} = CAST({column} AS {needed})"
        yield f"{alter} DROP COLUMN {column}"
        yield f"{alter} RENAME COLUMN {new} TO {column}"

    def left_over(self, live: LiveTable, before: Target | None) -> Iterator[DdlStep]:
        """Columns that the target no longer fills, or never did, must do without a value."""
        fields = {self.dialect.fold(field.name) for field in self.target.fields}
        ours = {self.dialect.fold(field.name) for field in before.fields} if before else set()
        for name, column in live.columns.items():
            if name in fields or not column.not_null or column.has_default:
                continue
            if name not in ours or not self.dialect.can_alter:
                raise ConnectorError(
                    f"column {self.name}.{name} may not be null and has no default",
                    why="it is not a field of the binding, so rows come without it",
                    fix="give the column a default, let it be null, or give another table",
                )
            yield self.nullable(name)

    def nullable(self, name: str) -> DdlStep:
        return DdlStep(
            statements=(f"ALTER TABLE {self.table} ALTER COLUMN {quoted(name)} DROP NOT NULL",),
            says=f"{self.name}.{name} may be null",
        )
