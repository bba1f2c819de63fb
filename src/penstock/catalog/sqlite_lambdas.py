"""Check SQLite lambdas with SQLite itself, on an empty in-memory database.

Migrations run, so that lambdas find the tables they expect; lambdas are only compiled. Statements
that reach outside the database are refused, and nothing runs for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import apsw

from penstock.model import pointer
from penstock.model.spec import Field
from penstock.runtime.derive.mistakes import Mistake
from penstock.runtime.derive.sqlite_code import (
    NULLS,
    Statement,
    described,
    error_offset,
    is_whole_document,
    line_of,
    members,
    refusal,
    statements,
)
from penstock.runtime.derive.sqlite_decimal import add_decimals

_STEPS_MAX = 5_000_000


class LambdaDatabase:
    """An in-memory database with the tables of the migrations run so far, without rows."""

    def __init__(self) -> None:
        self._db = apsw.Connection(":memory:")
        add_decimals(self._db)
        self._denied: str | None = None
        self._migrating = False
        self._db.authorizer = self._authorize

    def close(self) -> None:
        self._db.close()

    def migrate(self, sql: str) -> Mistake | None:
        """Run a migration; return what is wrong with it."""
        self._migrating = True
        for statement in statements(sql):
            if mistake := self._execute(sql, statement, statement.text):
                return mistake
        return None

    def compile(self, sql: str) -> Mistake | None:
        """Compile a lambda; return what is wrong with it."""
        self._migrating = False
        for statement in statements(sql):
            if mistake := self._execute(sql, statement, f"EXPLAIN {statement.text}"):
                return mistake
        return None

    def check_key(self, sql: str, fields: Iterable[Field], key: Sequence[str]) -> Mistake | None:
        """Find a lambda that compiles, publishes, and never gives all locations of the key.

        A column gives the locations below the member of its name. Nothing is known of a statement
        whose only column begins with `json`: it is the document.
        """
        fields = tuple(fields)
        without: tuple[int, list[str]] | None = None
        for statement in statements(sql):
            columns = described(self._db, statement.text).columns
            if not columns:
                continue
            if is_whole_document(columns):
                return None
            given = members(columns, fields)
            missing = [at for at in key if pointer.parse(at)[0] not in given]
            if not missing:
                return None
            without = without or (statement.offset, missing)
        if without is None:
            return None
        offset, missing = without
        member = pointer.parse(missing[0])[0]
        return Mistake(
            code="E-LAMBDA",
            offset=offset,
            message=f"line {line_of(sql, offset)}: no column gives the key {', '.join(missing)}",
            hint=f'name a column "{member}"',
        )

    def _authorize(
        self, action: int, name: str | None, argument: str | None, _: str | None, __: str | None
    ) -> int:
        why = refusal(action, name, argument, migrating=self._migrating)
        self._denied = self._denied or why
        return apsw.SQLITE_DENY if why else apsw.SQLITE_OK

    def _execute(self, sql: str, statement: Statement, text: str) -> Mistake | None:
        self._denied = None
        self._db.set_progress_handler(lambda: True, _STEPS_MAX)
        try:
            self._db.execute(text, NULLS).fetchall()
        except (apsw.Error, ValueError) as e:
            at = statement.offset + error_offset(e, text, len(text) - len(statement.text))
            message = f"line {line_of(sql, at)}: {self._denied or e}"
            return Mistake(code="E-LAMBDA", offset=at, message=message)
        return None
