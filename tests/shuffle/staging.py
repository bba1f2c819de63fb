"""Deliveries, and the rows that a slice would make of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.journal.committed import VisibleRows
from penstock.journal.state import Fragment, Inline
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.frontier import EMPTY
from penstock.model.runs import Run
from penstock.shuffle.delivery import Checkpoint, Delivery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ONE, TWO, THREE = (Producer(Producer.MULTICAST | n) for n in (1, 2, 3))

COLUMNS = (
    "_shard INT, _priority INT, _adj_clock BIGINT, _producer BIGINT, _binding INT, _clock BIGINT, "
    "_flags SMALLINT, _key_hash BIGINT, _key BINARY"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """What one close committed: its delivery, and the clocks of its rows."""

    delivery: Delivery
    clocks: tuple[int, ...]


def wrote(
    lsn: int,
    producer: Producer,
    clocks: Sequence[int],
    *,
    binding: int = 0,
    journal: str = "acme/orders/00",
    clock_gt: int = 0,
    commit: int | None = None,
) -> Wrote:
    """Rows of one run, committed at the last of them unless said otherwise."""
    run = Run(
        producer=producer,
        kind=Flag.CONTINUE_TXN,
        first_offset=0,
        last_offset=len(clocks) - 1,
        rows=len(clocks),
        clock_min=Clock(clocks[0]),
        clock_max=Clock(clocks[-1]),
        clock_max_offset=len(clocks) - 1,
        increasing=True,
    )
    fragment = Fragment(
        rows=len(clocks),
        bytes=10 * len(clocks),
        at=Inline(data=b""),
        schema="schema",
        runs=(run,),
        key_hash_min=0,
        key_hash_max=0,
    )
    delivery = Delivery(
        journal=journal,
        binding=binding,
        producer=producer,
        commit=Clock(clocks[-1] if commit is None else commit),
        rows=(VisibleRows(fragment=fragment, run=run, clock_gt=Clock(clock_gt)),),
        bytes=10 * len(clocks),
        lsn=lsn,
    )
    return Wrote(delivery=delivery, clocks=tuple(c for c in clocks if c > clock_gt))


def deliveries(some: Iterable[Wrote]) -> tuple[Delivery, ...]:
    return tuple(each.delivery for each in some)


def checkpoint(some: Iterable[Wrote]) -> Checkpoint:
    return Checkpoint(frontier=EMPTY, deliveries=deliveries(some))


class Staged(NamedTuple):
    """A row as it is staged; what it sorts by comes first."""

    descending_priority: int
    adj_clock: int
    clock: int
    producer: int
    binding: int

    @property
    def text(self) -> str:
        """Its document."""
        return f"{self.binding}/{self.producer}/{self.clock}"

    def shard(self, shards: int) -> int:
        return zlib.crc32(self.text.encode()) % shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Bindings with their priorities and delays, over some shards."""

    shards: int = 2
    priorities: tuple[int, ...] = (0, 0)
    delays: tuple[int, ...] = (0, 0)

    def rows(self, some: Iterable[Wrote]) -> list[Staged]:
        """All rows, in processing order."""
        return sorted(
            Staged(
                -self.priorities[each.delivery.binding],
                max(clock + self.delays[each.delivery.binding], each.delivery.level),
                clock,
                int(each.delivery.producer),
                each.delivery.binding,
            )
            for each in some
            for clock in each.clocks
        )

    def by_shard(self, some: Iterable[Wrote]) -> list[list[Staged]]:
        """The same at the shards that own them."""
        rows = self.rows(some)
        return [
            [row for row in rows if row.shard(self.shards) == shard] for shard in range(self.shards)
        ]

    def frame(self, spark: SparkSession, some: Iterable[Wrote]) -> DataFrame:
        """What `Slice.exchange` makes of them: columns of documents for bindings that have any."""
        from pyspark.sql import functions as f

        from penstock.shuffle.segment_files import ORDER

        rows = self.rows(some)
        bindings = sorted({row.binding for row in rows}) or [0]
        documents = "".join(f", d{n} STRUCT<id: BIGINT, `a.b`: STRING>" for n in bindings)
        values = [
            (
                row.shard(self.shards),
                -row.descending_priority,
                row.adj_clock,
                row.producer,
                row.binding,
                row.clock,
                int(Flag.CONTINUE_TXN),
                zlib.crc32(row.text.encode()),
                row.text.encode(),
                *((row.clock, row.text) if row.binding == n else None for n in bindings),
            )
            for row in reversed(rows)
        ]
        return (
            spark.createDataFrame(values, COLUMNS + documents)
            .repartitionById(self.shards, f.col("_shard"))
            .sortWithinPartitions(f.desc("_priority"), *ORDER[1:])
        )
