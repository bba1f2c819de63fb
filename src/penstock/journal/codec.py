"""PURE: diffs, states and pages of a journal as bytes.

msgpack of nested arrays: the first element of a record or a diff is its tag, the rest its fields in
a fixed order. An encoding is never changed, only followed by one of the next `FORMAT`; the state
log keeps the number beside the bytes and refuses to add to what a newer release wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock.errors import Bug
from penstock.journal.state import (
    NOTHING_FORGOTTEN,
    AckRecord,
    Append,
    Blob,
    Compact,
    Create,
    Diff,
    Digest,
    Drop,
    Forgotten,
    Fragment,
    Inline,
    JournalState,
    Page,
    Record,
    Reseal,
    Retain,
    Seal,
    Status,
    apply,
)
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.hints import Commit
from penstock.model.runs import Run

FORMAT: Final = 4
"""The format of diffs and states. 3 is the same without `Forgotten`, 2 without digests either,
1 without `Reseal` either."""

PAGE_FORMAT: Final = 2
"""The format of pages. 1 is the same without digests."""

_FRAGMENT, _ACK = 0, 1
# 2 and 3 were kept for diffs that no release has written.
_CREATE, _APPEND, _RETAIN, _COMPACT, _SEAL, _DROP, _RESEAL = 0, 1, 4, 5, 6, 7, 8

# Producer is a subclass of int, which msgspec passes to the hook; it is written as an integer.
_encode = msgspec.msgpack.Encoder(enc_hook=int).encode
_decode = msgspec.msgpack.Decoder().decode


class JournalMachine:
    """The state machine of a journal's log (`consensus.replica.Machine`)."""

    format = FORMAT

    def initial(self) -> JournalState:
        return JournalState()

    def apply(self, state: JournalState, diff: Diff, revision: int) -> JournalState:
        return apply(state, diff, revision)

    def encode_diff(self, diff: Diff) -> bytes:
        return _encode(_diff_out(diff))

    def decode_diff(self, data: bytes, format: int) -> Diff:  # noqa: A002
        return _diff_in(_decode(data))

    def encode_state(self, state: JournalState) -> bytes:
        return _encode(
            [
                state.status.value,
                state.collection,
                state.labels,
                state.key_begin,
                state.key_end,
                state.generation,
                state.begin,
                state.end,
                [_page_out(page) for page in state.pages],
                [_record_out(record) for record in state.records],
                *_forgotten_out(state.forgotten),
            ]
        )

    def decode_state(self, data: bytes, format: int, revision: int) -> JournalState:  # noqa: A002
        """A rollup does not know the revision of its own entry: `revision` stands in for it."""
        fields = _decode(data)
        status, collection, labels, key_begin, key_end, generation, begin, end = fields[:8]
        pages, records, *forgotten = fields[8:]
        return JournalState(
            status=Status(status),
            collection=collection,
            labels=_labels_in(labels),
            key_begin=key_begin,
            key_end=key_end,
            generation=generation,
            begin=begin,
            end=end,
            pages=tuple(map(_page_in, pages)),
            records=tuple(_record_in(record, revision) for record in records),
            forgotten=_forgotten_in(forgotten),
        )


def encode_page(records: Sequence[Record]) -> bytes:
    """The content of a page's object."""
    return _encode([PAGE_FORMAT, [_record_out(record) for record in records]])


def decode_page(data: bytes) -> tuple[Record, ...]:
    """The records of a page."""
    version, records = _decode(data)
    if version > PAGE_FORMAT:
        raise Bug(f"a page of format {version}; this release reads up to {PAGE_FORMAT}")
    return tuple(_record_in(record, 0) for record in records)


# --------------------------------------------------------------------------------------- details

_PAGE = (
    *("path", "begin", "end", "records", "rows", "bytes", "revision_min", "revision_max"),
    "digest",
)


def _page_out(page: Page) -> list[Any]:
    fields = [getattr(page, name) for name in _PAGE]
    return fields if page.digest is not None else fields[:-1]


def _page_in(page: list[Any]) -> Page:
    return Page(**dict(zip(_PAGE[: max(len(page), len(_PAGE) - 1)], page, strict=True)))


def _digest_out(digest: Digest | None) -> list[Any]:
    return [] if digest is None else [digest.bytes, digest.footer, digest.value, digest.rows]


def _digest_in(fields: list[Any]) -> Digest | None:
    if not fields:
        return None
    size, footer, value, rows = fields
    return Digest(bytes=size, footer=footer, value=value, rows=rows)


def _forgotten_out(forgotten: Forgotten) -> list[int]:
    return [] if forgotten == NOTHING_FORGOTTEN else [forgotten.clock, forgotten.revision]


