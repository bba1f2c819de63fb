"""Random lambdas over random documents: Spark SQL and SQLite give the same documents."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from penstock.model.json_order import Json, canonical_json
from penstock.runtime.derive.engine import Document
from penstock.runtime.derive.sqlite_native import NativeLambda, compile_to_spark
from runtime.derive.sqlite_derivations import Files, engine_of, reads, transaction

pytestmark = pytest.mark.spark

SOURCE: dict[str, Any] = {
    "id": {"type": "integer"},
    "n": {"type": "integer", "minimum": -20, "maximum": 20},
    "m": {"type": "integer", "minimum": -(2**40), "maximum": 2**40},
    "r": {"type": "number"},
    "q": {"type": "number"},
    "s": {"type": "string"},
    "t": {"type": "string"},
    "b": {"type": "boolean"},
}
COLUMNS = "id bigint, n bigint, m bigint, r double, q double, s string, t string, b boolean"
TEXTS = st.sampled_from(["", "a", "A", "aé", "É", " b ", "a\0b", "Z", "😀x", "10", "[1]", "\tz"])
REALS = st.sampled_from([0.0, -0.0, 1.0, -1.5, 0.1, 1e308, -1e308, 5e-324, 2.0**53, 3.0])
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(-20, 20),
        "m": st.integers(-(2**40), 2**40),
        "r": REALS,
        "q": REALS,
        "s": TEXTS,
        "t": TEXTS,
        "b": st.booleans(),
    },
)


def binary(operands: st.SearchStrategy[str], *symbols: str) -> st.SearchStrategy[str]:
    """Two operands, in parentheses or not: what binds tighter must be read alike."""
    forms = st.sampled_from(["{} {} {}", "({}) {} ({})", "({} {} {})"])
    symbol = st.sampled_from(symbols)
    return st.builds(lambda f, a, o, b: f.format(a, o, b), forms, operands, symbol, operands)


def called(form: str, *arguments: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*arguments).map(lambda given: form.format(*given))


INTEGER = st.deferred(
    lambda: st.one_of(
        st.sampled_from(["$n", "$m", "$n", "0", "3", "-2", "0x1f"]),
        binary(INTEGER, "+", "-", "*", "/", "%"),
        called("abs({})", INTEGER),
        called("-({})", INTEGER),
        called("length({})", TEXT),
        called("coalesce({}, {})", INTEGER, INTEGER),
        called("nullif({}, {})", INTEGER, INTEGER),
        called("iif({}, {}, {})", FLAG, INTEGER, INTEGER),
        called("case when {} then {} when {} then {} end", FLAG, INTEGER, FLAG, INTEGER),
    )
)
REAL = st.deferred(
    lambda: st.one_of(
        st.sampled_from(["$r", "$q", "0.1", "1.5", "-2.0", "1e10"]),
        binary(REAL, "+", "-", "*", "/"),
        called("({} * {})", INTEGER, REAL),
        called("abs({})", REAL),
        called("-({})", REAL),
        called("cast({} as real)", INTEGER),
        called("ifnull({}, {})", REAL, REAL),
        called("case when {} then {} else {} end", FLAG, REAL, REAL),
    )
)
TEXT = st.deferred(
    lambda: st.one_of(
        st.sampled_from(["$s", "$t", "'a'", "'it''s $s \\'", "''"]),
        binary(TEXT, "||"),
        called("({} || ({}))", TEXT, INTEGER),
        called("upper({})", TEXT),
        called("lower({})", TEXT),
        called("trim({})", TEXT),
        called("rtrim({})", TEXT),
        called("substr({}, 2, 1)", TEXT),
        called("substr({}, 1)", TEXT),
        called("cast({} as text)", INTEGER),
        called("coalesce({}, {})", TEXT, TEXT),
        called("nullif({}, {})", TEXT, TEXT),
    )
)
FLAG = st.deferred(
    lambda: st.one_of(
        st.sampled_from(["$b", "true", "$n", "$r"]),
        *(
            binary(kind, "=", "<>", "<", "<=", ">", ">=", "is", "is not")
            for kind in (INTEGER, REAL, TEXT)
        ),
        called("({} < {})", INTEGER, REAL),
        called("{} is not null", TEXT),
        called("({} is null)", REAL),
        called("not {}", FLAG),
        binary(FLAG, "and", "or"),
        called("({} between {} and {})", INTEGER, INTEGER, INTEGER),
        called("{} in ({}, {}, null)", TEXT, TEXT, TEXT),
        called("({} not in ({}, 4))", INTEGER, INTEGER),
    )
)
KINDS = {"integer": INTEGER, "number": REAL, "string": TEXT, "boolean": FLAG}
EXPRESSIONS = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: KINDS[kind].map(lambda text: (kind, text))
)


def plain(value: Json) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


OPERATIONS: list[tuple[str, str]] = [
    ("string", "upper($s) || lower($t)"),
    ("string", "trim($s) || '|' || ltrim($s) || '|' || rtrim($s)"),
    ("string", "substr($s, 2, 1) || '|' || substr($s, 1)"),
    ("string", "$s || $n || $b"),
    ("string", "cast($m as text)"),
    ("string", "case when $s > $t then $s when $s = $t then '=' else $t end"),
    ("string", "nullif($s, $t)"),
    ("string", "coalesce($s, $t, 'none')"),
    ("integer", "length($s)"),
    ("integer", "$n / $m"),
    ("integer", "$n % 3 - $n * 2 + -$n"),
    ("integer", "$n / 0"),
    ("integer", "$n % 0"),
    ("integer", "abs($n) + $b"),
    ("integer", "iif($n, $n, $m)"),
    ("number", "$r + $q"),
    ("number", "$r - $q"),
    ("number", "$r * $q"),
    ("number", "$r / $q"),
    ("number", "$n * $r"),
    ("number", "-$r"),
    ("number", "ifnull($r, $q)"),
    ("boolean", "$s < $t"),
    ("boolean", "$n = $r"),
    ("boolean", "$r > $q or $n is null and $b"),
    ("boolean", "$s in ($t, 'a', null)"),
    ("boolean", "$n not in (1, 2)"),
    ("boolean", "$n between $m and 5"),
    ("boolean", "$r is $q"),
    ("boolean", "not $n"),
    ("boolean", "$r - $r > 1 or $r * $q - $r * $q = 0"),
    ("boolean", "$s is not $t"),
    ("integer", "$b"),
]


def samples() -> list[Document]:
    """Documents in which every value meets others, null and absence."""
    texts = [None, "", "a", "A", "aé", "É", " b ", "a\0b", "Z", "😀x", "[1]", "\tz\t"]
    reals = [None, 0.0, -0.0, 1.0, -1.5, 0.1, 1e308, -1e308, 5e-324, 2.0**53, 3.0]
    whole = [None, 0, 1, -1, 2, 5, -20, 20]
    flags = [None, True, False]
    return [
        {
            "n": whole[i % 8],
            "m": whole[i // 8 % 8],
            "r": reals[i % 11],
            "q": reals[i // 11 % 11],
            "s": texts[i % 12],
            "t": texts[i // 12 % 12],
            "b": flags[i % 3],
        }
        for i in range(144)
    ]


def test_every_operation_equals_sqlite(spark: SparkSession) -> None:
    compare(spark, samples(), OPERATIONS, "$n is null or $n <> 20", all_native=True)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.lists(DOCUMENTS, min_size=5, max_size=10), st.lists(EXPRESSIONS, min_size=5, max_size=10),
    FLAG,
)  # fmt: skip
def test_native_lambdas_equal_sqlite(
    spark: SparkSession,
    documents: list[Document],
    expressions: list[tuple[str, str]],
    condition: str,
) -> None:
    compare(spark, documents, expressions, condition)


def compare(
    spark: SparkSession,
    documents: list[Document],
    expressions: list[tuple[str, str]],
    condition: str,
    *,
    all_native: bool = False,
) -> None:
    """Run what is native of a lambda in both."""
    for i, document in enumerate(documents):
        document["id"] = i
    target = {f"c{i}": {"type": kind} for i, (kind, _) in enumerate(expressions)}
    alone = engine_of("select $id", SOURCE, target)
    (source,) = (found.source for found in alone.lambdas if found)

    def native(code: str) -> NativeLambda | None:
        found = compile_to_spark(code, source, alone.target)
        return found if isinstance(found, NativeLambda) else None

    kept = [
        f"{text} as c{i}"
        for i, (_, text) in enumerate(expressions)
        if native(f"select {text} as c{i}")
    ]
    assert len(kept) == len(expressions) or not all_native, kept
    code = f"select $id, {', '.join(kept)}" if kept else "select $id"
    if native(f"{code} where {condition}"):
        code = f"{code} where {condition}"
    compiled = native(code)
    assert compiled
    published, _ = transaction(
        engine_of(code, SOURCE, target), reads(*documents), Files(Path("/nonexistent"))
    )
    want = [canonical_json(document) for _, document in published]
    names = [column.split()[0] for column in COLUMNS.split(", ")]
    rows = [tuple(document.get(name) for name in names) for document in documents]
    spark.createDataFrame(rows, COLUMNS).createOrReplaceTempView("source")
    try:
        found = spark.sql(compiled.sql).collect()
    finally:
        spark.catalog.dropTempView("source")
    got = sorted((row.asDict() for row in found), key=lambda row: row["id"])
    assert [canonical_json({k: plain(v) for k, v in row.items()}) for row in got] == want, code
