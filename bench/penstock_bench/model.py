"""`penstock bench model`: frontiers, packed keys and reductions, each beside plain code.

Frontiers: 100,000 producers, reduced and encoded, compared with entry by entry and with JSON.
Keys: one by one and by column in Python; as expressions and through Python workers in Spark.
Reductions: what a schema compiles to, compared with the `groupBy` that a person would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.model import frontier_codec, keys
from penstock.model.clock import Clock, Producer
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.json_order import Json
from penstock.model.producer_frontier import ProducerFrontier
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, seconds_of

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame

PRODUCERS: Final = 100_000
JOURNALS: Final = 1_000
_CLOCK: Final = 0x1EE833B04AFC0000
_MULTICAST: Final = 1 << 40


def run(bench: Bench) -> Report:
    """Measure everything in the model that must be fast."""
    parts = (measure_frontiers, measure_keys, measure_native_keys, measure_reductions)
    return Report.merge(part(bench) for part in parts)


def measure_frontiers(bench: Bench) -> Report:
    """Reduce and encode a frontier of 100,000 producers."""
    bench.say(f"building frontiers of {PRODUCERS:,} producers")
    before, after = _frontier(1), _frontier(2)
    few = _frontier(2, one_in=100)
    entries_before, entries_after = _entries(before), _entries(after)
    encoded, text = frontier_codec.encode(after), _to_json(after)
    taken = bench.interleave(
        "frontiers",
        {
            "reduce": seconds_of(lambda: before.reduce(after)),
            "reduce 1 %": seconds_of(lambda: before.reduce(few)),
            "reduce entry by entry": seconds_of(lambda: _reduce(entries_before, entries_after)),
            "encode": seconds_of(lambda: frontier_codec.encode(after)),
            "decode": seconds_of(lambda: frontier_codec.decode(encoded)),
            "encode as JSON": seconds_of(lambda: _to_json(after)),
            "decode from JSON": seconds_of(lambda: _from_json(text)),
        },
    )
    times = tuple(
        Result(name=f"frontier: {name}", value=1000 * taken.median(name), unit="ms")
        for name in taken.by_peer
    )
    size = Result(name="frontier: encoded", value=len(encoded) / PRODUCERS, unit="bytes/producer")
    return Report(
        results=(*times, size),
        goals=(
            Goal(
                name="frontier: reduce against entry by entry",
                measured=taken.ratio("reduce entry by entry", "reduce"),
                goal=10,
            ),
            Goal(
                name="frontier: encode against JSON",
                measured=taken.ratio("encode as JSON", "encode"),
                goal=10,
            ),
            Goal(
                name="frontier: decode against JSON",
                measured=taken.ratio("decode from JSON", "decode"),
                goal=10,
            ),
        ),
    )


def _to_json(frontier: Frontier) -> bytes:
    return msgspec.json.encode(list(frontier), enc_hook=int)


def _from_json(text: bytes) -> Frontier:
    values = msgspec.json.decode(
        text, type=list[JournalFrontier], dec_hook=lambda kind, value: kind(value)
    )
    return Frontier.of(values)


def measure_keys(bench: Bench) -> Report:
    """Pack and hash keys of a string and an integer, in Python on one core."""
    count = bench.size(full=200_000, quick=50_000)
    names = [f"customer-{n * 2654435761 % 1_000_003}" for n in range(count)]
    numbers = list(range(count))
    rows = list(zip(names, numbers, strict=True))
    taken = bench.interleave(
        "keys in Python",
        {
            "one by one": seconds_of(lambda: [keys.key_hash(keys.pack(row)) for row in rows]),
            "by column": seconds_of(
                lambda: [keys.key_hash(key) for key in keys.pack_columns([names, numbers])]
            ),
        },
    )
    return Report(
        results=tuple(
            Result(
                name=f"keys: in Python, {peer}",
                value=count / taken.median(peer),
                unit="keys/s",
            )
            for peer in taken.by_peer
        ),
        goals=(
            Goal(
                name="keys: by column against one by one",
                measured=taken.ratio("one by one", "by column"),
                goal=1.2,
            ),
        ),
    )


def measure_native_keys(bench: Bench) -> Report:
    """Pack and hash the same keys in Spark on all cores: by expressions, and by Python workers."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    from penstock.native.keys import key_hash, packed_key

    spark = bench.spark()  # first: without a session, Spark cannot build columns
    count = bench.size(full=4_000_000, quick=1_000_000)
    name = f.concat(f.lit("customer-"), (f.col("id") * 2654435761 % 1_000_003).cast("string"))
    frame = spark.range(count).select(name.alias("name"), f.col("id").alias("number")).persist()
    bench.say(f"making {frame.count():,} keys in Spark")
    packed = packed_key([(f.col("name"), t.StringType()), (f.col("number"), t.LongType())])
    native = frame.select(packed.alias("packed"), key_hash(packed).alias("hash"))
    through_python = frame.mapInArrow(_pack_batches, "packed binary, hash bigint")
    taken = bench.interleave(
        "keys in Spark",
        {"as expressions": _drain(native), "through Python": _drain(through_python)},
        warmups=2,
    )
    frame.unpersist()
    return Report(
        results=tuple(
            Result(
                name=f"keys: in Spark, {peer}",
                value=count / taken.median(peer),
                unit="keys/s",
            )
            for peer in taken.by_peer
        ),
        goals=(
            Goal(
                name="keys: Spark expressions against Python workers",
                measured=taken.ratio("through Python", "as expressions"),
                goal=1,
            ),
        ),
    )


