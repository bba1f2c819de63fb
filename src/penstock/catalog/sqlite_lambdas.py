"""Check SQLite lambdas with SQLite itself, on an empty in-memory database.

Migrations run, so that lambdas find the tables they expect; lambdas are only compiled. Statements
that reach outside the database are refused, and nothing runs for long.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator

from penstock.catalog.diagnostics import nearest
from penstock.runtime.derive.mistakes import Mistake

_STEPS_MAX = 5_000_000
_OUTSIDE = {
    sqlite3.SQLITE_ATTACH: "ATTACH reaches outside the derivation's database",
    sqlite3.SQLITE_DETACH: "DETACH reaches outside the derivation's database",
    sqlite3.SQLITE_TRANSACTION: "the runtime begins and commits transactions",
    sqlite3.SQLITE_SAVEPOINT: "the runtime begins and commits transactions",
}
_NOISE = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_PARAMETER = re.compile(r"(?<![\w$])\$([A-Za-z_][\w$]*)")


def parameter(field: str) -> str:
    """Return the SQL parameter of a field, without its `$`: `object/foo` is `object$foo`."""
    return re.sub(r"[^0-9A-Za-z$]", "_", field.replace("/", "$"))


def check_parameters(sql: str, fields: Iterable[str], collection: str) -> Iterator[Mistake]:
    """Yield every `$name` that is not exactly one field of the source."""
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
            hint = f"did you mean {', '.join(f'${c}' for c in close)}?"
            yield Mistake(code="E-PARAM", offset=offset, message=message, hint=hint)
        elif len(found) > 1:
            message = f"${used} is ambiguous: {' or '.join(found)}"
            hint = "give one of them a projection with another name"
            yield Mistake(code="E-PARAM", offset=offset, message=message, hint=hint)


class LambdaDatabase:
    """An in-memory database with the tables of the migrations run so far, without rows."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._denied: str | None = None
        self._db.set_authorizer(self._authorize)

    def close(self) -> None:
        self._db.close()

    def migrate(self, sql: str) -> Mistake | None:
        return self._execute_all(sql, "{}")

    def compile(self, sql: str) -> Mistake | None:
        return self._execute_all(sql, "EXPLAIN {}")

    def _authorize(self, action: int, *_: object) -> int:
        self._denied = _OUTSIDE.get(action)
        return sqlite3.SQLITE_DENY if self._denied else sqlite3.SQLITE_OK

    def _execute_all(self, sql: str, form: str) -> Mistake | None:
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
    """Yield the statements of a block with their offsets; the last needs no semicolon."""
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
    """NULL for every parameter."""

    def __missing__(self, name: str) -> None:
        return None
