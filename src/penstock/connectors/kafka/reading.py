"""Reading ranges of a topic in Spark tasks.

A row of the frame is the number of a range. Ranges of one partition are in the order of their
offsets, one Spark partition each: so documents of one key, which are in one partition of a topic if
their producer keys its records, keep their order.

A range ends at an offset, and not at a record: there may be none at its end. The client says when
it has come to the end of what is decided, which is no earlier than the end of the range.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.connectors.kafka.cluster import Cluster, Trouble
from penstock.connectors.kafka.offsets import Range
from penstock.connectors.kafka.records import Form
from penstock.runtime.connector.capture import Documents
from penstock.runtime.connector.common import ConnectorError

if TYPE_CHECKING:
    import pyarrow
    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

BATCH_RECORDS: Final = 20_000
BATCH_BYTES: Final = 16 << 20
"""Records, and about the bytes, that become documents at once."""

_CONSUMED: Final = 2_000
_SLICE_S: Final = 0.02
STALL_S_MAX: Final = 20.0
"""Seconds without a record after which a task gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaRead:
    """Some offsets of a topic, for Spark to read (`SparkRead`)."""

    binding: int
    bytes: int
    cluster: Cluster
    form: Form
    ranges: tuple[Range, ...]

    @property
    def rows_max(self) -> tuple[int, ...]:
        return tuple(each.count + 1 for each in self.ranges)

    def frame(self, spark: SparkSession) -> DataFrame:
        count = len(self.ranges)
        return spark.range(0, count, 1, numPartitions=count)

    def documents(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Documents]:
        for batch in batches:
            numbers: list[int] = batch.column(0).to_numpy().tolist()
            for at in numbers:
                for records in read_range(self.cluster, self.form, self.ranges[at]):
                    yield self.form.documents(records)


def read_range(cluster: Cluster, form: Form, wanted: Range) -> Iterator[list[Message]]:
    """Yield the records of a range, in order, some at a time. Blocks."""
    from confluent_kafka import TopicPartition

    trouble = Trouble()
    consumer = cluster.consumer(trouble)
    try:
        consumer.assign([TopicPartition(form.topic, wanted.partition, wanted.begin)])
        position, heard = wanted.begin, time.monotonic()
        pending: list[Message] = []
        pending_bytes = 0
        while position < wanted.end:
            with cluster.explained(trouble):
                some = consumer.consume(_CONSUMED, _SLICE_S)
            if some:
                heard = time.monotonic()
            elif time.monotonic() - heard > STALL_S_MAX:
                raise _stalled(cluster, form, wanted, position, trouble)
            for message in some:
                position, is_record = _advanced(cluster, form, wanted, message, trouble)
                if position > wanted.end:
                    break
                if is_record:
                    pending.append(message)
                    pending_bytes += len(message.value() or b"")
            if len(pending) >= BATCH_RECORDS or pending_bytes >= BATCH_BYTES:
                yield pending
                pending, pending_bytes = [], 0
        if pending:
            yield pending
    finally:
        consumer.close()


def _advanced(
    cluster: Cluster, form: Form, wanted: Range, message: Message, trouble: Trouble
) -> tuple[int, bool]:
    """Return the position after a message, and whether it is a record."""
    error, offset = message.error(), message.offset() or 0
    if error is None:
        return offset + 1, True
    if error.name() == "_PARTITION_EOF":
        return offset, False
    if error.name() == "_AUTO_OFFSET_RESET":
        # The next session looks at what is left of the topic, and says what is gone.
        raise ConnectorError(
            "Kafka has removed records that were about to be read",
            where=form.origin(wanted.partition, wanted.begin),
            transient=True,
        )
    raise cluster.explain(error, trouble, form.topic)


def _stalled(
    cluster: Cluster, form: Form, wanted: Range, position: int, trouble: Trouble
) -> ConnectorError:
    why = None if trouble.error is None else trouble.error.str()
    return ConnectorError(
        f"Kafka gave nothing for {STALL_S_MAX:.0f} s, and there is more to read",
        where=f"{cluster.name}, {form.origin(wanted.partition, position)}, up to {wanted.end}",
        why=why,
        fix="is the leader of the partition up?",
        transient=True,
    )