def _forgotten_in(fields: list[Any]) -> Forgotten:
    if not fields:
        return NOTHING_FORGOTTEN
    clock, revision = fields
    return Forgotten(clock=Clock(clock), revision=revision)


def _labels_in(labels: list[list[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in labels)


def _record_out(record: Record) -> list[Any]:
    if isinstance(record, AckRecord):
        own = (record.producer, record.clock)
        hints = [
            [hint.journal]
            if (hint.producer, hint.clock) == own
            else [hint.journal, hint.producer, hint.clock]
            for hint in record.hints
        ]
        return [_ACK, record.begin, record.revision, record.producer, record.clock, hints]
    at = record.at
    return [
        _FRAGMENT,
        record.begin,
        record.revision,
        record.rows,
        record.bytes,
        [at.data] if isinstance(at, Inline) else [at.path, at.row, *_digest_out(at.digest)],
        record.schema,
        [_run_out(run) for run in record.runs],
        record.key_hash_min,
        record.key_hash_max,
    ]


def _record_in(fields: list[Any], revision: int) -> Record:
    if fields[0] == _ACK:
        _, begin, known, producer, clock, hints = fields
        own = [producer, clock]
        return AckRecord(
            begin=begin,
            revision=known or revision,
            producer=Producer(producer),
            clock=Clock(clock),
            hints=tuple(_hint_in(journal, *(stamp or own)) for journal, *stamp in hints),
        )
    _, begin, known, rows, size, at, schema, runs, key_hash_min, key_hash_max = fields
    return Fragment(
        begin=begin,
        revision=known or revision,
        rows=rows,
        bytes=size,
        at=Inline(data=at[0])
        if len(at) == 1
        else Blob(path=at[0], row=at[1], digest=_digest_in(at[2:])),
        schema=schema,
        runs=tuple([_run_in(run) for run in runs]),
        key_hash_min=key_hash_min,
        key_hash_max=key_hash_max,
    )


def _hint_in(journal: str, producer: int, clock: int) -> Commit:
    return Commit(journal, Producer(producer), Clock(clock))


def _run_out(run: Run) -> list[Any]:
    return [
        run.producer,
        run.kind.value,
        run.first_offset,
        run.last_offset,
        run.rows,
        run.clock_min,
        run.clock_max,
        run.clock_max_offset,
        run.increasing,
    ]


_FLAGS: Final = {flag.value: flag for flag in Flag}  # what `Flag(kind)` does, for loads of many


def _run_in(fields: list[Any]) -> Run:
    producer, kind, first, last, rows, clock_min, clock_max, clock_max_offset, increasing = fields
    return Run(
        producer=Producer(producer),
        kind=_FLAGS[kind],
        first_offset=first,
        last_offset=last,
        rows=rows,
        clock_min=Clock(clock_min),
        clock_max=Clock(clock_max),
        clock_max_offset=clock_max_offset,
        increasing=increasing,
    )


def _diff_out(diff: Diff) -> list[Any]:
    match diff:
        case Create():
            return [_CREATE, diff.collection, diff.labels, diff.key_begin, diff.key_end]
        case Append():
            return [_APPEND, [_record_out(record) for record in diff.records]]
        case Retain():
            page = [] if diff.page is None else [_page_out(diff.page)]
            last = [diff.forgotten.clock, diff.forgotten.revision]
            return [_RETAIN, diff.offset, *last, *page]
        case Compact():
            own = [diff.begin, diff.end, diff.path, diff.bytes]
            return [_COMPACT, *own, *_digest_out(diff.digest)]
        case Seal():
            return [_SEAL, _page_out(diff.page)]
        case Reseal():
            return [_RESEAL, _page_out(diff.page)]
        case Drop():
            return [_DROP]


def _diff_in(fields: list[Any]) -> Diff:
    match fields:
        case [0, collection, labels, key_begin, key_end]:
            return Create(
                collection=collection,
                labels=_labels_in(labels),
                key_begin=key_begin,
                key_end=key_end,
            )
        case [1, records]:
            return Append(records=tuple(_record_in(record, 0) for record in records))
        case [4, offset, *rest]:
            return Retain(
                offset=offset,
                forgotten=_forgotten_in(rest[:2]),
                page=_page_in(rest[2]) if rest[2:] else None,
            )
        case [5, begin, end, path, size, *digest]:
            return Compact(begin=begin, end=end, path=path, bytes=size, digest=_digest_in(digest))
        case [6, page]:
            return Seal(page=_page_in(page))
        case [7]:
            return Drop()
        case [8, page]:
            return Reseal(page=_page_in(page))
        case _:
            raise Bug(f"a journal's diff has the tag {fields[:1]}, which no release wrote")