def measure_reductions(bench: Bench) -> Report:
    """Reduce documents by key with compiled schemas, and with hand-written aggregates."""
    from pyspark.sql import functions as f

    from penstock.model.schema import CompiledSchema
    from penstock.native.plan import compile_reduction
    from penstock.native.reduce import reduce_dataframe

    spark = bench.spark()
    count = bench.size(full=2_000_000, quick=1_000_000)
    customers = bench.size(full=100_000, quick=50_000)
    spread = f.col("id") * 2654435761 % 1_000_003
    documents = spark.range(count).select(
        f.concat(f.lit("customer-"), (spread % customers).cast("string")).alias("customer"),
        (f.col("id") % 7).alias("items"),
        (spread / 100).alias("total"),
        spread.alias("most"),
        spread.alias("least"),
        f.concat(f.lit("status "), (spread % 13).cast("string")).alias("status"),
        f.concat(f.lit("city "), (spread % 997).cast("string")).alias("city"),
        f.concat(f.lit("channel "), (spread % 5).cast("string")).alias("channel"),
        f.col("id").alias("clock"),
    )
    documents = documents.persist()
    bench.say(f"making {documents.count():,} documents of {customers:,} customers")
    by_hand = {
        "totals": documents.groupBy("customer").agg(
            f.sum("items"), f.sum("total"), f.max("most"), f.min("least")
        ),
        "statuses": documents.groupBy("customer").agg(
            f.sum("items"), f.max_by("status", "clock"), f.min_by("channel", "clock")
        ),
        "profiles": documents.groupBy("customer").agg(
            f.sum("items"),
            f.max_by("status", "clock"),
            f.max_by("city", "clock"),
            f.min_by("channel", "clock"),
        ),
    }
    results: list[Result] = []
    goals: list[Goal] = []
    bars: list[tuple[str, float]] = []
    for name, members in _REDUCTIONS.items():
        plan = compile_reduction(CompiledSchema(_schema(members)), ["/customer"])
        compiled = reduce_dataframe(
            plan,
            documents.select("customer", *members, "clock"),
            order=[f.col("clock")],
            full=True,
        )
        taken = bench.interleave(
            f"reductions, {name}",
            {"compiled": _drain(compiled), "by hand": _drain(by_hand[name])},
            warmups=2,
        )
        results += [
            Result(
                name=f"reduce: {name}, {peer}",
                value=count / taken.median(peer),
                unit="documents/s",
            )
            for peer in taken.by_peer
        ]
        bars += [
            (f"{OURS}, {name}", count / taken.median("compiled")),
            (f"groupBy by hand, {name}", count / taken.median("by hand")),
        ]
        goals.append(
            Goal(
                name=f"reduce: {name}, compiled against by hand",
                measured=taken.ratio("by hand", "compiled"),
                goal=0.9,
            )
        )
    documents.unpersist()
    chart = Chart(
        name="reductions",
        title=f"Reduce {count:,} documents to {customers:,} customers",
        unit="documents/s",
        bars=tuple(bars),
        note="What a schema compiles to, and the aggregates that a person would write for it.",
    )
    return Report(results=tuple(results), goals=tuple(goals), charts=(chart,))


