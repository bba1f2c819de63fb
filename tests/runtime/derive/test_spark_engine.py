"""Spark lambdas at work: documents in, documents out."""
# ruff: noqa: ANN401, S608 - options are passed on; queries are what is tested

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.journal.frames import frame_schema
from penstock.journal.rows import row_schema, stamp_rows
from penstock.model.clock import Flag, Producer, from_rfc3339
from penstock.model.json_order import ABSENT, Absent, Json, canonical_json
from penstock.model.schema import compiled
from penstock.model.spec import CollectionSpec
from penstock.native.arrow import to_arrow, to_json
from penstock.native.plan import compile_reduction
from penstock.native.spark_types import spark_schema
from penstock.runtime.derive.engine import LambdaFailed
from penstock.runtime.derive.spark_columns import read_layout, write_layout
from penstock.runtime.derive.spark_functions import FUNCTIONS
from penstock.runtime.derive.spark_sql import SparkLambda, judge_lambda
from support import spark_lambdas
from support.specs import collection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.runtime.derive.spark_engine import SparkTransform

pytestmark = pytest.mark.spark

ORDER = "$order"
MOMENT = "2026-03-01T12:00:00.5Z"

SOURCE = collection(
    "acme/transfers",
    {
        "id": {"type": "integer"},
        "sender": {"type": "string"},
        "recipient": {"type": "string"},
        "amount": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": ["string", "null"]},
        "at": {"type": "object", "properties": {"city": {"type": ["string", "null"]}}},
        "any": {},
        "pair": {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]},
    },
    projections={"town": "/at/city"},
)
SUMS: dict[str, Json] = {
    "id": {"type": "string"},
    "amount": {"type": "number", "reduce": {"strategy": "sum"}},
    "last": {"type": "integer", "reduce": {"strategy": "maximize"}},
}
MERGE: dict[str, Any] = {"reduce": {"strategy": "merge"}}


def judged(
    text: str, source: CollectionSpec, target: CollectionSpec, **options: Any
) -> SparkLambda:
    found = judge_lambda(text, source=source, target=target, **options)
    assert isinstance(found, SparkLambda), found
    sent = pickle.loads(pickle.dumps(found))  # noqa: S301 - our own
    assert sent == found
    return found


def frame_of(
    spark: SparkSession, documents: Sequence[dict[str, Json]], spec: CollectionSpec
) -> DataFrame:
    """Documents as they are stored, with stamps, and an order of their own."""
    from pyspark.sql import functions as f

    layout = read_layout(spec)
    rows = stamp_rows(
        to_arrow(documents, layout),
        layout,
        producer=Producer.from_random(bytes(6)),
        first_clock=from_rfc3339(MOMENT),
        flags=Flag.OUTSIDE_TXN,
    )
    frame = spark.createDataFrame(pa.Table.from_batches([rows]), schema=frame_schema(layout))
    return frame.withColumn(ORDER, f.col(row_schema(layout).names[-3]) - from_rfc3339(MOMENT))


def transform(
    text: str,
    target: CollectionSpec,
    *,
    source: CollectionSpec = SOURCE,
    nulls: Literal["missing", "explicit"] = "missing",
    **options: Any,
) -> SparkTransform:
    from penstock.runtime.derive.spark_engine import SparkTransform

    lambda_ = judged(text, source, target, **options)
    return SparkTransform(lambda_, source, target, nulls=nulls, name="t")


def documents_of(frame: DataFrame, target: CollectionSpec) -> list[Json]:
    layout = write_layout(target)
    names = [field.name for field in spark_schema(layout).fields]
    assert frame.columns[: len(names)] == names
    table = frame.select(*(f"`{n}`" for n in names)).toArrow().combine_chunks()
    return [json.loads(text) for batch in table.to_batches() for text in to_json(batch, layout)]


def run(
    spark: SparkSession,
    text: str,
    target: CollectionSpec,
    documents: Sequence[dict[str, Json]],
    **options: Any,
) -> list[Json]:
    made = transform(text, target, **options)
    frame = frame_of(spark, documents, options.get("source", SOURCE))
    with made.errors():
        return documents_of(made.apply(frame, order=None), target)


# --- types ---


def anything(**properties: Json) -> CollectionSpec:
    return collection("acme/out", {"id": {"type": "integer"}, **properties})


