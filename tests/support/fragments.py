"""Fragments written from batches at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from penstock.journal.blobs import BlobStore
from penstock.journal.fragments import FragmentLayout, FragmentWriter
from penstock.journal.state import Fragment


def write_fragments(
    blobs: BlobStore,
    prefix: str,
    layout: FragmentLayout,
    batches: Iterable[pa.RecordBatch],
    attempt: str,
) -> Iterator[Fragment]:
    """Rows as fragments of the layout's length, each durable when it is yielded."""
    pending = iter(batches)
    more = True
    while more:
        more = False
        with FragmentWriter(blobs, prefix, layout, attempt) as writer:
            for batch in pending:
                writer.write(batch)
                if writer.full:
                    more = True
                    break
            fragment = writer.finish()
        if fragment is not None:
            yield fragment


def write_fragment(
    blobs: BlobStore,
    prefix: str,
    layout: FragmentLayout,
    batches: Iterable[pa.RecordBatch],
    attempt: str,
) -> Fragment | None:
    """Rows as one fragment, however long; None if there are none."""
    with FragmentWriter(blobs, prefix, layout, attempt) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.finish()