_REDUCTIONS: Final[Mapping[str, Mapping[str, Json]]] = {
    "totals": {
        "items": {"type": "integer", "reduce": {"strategy": "sum"}},
        "total": {"type": "number", "reduce": {"strategy": "sum"}},
        "most": {"type": "integer", "reduce": {"strategy": "maximize"}},
        "least": {"type": "integer", "reduce": {"strategy": "minimize"}},
    },
    "statuses": {
        "items": {"type": "integer", "reduce": {"strategy": "sum"}},
        "status": {"type": "string"},
        "channel": {"type": "string", "reduce": {"strategy": "firstWriteWins"}},
    },
    "profiles": {
        "items": {"type": "integer", "reduce": {"strategy": "sum"}},
        "status": {"type": "string"},
        "city": {"type": "string", "reduce": {"strategy": "lastWriteWins"}},
        "channel": {"type": "string", "reduce": {"strategy": "firstWriteWins"}},
    },
}


def _schema(members: Mapping[str, Json]) -> dict[str, Json]:
    return {
        "type": "object",
        "required": ["customer", *members],
        "properties": {"customer": {"type": "string"}, **members},
        "reduce": {"strategy": "merge"},
    }


def _drain(frame: DataFrame) -> Callable[[], float]:
    """Make a peer that computes every row of a frame and keeps none."""
    return seconds_of(lambda: frame.write.format("noop").mode("overwrite").save())


def _pack_batches(batches: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
    """Pack keys as a Python worker would."""
    import pyarrow as pa

    for batch in batches:
        packed = keys.pack_columns([column.to_pylist() for column in batch.columns])
        hashes = [keys.key_hash(key) for key in packed]
        yield pa.RecordBatch.from_arrays(
            [pa.array(packed, pa.binary()), pa.array(hashes, pa.int64())], ["packed", "hash"]
        )


def _frontier(generation: int, *, one_in: int = 1) -> Frontier:
    """Build a frontier of many journals, some producers with an open span.

    A later generation has read further.
    """
    per_journal = PRODUCERS // JOURNALS

    def entries(journal: int) -> Iterator[ProducerFrontier]:
        for n in range(0, per_journal, one_in):
            end = 1000 * generation + 7 * n + 1
            yield ProducerFrontier(
                producer=Producer(_MULTICAST | (journal * per_journal + n)),
                last_commit=Clock(_CLOCK + 100_000 * generation + journal + n),
                offset=end if n % 10 == 0 else -end,
            )

    return Frontier.of(
        JournalFrontier(
            journal=f"acme/orders/region=r{journal:04}/pivot=00", producers=tuple(entries(journal))
        )
        for journal in range(JOURNALS)
    )


_Entries = Mapping[tuple[str, int, Producer], ProducerFrontier]


def _entries(frontier: Frontier) -> _Entries:
    return {(j.journal, j.binding, p.producer): p for j in frontier for p in j.producers}


def _reduce(base: _Entries, delta: _Entries) -> _Entries:
    """Reduce frontiers that are dictionaries, entry by entry."""
    reduced = dict(base)
    for key, entry in delta.items():
        held = reduced.get(key)
        reduced[key] = entry if held is None else held.reduce(entry)
    return reduced