NUMBER: Json = {"type": "number"}
TEXT: Json = {"type": "string"}
DATE: Json = {"type": "string", "format": "date"}
TIME: Json = {"type": "string", "format": "date-time"}
MONEY: Json = {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 10**8}


TYPES: list[tuple[str, Json, Json | Absent]] = [
    ("id", {"type": "integer"}, 7),
    ("int(id)", {"type": "integer"}, 7),
    ("id", NUMBER, 7),
    ("amount", {"type": "integer"}, 12),
    ("decimal(3.0)", {"type": "integer"}, 3),
    ("float(0.5)", NUMBER, 0.5),
    ("0.1 + 0.2", NUMBER, 0.3),
    ("9.99d", MONEY, 9.99),
    ("9.990", MONEY, 9.99),
    ("1.5", {"type": "string", "format": "number"}, "1.5"),
    ("id", {"type": "string", "format": "integer"}, "7"),
    ("date'2026-01-02'", DATE, "2026-01-02"),
    ("date'2026-01-02'", TEXT, "2026-01-02"),
    ("date'2026-01-02'", TIME, "2026-01-02T00:00:00Z"),
    ("timestamp'2026-01-02 03:04:05.25'", TIME, "2026-01-02T03:04:05.25Z"),
    ("flow_published_at", TIME, "2026-03-01T12:00:00.5Z"),
    ("cast('hi' as binary)", {"type": "string", "contentEncoding": "base64"}, "aGk="),
    ("tags", {"type": "array", "items": TEXT}, ["a", "b"]),
    ("array(1, 2)", {"type": "array", "items": NUMBER}, [1, 2]),
    ("map('x', 1)", {"type": "object", "additionalProperties": NUMBER}, {"x": 1}),
    (
        "struct(1 as x, cast(null as int) as y)",
        {"type": "object", "additionalProperties": NUMBER},
        {"x": 1},
    ),
    (
        "struct(id as b, 'c' as z)",
        {"type": "object", "properties": {"b": NUMBER, "c": TEXT}},
        {"b": 7, "z": "c"},
    ),
    ("at", {"type": "object", "properties": {"x": TEXT}}, {"city": None}),
    ("`any`", {}, {"b": [1.5, None], "a": "x"}),
    ("sender", {}, "s"),
    ("array(1.5d, 1e22d, 1e-7d, 3d)", {}, [1.5, 1e22, 1e-7, 3]),
    ("struct(2 as b, map('z', true, 'y', false) as a)", {}, {"b": 2, "a": {"z": True, "y": False}}),
    ("flow_document", {}, "whole"),
    ("`pair/1`", TEXT, "two"),
    ("`pair/0`", {"type": "integer"}, 1),
    ("town", {"type": ["string", "null"]}, ABSENT),
    ("get_json_object(`any`, '$.a')", TEXT, "x"),
    ("parse_json('[1]')", {}, [1]),
]
"""An expression, the schema of its location, and the value that comes out there."""


def test_tables_of_letters_are_made_ahead_for_lambdas_that_need_them(spark: SparkSession) -> None:
    from penstock.runtime.derive import spark_engine

    started = []
    for name in ("lower(sender)", "sender"):
        text = f"select {name} as id from source"
        lambda_ = judged(text, SOURCE, collection("acme/names", {"id": {"type": "string"}}))
        spark_engine.make_ready(spark, [lambda_])
        threads = [thread for thread in threading.enumerate() if thread.name == "penstock-cases"]
        started.append(len(threads))
        for thread in threads:
            thread.join()
    assert started == [1, 0]
    jvm: Any = spark._jvm
    assert jvm.java.lang.Class.forName(spark_engine._CASES)  # errors are passed over there


def test_types(spark: SparkSession) -> None:
    document: dict[str, Json] = {
        "id": 7,
        "sender": "s",
        "amount": 12.0,
        "tags": ["a", "b"],
        "at": {"city": None},
        "any": {"b": [1.5, None], "a": "x"},
        "pair": [1, "two"],
        "more": [True],
    }
    target = anything(**{f"v{at}": schema for at, (_, schema, _) in enumerate(TYPES)})
    given = [f"{expression} as v{at}" for at, (expression, _, _) in enumerate(TYPES)]
    (found,) = run(spark, f"select id, {', '.join(given)} from source", target, [document])
    assert isinstance(found, dict)
    for at, (expression, schema, want) in enumerate(TYPES):
        value = found.get(f"v{at}", ABSENT)
        wanted = document if want == "whole" else want
        assert value == wanted, f"{expression} as {schema}"


