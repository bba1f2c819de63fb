"""Fragments: what goes in comes out, and the statistics say what the rows would."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.errors import Bug, PenstockError
from penstock.journal import fragments as module
from penstock.journal.blobs import BlobStore, open_blobs
from penstock.journal.committed import VisibleRows
from penstock.journal.fragments import (
    DICTIONARY_BYTES,
    FEW_ROWS,
    FragmentLayout,
    FragmentWriter,
    decode_inline,
    encode_inline,
    read_fragment,
    read_visible,
)
from penstock.journal.integrity import CorruptBlob
from penstock.journal.rows import STAMPS, row_schema, stamp_names, stamp_rows, to_lines
from penstock.journal.state import INLINE_BYTES_MAX, Blob, Fragment, Inline
from penstock.journal.statistics import HASHED_ROWS_MAX, Statistics
from penstock.model.clock import CONTROL, Clock, DocumentId, Flag, Producer
from penstock.model.columns import Column, as_stored, columns, unstorable
from penstock.model.infer import infer
from penstock.model.json_order import canonical_json
from penstock.model.keys import key_hash, pack
from penstock.model.runs import Run
from penstock.model.schema import CompiledSchema
from penstock.model.spec import CollectionSpec, Fragments, Frozen
from penstock.native.arrow import to_arrow
from support import strategies_schema as strategies
from support.fragments import write_fragment, write_fragments

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "at": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["id"],
}
ROOT = columns(infer(SCHEMA))
LAYOUT = FragmentLayout(schema="s", root=ROOT, key=("/id",))
P1, P2 = (Producer(Producer.MULTICAST | n) for n in (1, 2))
CONTINUE, OUTSIDE = Flag.CONTINUE_TXN, Flag.OUTSIDE_TXN

Stamp = tuple[Producer, int, int]


def documents(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "name": f"n{i % 7}",
            "at": {"x": i / 2 if i % 3 else None},
            "tags": ["a"] * (i % 3),
        }
        for i in range(first, first + count)
    ]


def rows(count: int, first: int = 0, root: Column = ROOT) -> pa.RecordBatch:
    """Rows of one producer, clocks 1, 2, … by their number."""
    batch = to_arrow(documents(count, first), root)
    return stamp_rows(batch, root, producer=P1, first_clock=Clock(first + 1), flags=CONTINUE)


def with_stamps(stamps: list[Stamp]) -> pa.RecordBatch:
    batch = rows(len(stamps))
    arrays = [
        pa.array([int(clock) for _, clock, _ in stamps], pa.int64()),
        pa.array([int(producer) for producer, _, _ in stamps], pa.int64()),
        pa.array([flags for _, _, flags in stamps], pa.int16()),
    ]
    return pa.RecordBatch.from_arrays([*batch.columns[:-3], *arrays], schema=batch.schema)


def ids(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [i for batch in batches for i in batch.column("id").to_pylist()]


def written(fragment: Fragment | None) -> Fragment:
    assert fragment is not None
    return fragment


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return open_blobs(str(tmp_path))


# --------------------------------------------------------------------------------- there and back


def test_rows_come_back_as_they_were_written(blobs: BlobStore) -> None:
    batches = [rows(5_000, at) for at in range(0, 20_000, 5_000)]
    fragment = written(write_fragment(blobs, "acme/orders/", LAYOUT, batches, "t1.0"))
    assert isinstance(fragment.at, Blob)
    assert fragment.at.path.startswith("acme/orders/")
    assert fragment.at.path.endswith("-t1.0.parquet")
    (stored,) = blobs.list()
    assert (stored.path, stored.bytes) == (fragment.at.path, fragment.bytes)
    assert (fragment.begin, fragment.revision, fragment.rows) == (0, 0, 20_000)
    assert fragment.schema == "s"
    read = list(read_fragment(blobs, fragment, ROOT, batch_rows=3_000))
    assert max(batch.num_rows for batch in read) <= 3_000
    lines = [line for batch in read for line in to_lines(batch, ROOT)]
    assert lines == [canonical_json(as_stored(d, ROOT)) for d in documents(20_000)]


@given(strategies.cases())
def test_documents_of_any_schema_survive_inline_and_in_parquet(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    schema, candidates = case
    compiled = CompiledSchema(schema)
    root = columns(compiled.shape)
    stored = [d for d in candidates if compiled.is_valid(d) and unstorable(d, root) is None]
    if not stored:
        return
    batch = stamp_rows(
        to_arrow(stored, root), root, producer=P1, first_clock=Clock(9), flags=OUTSIDE
    )
    texts = [canonical_json(as_stored(d, root)) for d in stored]
    inline = decode_inline(encode_inline([batch], batch.schema), row_schema(root))
    assert to_lines(inline, root) == texts
    blobs = open_blobs(str(tmp_path_factory.mktemp("any", numbered=True)))
    layout = FragmentLayout(schema="s", root=root, key=("/k",))
    with FragmentWriter(blobs, "c", layout, "a") as writer:
        writer.write(batch)
        writer._write_group()
        fragment = written(writer.finish())
    assert isinstance(fragment.at, Blob)
    (read,) = read_fragment(blobs, fragment, root)
    assert read.schema.equals(batch.schema)
    assert to_lines(read, root) == texts
    hashes = [key_hash(pack([d["k"]])) for d in stored]
    assert (fragment.key_hash_min, fragment.key_hash_max) == (min(hashes), max(hashes))


def test_a_few_rows_travel_in_the_record(blobs: BlobStore) -> None:
    fragment = written(write_fragment(blobs, "c", LAYOUT, [rows(1), rows(2, 1)], "a"))
    assert isinstance(fragment.at, Inline)
    assert fragment.bytes == len(fragment.at.data) < 500
    assert list(blobs.list()) == []
    assert ids(read_fragment(blobs, fragment, ROOT, batch_rows=2)) == [0, 1, 2]


def test_inline_or_not_is_decided_by_the_size_of_inline_rows(blobs: BlobStore) -> None:
    for count in (10, 100, 300, 1000, 3000):
        fragment = written(write_fragment(blobs, "c", LAYOUT, [rows(count)], "a"))
        size = len(encode_inline([rows(count)], row_schema(ROOT)))
        assert isinstance(fragment.at, Inline) == (size <= INLINE_BYTES_MAX)
        assert ids(read_fragment(blobs, fragment, ROOT)) == list(range(count))


def test_no_rows_are_no_fragment(blobs: BlobStore) -> None:
    assert write_fragment(blobs, "c", LAYOUT, [], "a") is None
    assert write_fragment(blobs, "c", LAYOUT, [rows(0)], "a") is None
    assert list(write_fragments(blobs, "c", LAYOUT, [], "a")) == []
    assert list(blobs.list()) == []


def test_a_long_stream_becomes_fragments_of_the_wanted_length(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_ROWS", 500)
    layout = FragmentLayout(schema="s", root=ROOT, key=("/id",), length_bytes=10_000)
    batches = (rows(1_000, at) for at in range(0, 20_000, 1_000))
    parts = list(write_fragments(blobs, "c", layout, batches, "a"))
    assert len(parts) > 3
    assert all(part.bytes >= 10_000 for part in parts[:-1])
    assert len({part.at for part in parts}) == len(parts)
    read = itertools.chain.from_iterable(read_fragment(blobs, part, ROOT) for part in parts)
    assert ids(read) == list(range(20_000))


def test_nothing_is_left_of_a_fragment_whose_rows_fail(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_ROWS", 100)

    def failing() -> Iterator[pa.RecordBatch]:
        yield rows(1_000)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="source"):
        write_fragment(blobs, "c", LAYOUT, failing(), "a")
    assert list(blobs.list()) == []


def test_a_writer_that_is_left_unfinished_leaves_nothing(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_ROWS", 100)
    with FragmentWriter(blobs, "c", LAYOUT, "a") as writer:
        writer.write(rows(1_000))
    assert list(blobs.list()) == []


@pytest.mark.parametrize("codec", ["NONE", "GZIP", "ZSTANDARD", "SNAPPY"])
def test_the_collection_chooses_the_codec(blobs: BlobStore, tmp_path: Path, codec: Any) -> None:  # noqa: ANN401
    collection = CollectionSpec(
        name="acme/orders",
        key=("/id",),
        write_schema=Frozen(SCHEMA),
        read_schema=Frozen(SCHEMA),
        fields=(),
        fragments=Fragments(codec=codec, length_bytes=7),
    )
    layout = FragmentLayout.of(collection)
    assert (layout.root, layout.length_bytes) == (ROOT, 7)
    fragment = written(write_fragment(blobs, "c", layout, [rows(5_000)], "a"))
    assert isinstance(fragment.at, Blob)
    chosen = {"NONE": "UNCOMPRESSED", "ZSTANDARD": "ZSTD"}.get(codec, codec)
    stamps = dict.fromkeys(row_schema(ROOT).names[-STAMPS:], "UNCOMPRESSED")  # short as they are
    for column in _columns(tmp_path / fragment.at.path):
        assert column.compression == stamps.get(column.path_in_schema, chosen)


def test_few_rows_are_written_as_what_is_read_soonest(blobs: BlobStore, tmp_path: Path) -> None:
    """Integers by their differences; few rows without dictionaries, compression or statistics."""
    for count in (FEW_ROWS - 1, FEW_ROWS):
        few = count < FEW_ROWS
        with FragmentWriter(blobs, "c", LAYOUT, "a", inline=False) as writer:
            writer.write(rows(count))
            fragment = written(writer.finish())
        assert isinstance(fragment.at, Blob)
        *documents, _, producer, flags = _columns(tmp_path / fragment.at.path)
        assert {column.is_stats_set for column in documents} == {not few}
        for column in documents:
            packed = column.physical_type in ("INT32", "INT64")
            assert ("DELTA_BINARY_PACKED" in column.encodings) == packed
            assert (column.compression == "UNCOMPRESSED") == (packed and few)
            assert column.has_dictionary_page == (not packed and not few)
        (read,) = read_fragment(blobs, fragment, ROOT)
        assert read.equals(rows(count))
        assert producer.has_dictionary_page
        assert flags.has_dictionary_page


def test_a_dictionary_that_grows_large_is_given_up(blobs: BlobStore, tmp_path: Path) -> None:
    root = columns(infer({"type": "object", "properties": {"d": {"type": "number"}}}))
    count = 3 * DICTIONARY_BYTES // 8
    batch = stamp_rows(
        to_arrow([{"d": number + 0.5} for number in range(count)], root),
        root,
        producer=P1,
        first_clock=Clock(1),
        flags=CONTINUE,
    )
    layout = FragmentLayout(schema="s", root=root, key=("/d",), codec="NONE")
    fragment = written(write_fragment(blobs, "c", layout, [batch], "a"))
    assert isinstance(fragment.at, Blob)
    values = _columns(tmp_path / fragment.at.path)[0]
    # The dictionary, indices of those values, and the others as they are: less than all in one.
    assert values.total_uncompressed_size < 1.2 * 8 * count
    (read,) = read_fragment(blobs, fragment, root, batch_rows=count)
    assert read.equals(batch)


@pytest.mark.parametrize("count", [3, FEW_ROWS])
@pytest.mark.parametrize("kinds", [("integer", "string"), ("string", "integer")])
def test_members_may_have_one_path(blobs: BlobStore, count: int, kinds: tuple[str, str]) -> None:
    """A column is named by its path, and what is true of one of these is not of the other."""
    inner, outer = ({"type": kind} for kind in kinds)
    within = {"type": "object", "properties": {"b": inner}}
    root = columns(infer({"type": "object", "properties": {"a": within, "a.b": outer}}))

    def value(kind: str, n: int) -> int | str:
        return n if kind == "integer" else f"text {n}"

    given = [{"a": {"b": value(kinds[0], n)}, "a.b": value(kinds[1], n)} for n in range(count)]
    layout = FragmentLayout(schema="s", root=root, key=("/a.b",))
    batch = stamp_rows(
        to_arrow(given, root), root, producer=P1, first_clock=Clock(1), flags=CONTINUE
    )
    with FragmentWriter(blobs, "c", layout, "a", inline=False) as writer:
        writer.write(batch)
        fragment = written(writer.finish())
    (read,) = read_fragment(blobs, fragment, root)
    assert to_lines(read, root) == [canonical_json(each) for each in given]


def _columns(path: Path) -> list[Any]:
    group = pq.ParquetFile(path).metadata.row_group(0)
    return [group.column(at) for at in range(group.num_columns)]


def test_only_wanted_columns_are_read_in_their_order(blobs: BlobStore) -> None:
    for count in (2, 5_000):
        fragment = written(write_fragment(blobs, "c", LAYOUT, [rows(count)], "a"))
        (run,) = fragment.runs
        last = Clock(run.clock_max - 1)
        for wanted in (["name", "id"], ["_clock", "name"], ["_flags"]):
            batches = list(read_fragment(blobs, fragment, ROOT, columns=wanted))
            assert pa.Table.from_batches(batches).equals(pa.table(rows(count)).select(wanted))
            # Which of a run's rows are shown is told by stamps, whether they are wanted or not.
            shown = VisibleRows(fragment=fragment, run=run, clock_gt=last)
            (batch,) = read_visible(blobs, shown, ROOT, columns=wanted)
            assert batch.equals(rows(count).select(wanted).slice(count - 1))


def test_a_shared_object_is_read_by_rows_and_other_groups_are_left_alone(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_ROWS", 1_000)
    whole = written(write_fragment(blobs, "c", LAYOUT, [rows(5_000)], "a"))
    assert isinstance(whole.at, Blob)
    for first, count in [(0, 5_000), (0, 1), (999, 2), (1_000, 1_000), (2_500, 2_500), (4_999, 1)]:
        run = Run(
            producer=P1,
            kind=CONTINUE,
            first_offset=0,
            last_offset=count - 1,
            rows=count,
            clock_min=Clock(first + 1),
            clock_max=Clock(first + count),
            clock_max_offset=count - 1,
            increasing=True,
        )
        part = Fragment(
            rows=count,
            bytes=1,
            at=Blob(path=whole.at.path, row=first),
            schema="s",
            runs=(run,),
            key_hash_min=0,
            key_hash_max=0,
        )
        read = read_fragment(blobs, part, ROOT, batch_rows=300)
        assert ids(read) == list(range(first, first + count))


@pytest.mark.parametrize("digest", [True, False], ids=["with a digest", "of an earlier release"])
def test_a_short_object_is_damaged(blobs: BlobStore, tmp_path: Path, digest: bool) -> None:
    fragment = written(write_fragment(blobs, "c", LAYOUT, [rows(5_000)], "a"))
    assert isinstance(fragment.at, Blob)
    if not digest:
        fragment = structs.replace(fragment, at=structs.replace(fragment.at, digest=None))
    file = tmp_path / fragment.at.path
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptBlob, match=fragment.at.path):
        list(read_fragment(blobs, fragment, ROOT))


def test_the_stamp_yields_to_members_of_its_names(blobs: BlobStore) -> None:
    properties = {name: {"type": "string"} for name in ("_clock", "__clock", "_flags")}
    root = columns(infer({"type": "object", "properties": properties}))
    names = stamp_names(root)
    assert (names.clock, names.producer, names.flags) == ("___clock", "_producer", "__flags")
    batch = stamp_rows(
        to_arrow([{"_clock": "noon"}], root), root, producer=P1, first_clock=Clock(1), flags=0
    )
    layout = FragmentLayout(schema="s", root=root, key=())
    fragment = written(write_fragment(blobs, "c", layout, [batch], "a"))
    (read,) = read_fragment(blobs, fragment, root)
    assert to_lines(read, root) == ['{"_clock":"noon"}']


def test_what_tasks_receive_survives_pickling(blobs: BlobStore) -> None:
    sent = pickle.dumps(
        (blobs, LAYOUT, written(write_fragment(blobs, "c", LAYOUT, [rows(3)], "a")))
    )
    blobs, layout, fragment = pickle.loads(sent)  # noqa: S301 - our own bytes
    assert layout == LAYOUT
    assert ids(read_fragment(blobs, fragment, layout.root)) == [0, 1, 2]


@pytest.mark.parametrize("attempt", ["", "../x", "a/b", "x" * 65])
def test_an_attempt_cannot_lead_elsewhere(blobs: BlobStore, attempt: str) -> None:
    with pytest.raises(Bug):
        FragmentWriter(blobs, "c", LAYOUT, attempt)


# ------------------------------------------------------------------------------------- statistics

_stamps = st.tuples(
    st.sampled_from([P1, P2]),
    st.integers(1, 9),
    st.sampled_from([OUTSIDE, CONTINUE, OUTSIDE | CONTROL]).map(int),
)


def runs_of(stamps: list[Stamp]) -> tuple[Run, ...]:
    """The definition: per producer, maximal stretches of one kind."""
    found: list[Run] = []
    for producer in {stamp[0] for stamp in stamps}:
        own = [
            (at, clock, flags & 3) for at, (p, clock, flags) in enumerate(stamps) if p == producer
        ]
        for kind, group in itertools.groupby(own, key=lambda row: row[2]):
            stretch = list(group)
            clocks = [clock for _, clock, _ in stretch]
            found.append(
                Run(
                    producer=producer,
                    kind=Flag(kind),
                    first_offset=stretch[0][0],
                    last_offset=stretch[-1][0],
                    rows=len(stretch),
                    clock_min=Clock(min(clocks)),
                    clock_max=Clock(max(clocks)),
                    clock_max_offset=stretch[clocks.index(max(clocks))][0],
                    increasing=all(a < b for a, b in itertools.pairwise(clocks)),
                )
            )
    return tuple(sorted(found, key=lambda run: run.first_offset))


@given(st.lists(_stamps, min_size=1, max_size=20), st.lists(st.integers(0, 20), max_size=4))
def test_runs_are_the_stretches_of_each_producer_however_rows_are_batched(
    stamps: list[Stamp], cuts: list[int]
) -> None:
    statistics = Statistics(ROOT, ("/id",), 0, 0xFFFFFFFF)
    batch = with_stamps(stamps)
    edges = sorted({0, len(stamps), *(cut for cut in cuts if cut <= len(stamps))})
    for begin, end in itertools.pairwise(edges):
        statistics.add(batch.slice(begin, end - begin))
    assert statistics.runs == runs_of(stamps)
    assert statistics.runs_count == len(statistics.runs)
    assert statistics.rows == len(stamps)


@pytest.mark.parametrize("flags", [int(Flag.ACK_TXN), 3])
def test_an_ack_is_not_a_row(flags: int) -> None:
    statistics = Statistics(ROOT, ("/id",), 0, 0xFFFFFFFF)
    with pytest.raises(PenstockError):
        statistics.add(with_stamps([(P1, 1, int(CONTINUE)), (P1, 2, flags)]))


@pytest.mark.parametrize(
    ("key", "schema", "document", "values"),
    [
        pytest.param(("/a",), {"a": {"type": "string"}}, {"a": "é\0"}, ["é\0"], id="a string"),
        pytest.param(("/a",), {"a": {"type": "boolean"}}, {"a": True}, [True], id="a boolean"),
        pytest.param(
            ("/o/b", "/a"),
            {
                "a": {"type": "integer"},
                "o": {"type": "object", "properties": {"b": {"type": "string"}}},
            },
            {"a": -7, "o": {"b": "x"}},
            ["x", -7],
            id="a member of a member, in the order of the key",
        ),
        pytest.param(
            ("/a",),
            {"a": {"type": "integer", "maximum": 10**30}},
            {"a": 10**25},
            [10**25],
            id="a decimal",
        ),
        pytest.param(
            ("/a",),
            {"a": {"type": "integer", "maximum": 10**50}},
            {"a": 10**45},
            [10**45],
            id="an integer beyond decimals",
        ),
    ],
)
def test_key_hashes_are_those_of_the_packed_key(
    key: tuple[str, ...], schema: dict[str, Any], document: dict[str, Any], values: list[Any]
) -> None:
    root = columns(infer({"type": "object", "properties": schema}))
    statistics = Statistics(root, key, 1, 2)
    batch = to_arrow([document], root)
    statistics.add(stamp_rows(batch, root, producer=P1, first_clock=Clock(1), flags=0))
    wanted = key_hash(pack(values))
    assert statistics.key_hashes == (wanted, wanted)


@pytest.mark.parametrize(
    ("count", "key"),
    [
        pytest.param(HASHED_ROWS_MAX + 1, ("/id",), id="many rows"),
        pytest.param(3, ("/at/y",), id="a location without a column"),
        pytest.param(3, ("/at/x",), id="a value that may be missing"),
        pytest.param(3, (), id="no key"),
    ],
)
def test_otherwise_the_range_is_the_journals(count: int, key: tuple[str, ...]) -> None:
    statistics = Statistics(ROOT, key, 0x10, 0x20)
    statistics.add(rows(count))
    assert statistics.key_hashes == (0x10, 0x20)


# ---------------------------------------------------------------------------------------- visible


@given(st.lists(_stamps, min_size=1, max_size=20), st.integers(0, 9), st.data())
def test_visible_rows_are_those_that_comparing_one_by_one_keeps(
    tmp_path_factory: pytest.TempPathFactory,
    stamps: list[Stamp],
    clock_gt: int,
    data: st.DataObject,
) -> None:
    blobs = open_blobs(str(tmp_path_factory.getbasetemp()))  # inline: nothing is written
    fragment = written(write_fragment(blobs, "c", LAYOUT, [with_stamps(stamps)], "a"))
    run = data.draw(st.sampled_from(fragment.runs))
    shown = VisibleRows(
        fragment=fragment, run=run, clock_gt=Clock(clock_gt), running_max=not run.increasing
    )
    wanted: list[int] = []
    above = clock_gt
    for at in range(run.first_offset, run.last_offset + 1):
        producer, clock, _ = stamps[at]
        if producer == run.producer and clock > above:
            wanted.append(at)
            above = clock if shown.running_max else above
    batch_rows = data.draw(st.integers(1, 7))
    assert ids(read_visible(blobs, shown, ROOT, batch_rows=batch_rows)) == wanted


# ------------------------------------------------------------------------------------------ lines


@pytest.mark.parametrize(
    ("properties", "document"),
    [
        pytest.param({}, {"id": 1}, id="no _meta"),
        pytest.param({}, {"id": 1, "_meta": {"op": "c"}, "z": [1]}, id="an unknown _meta"),
        pytest.param({"_meta": {"type": "object"}}, {"id": 1, "_meta": {"op": 1}}, id="JSON text"),
        pytest.param(
            {"_meta": {"type": "object", "properties": {"op": {"type": ["string", "null"]}}}},
            {"id": 1, "_meta": {"op": None, "uuid": 5}},
            id="a typed _meta, and a value where the UUID comes",
        ),
        pytest.param(
            {"_meta": {"type": ["object", "null"], "properties": {"op": {"type": "string"}}}},
            {"id": 1, "_meta": None},
            id="null",
        ),
    ],
)
def test_the_uuid_is_added_to_whatever_meta_there_is(
    properties: dict[str, Any], document: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"id": {"type": "integer"}, **properties}}
    root = columns(infer(schema))
    clock = Clock(0x1EE833B04AFC0007)
    batch = stamp_rows(
        to_arrow([document] * 2, root), root, producer=P2, first_clock=clock, flags=1
    )
    for at, line in enumerate(to_lines(batch, root, uuid=True)):
        uuid = DocumentId(producer=P2, clock=Clock(clock + at), flags=1).uuid
        meta = {**(document.get("_meta") or {}), "uuid": str(uuid)}
        assert json.loads(line) == {**document, "_meta": meta}
        assert line == canonical_json({**document, "_meta": meta})
    assert to_lines(batch, root) == [canonical_json(document)] * 2


@given(
    st.lists(st.tuples(st.integers(1, 2**63 - 1), st.integers(0, 2**48 - 1), st.integers(0, 1023)))
)
def test_uuids_are_those_of_the_model(stamps: list[tuple[int, int, int]]) -> None:
    from penstock.journal.rows import Stamps, uuids

    producers = [Producer(p | Producer.MULTICAST) for _, p, _ in stamps]
    texts = uuids(
        Stamps(
            clock=np.array([c for c, _, _ in stamps], np.int64),
            producer=np.array(producers, np.int64),
            flags=np.array([f for _, _, f in stamps], np.int16),
        )
    ).to_pylist()
    wanted = [
        DocumentId(producer=producer, clock=Clock(clock), flags=flags).uuid
        for producer, (clock, _, flags) in zip(producers, stamps, strict=True)
    ]
    assert [UUID(text) for text in texts] == wanted
    assert texts == [str(uuid) for uuid in wanted]
