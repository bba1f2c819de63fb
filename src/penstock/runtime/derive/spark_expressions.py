"""PURE: the types of Spark expressions, where they can be told for sure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.expressions import DataType

from penstock.runtime.derive.spark_columns import (
    BOOLEAN,
    DECIMAL,
    DOUBLE,
    INTEGER,
    NULL,
    NUMBERS,
    STRING,
    TIMESTAMP,
    SqlType,
    Word,
)
from penstock.runtime.derive.spark_functions import words

_D: Final = DataType.Type
_WORDS: Final[Mapping[object, Word]] = {
    _D.BOOLEAN: "boolean",
    **dict.fromkeys((_D.TINYINT, _D.SMALLINT, _D.INT, _D.BIGINT), "integer"),
    _D.DECIMAL: "decimal",
    **dict.fromkeys((_D.FLOAT, _D.DOUBLE), "double"),
    **dict.fromkeys((_D.TEXT, _D.VARCHAR, _D.CHAR), "string"),
    _D.DATE: "date",
    **dict.fromkeys((_D.TIMESTAMP, _D.TIMESTAMPTZ, _D.TIMESTAMPLTZ, _D.TIMESTAMPNTZ), "timestamp"),
    _D.BINARY: "binary",
}
_RETURNS: Final = Spark.EXPRESSION_METADATA

_OF_TYPE: Final[Mapping[SqlType, frozenset[str]]] = {
    STRING: words(
        """
        base64 btrim char concat_ws date_format decode format_number format_string from_unixtime
        get_json_object hex initcap lcase left lower lpad ltrim md5 regexp_extract regexp_replace
        repeat replace right rpad rtrim sha1 sha2 split_part string substr substring
        substring_index to_char to_json translate trim ucase upper url_decode url_encode
        """
    ),
    INTEGER: words(
        """
        ascii bigint bit_length cardinality char_length count count_if datediff day dayofmonth
        dayofweek dayofyear hash hour int length locate minute month octet_length quarter second
        size unix_date unix_micros unix_millis unix_seconds unix_timestamp weekday weekofyear
        xxhash64 year
        """
    ),
    DOUBLE: words("double exp ln log10 log2 pi power pow sqrt"),
    BOOLEAN: words(
        """
        array_contains boolean contains endswith equal_null isnan isnotnull isnull
        map_contains_key rlike startswith
        """
    ),
    TIMESTAMP: words(
        """
        from_utc_timestamp timestamp timestamp_micros timestamp_millis timestamp_seconds
        to_timestamp to_utc_timestamp
        """
    ),
    SqlType(word="date"): words("add_months date date_sub last_day make_date next_day to_date"),
}
_KNOWN: Final = {name: kind for kind, names in _OF_TYPE.items() for name in names}
"""Functions that have one type whatever they are given."""

_SAME: Final = words("min max any_value abs negative positive")
"""Functions that have the type of their first argument."""
_ONE_OF: Final = frozenset(["coalesce", "nvl", "ifnull", "greatest", "least"])

Lookup = Callable[[exp.Expr], "SqlType | None"]
Written = Callable[[exp.Expr], str]


def expression_type(node: exp.Expr | None, column: Lookup, written: Written) -> SqlType | None:
    """The type of an expression; None if it cannot be told. `column` knows columns and queries."""

    def of(inner: exp.Expr | None) -> SqlType | None:
        return expression_type(inner, column, written)

    match node:
        case None:
            return None
        case exp.Column() | exp.Subquery() | exp.Select():
            return column(node)
        case exp.Alias() | exp.Paren():
            return of(node.this)
        case exp.Literal():
            if node.is_string:
                return STRING
            text = str(node.this).lower()
            return INTEGER if text.isdigit() else DOUBLE if "e" in text else DECIMAL
        case exp.Null():
            return NULL
        case exp.Boolean() | exp.Predicate() | exp.Connector() | exp.Not() | exp.Is():
            return BOOLEAN
        case exp.Cast():
            return data_type(node.to)
        case exp.Neg():
            return _number([of(node.this)])
        case exp.Add() | exp.Sub() | exp.Mul() | exp.Mod():
            return _number([of(node.this), of(node.expression)])
        case exp.Div():
            both = _number([of(node.this), of(node.expression)])
            return DOUBLE if both == INTEGER else both
        case exp.IntDiv():
            return INTEGER
        case exp.DPipe():
            return STRING if of(node.this) == STRING or of(node.expression) == STRING else None
        case exp.Case() | exp.If():
            return _one_of([*_branches(node, of)])
        case exp.Func():
            return _function(node, written(node).lower(), of)
        case _:
            return None


def data_type(node: exp.Expr) -> SqlType | None:
    """The type that a cast names."""
    if not isinstance(node, DataType):
        return None
    if node.this in _WORDS:
        return SqlType(word=_WORDS[node.this])
    inner = node.expressions
    match node.this:
        case _D.ARRAY:
            return SqlType(word="array", element=data_type(inner[0]) if inner else None)
        case _D.MAP:
            return SqlType(word="map", element=data_type(inner[1]) if len(inner) > 1 else None)
        case _D.STRUCT:
            named = tuple((d.name, data_type(d.args["kind"])) for d in inner if d.args.get("kind"))
            return SqlType(word="struct", members=named if len(named) == len(inner) else None)
        case _:
            return None


def _branches(
    node: exp.Expr, of: Callable[[exp.Expr | None], SqlType | None]
) -> Iterable[SqlType | None]:
    if isinstance(node, exp.Case):
        yield from (of(branch.args.get("true")) for branch in node.args.get("ifs") or ())
        yield of(node.args["default"]) if node.args.get("default") is not None else NULL
    else:
        yield of(node.args.get("true"))
        yield of(node.args["false"]) if node.args.get("false") is not None else NULL


def _function(node: exp.Expr, name: str, of: Lookup) -> SqlType | None:
    arguments = _arguments(node)
    if name in _KNOWN:
        return _KNOWN[name]
    if name in _SAME:
        return of(arguments[0]) if arguments else None
    if name in _ONE_OF:
        return _one_of([of(argument) for argument in arguments])
    match name:
        case "sum":
            return _number([of(arguments[0])]) if arguments else None
        case "avg" | "mean":
            inner = _number([of(arguments[0])]) if arguments else None
            return DOUBLE if inner == INTEGER else inner
        case "concat":
            kinds = [of(argument) for argument in arguments]
            return (
                STRING
                if all(k is not None and k.word not in ("array", "binary") for k in kinds)
                else None
            )
        case "struct" | "named_struct":
            return SqlType(word="struct")
        case "array" | "split" | "sequence" | "map_keys" | "collect_list" | "collect_set":
            return SqlType(word="array")
        case "map" | "map_from_arrays" | "map_from_entries":
            return SqlType(word="map")
        case _:
            returns = (_RETURNS.get(type(node)) or {}).get("returns")
            return SqlType(word=_WORDS[returns]) if name == "" and returns in _WORDS else None


def _arguments(node: exp.Expr) -> list[exp.Expr]:
    """The arguments of a call, in the order that sqlglot keeps them."""
    found: list[exp.Expr] = []
    for value in node.args.values():
        found += [
            v for v in (value if isinstance(value, list) else [value]) if isinstance(v, exp.Expr)
        ]
    return found


def _number(kinds: list[SqlType | None]) -> SqlType | None:
    """The type of arithmetic, if all operands are numbers."""
    words = [kind.word for kind in kinds if kind is not None]
    if len(words) != len(kinds) or not all(word in NUMBERS for word in words):
        return None
    return max((SqlType(word=word) for word in words), key=lambda t: NUMBERS.index(t.word))


def _one_of(kinds: list[SqlType | None]) -> SqlType | None:
    """The type of a choice, if it does not matter which one is taken."""
    given = [kind for kind in kinds if kind != NULL]
    if not given:
        return NULL
    return given[0] if all(kind == given[0] for kind in given) else _number(given)
