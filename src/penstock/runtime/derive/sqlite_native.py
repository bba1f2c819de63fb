"""PURE: SQLite lambdas that Spark can run as they are meant, with exactly the same documents.

A lambda that selects expressions of parameters from nothing becomes a projection and filter of
`source`. Every expression has one type, known from the schema, and only operations whose result is
the same in both are taken:

- integers stay within 64 bits, by the bounds of the schema: SQLite continues with REAL beyond them,
  and Spark fails;
- integers compare with REAL below 2**53, where both are exact;
- dividing by zero is NULL, and so is a REAL that is not a number;
- text compares by bytes; upper and lower change ASCII only; length and substr end at a zero byte.

`sqlglot` parses the text, and SQLite judges the result: the expressions are written again, every
operation in parentheses, and must compile to the same program as the lambda.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import apsw
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from penstock.model.columns import LONG_MAX, LONG_MIN
from penstock.model.json_order import EXACT_MAX
from penstock.model.schema import compiled
from penstock.model.shape import Shape, locate
from penstock.model.spec import CollectionSpec, Field
from penstock.native import sql
from penstock.runtime.derive.sqlite_code import (
    NULLS,
    described,
    is_whole_document,
    members,
    parameters,
    replace_parameters,
    statements,
)

_NAN: Final = "CAST('NaN' AS DOUBLE)"
_COUNT: Final = re.compile("[0-9]{1,9}")
_LOWER: Final = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLambda:
    """Spark SQL over `source` that gives the documents of a lambda."""

    sql: str

    def explain(self) -> str:
        return "native: runs as Spark SQL"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The reason why SQLite itself runs a lambda."""

    reason: str

    def explain(self) -> str:
        return f"row by row in SQLite: {self.reason}"


class _Unsupported(Exception):
    """An expression without an exact twin."""


class _Type(enum.Enum):
    NULL = "null"
    FLAG = "a boolean"
    INTEGER = "an integer"
    REAL = "a number"
    TEXT = "text"


_WHOLE = frozenset({_Type.FLAG, _Type.INTEGER})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expression:
    """An expression in both languages. Of a FLAG, `spark` is a BOOLEAN, and SQLite's is 0 or 1."""

    type: _Type
    spark: str
    sqlite: str
    low: int = LONG_MIN
    high: int = LONG_MAX
    """Bounds of an INTEGER."""
    finite: bool = True
    """False of a REAL that may be infinite."""


def compile_to_spark(
    code: str, source: CollectionSpec, target: CollectionSpec
) -> NativeLambda | WhyNot:
    """Return the Spark SQL that gives the same documents as a lambda without state, or why none."""
    try:
        return NativeLambda(sql=_Compiler(source).compile(code, target))
    except _Unsupported as e:
        return WhyNot(reason=str(e))


def _no(reason: str) -> NoReturn:
    raise _Unsupported(reason)


