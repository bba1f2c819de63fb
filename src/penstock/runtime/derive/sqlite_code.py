"""PURE: the text of SQLite lambdas: statements, parameters and migrations."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import apsw

from penstock.model.spec import DerivationSpec, Field
from penstock.runtime.derive.mistakes import Mistake

_NOISE = re.compile(
    r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`(?:[^`]|``)*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)",
    re.DOTALL,
)
_COMMENT_OR_TEXT = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_PARAMETER = re.compile(r"(?<![\w$])\$([A-Za-z_][\w$]*)")
_OTHER_PARAMETER = re.compile(r"(?<![\w$:@])(?:[:@]([A-Za-z_][\w$]*)|\?\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement of a block of SQL, at an offset in it."""

    offset: int
    text: str


def statements(sql: str) -> Iterator[Statement]:
    """Yield the statements of a block; the last needs no semicolon."""
    start = 0
    for match in re.finditer(";", sql):
        statement = sql[start : match.end()]
        if apsw.complete(statement):
            found = _trimmed(start, statement)
            if _COMMENT_OR_TEXT.sub("", found.text).strip() != ";":
                yield found
            start = match.end()
    rest = _trimmed(start, sql[start:])
    if _COMMENT_OR_TEXT.sub("", rest.text).strip() or re.search(r"['\"]", rest.text):
        yield rest


def _trimmed(start: int, statement: str) -> Statement:
    leading = len(statement) - len(statement.lstrip())
    return Statement(offset=start + leading, text=statement.strip())


def line_of(sql: str, offset: int) -> int:
    """Return the line of an offset, counted from one."""
    return sql.count("\n", 0, offset) + 1


def parameter(field: str) -> str:
    """Return the SQL parameter of a field, without its `$`: `object/foo` is `object$foo`."""
    return re.sub(r"[^0-9A-Za-z$]", "_", field.replace("/", "$"))


def parameters(fields: Iterable[Field]) -> dict[str, list[Field]]:
    """Return the fields of each parameter; several fields make it ambiguous."""
    known: dict[str, list[Field]] = {}
    for field in fields:
        known.setdefault(parameter(field.name), []).append(field)
    return known


def check_parameters(sql: str, fields: Iterable[Field], collection: str) -> Iterator[Mistake]:
    """Yield every parameter that is not exactly one field of the source."""
    known = parameters(fields)
    blank = _blank(sql)
    first_use: dict[str, int] = {}
    for match in _PARAMETER.finditer(blank):
        first_use.setdefault(match[1], match.start())
    for used, offset in first_use.items():
        found = known.get(used, [])
        if not found:
            folded = {name.casefold(): name for name in known}
            near = difflib.get_close_matches(used.casefold(), folded, n=3, cutoff=0.6)
            close = [folded[name] for name in near] or sorted(known)[:3]
            message = f"${used} is not a field of {collection}"
            hint = f"did you mean {', '.join(f'${c}' for c in close)}?"
            yield Mistake(code="E-PARAM", offset=offset, message=message, hint=hint)
        elif len(found) > 1:
            message = f"${used} is ambiguous: {' or '.join(field.name for field in found)}"
            hint = "give one of them a projection with another name"
            yield Mistake(code="E-PARAM", offset=offset, message=message, hint=hint)
    for match in _OTHER_PARAMETER.finditer(blank):
        hint = f"write ${match[1] or 'field'}"
        message = f"{match[0]} is not a parameter of a lambda: they begin with $"
        yield Mistake(code="E-PARAM", offset=match.start(), message=message, hint=hint)


def replace_parameters(sql: str, write: Callable[[str], str]) -> str:
    """Return a statement with every `$name` written otherwise."""
    parts, end = [], 0
    for match in _PARAMETER.finditer(_blank(sql)):
        parts += [sql[end : match.start()], write(match[1])]
        end = match.end()
    return "".join([*parts, sql[end:]])


def _blank(sql: str) -> str:
    """Return a text of the same length without literals, quoted names and comments."""
    return _NOISE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), sql)


def members(columns: Iterable[str], fields: Iterable[Field]) -> list[str]:
    """Return the member that each column gives: `$a_b` may give `a-b`, others as they are named.

    SQLite names a column that has no name by its text, together with a comment behind it.
    """
    known = parameters(fields)
    found = []
    for column in columns:
        named = known.get(_COMMENT_OR_TEXT.sub("", column).strip().removeprefix("$"), ())
        found.append(named[0].name if column.startswith("$") and named else column)
    return found


