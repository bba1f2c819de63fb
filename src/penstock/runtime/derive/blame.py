"""SPARK: finds the document at which a query fails.

Spark says what went wrong and where in the text, but not for which row. So the query is run on the
documents up to some clock, again and again, until the first one is found at which it fails. Only
for queries that act on each document by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from penstock.journal.rows import StampNames
from penstock.model.clock import Clock, Producer
from penstock.runtime.derive.spark_engine import SparkTransform
from penstock.runtime.spark_tasks import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def first_failing(
    transform: SparkTransform, documents: DataFrame, stamps: StampNames
) -> tuple[Clock, Producer] | None:
    """Return the clock and producer of the first document at which a query fails. Runs jobs."""
    clock, producer = f.col(quoted(stamps.clock)), f.col(quoted(stamps.producer))
    row = documents.agg(f.min(clock), f.max(clock)).first()
    if row is None or row[0] is None:
        return None
    low, high = int(row[0]), int(row[1])
    if not _fails(transform, documents):
        return None
    while low < high:
        middle = (low + high) // 2
        if _fails(transform, documents.where(clock <= middle)):
            high = middle
        else:
            low = middle + 1
    for found in documents.where(clock == low).select(producer).distinct().collect():
        if _fails(transform, documents.where((clock == low) & (producer == found[0]))):
            return Clock(low), Producer(int(found[0]))
    return None


def _fails(transform: SparkTransform, documents: DataFrame) -> bool:
    try:
        made = transform.apply(documents, order=None)
        made.write.format("noop").mode("overwrite").save()
    except (PySparkException, Py4JJavaError):
        return True
    return False