class _Compiler:
    def __init__(self, source: CollectionSpec) -> None:
        self._source = source
        self._shape = compiled(source.read_schema.text).shape
        self._known = parameters(source.fields)

    def compile(self, code: str, target: CollectionSpec) -> str:
        found = list(statements(code))
        if len(found) != 1:
            _no("it has several statements" if found else "it has no statement")
        (statement,) = found
        text = statement.text.rstrip("; \n\t")
        select = _parsed(text)
        expressions = [self._expression(_bare(item)) for item in select.expressions]
        where = select.args.get("where")
        condition = self._truth(where.this) if where else None
        columns = _described(text)
        again = f"SELECT {', '.join(e.sqlite for e in expressions)}"
        again += f" WHERE {condition.sqlite}" if condition else ""
        if _program(text) != _program(again):
            _no("sqlglot and SQLite do not read it alike")
        names = self._members(columns)
        shape = compiled(target.write_schema.text).shape
        outputs = [
            f"{_output(e, shape.objects.member(member), member)} AS {sql.name(member)}"
            for e, member in zip(expressions, names, strict=True)
        ]
        filtered = f" WHERE {condition.spark}" if condition else ""
        return f"SELECT {', '.join(outputs)} FROM source{filtered}"  # noqa: S608 - names and literals are quoted

    def _members(self, columns: Sequence[str]) -> list[str]:
        if is_whole_document(columns):
            _no("its column is the whole document")
        found = members(columns, self._source.fields)
        if len(set(found)) < len(found):
            _no("two columns have one name")
        return found

    # --- expressions ---

    def _expression(self, node: exp.Expression) -> _Expression:
        if isinstance(node, exp.Paren):
            return self._expression(node.this)
        if isinstance(node, exp.Column):
            return self._parameter(node)
        if isinstance(node, exp.Literal | exp.Boolean | exp.Null):
            return _literal(node)
        build = _BUILDERS.get(type(node))
        if build is None:
            _no(f"{_written(node)} has no exact twin in Spark")
        return build(self, node)

    def _parameter(self, node: exp.Column) -> _Expression:
        name = node.this.this if isinstance(node.this, exp.Identifier) else ""
        if node.args.get("table") or not name.startswith("$"):
            _no(f"{_written(node)} is not a parameter")
        fields = self._known.get(name[1:], [])
        if len(fields) != 1:
            _no(f"{name} is not one field of {self._source.name}")
        return _of_field(fields[0], name, locate(self._shape, fields[0].location)[0])

    def _truth(self, node: exp.Expression) -> _Expression:
        """Return an expression as a condition: true if it is not zero."""
        value = self._expression(node)
        match value.type:
            case _Type.FLAG:
                return value
            case _Type.NULL:
                return _flag("CAST(NULL AS BOOLEAN)", value.sqlite)
            case _Type.INTEGER:
                return _flag(f"({value.spark} <> 0)", value.sqlite)
            case _Type.REAL:
                return _flag(f"({value.spark} <> 0.0D)", value.sqlite)
            case _:
                _no(f"{_written(node)} is text where a condition is wanted")

    def _both(self, node: exp.Expression) -> tuple[_Expression, _Expression]:
        return self._expression(node.this), self._expression(node.expression)

    def arithmetic(self, node: exp.Expression) -> _Expression:
        a, b = self._both(node)
        symbol = "+" if isinstance(node, exp.Add) else "-" if isinstance(node, exp.Sub) else "*"
        written = f"({a.sqlite} {symbol} {b.sqlite})"
        if a.type in _WHOLE and b.type in _WHOLE:
            a, b = _as_integer(a), _as_integer(b)
            operate = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[symbol]
            corners = [operate(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
            return _integer(f"({a.spark} {symbol} {b.spark})", written, corners, node)
        a, b = _as_real(a, node), _as_real(b, node)
        return _real(f"nullif(({a.spark} {symbol} {b.spark}), {_NAN})", written, finite=False)

    def divide(self, node: exp.Expression) -> _Expression:
        a, b = self._both(node)
        written = f"({a.sqlite} / {b.sqlite})"
        if a.type in _WHOLE and b.type in _WHOLE:
            a, b = _as_integer(a), _as_integer(b)
            if a.low == LONG_MIN and b.low <= -1 <= b.high:
                _no(f"{_written(node)} may leave 64 bits")
            most = max(abs(a.low), abs(a.high))
            spark = f"({a.spark} DIV nullif({b.spark}, 0L))"
            corners = [max(-most, LONG_MIN), min(most, LONG_MAX)]
            return _integer(spark, written, corners, node)
        a, b = _as_real(a, node), _as_real(b, node)
        spark = f"nullif(({a.spark} / nullif({b.spark}, 0.0D)), {_NAN})"
        return _real(spark, written, finite=False)

    def modulo(self, node: exp.Expression) -> _Expression:
        a, b = self._both(node)
        if a.type not in _WHOLE or b.type not in _WHOLE:
            _no(f"{_written(node)} is not of integers")
        a, b = _as_integer(a), _as_integer(b)
        spark = f"({a.spark} % nullif({b.spark}, 0L))"
        return _integer(spark, f"({a.sqlite} % {b.sqlite})", [a.low, a.high, 0], node)

    def negate(self, node: exp.Expression) -> _Expression:
        a = self._expression(node.this)
        if a.type in _WHOLE:
            a = _as_integer(a)
            return _integer(f"(- {a.spark})", f"(- {a.sqlite})", [-a.low, -a.high], node)
        a = _as_real(a, node)
        return _real(f"(- {a.spark})", f"(- {a.sqlite})", finite=a.finite)

    def absolute(self, node: exp.Expression) -> _Expression:
        a = self._expression(node.this)
        if a.type in _WHOLE:
            a = _as_integer(a)
            ends = [0, -a.low, a.high]
            return _integer(f"abs({a.spark})", f"abs({a.sqlite})", ends, node)
        a = _as_real(a, node)
        return _real(f"abs({a.spark})", f"abs({a.sqlite})", finite=a.finite)

    def compare(self, node: exp.Expression) -> _Expression:
        a, b = self._both(node)
        in_sqlite, in_spark = _COMPARISONS[type(node)]
        x, y = _comparable(a, b, node)
        written = f"({a.sqlite} {in_sqlite} {b.sqlite})"
        if isinstance(node, exp.NullSafeNEQ):
            return _flag(f"(NOT ({x} <=> {y}))", written)
        return _flag(f"({x} {in_spark} {y})", written)

    def between(self, node: exp.Expression) -> _Expression:
        value, low, high = (self._expression(node.args[a]) for a in ("this", "low", "high"))
        x, y = _comparable(value, low, node)
        z, w = _comparable(value, high, node)
        written = f"({value.sqlite} BETWEEN {low.sqlite} AND {high.sqlite})"
        return _flag(f"(({x} >= {y}) AND ({z} <= {w}))", written)

    def is_one_of(self, node: exp.Expression) -> _Expression:
        value = self._expression(node.this)
        if not node.expressions or node.args.get("query"):
            _no(f"{_written(node)} is not a list")
        items = [self._expression(item) for item in node.expressions]
        pairs = [_comparable(value, item, node) for item in items]
        written = f"({value.sqlite} IN ({', '.join(item.sqlite for item in items)}))"
        return _flag(f"({' OR '.join(f'({x} = {y})' for x, y in pairs)})", written)

    def is_same(self, node: exp.Expression) -> _Expression:
        a, b = self._both(node)
        if isinstance(node.expression, exp.Null):
            return _flag(f"({a.spark} IS NULL)", f"({a.sqlite} IS NULL)")
        if isinstance(node.expression, exp.Boolean) and a.type is not _Type.FLAG:
            _no(f"{_written(node)} asks for the truth of what is no condition")
        x, y = _comparable(a, b, node)
        return _flag(f"({x} <=> {y})", f"({a.sqlite} IS {b.sqlite})")

    def opposite(self, node: exp.Expression) -> _Expression:
        inner = node.this
        if isinstance(inner, exp.Is) and isinstance(inner.expression, exp.Null):
            a = self._expression(inner.this)
            return _flag(f"({a.spark} IS NOT NULL)", f"({a.sqlite} IS NOT NULL)")
        a = self._truth(inner)
        return _flag(f"(NOT {a.spark})", f"(NOT {a.sqlite})")

    def connect(self, node: exp.Expression) -> _Expression:
        a, b = self._truth(node.this), self._truth(node.expression)
        word = "AND" if isinstance(node, exp.And) else "OR"
        return _flag(f"({a.spark} {word} {b.spark})", f"({a.sqlite} {word} {b.sqlite})")

    def choose(self, node: exp.Expression) -> _Expression:
        if node.this is not None and isinstance(node, exp.Case):
            _no(f"{_written(node)} compares; write CASE WHEN … THEN")
        branches = [node] if isinstance(node, exp.If) else node.args["ifs"]
        otherwise = node.args.get("false" if isinstance(node, exp.If) else "default")
        conditions = [self._truth(branch.this) for branch in branches]
        values = [self._expression(branch.args["true"]) for branch in branches]
        ending = self._expression(otherwise) if otherwise is not None else None
        results, joined = _one_type([*values, *([ending] if ending else [])], node)
        last = f" ELSE {results[-1]}" if ending else ""
        whens = zip(conditions, results, strict=False)
        spark = " ".join(f"WHEN {c.spark} THEN {r}" for c, r in whens)
        both = zip(conditions, values, strict=True)
        if isinstance(node, exp.If):
            choices = [conditions[0], *values, *([ending] if ending else [])]
            written = f"iif({', '.join(e.sqlite for e in choices)})"
            return joined(f"(CASE {spark}{last} END)", written)
        sqlite = " ".join(f"WHEN {c.sqlite} THEN {v.sqlite}" for c, v in both)
        sqlite += f" ELSE {ending.sqlite}" if ending else ""
        return joined(f"(CASE {spark}{last} END)", f"(CASE {sqlite} END)")

    def coalesce(self, node: exp.Expression) -> _Expression:
        values = [self._expression(item) for item in (node.this, *node.expressions)]
        results, joined = _one_type(values, node)
        written = f"coalesce({', '.join(v.sqlite for v in values)})"
        return joined(f"coalesce({', '.join(results)})", written)

    def unless(self, node: exp.Expression) -> _Expression:
        a, b = self._both(node)
        x, y = _comparable(a, b, node)
        _, joined = _one_type([a], node)
        spark = f"(CASE WHEN {x} = {y} THEN NULL ELSE {a.spark} END)"
        return joined(spark, f"nullif({a.sqlite}, {b.sqlite})")

    # --- text ---

    def _text(self, node: exp.Expression) -> _Expression:
        value = self._expression(node)
        if value.type is not _Type.TEXT:
            _no(f"{_written(node)} is {value.type.value} where text is wanted")
        return value

    def concat(self, node: exp.Expression) -> _Expression:
        a, b = self._both(node)
        spark = f"({_as_text(a, node)} || {_as_text(b, node)})"
        return _string(spark, f"({a.sqlite} || {b.sqlite})")

    def fold(self, node: exp.Expression) -> _Expression:
        a = self._text(node.this)
        upper = isinstance(node, exp.Upper)
        before, after = (_LOWER, _LOWER.upper()) if upper else (_LOWER.upper(), _LOWER)
        written = f"{'upper' if upper else 'lower'}({a.sqlite})"
        return _string(f"translate({a.spark}, '{before}', '{after}')", written)

    def length(self, node: exp.Expression) -> _Expression:
        a = self._text(node.this)
        spark = f"CAST(length({_until_zero(a)}) AS BIGINT)"
        return _integer(spark, f"length({a.sqlite})", [0, 2**31], node)

    def substring(self, node: exp.Expression) -> _Expression:
        a = self._text(node.this)
        start = _count(node.args.get("start"))
        length = _count(node.args.get("length"))
        if not start or (length is None and node.args.get("length") is not None):
            _no(f"{_written(node)} is not at a constant place from the left")
        places = f"{start}" if length is None else f"{start}, {length}"
        spark = f"substring({_until_zero(a)}, {places})"
        return _string(spark, f"substr({a.sqlite}, {places})")

    def trim(self, node: exp.Expression) -> _Expression:
        if node.expression is not None or node.args.get("collation"):
            _no(f"{_written(node)} trims other characters than spaces")
        a = self._text(node.this)
        position = node.args.get("position")
        name = {"LEADING": "ltrim", "TRAILING": "rtrim"}.get(position or "", "trim")
        return _string(f"{name}({a.spark})", f"{name}({a.sqlite})")

    def cast(self, node: exp.Expression) -> _Expression:
        a = self._expression(node.this)
        to = re.sub(r".*\s+as\s+(\w+)\)$", r"\1", node.sql("sqlite"), flags=re.I | re.S).upper()
        written = f"CAST({a.sqlite} AS {to})"
        if to == "TEXT" and a.type in {*_WHOLE, _Type.TEXT}:
            return _string(_as_text(a, node), written)
        if to == "INTEGER" and a.type in _WHOLE:
            a = _as_integer(a)
            return _integer(a.spark, written, [a.low, a.high], node)
        if to == "REAL" and a.type in {*_WHOLE, _Type.REAL}:
            a = _as_real(a, node)
            return _real(a.spark, written, finite=a.finite)
        _no(f"{_written(node)} has no exact twin in Spark")


_COMPARISONS: Final[dict[type[exp.Expression], tuple[str, str]]] = {
    exp.EQ: ("=", "="),
    exp.NEQ: ("<>", "<>"),
    exp.LT: ("<", "<"),
    exp.LTE: ("<=", "<="),
    exp.GT: (">", ">"),
    exp.GTE: (">=", ">="),
    exp.NullSafeEQ: ("IS", "<=>"),
    exp.NullSafeNEQ: ("IS NOT", ""),
}
_BUILDERS: Final[dict[type[exp.Expression], Callable[[_Compiler, exp.Expression], _Expression]]] = {
    **dict.fromkeys((exp.Add, exp.Sub, exp.Mul), _Compiler.arithmetic),
    **dict.fromkeys(_COMPARISONS, _Compiler.compare),
    **dict.fromkeys((exp.And, exp.Or), _Compiler.connect),
    **dict.fromkeys((exp.Case, exp.If), _Compiler.choose),
    **dict.fromkeys((exp.Upper, exp.Lower), _Compiler.fold),
    exp.Div: _Compiler.divide,
    exp.Mod: _Compiler.modulo,
    exp.Neg: _Compiler.negate,
    exp.Abs: _Compiler.absolute,
    exp.Between: _Compiler.between,
    exp.In: _Compiler.is_one_of,
    exp.Is: _Compiler.is_same,
    exp.Not: _Compiler.opposite,
    exp.Coalesce: _Compiler.coalesce,
    exp.Nullif: _Compiler.unless,
    exp.DPipe: _Compiler.concat,
    exp.Length: _Compiler.length,
    exp.Substring: _Compiler.substring,
    exp.Trim: _Compiler.trim,
    exp.Cast: _Compiler.cast,
}


# --- parsing, and SQLite's opinion ---


def _parsed(text: str) -> exp.Select:
    try:
        select = sqlglot.parse_one(replace_parameters(text, '"${}"'.format), dialect="sqlite")
    except (SqlglotError, RecursionError) as e:
        _no(f"sqlglot cannot read it: {str(e).splitlines()[0]}")
    if not isinstance(select, exp.Select):
        _no("it is not one SELECT")
    others = {name for name, value in select.args.items() if value} - {"expressions", "where"}
    if others:
        _no(f"it has {min(others).rstrip('_').upper()}")
    return select


def _bare(item: exp.Expression) -> exp.Expression:
    inner = item.this if isinstance(item, exp.Alias) else item
    assert isinstance(inner, exp.Expression)  # noqa: S101 - an alias is of an expression
    return inner


def _program(text: str) -> list[tuple[object, ...]]:
    """Return the program that SQLite compiles, which does not know how its text was written."""
    db = apsw.Connection(":memory:")
    try:
        return list(db.execute(f"EXPLAIN {text}", NULLS))
    except (apsw.Error, ValueError) as e:
        _no(f"SQLite cannot compile it: {e}")
    finally:
        db.close()


def _described(text: str) -> list[str]:
    db = apsw.Connection(":memory:")
    try:
        return described(db, text).columns
    except (apsw.Error, ValueError) as e:
        _no(f"SQLite cannot compile it: {e}")
    finally:
        db.close()


def _written(node: exp.Expression) -> str:
    text = node.sql("sqlite").replace('"$', "$").replace('"', "")
    return text if len(text) <= 60 else f"{text[:60]}…"


# --- leaves ---


def _literal(node: exp.Expression) -> _Expression:
    if isinstance(node, exp.Null):
        return _Expression(type=_Type.NULL, spark="NULL", sqlite="NULL")
    if isinstance(node, exp.Boolean):
        word = "true" if node.this else "false"
        return _flag(word, word)
    if node.is_string:
        quoted = "'" + node.this.replace("'", "''") + "'"
        return _string(sql.text(node.this), quoted)
    db = apsw.Connection(":memory:")
    try:
        ((value,),) = db.execute(f"SELECT {node.this}")
    except apsw.Error:
        _no(f"{node.this} is not a number of SQLite")
    finally:
        db.close()
    if isinstance(value, int):
        return _integer(sql.bigint(value), str(node.this), [value], node)
    if not isinstance(value, float) or not math.isfinite(value):
        _no(f"{node.this} is not a finite number")
    return _real(sql.double(value), str(node.this), finite=True)


def _of_field(field: Field, name: str, shape: Shape) -> _Expression:
    column = sql.name(field.name)
    strings = shape.strings
    if field.location in {"", "/_meta/uuid"}:
        _no(f"{name} is not a column")
    match list(shape.not_null):
        case ["boolean"]:
            return _flag(column, name)
        case ["integer"]:
            low, high = shape.numbers.minimum, shape.numbers.maximum
            ends = (
                LONG_MIN if low is None else math.floor(low),
                LONG_MAX if high is None else math.ceil(high),
            )
            if ends[0] < LONG_MIN or ends[1] > LONG_MAX:
                _no(f"{name} may be beyond 64 bits")
            return _Expression(
                type=_Type.INTEGER, spark=column, sqlite=name, low=ends[0], high=ends[1]
            )
        case ["number"] if shape.numbers.multiple_of is None:
            return _real(column, name, finite=True)
        case ["string"] if (
            strings.format not in {"integer", "number"} and strings.content_encoding is None
        ):
            return _string(column, name)
        case _:
            _no(f"the type of {name} has no exact twin in Spark")


# --- types ---


def _flag(spark: str, sqlite: str) -> _Expression:
    return _Expression(type=_Type.FLAG, spark=spark, sqlite=sqlite, low=0, high=1)


def _real(spark: str, sqlite: str, *, finite: bool) -> _Expression:
    return _Expression(type=_Type.REAL, spark=spark, sqlite=sqlite, finite=finite)


def _string(spark: str, sqlite: str) -> _Expression:
    return _Expression(type=_Type.TEXT, spark=spark, sqlite=sqlite)


def _integer(spark: str, sqlite: str, ends: Sequence[int], node: exp.Expression) -> _Expression:
    """Return an integer with the bounds of `ends`, which must fit 64 bits."""
    low, high = min(ends), max(ends)
    if low < LONG_MIN or high > LONG_MAX:
        _no(f"{_written(node)} may leave 64 bits: give its fields a minimum and a maximum")
    return _Expression(type=_Type.INTEGER, spark=spark, sqlite=sqlite, low=low, high=high)


def _as_integer(value: _Expression) -> _Expression:
    if value.type is _Type.FLAG:
        spark = f"CAST({value.spark} AS BIGINT)"
        return _Expression(type=_Type.INTEGER, spark=spark, sqlite=value.sqlite, low=0, high=1)
    return value


def _as_real(value: _Expression, node: exp.Expression) -> _Expression:
    if value.type in _WHOLE:
        spark = f"CAST({_as_integer(value).spark} AS DOUBLE)"
        return _real(spark, value.sqlite, finite=True)
    if value.type is not _Type.REAL:
        _no(f"{_written(node)} has an operand that is {value.type.value}")
    return value


def _as_text(value: _Expression, node: exp.Expression) -> str:
    if value.type is _Type.TEXT:
        return value.spark
    if value.type in _WHOLE:
        return f"CAST({_as_integer(value).spark} AS STRING)"
    _no(f"{_written(node)} writes {value.type.value} as text")


def _comparable(a: _Expression, b: _Expression, node: exp.Expression) -> tuple[str, str]:
    """Return both operands of a comparison in Spark, as one type."""
    if _Type.NULL in {a.type, b.type}:
        return _typed(a, b), _typed(b, a)
    if a.type is b.type:
        return a.spark, b.spark
    if a.type in _WHOLE and b.type in _WHOLE:
        return _as_integer(a).spark, _as_integer(b).spark
    if _Type.TEXT not in {a.type, b.type}:
        whole = a if a.type in _WHOLE else b
        if whole.low >= -EXACT_MAX and whole.high <= EXACT_MAX:
            return _as_real(a, node).spark, _as_real(b, node).spark
        _no(f"{_written(node)} compares an integer beyond 2**53 with a number")
    _no(f"{_written(node)} compares {a.type.value} with {b.type.value}")


def _typed(value: _Expression, other: _Expression) -> str:
    if value.type is not _Type.NULL:
        return value.spark
    kind = {_Type.FLAG: "BOOLEAN", _Type.INTEGER: "BIGINT", _Type.REAL: "DOUBLE"}
    return f"CAST(NULL AS {kind.get(other.type, 'STRING')})"


def _one_type(
    values: Sequence[_Expression], node: exp.Expression
) -> tuple[list[str], Callable[[str, str], _Expression]]:
    """Return alternatives in Spark as one type, and what makes an expression of their choice."""
    types = {value.type for value in values} - {_Type.NULL}
    if types == {_Type.FLAG, _Type.INTEGER}:
        values = [_as_integer(value) for value in values]
        types = {_Type.INTEGER}
    if len(types) != 1:
        found = " or ".join(sorted(t.value for t in types)) or "always null"
        _no(f"{_written(node)} is {found}")
    (kind,) = types
    typed = [value for value in values if value.type is kind]
    low, high = min(value.low for value in typed), max(value.high for value in typed)
    finite = all(value.finite for value in typed)

    def joined(spark: str, sqlite: str) -> _Expression:
        return _Expression(type=kind, spark=spark, sqlite=sqlite, low=low, high=high, finite=finite)

    return [_typed(value, typed[0]) for value in values], joined


def _count(node: object) -> int | None:
    """Return the number that a literal of digits writes."""
    if isinstance(node, exp.Literal) and not node.is_string and _COUNT.fullmatch(node.this):
        return int(node.this)
    return None


def _until_zero(value: _Expression) -> str:
    return f"substring_index({value.spark}, chr(0), 1)"


def _output(value: _Expression, shape: Shape, member: str) -> str:
    """Return an expression as the column of a member, if it becomes the same JSON."""
    only_flags = shape.not_null == {"boolean"}
    match value.type:
        case _Type.NULL:
            return "CAST(NULL AS STRING)"
        case _Type.FLAG if only_flags:
            return value.spark
        case _Type.FLAG:
            return _as_integer(value).spark
        case _Type.INTEGER if only_flags:
            _no(f"{member} is boolean, and its column may be another number than 0 and 1")
        case _Type.REAL if not value.finite and shape.not_null != {"number"}:
            _no(f"{member} may be infinite, which is text in a document")
        case _Type.TEXT if not shape.types.isdisjoint({"array", "object"}):
            _no(f"{member} may be an array or object, which text of a column is embedded as")
        case _:
            return value.spark
