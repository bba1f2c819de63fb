"""PURE: what a changed target means for its table: altered in place, or filled again.

Targets are compared as they were applied and as they are to be applied, so the answer needs no
database: `penstock check` and `penstock apply` have it before anything runs. The concrete types are
the dialect's: here it is only asked which type a field gets, and whether a column of one type can
become one of another (`Dialect.fit`).

A table is filled again where no statement could make its rows right: a column whose values cannot
be converted as they are stored, another key, a column that shows another location, or rows that
lack the document from which they are reduced from now on.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.connectors.sql.dialect import Dialect, Fit
from penstock.runtime.connector.materialize import TableChange, Target, TargetField


def changes(dialect: Dialect, was: Target, now: Target) -> Iterator[TableChange]:
    """Yield what changes, columns in the order of the target."""
    yield from _rows(dialect, was, now)
    before = {dialect.fold(field.name): field for field in was.fields}
    renamed = renames(dialect, was, now)
    for field in now.fields:
        old = before.get(dialect.fold(field.name)) or renamed.get(field.name)
        yield from _added(dialect, field) if old is None else _column(dialect, old, field)
    kept = {dialect.fold(field.name) for field in now.fields}
    kept |= {dialect.fold(field.name) for field in renamed.values()}
    for name, field in before.items():
        if name not in kept and not (field.is_document and now.pushdown):
            type_ = dialect.type_of(field)
            says = "is filled no more; its values stay"
            yield TableChange(column=field.name, was=type_, rebuild=False, says=says)


def renames(dialect: Dialect, was: Target | None, now: Target) -> dict[str, TargetField]:
    """Return, by their new names, fields that show the same location under another name now."""
    if was is None:
        return {}
    new = {dialect.fold(field.name) for field in now.fields}
    old = {dialect.fold(field.name) for field in was.fields}
    gone = {f.pointer: f for f in was.fields if dialect.fold(f.name) not in new}
    return {
        field.name: gone[field.pointer]
        for field in now.fields
        if dialect.fold(field.name) not in old and field.pointer in gone
    }


def _rows(dialect: Dialect, was: Target, now: Target) -> Iterator[TableChange]:
    """Yield why rows as a whole are wrong."""
    if was.delta_updates != now.delta_updates:
        says = "one row for each document" if now.delta_updates else "one row for each key"
        yield TableChange(rebuild=True, says=f"the table has {says} now")
        return
    renamed = {new: old.name for new, old in renames(dialect, was, now).items()}
    keys = (
        [dialect.fold(field.name) for field in was.key],
        [dialect.fold(renamed.get(field.name, field.name)) for field in now.key],
    )
    if not now.delta_updates and sorted(keys[0]) != sorted(keys[1]):
        listed = ", ".join(field.name for field in now.key)
        yield TableChange(rebuild=True, says=f"the key of its rows is ({listed}) now")
    if not now.delta_updates and now.document is not None and was.document is None:
        says = f"rows are reduced from {now.document.name} now, and those that exist have none"
        yield TableChange(rebuild=True, says=says)


def _added(dialect: Dialect, field: TargetField) -> Iterator[TableChange]:
    type_ = dialect.type_of(field)
    says = f"is added as {type_}, and is null in rows that exist"
    yield TableChange(column=field.name, now=type_, rebuild=False, says=says)


def _column(dialect: Dialect, old: TargetField, new: TargetField) -> Iterator[TableChange]:
    before, after = dialect.type_of(old), dialect.type_of(new)

    def change(says: str, *, rebuild: bool) -> TableChange:
        return TableChange(column=new.name, was=before, now=after, rebuild=rebuild, says=says)

    if old.pointer != new.pointer:
        shows = f"shows {new.pointer or 'the document'} now, and showed {old.pointer or 'that'}"
        yield change(shows, rebuild=True)
        return
    if old.name != new.name:
        yield change(f"is renamed from {old.name}", rebuild=False)
    if before != after:
        in_place = dialect.fit(new, before) in (Fit.WIDENS, Fit.CONVERTS)
        yield change(f"{before} becomes {after}", rebuild=not in_place)
    elif old.required and not new.required and dialect.can_alter and not new.is_key:
        yield change("may be null", rebuild=False)
