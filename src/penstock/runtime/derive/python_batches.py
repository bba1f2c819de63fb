"""The batch form of Python derivations: methods take and yield Arrow batches, never documents.

Columns are those of stored documents (`native.arrow_types`). A method may leave columns out, give
them in any order, and use other types that convert without loss; the batch that leaves here has
exactly the columns of the derived collection, NULL where the method gave none.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import pyarrow as pa

from penstock.model.columns import Column
from penstock.native.arrow import to_arrow, to_json
from penstock.native.arrow_types import arrow_schema
from penstock.runtime.derive.engine import Document, SourceRead

ROWS_MAX = 4096
"""Documents of a batch that is made from documents."""


def conforming(published: object, layout: Column) -> Iterator[pa.RecordBatch]:
    """The batches of what a method published, with exactly the columns of the layout.

    Raises TypeError or ValueError if it cannot have them.
    """
    if isinstance(published, pa.Table):
        for batch in published.to_batches():
            yield from conforming(batch, layout)
        return
    if not isinstance(published, pa.RecordBatch):
        raise TypeError(f"published a {type(published).__name__}, not a pyarrow.RecordBatch")
    schema = arrow_schema(layout)
    if published.schema.equals(schema):
        yield published
        return
    names = published.schema.names
    for name in names:
        if name not in schema.names:
            close = difflib.get_close_matches(name, schema.names, n=1)
            meant = f"; did you mean {close[0]}?" if close else f": {', '.join(schema.names)}"
            raise ValueError(f"column {name} is not one of the collection's columns{meant}")
        if names.count(name) > 1:
            raise ValueError(f"column {name} is there twice")
    arrays = [_column(published, field) for field in schema]
    yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(batch: pa.RecordBatch, field: pa.Field[Any]) -> Any:  # noqa: ANN401 - any array
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    found: Any = batch.column(field.name)
    if found.type == field.type:
        return found
    try:
        return found.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise ValueError(
            f"column {field.name} is {found.type}, and cannot become {field.type}: {e}"
        ) from e


def process_rows(
    reads: Iterable[SourceRead],
    layouts: list[Column],
    derived: Column,
    run: Callable[[int, pa.RecordBatch, int], Iterator[pa.RecordBatch]],
) -> Iterator[tuple[int, Document]]:
    """Run the batch form on documents: batches of consecutive reads of one transform.

    What a batch publishes has the position of its last read.
    """
    last = -1
    for transform, group in itertools.groupby(reads, key=attrgetter("transform")):
        while some := [read.document for read in itertools.islice(group, ROWS_MAX)]:
            last += len(some)
            for batch in run(transform, to_arrow(some, layouts[transform]), last):
                for text in to_json(batch, derived):
                    yield last, json.loads(text)
