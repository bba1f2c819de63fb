"""Keys, r-clocks and shards on Spark: those of the model, to the bit."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from penstock.journal.rows import row_schema
from penstock.journal.schemas import layout
from penstock.model import pointer
from penstock.model.clock import CLOCK_MAX, Clock, rotate
from penstock.model.json_order import ABSENT
from penstock.model.keys import pack
from penstock.model.routing import Routing, Shard, split_shards
from penstock.model.schema import compiled
from penstock.model.shape import locate
from penstock.model.spec import Frozen
from penstock.native.arrow import to_arrow
from penstock.native.spark_types import spark_schema
from penstock.shuffle.route import key_columns, needed_columns, r_clock, shard_column

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# ------------------------------------------------------------------------------------------- keys

SCHEMA = {
    "type": "object",
    "required": ["id", "void", "deep"],
    "properties": {
        "id": {"type": "integer"},
        "flag": {"type": "boolean", "default": True},
        "name": {"type": "string"},
        "kind": {"type": ["string", "null"], "default": "none"},
        "void": {"type": ["integer", "null"], "default": 7},
        "large": {"type": "integer", "minimum": 0, "maximum": 10**30},
        "huge": {"type": "integer", "minimum": 0, "maximum": 10**50},
        "deep": {
            "type": ["object", "null"],
            "required": ["n"],
            "properties": {
                "n": {"type": ["integer", "null"], "default": -5},
                "a.b": {"type": ["string", "null"], "default": "d"},
            },
        },
        "list": {"type": "array", "items": {"type": "integer"}},
    },
}

DOCUMENTS: list[dict[str, Any]] = [
    {"id": 1, "void": None, "deep": None},
    {"id": -1, "void": 3, "deep": {"n": None}, "flag": False, "name": "a\0b", "kind": None},
    {"id": 2**62, "void": 0, "deep": {"n": 9, "a.b": None}, "kind": "x", "large": 10**29},
    {"id": 0, "void": 1, "deep": {"n": 0, "a.b": "é"}, "huge": 10**49, "list": [5, 6], "more": 4},
    {"id": 5, "void": 1, "deep": {"n": 1}, "huge": 3, "list": [8], "more": "four"},
]

KEYS = [
    ("/id",),
    ("/flag", "/name"),
    ("/kind",),
    ("/void", "/large"),
    ("/deep/n", "/id"),
    ("/deep/a.b",),
    ("/huge", "/kind"),
    ("/list/1", "/deep/a.b"),
    ("/more",),
]


def oracle(document: dict[str, Any], key: tuple[str, ...]) -> bytes:
    """What the model says: a missing value is its default, or null."""
    shape = compiled(Frozen(SCHEMA).text).shape
    values = []
    for location in key:
        value: Any = pointer.get(document, location)
        if value is ABSENT:
            default: Any = locate(shape, location)[0].default
            value = None if default is ABSENT else default
        values.append(value)
    return pack(values)


@pytest.mark.spark
def test_keys_are_packed_as_the_model_packs_them(spark: SparkSession) -> None:
    text = Frozen(SCHEMA).text
    root = layout(text)
    import pyarrow as pa

    table = pa.Table.from_batches([to_arrow(DOCUMENTS, root)])
    frame = spark.createDataFrame(table, spark_schema(root))
    found = [key_columns(compiled(text).shape, root, key) for key in KEYS]
    rows = frame.select(*(key.packed.alias(f"k{n}") for n, key in enumerate(found))).collect()
    for document, row in zip(DOCUMENTS, rows, strict=True):
        for key, packed in zip(KEYS, row, strict=True):
            assert bytes(packed) == oracle(document, key), (document, key)


@pytest.mark.parametrize(
    ("key", "needs"),
    [
        pytest.param(("/id",), ("id",), id="a column"),
        pytest.param(("/deep/n", "/deep/a.b"), ("deep",), id="members of a column"),
        pytest.param(("/kind",), ("kind", "_n"), id="a null is listed beside it"),
        pytest.param(("/more", "/id"), ("id", "_x"), id="unnamed members are kept together"),
    ],
)
def test_a_key_needs_its_columns_and_no_others(
    key: tuple[str, ...], needs: tuple[str, ...]
) -> None:
    root = layout(Frozen(SCHEMA).text)
    tops = [pointer.parse(location)[0] for location in key]
    assert needed_columns(root, tops) == needs
    assert set(needs) <= set(row_schema(root).names)


# ----------------------------------------------------------------------------------------- shards


def shards(*ranges: tuple[int, int, int, int]) -> Routing:
    return Routing(
        tuple(
            Shard(id=f"t/{n}", key_begin=a, key_end=b, r_begin=c, r_end=d)
            for n, (a, b, c, d) in enumerate(ranges)
        )
    )


END = 0xFFFFFFFF
UNEQUAL = shards((0, 0xFF, 0, END), (0x100, 0x7FFFFFFF, 0, END), (0x80000000, END, 0, END))
R_SPLIT = shards((0, END, 0, 0x7FFFFFFF), (0, END, 0x80000000, END))
BOTH = shards(
    (0, 0x3FFFFFFF, 0, END),
    (0x40000000, 0xBFFFFFFF, 0, 0x1FFFFFFF),
    (0x40000000, 0xBFFFFFFF, 0x20000000, 0x7FFFFFFF),
    (0x40000000, 0xBFFFFFFF, 0x80000000, END),
    (0xC0000000, END, 0, 0x80000000),
    (0xC0000000, END, 0x80000001, END),
)


@pytest.mark.spark
def test_r_clocks_are_those_of_the_model(spark: SparkSession) -> None:
    chance = random.Random(1)
    clocks = [0, 1, 2, 3, 4, 16, 32, 160, 320, 0x1EE833B04AFC0000, CLOCK_MAX]
    clocks += [chance.getrandbits(63) for _ in range(500)]
    frame = spark.createDataFrame([(clock,) for clock in clocks], "c BIGINT")
    found = [row[0] for row in frame.selectExpr(r_clock("c")).collect()]
    assert found == [rotate(Clock(clock)) for clock in clocks]
    assert found[:3] == [0, 0x80000000, 0x40000000]


@pytest.mark.spark
def test_rows_go_to_the_shards_that_the_model_names(spark: SparkSession) -> None:
    from pyspark.sql import functions as f

    chance = random.Random(2)
    hashes = [0, 1, 0xFF, 0x100, 0x162FFE02, 0x78318482, 0x7FFFFFFF, 0x80000000, 0xD9E78640, END]
    rows = [(n, h, chance.getrandbits(63)) for n, h in enumerate(hashes * 20)]
    frame = spark.createDataFrame(rows, "row INT, h BIGINT, c BIGINT")
    frame = frame.withColumn("r", f.expr(r_clock("c")))
    plain = [(split_shards(1), True), (split_shards(3), False), (UNEQUAL, False)]
    split = [(routing, filtered) for routing in (R_SPLIT, BOTH) for filtered in (False, True)]
    cases = plain + split
    frames = [
        frame.select(
            f.lit(n).alias("n"),
            "row",
            shard_column(routing, f.col("h"), f.col("r"), filter_r_clocks=filtered).alias("s"),
        )
        for n, (routing, filtered) in enumerate(cases)
    ]
    union = frames[0]
    for other in frames[1:]:
        union = union.union(other)
    got: dict[tuple[int, int], list[int]] = {}
    for n, row, shard in union.collect():
        got.setdefault((n, row), []).append(shard)
    for n, (routing, filtered) in enumerate(cases):
        for row, key_hash, clock in rows:
            want = routing.route(key_hash, rotate(Clock(clock)), filter_r_clocks=filtered)
            assert sorted(got[n, row]) == list(want), json.dumps([n, row])