def test_any_value_is_written_in_the_canonical_form(spark: SparkSession) -> None:
    values: list[Json] = [
        0.1, -0.5, 1e-4, 1.5e-5, 123456789.25, 2.0**53, 1e15 + 0.5, 1e16, 1.5e300, -3.0, 1.5e-310,
        -0.0, 2.0**53 + 2, 'ü"\\\n', 12345.6789, 1e22,
    ]  # fmt: skip
    source = collection("acme/in", {"id": {"type": "integer"}, "n": {"type": "number"}, "t": TEXT})
    documents: list[dict[str, Json]] = [
        {"id": at, ("t" if isinstance(v, str) else "n"): v} for at, v in enumerate(values)
    ]
    target = anything()
    made = transform("select id, n as x, struct(t) as y from source", target, source=source)
    rows = made.apply(frame_of(spark, documents, source), order=None)
    extra = write_layout(target).extra
    found = [row[0] for row in rows.select(extra or "").collect()]
    for value, row in zip(values, found, strict=True):
        text = row.get("y") if isinstance(value, str) else row.get("x")
        assert text == canonical_json({"t": value} if isinstance(value, str) else value)


@pytest.mark.parametrize(
    ("expression", "schema", "says"),
    [
        ("amount + 0.5", {"type": "integer"}, "/v: 12.5 is not an integer"),
        ("double('NaN')", NUMBER, "/v: NaN is not a number in JSON"),
        ("1e30d", {"type": "integer"}, "/v: 1.0E30 is not an integer"),
        ("9223372036854775808d", {"type": "integer"}, "is not an integer"),
        ("9.999", MONEY, "/v: 9.999 is not decimal(11,2)"),
        ("9.999d", MONEY, "/v: 9.999 is not decimal(11,2)"),
        ("array('a', null)", {"type": "array", "items": TEXT}, "/v/*: null is not allowed here"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error(
    spark: SparkSession, expression: str, schema: Json, says: str
) -> None:
    text = f"select id, {expression} as v from source"
    with pytest.raises(LambdaFailed, match="does not fit") as failed:
        run(spark, text, anything(v=schema), [{"id": 7, "amount": 12.0}])
    assert says in failed.value.what
    assert failed.value.where == "transform t"


def test_an_error_of_the_lambda_names_its_line(spark: SparkSession) -> None:
    text = "select id,\n  1 / (id - 7) as v\nfrom source"
    with pytest.raises(LambdaFailed, match="Division by zero") as failed:
        run(spark, text, anything(v=NUMBER), [{"id": 7}])
    assert failed.value.where == "transform t, line 2: 1 / (id - 7)"


# --- null and absent ---


def test_null_is_absent_where_it_may_be(spark: SparkSession) -> None:
    nullable: Json = {"type": ["string", "null"]}
    properties: dict[str, Json] = {
        "id": {"type": "integer"},
        "a": nullable,
        "b": nullable,
        "c": TEXT,
        "d": {},
    }
    target = collection("acme/out", properties, required=["id", "b"])
    text = "select id, note as a, note as b, note as c, note as d, note as e from source"
    documents: list[dict[str, Json]] = [{"id": 1}, {"id": 2, "note": "x"}]
    full = {"id": 2, **dict.fromkeys("abcde", "x")}
    assert run(spark, text, target, documents) == [{"id": 1, "b": None}, full]
    assert run(spark, text, target, documents, nulls="explicit") == [
        {"id": 1, "a": None, "b": None, "d": None, "e": None},
        full,
    ]


def test_a_star_copies_documents_exactly(spark: SparkSession) -> None:
    documents: list[dict[str, Json]] = [
        {"id": 1, "note": None, "any": None, "more": {"x": [1.5]}, "at": {"city": None, "zip": 1}},
        {"id": 2, "note": "n", "at": {}, "_meta": {"op": "c"}, "tags": []},
    ]
    want = [documents[0], {k: v for k, v in documents[1].items() if k != "_meta"}]
    other = collection(
        "acme/out",
        {
            "aaa": {"type": ["null", "integer"]},
            "id": {"type": "integer"},
            "more": {"type": "object"},
            "note": {"type": ["string", "null"]},
            "at": {
                "type": "object",
                "properties": {"city": {"type": ["string", "null"]}, "x": TEXT},
            },
        },
    )
    named = "_meta" in {m.name for m in read_layout(SOURCE).members}
    for target in (SOURCE, other):
        found = run(
            spark, "select *, `at/city` as town_of from source where true", target, documents
        )
        towns = [d.pop("town_of", None) for d in found if isinstance(d, dict)]
        assert towns == [None, None]
        assert found == (want if named else documents)


def test_members_that_the_target_must_not_have_are_an_error(spark: SparkSession) -> None:
    closed = collection("acme/out", {"id": {"type": "integer"}}, additionalProperties=False)
    open_source = collection("acme/in", {"id": {"type": "integer"}})
    assert run(spark, "select * from source", closed, [{"id": 1}], source=open_source) == [
        {"id": 1}
    ]
    with pytest.raises(LambdaFailed, match="there is no member more"):
        run(spark, "select * from source", closed, [{"id": 1, "more": 2}], source=open_source)


def test_members_that_only_the_target_names_are_taken_out_of_the_others(
    spark: SparkSession,
) -> None:
    source = collection("acme/in", {"id": {"type": "integer"}})
    target = anything(
        n={"type": "integer"},
        t={"type": ["string", "null"]},
        b={"type": "boolean"},
        x=NUMBER,
        tags={"type": "array", "items": TEXT},
    )
    documents: list[dict[str, Json]] = [
        {"id": 1, "n": 2**60 + 1, "t": 'a"b', "b": False, "x": 1.5, "other": [1]},
        {"id": 2, "t": None, "x": 3},
    ]
    assert run(spark, "select * from source", target, documents, source=source) == documents
    unfit: list[dict[str, Json]] = [{"n": 1.5}, {"n": "1"}, {"t": 1}, {"b": 1}, {"tags": ["a"]}]
    for wrong in unfit:
        with pytest.raises(LambdaFailed, match="does not fit"):
            run(spark, "select * from source", target, [{"id": 1, **wrong}], source=source)


def test_an_alias_with_a_slash_writes_inside(spark: SparkSession) -> None:
    inner: Json = {"type": "object", "properties": {"n": NUMBER}}
    target = anything(a=inner, m={"type": "object", "additionalProperties": NUMBER})
    text = "select id, amount as `a/n`, amount as `m/x`, amount as `z/y`, note as `z/t` from source"
    assert run(spark, text, target, [{"id": 1, "amount": 2}, {"id": 2}]) == [
        {"id": 1, "a": {"n": 2}, "m": {"x": 2}, "z": {"y": 2}},
        {"id": 2},
    ]


def test_views_are_tables(spark: SparkSession) -> None:
    views = {
        "names": "select * from values ('s', 'Sam'), ('r', 'Ria') as t(short, long); ",
        "longer": "select long from names -- all of them",
    }
    text = (
        "select id, long as name from source join names on sender = short\n"
        "where long in (select long from longer)"
    )
    target = anything(name=TEXT)
    documents: list[dict[str, Json]] = [{"id": 1, "sender": "s"}, {"id": 2, "sender": "?"}]
    assert run(spark, text, target, documents, views=views) == [{"id": 1, "name": "Sam"}]


def test_nothing_is_left_in_the_session(spark: SparkSession) -> None:
    run(spark, "select id from source", anything(), [{"id": 1}])
    assert [table.name for table in spark.catalog.listTables()] == []


# --- order ---

LAST = collection(
    "acme/last",
    {"id": {"type": "string"}, "v": TEXT, "n": {"type": "integer"}, "x": {"type": "integer"}},
    key=["/id"],
)


def reduced(frame: DataFrame, target: CollectionSpec) -> dict[Any, Json]:
    from pyspark.sql import functions as f

    from penstock.native.reduce import reduce_dataframe

    plan = compile_reduction(compiled(target.read_schema.text), target.key)
    rows = reduce_dataframe(plan, frame, order=[f.col(f"`{ORDER}`")], full=True)
    names = [field.name for field in spark_schema(write_layout(target)).fields]
    found = documents_of(rows.select(*(f"`{n}`" for n in names if n in rows.columns)), target)
    return {d["id"]: d for d in found if isinstance(d, dict)}


ORDERED: list[tuple[str, dict[str, Any]]] = [
    (
        "select sender as id, 'sent' as v, id as n from source\n"
        "union all\nselect recipient, 'got', id from source -- the last statement wins",
        {"a": ("got", 3), "b": ("sent", 3)},
    ),
    (
        "select sender as id, tag as v, id as n from source lateral view explode(tags) t as tag",
        {"a": ("y", 2), "b": ("z", 3)},
    ),
    (
        "with c(who, what, n) as (select sender, note, id from source where id > 0)\n"
        "select who as id, what as v, c.n from (select * from c) c",
        {"a": ("n2", 2), "b": ("n3", 3)},
    ),
    (
        "select sender as id, max(note) as v, max(id) as n from source group by sender, amount",
        {"a": ("n2", 2), "b": ("n3", 3)},
    ),
    (
        "select * except (id), sender as id, note as v, struct(*).id as n from source",
        {"a": ("n2", 2), "b": ("n3", 3)},
    ),
]


@pytest.mark.parametrize(("text", "want"), ORDERED, ids=range(len(ORDERED)))
def test_order_travels_with_rows(spark: SparkSession, text: str, want: dict[str, Any]) -> None:
    documents: list[dict[str, Json]] = [
        {"id": 1, "sender": "a", "recipient": "b", "tags": ["z"], "note": "n1", "amount": 1},
        {"id": 2, "sender": "a", "recipient": "b", "tags": ["x", "y"], "note": "n2", "amount": 2},
        {"id": 3, "sender": "b", "recipient": "a", "tags": ["a", "z"], "note": "n3", "amount": 3},
    ]
    nonlinear = "group by" in text
    made = transform(text, LAST, nonlinear=nonlinear)
    for shuffled in (documents, documents[::-1]):
        frame = frame_of(spark, documents, SOURCE)
        if shuffled is not documents:
            frame = frame.orderBy(frame[ORDER].desc()).repartition(2)
        found = reduced(made.apply(frame, order=ORDER), LAST)
        assert {i: (d["v"], d["n"]) for i, d in found.items() if isinstance(d, dict)} == want


def test_the_order_of_one_row_per_document_stays_a_number(spark: SparkSession) -> None:
    made = transform("select sender as id, note as v from source where id > 0", LAST)
    frame = frame_of(spark, [{"id": 1, "sender": "a"}], SOURCE)
    kinds = {True: "struct", False: "bigint"}
    for uniform, kind in kinds.items():
        found = made.apply(frame, order=ORDER, uniform=uniform)
        assert found.columns[-1] == ORDER
        assert found.schema[-1].dataType.simpleString().startswith(kind)


def test_a_frame_is_made_once_and_collected_often(spark: SparkSession, tmp_path: Path) -> None:
    layout = read_layout(SOURCE)
    path = tmp_path / "rows.parquet"

    def put(number: int) -> None:
        pq.write_table(pa.Table.from_batches([to_arrow([{"id": number}], layout)]), path)

    put(1)
    frame = spark.read.schema(spark_schema(layout)).parquet(str(path))
    made = transform("select id, id + 1 as n from source", anything()).apply(frame, order=None)
    assert documents_of(made, anything()) == [{"id": 1, "n": 2}]
    put(5)
    assert documents_of(made, anything()) == [{"id": 5, "n": 6}]


def test_the_result_has_the_types_of_the_layout(spark: SparkSession) -> None:
    target = anything(
        a={"type": "array", "items": TEXT}, s={"type": "object", "properties": {"x": TEXT}}
    )
    made = transform("select 1 as id, array('x') as a, struct('y' as x) as s from source", target)
    found = made.apply(frame_of(spark, [{"id": 1}], SOURCE), order=None)
    want = spark_schema(write_layout(target))
    assert [(x.name, x.dataType, x.metadata) for x in found.schema] == [
        (x.name, x.dataType, x.metadata) for x in want
    ]


def test_spark_accepts_what_is_accepted(spark: SparkSession) -> None:
    frame = frame_of(spark, [], spark_lambdas.SOURCE)
    for text, _ in spark_lambdas.LINEAR:
        made = transform(
            text, spark_lambdas.LAST, source=spark_lambdas.SOURCE, views=spark_lambdas.VIEWS
        )
        assert made.apply(frame, order=ORDER).columns[-1] == ORDER, text


def test_the_list_of_functions_is_that_of_spark(spark: SparkSession) -> None:
    theirs = {row[0] for row in spark.sql("SHOW SYSTEM FUNCTIONS").collect()}
    named = {name for name in theirs if name.isidentifier()}
    assert named - FUNCTIONS == set()
    assert FUNCTIONS - named == {"try_cast", "timestampadd", "timestampdiff"}
