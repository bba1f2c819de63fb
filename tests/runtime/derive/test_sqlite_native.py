"""Lambdas that become Spark SQL, and those that SQLite must run itself."""

import pytest

from penstock.runtime.derive.sqlite_native import NativeLambda, WhyNot, compile_to_spark
from runtime.derive.sqlite_derivations import collection

SOURCE = collection(
    "acme/source",
    {
        "id": {"type": "integer"},
        "n": {"type": "integer", "minimum": -1000, "maximum": 1000},
        "r": {"type": "number"},
        "s": {"type": "string"},
        "b": {"type": "boolean"},
        "u": {"type": ["integer", "string"]},
        "f": {"type": "string", "format": "integer"},
        "c": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 100},
        "o": {"type": "object", "properties": {"x-y": {"type": "string"}}},
    },
)
TARGET = collection(
    "acme/target",
    {
        "id": {"type": "integer"},
        "o/x-y": {"type": "string"},
        "s": {"type": "string"},
        "r": {"type": "number"},
        "b": {"type": "boolean"},
    },
)


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("select $id", "SELECT `id` AS `id` FROM source"),
        ("select $id -- it", "SELECT `id` AS `id` FROM source"),
        ("select $id as id where $b;", "SELECT `id` AS `id` FROM source WHERE `b`"),
        ("select $o$x_y", "SELECT `o/x-y` AS `o/x-y` FROM source"),
        ("select $b as id", "SELECT CAST(`b` AS BIGINT) AS `id` FROM source"),
        ("select $b", "SELECT `b` AS `b` FROM source"),
        ("select $s || '$id' as s", "SELECT (`s` || '\\u0024id') AS `s` FROM source"),
    ],
)
def test_a_projection_becomes_spark_sql(code: str, want: str) -> None:
    assert compile_to_spark(code, SOURCE, TARGET) == NativeLambda(sql=want)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("select $id; select $id", "several statements"),
        ("insert into t values (1)", "not one SELECT"),
        ("select $id from json_each('[]')", "it has FROM"),
        ("select distinct $id", "it has DISTINCT"),
        ("select $id limit 1", "it has LIMIT"),
        ("select $id + 1 as id", "may leave 64 bits"),
        ("select -$id as id", "may leave 64 bits"),
        ("select $id / $n as id", "may leave 64 bits"),
        ("select abs($id) as id", "may leave 64 bits"),
        ("select $id < $r as b", "beyond 2**53"),
        ("select $n = $s as b", "compares an integer with text"),
        ("select $s like 'x' as b", "no exact twin"),
        ("select round($r) as r", "no exact twin"),
        ("select random() as id", "no exact twin"),
        ("select $r || '' as s", "writes a number as text"),
        ("select $s + 1 as id", "operand that is text"),
        ("select $u as id", "the type of $u"),
        ("select $f as id", "the type of $f"),
        ("select $c as r", "the type of $c"),
        ("select $flow_document as s", "not a column"),
        ("select $n as b", "b is boolean"),
        ("select $s as undeclared", "array or object"),
        ("select $r * 2 as undeclared", "may be infinite"),
        ("select $o as s", "the type of $o"),
        ("select coalesce($n, $s) as id", "an integer or text"),
        ("select substr($s, -1) as s", "constant place"),
        ("select $id, $n as id", "two columns have one name"),
        ("select $s as json", "whole document"),
        ("select 'x' as id where $s", "condition is wanted"),
        ("select $n is true as b", "asks for the truth"),
        ('select "id" as id', "not a parameter"),
        ("select $nothing as id", "not one field"),
    ],
)
def test_what_might_differ_stays_with_sqlite(code: str, why: str) -> None:
    found = compile_to_spark(code, SOURCE, TARGET)
    assert isinstance(found, WhyNot), found
    assert why in found.reason


def test_a_text_that_is_read_in_two_ways_stays_with_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.runtime.derive import sqlite_native

    parse = sqlite_native.sqlglot.parse_one
    monkeypatch.setattr(
        sqlite_native.sqlglot, "parse_one", lambda text, **how: parse(text.replace("-", "+"), **how)
    )
    found = compile_to_spark("select $n - 1 as id", SOURCE, TARGET)
    assert found == WhyNot(reason="sqlglot and SQLite do not read it alike")


def test_each_says_how_it_runs() -> None:
    assert compile_to_spark("select $id", SOURCE, TARGET).explain() == "native: runs as Spark SQL"
    assert compile_to_spark("select $id limit 1", SOURCE, TARGET).explain() == (
        "row by row in SQLite: it has LIMIT"
    )
