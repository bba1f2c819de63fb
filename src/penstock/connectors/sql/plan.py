"""PURE: the statements that bring a live table to its target.

`plan` and `remake` decide from the shape that `Dialect.look` read, and change nothing; the caller
executes the steps in one transaction. So a decision is tested without a database, and half a plan
never happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.connectors.sql.changes import renames
from penstock.connectors.sql.dialect import Dialect, Fit, LiveTable
from penstock.connectors.sql.statements import columns_of, key_of, quoted
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import Target, TargetField


@dataclass(frozen=True, slots=True, kw_only=True)
class DdlStep:
    """Statements, and a description of their effect for people."""

    statements: tuple[str, ...]
    says: str


def plan(
    dialect: Dialect, target: Target, live: LiveTable | None, *, before: Target | None
) -> Iterator[DdlStep]:
    """Yield the steps to a table that fits its target and keeps its rows.

    `before` is the target as it was applied last. Columns that others added stay. Raises
    `ConnectorError` where only a person can decide.
    """
    return _Planner(dialect, target).steps(live, before)


def types(
    dialect: Dialect, target: Target, live: LiveTable | None, *, before: Target | None
) -> dict[str, str]:
    """Return the types, by field, of the columns of a table that is filled again.

    Columns that others have made of a type that holds the values keep it.
    """
    made = {dialect.fold(f.name): dialect.type_of(f) for f in (before.fields if before else ())}
    found = {}
    for field in target.fields:
        name = dialect.fold(field.name)
        there = None if live is None else live.columns.get(name)
        keeps = (
            there is not None
            and dialect.fit(field, there.type) is Fit.HOLDS
            and made.get(name) != there.type
        )
        found[field.name] = there.type if there and keeps else dialect.type_of(field)
    return found


def create(dialect: Dialect, target: Target, types: Mapping[str, str]) -> str:
    """Return the statement that makes the table of a target with columns of these types."""
    return _Planner(dialect, target, types).created()


def remake(
    dialect: Dialect, target: Target, live: LiveTable | None, types: Mapping[str, str]
) -> Iterator[DdlStep]:
    """Yield the steps to an empty table with columns of these types; what others added stays."""
    return _Planner(dialect, target, types).remade(live)


def copy(target: Target, shadow: tuple[str, ...]) -> str:
    """Return the statement that stores all rows of a shadow table to the target's."""
    columns = columns_of(target)
    return f"INSERT INTO {quoted(*target.path)} ({columns}) SELECT {columns} FROM {quoted(*shadow)}"


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
    types: Mapping[str, str] | None = None
    """Types of columns, where they are not what the dialect says."""

    @property
    def name(self) -> str:
        return ".".join(self.target.path)

    @property
    def table(self) -> str:
        return quoted(*self.target.path)

    def type_of(self, field: TargetField) -> str:
        return self.dialect.type_of(field) if self.types is None else self.types[field.name]

    def steps(self, live: LiveTable | None, before: Target | None) -> Iterator[DdlStep]:
        if live is None:
            yield DdlStep(statements=(self.created(),), says=f"created {self.name}")
            return
        check_kind(self.target.path, live)
        steps, live = self.renamed(live, before)
        yield from steps
        self.check(live)
        for field in self.target.fields:
            yield from self.column(field, live, before)
        yield from self.left_over(live, before)

    def remade(self, live: LiveTable | None) -> Iterator[DdlStep]:
        if live is not None and (live.flaw is not None or not self.has_key(live)):
            yield DdlStep(
                statements=(f"DROP TABLE {self.table}",),
                says=f"dropped {self.name}: it does not fit",
            )
            live = None
        if live is None:
            yield DdlStep(statements=(self.created(),), says=f"created {self.name}")
            return
        yield DdlStep(statements=(f"DELETE FROM {self.table}",), says=f"emptied {self.name}")
        # In an empty table a column can be made anew; grants and other indexes stay.
        for field in self.target.fields:
            there = live.columns.get(self.dialect.fold(field.name))
            if there is None:
                yield self.added(field)
            elif there.type != self.type_of(field):
                yield self.made_anew(field)
            elif there.not_null and self.dialect.can_alter and not self.is_not_null(field):
                yield self.nullable(field.name)
        yield from self.left_over(live, None, revoke=True)

    def renamed(self, live: LiveTable, before: Target | None) -> tuple[list[DdlStep], LiveTable]:
        """Rename columns of locations that have another name now; return the table after that."""
        steps, columns, moved = [], dict(live.columns), dict[str, str]()
        for new, old in renames(self.dialect, before, self.target).items():
            was, name = self.dialect.fold(old.name), self.dialect.fold(new)
            if was not in columns or name in columns:
                continue
            rename = f"RENAME COLUMN {quoted(old.name)} TO {quoted(new)}"
            steps.append(
                DdlStep(
                    statements=(f"ALTER TABLE {self.table} {rename}",),
                    says=f"renamed {self.name}.{old.name} to {new}",
                )
            )
            columns[name] = columns.pop(was)
            moved[was] = name
        unique = frozenset(frozenset(moved.get(n, n) for n in names) for names in live.unique)
        return steps, replace(live, columns=columns, unique=unique)

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

    def has_key(self, live: LiveTable) -> bool:
        """True if an empty table can stay: only columns that are no key's can be made anew."""
        return self.fits_key(live) and all(
            live.columns[self.dialect.fold(field.name)].type == self.type_of(field)
            for field in self.target.key
            if not self.target.delta_updates
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
            f"{quoted(field.name)} {self.type_of(field)}"
            f"{' NOT NULL' if self.is_not_null(field) else ''}"
            for field in self.target.fields
        ]
        if not self.target.delta_updates:
            columns.append(f"PRIMARY KEY ({key_of(self.target)})")
        return f"CREATE TABLE {self.table} ({', '.join(columns)}){self.dialect.table_options}"

    def added(self, field: TargetField) -> DdlStep:
        # Without NOT NULL: rows that exist have no value yet.
        column = f"{quoted(field.name)} {self.type_of(field)}"
        return DdlStep(
            statements=(f"ALTER TABLE {self.table} ADD COLUMN {column}",),
            says=f"added {self.name}.{field.name}",
        )

    def made_anew(self, field: TargetField) -> DdlStep:
        column, needed = quoted(field.name), self.type_of(field)
        return DdlStep(
            statements=(
                f"ALTER TABLE {self.table} DROP COLUMN {column}",
                f"ALTER TABLE {self.table} ADD COLUMN {column} {needed}",
            ),
            says=f"{self.name}.{field.name} is {needed} now",
        )

    def column(
        self, field: TargetField, live: LiveTable, before: Target | None
    ) -> Iterator[DdlStep]:
        column, needed = quoted(field.name), self.type_of(field)
        there = live.columns.get(self.dialect.fold(field.name))
        if there is None:
            yield self.added(field)
            return
        match self.dialect.fit(field, there.type):
            case Fit.CONVERTS if before is not None:
                yield DdlStep(
                    statements=tuple(self.widened(field.name, needed)),
                    says=f"changed {self.name}.{field.name} from {there.type} to {needed}",
                )
            case Fit.WIDENS:
                yield DdlStep(
                    statements=tuple(self.widened(field.name, needed)),
                    says=f"widened {self.name}.{field.name} from {there.type} to {needed}",
                )
            case Fit.FAILS | Fit.CONVERTS:
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
        if self.is_back(field, before):
            yield DdlStep(
                statements=(f"UPDATE {self.table} SET {column} = NULL",),
                says=f"{self.name}.{field.name} starts without values",
            )

    def is_back(self, field: TargetField, before: Target | None) -> bool:
        """True if the column was not filled for a while: what it holds is out of date."""
        if before is None or field.is_key or self.target.delta_updates:
            return False
        known = {self.dialect.fold(each.name) for each in before.fields}
        renamed = renames(self.dialect, before, self.target)
        return self.dialect.fold(field.name) not in known and field.name not in renamed

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

    def left_over(
        self, live: LiveTable, before: Target | None, *, revoke: bool = False
    ) -> Iterator[DdlStep]:
        """Columns that the target no longer fills, or never did, must do without a value."""
        fields = {self.dialect.fold(field.name) for field in self.target.fields}
        ours = {self.dialect.fold(field.name) for field in before.fields} if before else set()
        for name, column in live.columns.items():
            if name in fields or not column.not_null or column.has_default:
                continue
            if not (revoke or name in ours) or not self.dialect.can_alter:
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
