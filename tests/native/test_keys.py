"""Spark packs, hashes and routes keys exactly as the model does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.errors import UserError
from penstock.model import keys
from penstock.model.routing import RANGE_MAX, shard_of, split_shards
from penstock.native.keys import key_hash, pack_component, packed_key, shard_index

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TYPES: dict[str, t.DataType] = {
    "flag": t.BooleanType(),
    "small": t.IntegerType(),
    "number": t.LongType(),
    "large": t.DecimalType(38, 0),
    "text": t.StringType(),
    "blob": t.BinaryType(),
}
SCHEMA = t.StructType([t.StructField(name, kind) for name, kind in TYPES.items()])

POWERS = [0, *(2 ** (8 * k) for k in range(16)), 10**37]
INTEGERS = sorted({s * p + d for p in POWERS for d in (-1, 0, 1) for s in (1, -1)})
LONGS = [n for n in [*INTEGERS, -(2**63), 2**63 - 1] if -(2**63) <= n < 2**63]
LARGE = [*INTEGERS, 2**64 + 2**32, -(2**64) - 1, 10**38 - 1, 1 - 10**38]
TEXTS = ["", "\0", "\0\0", "a\0b", "\0\x01", "é", "\ue000", "\U0001f600\0", "key", "x" * 300]
BLOBS = [text.encode() for text in TEXTS] + [b"\xff", b"\0\xff", b"\xff\0\xff\0"]
CHARACTERS = "\0\x01\x7faz09 é\u07ff\ud7ff\ue000\U0001f600\U0010ffff"

ROWS_PER_JOB = 10_000
SHARDS = [1, 2, 3, 7, 1000]

Row = tuple[bool | int | str | bytes | None, ...]


def random_row(rng: random.Random) -> Row:
    def number(bits_max: int) -> int:
        return rng.choice((1, -1)) * rng.getrandbits(rng.randint(0, bits_max))

    def text() -> str:
        return "".join(rng.choices(CHARACTERS, k=rng.randint(0, 12)))

    row = (
        rng.choice([True, False]),
        number(31) if rng.random() < 0.9 else rng.choice([-(2**31), 2**31 - 1]),
        rng.choice([number(63), rng.choice(LONGS)]),
        rng.choice([number(126), rng.choice(LARGE)]),
        rng.choice([text(), rng.choice(TEXTS)]),
        rng.choice([rng.randbytes(rng.randint(0, 9)), rng.choice(BLOBS)]),
    )
    return tuple(None if rng.random() < 0.1 else value for value in row)


def edge_rows() -> list[Row]:
    columns: list[Sequence[bool | int | str | bytes]] = [
        [True, False], [0], LONGS, LARGE, TEXTS, BLOBS
    ]  # fmt: skip
    return [tuple(None for _ in TYPES)] + [
        tuple(value if i == place else None for i in range(len(TYPES)))
        for place, column in enumerate(columns)
        for value in column
    ]


def test_every_column_type_packs_and_hashes_as_in_the_model(spark: SparkSession) -> None:
    rng = random.Random(random.getrandbits(64))  # the test run prints the seed of `random`
    rows = [*edge_rows(), *(random_row(rng) for _ in range(ROWS_PER_JOB))]
    stored = [
        tuple(Decimal(v) if i == 3 and v is not None else v for i, v in enumerate(row))
        for row in rows
    ]
    # An exchange in between, so that the expressions are compiled rather than folded.
    frame = spark.createDataFrame(stored, SCHEMA).repartition(2)
    packed = packed_key([(f.col(name), kind) for name, kind in TYPES.items()])
    result = frame.withColumn("packed", packed).withColumn("hash", key_hash(f.col("packed")))

    answers = result.collect()
    assert len(answers) == len(rows)
    for got in answers:
        key = tuple(int(v) if isinstance(v, Decimal) else _plain(v) for v in got[: len(TYPES)])
        want = keys.pack(key)
        assert bytes(got["packed"]).hex() == want.hex(), key
        assert got["hash"] == keys.key_hash(want)


def _plain(value: object) -> bool | int | str | bytes | None:
    assert value is None or isinstance(value, bool | int | str | bytes | bytearray)
    return bytes(value) if isinstance(value, bytearray) else value


def test_key_hashes_route_as_in_the_model(spark: SparkSession) -> None:
    begins = {shard.key_begin for count in SHARDS for shard in split_shards(count).shards}
    hashes = sorted({h for b in begins for h in (b - 1, b, b + 1) if 0 <= h <= RANGE_MAX})
    frame = spark.createDataFrame([(h,) for h in [*hashes, RANGE_MAX]], "hash bigint")
    for row in frame.select("hash", *(shard_index(f.col("hash"), n) for n in SHARDS)).collect():
        assert list(row[1:]) == [shard_of(row["hash"], n) for n in SHARDS]


def test_folded_constants_pack_as_compiled_expressions_do(spark: SparkSession) -> None:
    wide = t.DecimalType(38, 0)
    literals = [
        (f.lit("a\0b"), t.StringType(), "026100ff6200", 0xC976F0F9),
        (f.lit(-256).cast("bigint"), t.LongType(), "12feff", 0xA4AC8139),
        (f.lit(-(2**63)).cast("bigint"), t.LongType(), "0c7fffffffffffffff", 0x7AE3C9CB),
        (f.lit(str(2**63)).cast(wide), wide, "1c8000000000000000", 0xA1BB4C60),
        (f.lit(None), t.NullType(), "00", 0x83A7B47F),
    ]  # fmt: skip
    packed = [pack_component(column, kind) for column, kind, _, _ in literals]
    row = spark.range(1).select(*packed, *map(key_hash, packed)).collect()[0]
    assert [bytes(v).hex() for v in row[: len(literals)]] == [v[2] for v in literals]
    assert list(row[len(literals) :]) == [v[3] for v in literals]


@pytest.mark.parametrize(
    "kind", [t.DoubleType(), t.DecimalType(10, 2), t.ArrayType(t.StringType())], ids=str
)
def test_types_that_cannot_be_keys_are_refused(spark: SparkSession, kind: t.DataType) -> None:
    with pytest.raises(UserError, match="column cannot be part of a key"):
        pack_component(f.col("x"), kind)
