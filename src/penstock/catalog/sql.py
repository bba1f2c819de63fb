"""Lambdas in SQLite's SQL, checked by SQLite itself on an empty database in memory.

Migrations are run, so that lambdas meet the tables they expect; lambdas are only compiled. What
would reach outside of the database is refused, and nothing runs for long.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.catalog.diagnostics import nearest

_STEPS_MAX = 5_000_000
_OUTSIDE = {
    sqlite3.SQLITE_ATTACH: "ATTACH reaches outside of the derivation's database",
    sqlite3.SQLITE_DETACH: "DETACH reaches outside of the derivation's database",
    sqlite3.SQLITE_TRANSACTION: "a transaction is begun and committed by the runtime",
    sqlite3.SQLITE_SAVEPOINT: "a transaction is begun and committed by the runtime",
}
_NOISE = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_PARAMETER = re.compile(r"(?<![\w$])\$([A-Za-z_][\w$]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Something wrong with a block of SQL, at an offset into it."""

    code: str
    offset: int
    message: str
    hint: str | None = None


def parameter(field: str) -> str:
    """The SQL parameter of a field, without its `$`: `object/foo` is `object$foo` (P-2)."""
    return re.sub(r"[^0-9A-Za-z$]", "_", field.replace("/", "$"))


def check_parameters(sql: str, fields: Iterable[str], collection: str) -> Iterator[Mistake]:
    """Every `$name` is one field of the source."""
    known: dict[str, list[str]] = {}
    for field in fields:
        known.setdefault(parameter(field), []).append(field)
    blank = _NOISE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), sql)
    first_use: dict[str, int] = {}
    for match in _PARAMETER.finditer(blank):
        first_use.setdefault(match[1], match.start())
    for used, offset in first_use.items():
        found = known.get(used, [])
        if not found:
            close = nearest(used, known, 3) or sorted(known)[:3]
            message = f"${used} is not a field of {collection}"
            hint = f"nearest: {', '.join(f'${c}' for c in close)}"
            yield Mistake(code="E-PARAM", offset=offset, message=message, hint=hint)
        elif len(found) > 1:
            message = f"${used} may be {' and '.join(found)}"
            hint = "name one of them by a projection of its own"
            yield Mistake(code="E-PARAM", offset=offset, message=message, hint=hint)


class Database:
    """An empty database with the tables of the migrations that it was given."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._denied: str | None = None
        self._db.set_authorizer(self._authorize)

    def close(self) -> None:
        self._db.close()

    def migrate(self, sql: str) -> Mistake | None:
        return self._each(sql, "{}")

    def compile(self, sql: str) -> Mistake | None:
        return self._each(sql, "EXPLAIN {}")

    def _authorize(self, action: int, *_: object) -> int:
        self._denied = _OUTSIDE.get(action)
        return sqlite3.SQLITE_DENY if self._denied else sqlite3.SQLITE_OK

    def _each(self, sql: str, form: str) -> Mistake | None:
        for offset, statement in statements(sql):
            self._denied = None
            self._db.set_progress_handler(lambda: 1, _STEPS_MAX)
            try:
                self._db.execute(form.format(statement), _Nulls())
            except (sqlite3.Error, ValueError) as e:
                message = self._denied or str(e)
                near = re.search(r'near "(.*?)"', message)
                found = statement.find(near[1]) if near else -1
                at = offset + max(found, 0)
                line = sql.count("\n", 0, at) + 1
                return Mistake(code="E-LAMBDA", offset=at, message=f"line {line}: {message}")
        return None


def statements(sql: str) -> Iterator[tuple[int, str]]:
    """The statements of a block, each with its offset; the last one needs no semicolon."""
    start = 0
    for match in re.finditer(";", sql):
        statement = sql[start : match.end()]
        if sqlite3.complete_statement(statement):
            yield _trimmed(start, statement)
            start = match.end()
    offset, rest = _trimmed(start, sql[start:])
    if _NOISE.sub("", rest).strip() or re.search(r"['\"]", rest):
        yield offset, rest


def _trimmed(start: int, statement: str) -> tuple[int, str]:
    return start + len(statement) - len(statement.lstrip()), statement.strip()


class _Nulls(dict[str, None]):
    """A value for every parameter."""

    def __missing__(self, name: str) -> None:
        return None