def is_whole_document(columns: Sequence[str]) -> bool:
    """True if the only column of a statement is the document, not a member of it."""
    return len(columns) == 1 and columns[0].lower().startswith("json")


def error_offset(error: Exception, sql: str, prefix: int = 0) -> int:
    """Return where in `sql`, after a prefix, SQLite found an error; 0 if it does not say."""
    at = getattr(error, "error_offset", -1)
    return max(len(sql.encode()[:at].decode(errors="ignore")) - prefix, 0) if at > 0 else 0


class _Nulls(Mapping[str, None]):
    """NULL for every parameter."""

    def __getitem__(self, name: str) -> None:
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


NULLS: Final = _Nulls()


class Described(NamedTuple):
    """A compiled statement."""

    parameters: list[str]
    """In the order in which SQLite numbers them, each once, without its `$`."""
    columns: list[str]


def described(db: apsw.Connection, sql: str) -> Described:
    """Compile a statement and describe it, without running it. Raises SQLite's errors."""
    found = Described([], [])

    def trace(cursor: apsw.Cursor, _: str, __: object) -> bool:
        found.parameters.extend(name or "?" for name in cursor.bindings_names)
        found.columns.extend(name for name, *_ in cursor.get_description())
        return False

    cursor = db.cursor()
    cursor.exec_trace = trace
    with contextlib.suppress(apsw.ExecTraceAbort):
        cursor.execute(sql, NULLS)
    return found


def migration_hashes(spec: DerivationSpec) -> tuple[str, ...]:
    """Return what identifies each migration: its text, without space around it."""
    return tuple(hashlib.sha256(text.strip().encode()).hexdigest() for text in spec.migrations)


# --- statements that lambdas may not use ---

_OUTSIDE = {
    apsw.SQLITE_ATTACH: "ATTACH reaches outside the derivation's database",
    apsw.SQLITE_DETACH: "DETACH reaches outside the derivation's database",
    apsw.SQLITE_TRANSACTION: "the runtime begins and commits transactions",
    apsw.SQLITE_SAVEPOINT: "the runtime begins and commits transactions",
}
_SCHEMA_CHANGES = {
    apsw.SQLITE_CREATE_INDEX,
    apsw.SQLITE_CREATE_TABLE,
    apsw.SQLITE_CREATE_TRIGGER,
    apsw.SQLITE_CREATE_VIEW,
    apsw.SQLITE_CREATE_VTABLE,
    apsw.SQLITE_DROP_INDEX,
    apsw.SQLITE_DROP_TABLE,
    apsw.SQLITE_DROP_TRIGGER,
    apsw.SQLITE_DROP_VIEW,
    apsw.SQLITE_DROP_VTABLE,
    apsw.SQLITE_ALTER_TABLE,
    apsw.SQLITE_ANALYZE,
    apsw.SQLITE_REINDEX,
}
_TEMPORARY = {
    apsw.SQLITE_CREATE_TEMP_INDEX,
    apsw.SQLITE_CREATE_TEMP_TABLE,
    apsw.SQLITE_CREATE_TEMP_TRIGGER,
    apsw.SQLITE_CREATE_TEMP_VIEW,
}
_HARMLESS_PRAGMAS = {
    "foreign_key_list",
    "function_list",
    "index_info",
    "index_list",
    "index_xinfo",
    "table_info",
    "table_list",
    "table_xinfo",
}


def refusal(action: int, name: str | None, argument: str | None, *, migrating: bool) -> str | None:
    """Return why a lambda or migration may not do what SQLite's authorizer asks about."""
    if action in _OUTSIDE:
        return _OUTSIDE[action]
    if action == apsw.SQLITE_FUNCTION and (argument or "").lower() == "load_extension":
        return "load_extension reaches outside the derivation's database"
    if action in _TEMPORARY:
        return "temporary tables end with the transaction, whose end the runtime chooses"
    if action in _SCHEMA_CHANGES and not migrating:
        return "only migrations change the tables of a derivation"
    if action == apsw.SQLITE_PRAGMA and (name or "").lower() not in _HARMLESS_PRAGMAS:
        written = f"PRAGMA {name}" + ("" if argument is None else f" = {argument}")
        return f"{written} changes how the runtime keeps the database"
    return None
