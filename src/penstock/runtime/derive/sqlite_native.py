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

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import apsw
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from penstock.model.columns import LONG_MAX, LONG_MIN
from penstock.model.schema import compiled
from penstock.model.shape import locate
from penstock.model.spec import CollectionSpec
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
from penstock.runtime.derive.sqlite_expressions import (
    WHOLE,
    Expression,
    SqlType,
    Unsupported,
    as_integer,
    as_real,
    as_text,
    comparable,
    count_of,
    flag,
    integer,
    literal,
    of_field,
    one_type,
    output,
    real,
    refuse,
    string,
    until_zero,
    written_as,
)

_NAN: Final = "CAST('NaN' AS DOUBLE)"
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


def compile_to_spark(
    code: str, source: CollectionSpec, target: CollectionSpec
) -> NativeLambda | WhyNot:
    """Return the Spark SQL that gives the same documents as a lambda without state, or why none."""
    try:
        return NativeLambda(sql=_Compiler(source).compile(code, target))
    except Unsupported as e:
        return WhyNot(reason=str(e))


class _Compiler:
    def __init__(self, source: CollectionSpec) -> None:
        self._source = source
        self._shape = compiled(source.read_schema.text).shape
        self._known = parameters(source.fields)

    def compile(self, code: str, target: CollectionSpec) -> str:
        found = list(statements(code))
        if len(found) != 1:
            refuse("it has several statements" if found else "it has no statement")
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
            refuse("sqlglot and SQLite do not read it alike")
        names = self._members(columns)
        shape = compiled(target.write_schema.text).shape
        outputs = [
            f"{output(e, shape.objects.member(member), member)} AS {sql.name(member)}"
            for e, member in zip(expressions, names, strict=True)
        ]
        filtered = f" WHERE {condition.spark}" if condition else ""
        return f"SELECT {', '.join(outputs)} FROM source{filtered}"  # noqa: S608 - names and literals are quoted

    def _members(self, columns: Sequence[str]) -> list[str]:
        if is_whole_document(columns):
            refuse("its column is the whole document")
        found = members(columns, self._source.fields)
        if len(set(found)) < len(found):
            refuse("two columns have one name")
        return found

    # --- expressions ---

    def _expression(self, node: exp.Expression) -> Expression:
        if isinstance(node, exp.Paren):
            return self._expression(node.this)
        if isinstance(node, exp.Column):
            return self._parameter(node)
        if isinstance(node, exp.Literal | exp.Boolean | exp.Null):
            return literal(node)
        build = _BUILDERS.get(type(node))
        if build is None:
            refuse(f"{written_as(node)} has no exact twin in Spark")
        return build(self, node)

    def _parameter(self, node: exp.Column) -> Expression:
        name = node.this.this if isinstance(node.this, exp.Identifier) else ""
        if node.args.get("table") or not name.startswith("$"):
            refuse(f"{written_as(node)} is not a parameter")
        fields = self._known.get(name[1:], [])
        if len(fields) != 1:
            refuse(f"{name} is not one field of {self._source.name}")
        return of_field(fields[0], name, locate(self._shape, fields[0].location)[0])

    def _truth(self, node: exp.Expression) -> Expression:
        """Return an expression as a condition: true if it is not zero."""
        value = self._expression(node)
        match value.type:
            case SqlType.FLAG:
                return value
            case SqlType.NULL:
                return flag("CAST(NULL AS BOOLEAN)", value.sqlite)
            case SqlType.INTEGER:
                return flag(f"({value.spark} <> 0)", value.sqlite)
            case SqlType.REAL:
                return flag(f"({value.spark} <> 0.0D)", value.sqlite)
            case _:
                raise Unsupported(f"{written_as(node)} is text where a condition is wanted")

    def _both(self, node: exp.Expression) -> tuple[Expression, Expression]:
        return self._expression(node.this), self._expression(node.expression)

    def arithmetic(self, node: exp.Expression) -> Expression:
        a, b = self._both(node)
        symbol = "+" if isinstance(node, exp.Add) else "-" if isinstance(node, exp.Sub) else "*"
        written = f"({a.sqlite} {symbol} {b.sqlite})"
        if a.type in WHOLE and b.type in WHOLE:
            a, b = as_integer(a), as_integer(b)
            operate = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[symbol]
            corners = [operate(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
            return integer(f"({a.spark} {symbol} {b.spark})", written, corners, node)
        a, b = as_real(a, node), as_real(b, node)
        return real(f"nullif(({a.spark} {symbol} {b.spark}), {_NAN})", written, finite=False)

    def divide(self, node: exp.Expression) -> Expression:
        a, b = self._both(node)
        written = f"({a.sqlite} / {b.sqlite})"
        if a.type in WHOLE and b.type in WHOLE:
            a, b = as_integer(a), as_integer(b)
            if a.low == LONG_MIN and b.low <= -1 <= b.high:
                refuse(f"{written_as(node)} may leave 64 bits")
            most = max(abs(a.low), abs(a.high))
            spark = f"({a.spark} DIV nullif({b.spark}, 0L))"
            corners = [max(-most, LONG_MIN), min(most, LONG_MAX)]
            return integer(spark, written, corners, node)
        a, b = as_real(a, node), as_real(b, node)
        spark = f"nullif(({a.spark} / nullif({b.spark}, 0.0D)), {_NAN})"
        return real(spark, written, finite=False)

    def modulo(self, node: exp.Expression) -> Expression:
        a, b = self._both(node)
        if a.type not in WHOLE or b.type not in WHOLE:
            refuse(f"{written_as(node)} is not of integers")
        a, b = as_integer(a), as_integer(b)
        spark = f"({a.spark} % nullif({b.spark}, 0L))"
        return integer(spark, f"({a.sqlite} % {b.sqlite})", [a.low, a.high, 0], node)

    def negate(self, node: exp.Expression) -> Expression:
        a = self._expression(node.this)
        if a.type in WHOLE:
            a = as_integer(a)
            return integer(f"(- {a.spark})", f"(- {a.sqlite})", [-a.low, -a.high], node)
        a = as_real(a, node)
        return real(f"(- {a.spark})", f"(- {a.sqlite})", finite=a.finite)

    def absolute(self, node: exp.Expression) -> Expression:
        a = self._expression(node.this)
        if a.type in WHOLE:
            a = as_integer(a)
            ends = [0, -a.low, a.high]
            return integer(f"abs({a.spark})", f"abs({a.sqlite})", ends, node)
        a = as_real(a, node)
        return real(f"abs({a.spark})", f"abs({a.sqlite})", finite=a.finite)

    def compare(self, node: exp.Expression) -> Expression:
        a, b = self._both(node)
        in_sqlite, in_spark = _COMPARISONS[type(node)]
        x, y = comparable(a, b, node)
        written = f"({a.sqlite} {in_sqlite} {b.sqlite})"
        if isinstance(node, exp.NullSafeNEQ):
            return flag(f"(NOT ({x} <=> {y}))", written)
        return flag(f"({x} {in_spark} {y})", written)

    def between(self, node: exp.Expression) -> Expression:
        value, low, high = (self._expression(node.args[a]) for a in ("this", "low", "high"))
        x, y = comparable(value, low, node)
        z, w = comparable(value, high, node)
        written = f"({value.sqlite} BETWEEN {low.sqlite} AND {high.sqlite})"
        return flag(f"(({x} >= {y}) AND ({z} <= {w}))", written)

    def is_one_of(self, node: exp.Expression) -> Expression:
        value = self._expression(node.this)
        if not node.expressions or node.args.get("query"):
            refuse(f"{written_as(node)} is not a list")
        items = [self._expression(item) for item in node.expressions]
        pairs = [comparable(value, item, node) for item in items]
        written = f"({value.sqlite} IN ({', '.join(item.sqlite for item in items)}))"
        return flag(f"({' OR '.join(f'({x} = {y})' for x, y in pairs)})", written)

    def is_same(self, node: exp.Expression) -> Expression:
        a, b = self._both(node)
        if isinstance(node.expression, exp.Null):
            return flag(f"({a.spark} IS NULL)", f"({a.sqlite} IS NULL)")
        if isinstance(node.expression, exp.Boolean) and a.type is not SqlType.FLAG:
            refuse(f"{written_as(node)} asks for the truth of what is no condition")
        x, y = comparable(a, b, node)
        return flag(f"({x} <=> {y})", f"({a.sqlite} IS {b.sqlite})")

    def opposite(self, node: exp.Expression) -> Expression:
        inner = node.this
        if isinstance(inner, exp.Is) and isinstance(inner.expression, exp.Null):
            a = self._expression(inner.this)
            return flag(f"({a.spark} IS NOT NULL)", f"({a.sqlite} IS NOT NULL)")
        a = self._truth(inner)
        return flag(f"(NOT {a.spark})", f"(NOT {a.sqlite})")

    def connect(self, node: exp.Expression) -> Expression:
        a, b = self._truth(node.this), self._truth(node.expression)
        word = "AND" if isinstance(node, exp.And) else "OR"
        return flag(f"({a.spark} {word} {b.spark})", f"({a.sqlite} {word} {b.sqlite})")

    def choose(self, node: exp.Expression) -> Expression:
        if node.this is not None and isinstance(node, exp.Case):
            refuse(f"{written_as(node)} compares; write CASE WHEN … THEN")
        branches = [node] if isinstance(node, exp.If) else node.args["ifs"]
        otherwise = node.args.get("false" if isinstance(node, exp.If) else "default")
        conditions = [self._truth(branch.this) for branch in branches]
        values = [self._expression(branch.args["true"]) for branch in branches]
        ending = self._expression(otherwise) if otherwise is not None else None
        results, joined = one_type([*values, *([ending] if ending else [])], node)
        last = f" ELSE {results[-1]}" if ending else ""
        whens = zip(conditions, results, strict=False)
        spark = " ".join(f"WHEN {c.spark} THEN {r}" for c, r in whens)
        both = zip(conditions, values, strict=True)
        if isinstance(node, exp.If):
            choices = [conditions[0], *values, *([ending] if ending else [])]
            written = f"if({', '.join(e.sqlite for e in choices)})"
            return joined(f"(CASE {spark}{last} END)", written)
        sqlite = " ".join(f"WHEN {c.sqlite} THEN {v.sqlite}" for c, v in both)
        sqlite += f" ELSE {ending.sqlite}" if ending else ""
        return joined(f"(CASE {spark}{last} END)", f"(CASE {sqlite} END)")

    def coalesce(self, node: exp.Expression) -> Expression:
        values = [self._expression(item) for item in (node.this, *node.expressions)]
        results, joined = one_type(values, node)
        written = f"coalesce({', '.join(v.sqlite for v in values)})"
        return joined(f"coalesce({', '.join(results)})", written)

    def unless(self, node: exp.Expression) -> Expression:
        a, b = self._both(node)
        x, y = comparable(a, b, node)
        _, joined = one_type([a], node)
        spark = f"(CASE WHEN {x} = {y} THEN NULL ELSE {a.spark} END)"
        return joined(spark, f"nullif({a.sqlite}, {b.sqlite})")

    # --- text ---

    def _text(self, node: exp.Expression) -> Expression:
        value = self._expression(node)
        if value.type is not SqlType.TEXT:
            refuse(f"{written_as(node)} is {value.type.value} where text is wanted")
        return value

    def concat(self, node: exp.Expression) -> Expression:
        a, b = self._both(node)
        spark = f"({as_text(a, node)} || {as_text(b, node)})"
        return string(spark, f"({a.sqlite} || {b.sqlite})")

    def fold(self, node: exp.Expression) -> Expression:
        a = self._text(node.this)
        upper = isinstance(node, exp.Upper)
        before, after = (_LOWER, _LOWER.upper()) if upper else (_LOWER.upper(), _LOWER)
        written = f"{'upper' if upper else 'lower'}({a.sqlite})"
        return string(f"translate({a.spark}, '{before}', '{after}')", written)

    def length(self, node: exp.Expression) -> Expression:
        a = self._text(node.this)
        spark = f"CAST(length({until_zero(a)}) AS BIGINT)"
        return integer(spark, f"length({a.sqlite})", [0, 2**31], node)

    def substring(self, node: exp.Expression) -> Expression:
        a = self._text(node.this)
        start = count_of(node.args.get("start"))
        length = count_of(node.args.get("length"))
        if not start or (length is None and node.args.get("length") is not None):
            refuse(f"{written_as(node)} is not at a constant place from the left")
        places = f"{start}" if length is None else f"{start}, {length}"
        spark = f"substring({until_zero(a)}, {places})"
        return string(spark, f"substr({a.sqlite}, {places})")

    def trim(self, node: exp.Expression) -> Expression:
        if node.expression is not None or node.args.get("collation"):
            refuse(f"{written_as(node)} trims other characters than spaces")
        a = self._text(node.this)
        position = node.args.get("position")
        name = {"LEADING": "ltrim", "TRAILING": "rtrim"}.get(position or "", "trim")
        return string(f"{name}({a.spark})", f"{name}({a.sqlite})")

    def cast(self, node: exp.Expression) -> Expression:
        a = self._expression(node.this)
        to = re.sub(r".*\s+as\s+(\w+)\)$", r"\1", node.sql("sqlite"), flags=re.I | re.S).upper()
        written = f"CAST({a.sqlite} AS {to})"
        if to == "TEXT" and a.type in {*WHOLE, SqlType.TEXT}:
            return string(as_text(a, node), written)
        if to == "INTEGER" and a.type in WHOLE:
            a = as_integer(a)
            return integer(a.spark, written, [a.low, a.high], node)
        if to == "REAL" and a.type in {*WHOLE, SqlType.REAL}:
            a = as_real(a, node)
            return real(a.spark, written, finite=a.finite)
        raise Unsupported(f"{written_as(node)} has no exact twin in Spark")


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
_BUILDERS: Final[dict[type[exp.Expression], Callable[[_Compiler, exp.Expression], Expression]]] = {
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
        refuse(f"sqlglot cannot read it: {str(e).splitlines()[0]}")
    if not isinstance(select, exp.Select):
        refuse("it is not one SELECT")
    others = {name for name, value in select.args.items() if value} - {"expressions", "where"}
    if others:
        refuse(f"it has {min(others).rstrip('_').upper()}")
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
        refuse(f"SQLite cannot compile it: {e}")
    finally:
        db.close()


def _described(text: str) -> list[str]:
    db = apsw.Connection(":memory:")
    try:
        return described(db, text).columns
    except (apsw.Error, ValueError) as e:
        refuse(f"SQLite cannot compile it: {e}")
    finally:
        db.close()
