"""A flipped bit of an object is an error, or makes no difference; never other documents."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from journal.publishing import ORDERS, World, batch, world
from penstock.catalog import desired
from penstock.journal import integrity as module
from penstock.journal.blobs import BlobStore, open_blobs
from penstock.journal.codec import JournalMachine, decode_page, encode_page
from penstock.journal.fragments import (
    FragmentLayout,
    FragmentWriter,
    read_fragment,
)
from penstock.journal.integrity import (
    SUMS_KEY,
    WHOLE_BYTES,
    CorruptBlob,
    Sums,
    check_object,
    check_skeleton,
    read_page,
)
from penstock.journal.rows import row_schema, stamp_rows
from penstock.journal.scan import read_collection
from penstock.journal.schemas import layout
from penstock.journal.sealing import seal
from penstock.journal.state import Blob, Fragment
from penstock.journal.sweeping import collect_garbage
from penstock.journal.upkeep import CompactionOptions, compact_all
from penstock.model.clock import Clock, Producer
from penstock.model.spec import Catalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_pa: Any = pa
_pq: Any = pq

ROOT = layout(ORDERS.write_schema.text)
P1 = Producer(Producer.MULTICAST | 1)
EAGER = CompactionOptions(inputs_min=2)
MACHINE = JournalMachine()

Codec = Literal["NONE", "GZIP", "ZSTANDARD", "SNAPPY"]


def rows(count: int, *, text: int) -> pa.RecordBatch:
    chance = random.Random(count)
    documents = [
        {
            "id": n * n,
            "region": chance.choice(["eu", "us", None]),
            "text": chance.randbytes(text).hex(),
        }
        for n in range(count)
    ]
    return stamp_rows(batch(documents), ROOT, producer=P1, first_clock=Clock(7), flags=0)


def written(
    blobs: BlobStore, count: int, *, text: int, codec: Codec = "ZSTANDARD"
) -> tuple[Fragment, Blob]:
    form = FragmentLayout(schema="s", root=ROOT, key=("/id",), codec=codec)
    with FragmentWriter(blobs, "acme", form, "a", inline=False) as writer:
        writer.write(rows(count, text=text))
        fragment = writer.finish()
    assert fragment is not None
    assert isinstance(fragment.at, Blob)
    assert fragment.at.digest is not None
    return fragment, fragment.at


def flipped(data: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def regions(file: Path) -> dict[str, list[range]]:
    """Which bytes of an object are what."""
    data = file.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little")
    body = len(data) - 8 - footer
    sums = Sums.decode(pq.read_metadata(file).metadata[SUMS_KEY.encode()])
    begins = list(accumulate(sums.sizes, initial=4))
    headers = [range(at, at + n) for at, n in zip(begins, sums.header_sizes, strict=False)]
    contents = [
        range(header.stop, end) for header, end in zip(headers, begins[1:], strict=True)
    ] or [range(4, body)]
    return {
        "magic": [range(4), range(len(data) - 4, len(data))],
        "headers": headers,
        "pages": contents,
        "footer": [range(body, len(data) - 8)],
        "length of the footer": [range(len(data) - 8, len(data) - 4)],
    }


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return open_blobs(str(tmp_path))


def read(blobs: BlobStore, fragment: Fragment, columns: list[str] | None = None) -> pa.Table:
    schema = row_schema(ROOT)
    kept = pa.schema([schema.field(name) for name in columns or schema.names])
    return pa.Table.from_batches(read_fragment(blobs, fragment, ROOT, columns=columns), kept)


# ---------------------------------------------------------------------------------------- objects


@pytest.mark.parametrize(
    ("count", "text", "codec"),
    [
        pytest.param(3, 20, "ZSTANDARD", id="few rows"),
        pytest.param(2_000, 1, "ZSTANDARD", id="many rows, with dictionaries"),
        pytest.param(60, 20, "NONE", id="not compressed"),
    ],
)
def test_no_bit_of_a_small_object_can_flip_unnoticed(
    blobs: BlobStore, tmp_path: Path, count: int, text: int, codec: Codec
) -> None:
    fragment, blob = written(blobs, count, text=text, codec=codec)
    file, right = tmp_path / blob.path, read(blobs, fragment)
    data = file.read_bytes()
    assert len(data) <= WHOLE_BYTES
    assert right.num_rows == count
    chance = random.Random(1)
    for position in range(0, len(data), max(1, len(data) // 400)):
        file.write_bytes(flipped(data, position, chance.randrange(8)))
        for look in (
            lambda: read(blobs, fragment),
            lambda: read(blobs, fragment, ["id"]),
            lambda: check_skeleton(blobs, blob, headers=True),
            lambda: check_object(blobs, blob),
        ):
            with pytest.raises(CorruptBlob, match=blob.path):
                look()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[BlobStore, Fragment, Path, pa.Table]:
    """An object of several groups, which is not read in one piece, and its rows."""
    directory = tmp_path_factory.mktemp("large")
    blobs = open_blobs(str(directory))
    fragment, blob = written(blobs, 20_000, text=12)
    file = directory / blob.path
    assert file.stat().st_size > WHOLE_BYTES
    return blobs, fragment, file, read(blobs, fragment)


@pytest.mark.parametrize("region", ["magic", "headers", "pages", "footer", "length of the footer"])
def test_no_bit_of_a_large_object_can_flip_unnoticed(
    large: tuple[BlobStore, Fragment, Path, pa.Table], region: str
) -> None:
    blobs, fragment, file, right = large
    assert isinstance(fragment.at, Blob)
    data, every = file.read_bytes(), regions(file)
    positions = [position for some in every[region] for position in some]
    chance = random.Random(2)
    read_as_it_was = 0
    try:
        for position in chance.sample(positions, min(len(positions), 25)):
            file.write_bytes(flipped(data, position, chance.randrange(8)))
            try:
                assert read(blobs, fragment).equals(right)
                read_as_it_was += 1
            except CorruptBlob:
                pass
            with pytest.raises(CorruptBlob):
                check_object(blobs, fragment.at)
            if region in ("headers", "footer", "length of the footer"):
                with pytest.raises(CorruptBlob):
                    check_skeleton(blobs, fragment.at, headers=True)
    finally:
        file.write_bytes(data)
    assert read_as_it_was == (4 if region == "magic" else 0)  # the first one: nobody looks at it


def test_what_planning_does_not_compare_the_checksums_of_pages_do(
    large: tuple[BlobStore, Fragment, Path, pa.Table],
) -> None:
    """With Arrow's reader in the place of Spark's, which compares the same."""
    blobs, fragment, file, _ = large
    assert isinstance(fragment.at, Blob)
    data, chance = file.read_bytes(), random.Random(3)
    try:
        for content in regions(file)["pages"]:
            if len(content):
                file.write_bytes(flipped(data, chance.choice(content), chance.randrange(8)))
                check_skeleton(blobs, fragment.at, headers=True)
                with pytest.raises(OSError, match="CRC"):
                    _pq.ParquetFile(file, page_checksum_verification=True).read()
    finally:
        file.write_bytes(data)


def test_pages_of_other_columns_are_neither_read_nor_compared(
    large: tuple[BlobStore, Fragment, Path, pa.Table],
) -> None:
    blobs, fragment, file, right = large
    data = file.read_bytes()
    column = pq.read_metadata(file).row_group(0).column(right.schema.names.index("text"))
    assert column.path_in_schema == "text"
    file.write_bytes(flipped(data, column.data_page_offset + 1000, 0))
    try:
        assert read(blobs, fragment, ["id"]).equals(right.select(["id"]))
        with pytest.raises(CorruptBlob):
            read(blobs, fragment, ["text"])
    finally:
        file.write_bytes(data)


@pytest.mark.parametrize("written_by", [0, 1, 2, 3])
@pytest.mark.parametrize("read_by", [0, 1, 2, 3])
def test_releases_may_differ_in_what_is_small(
    blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_by: int, read_by: int
) -> None:
    """The limit lies below the object, within its footer, or above, when it is written and read."""
    fragment, blob = written(blobs, 500, text=8)
    assert blob.digest is not None
    body, right = blob.digest.bytes - blob.digest.footer, read(blobs, fragment)
    limits = [body - 1, body, body + 1, 2 * body]
    monkeypatch.setattr(module, "WHOLE_BYTES", limits[written_by])
    fragment, blob = written(blobs, 500, text=8)
    assert blob.digest is not None
    monkeypatch.setattr(module, "WHOLE_BYTES", limits[read_by])
    assert read(blobs, fragment).equals(right)
    check_skeleton(blobs, blob, headers=True)
    check_object(blobs, blob)
    file = tmp_path / blob.path
    data = file.read_bytes()
    for position in (0, 4, body // 2, body + 1, len(data) - 1):
        file.write_bytes(flipped(data, position, 1))
        with pytest.raises(CorruptBlob):
            check_object(blobs, blob)


def test_another_object_in_its_place_is_damage(blobs: BlobStore, tmp_path: Path) -> None:
    fragment, blob = written(blobs, 50, text=8)
    _, other = written(blobs, 51, text=8)
    (tmp_path / blob.path).write_bytes((tmp_path / other.path).read_bytes())
    with pytest.raises(CorruptBlob):
        read(blobs, fragment)


def test_objects_of_an_earlier_release_are_read_as_they_were(
    blobs: BlobStore, tmp_path: Path
) -> None:
    """They have neither digest nor sums; what can be told of damage is told."""
    fragment, blob = written(blobs, 2_000, text=4)
    file, right = tmp_path / blob.path, read(blobs, fragment)
    pq.write_table(_pa.Table.from_batches([rows(2_000, text=4)]), file)
    old = structs.replace(fragment, at=structs.replace(blob, digest=None))
    assert read(blobs, old).equals(right)
    check_skeleton(blobs, structs.replace(blob, digest=None), headers=True)
    file.write_bytes(file.read_bytes()[:-9] + b"PAR1")
    with pytest.raises(CorruptBlob, match=blob.path):
        read(blobs, old)


@given(
    st.builds(
        Sums,
        body=st.integers(0, (1 << 32) - 1),
        headers=st.integers(0, (1 << 64) - 1),
    ),
    st.lists(st.tuples(*[st.integers(0, (1 << 32) - 1)] * 3), max_size=20),
)
def test_sums_are_decoded_as_they_were_encoded(sums: Sums, pages: list[tuple[int, ...]]) -> None:
    sizes, headers, crcs = zip(*pages, strict=True) if pages else ((), (), ())
    whole = Sums(
        body=sums.body, headers=sums.headers, sizes=sizes, header_sizes=headers, pages=crcs
    )
    assert Sums.decode(whole.encode().encode()) == whole


@given(st.integers(1, 3_000), st.integers(0, 9), st.sampled_from(["NONE", "GZIP", "ZSTANDARD"]))
def test_the_walk_over_pages_ends_where_the_footer_begins(
    tmp_path_factory: pytest.TempPathFactory, count: int, text: int, codec: Codec
) -> None:
    """Whatever Arrow writes: nested columns, NULLs, empty pages, dictionaries."""
    blobs = open_blobs(str(tmp_path_factory.mktemp("walk")))
    form = FragmentLayout(schema="s", root=ROOT, key=("/id",), codec=codec)
    with FragmentWriter(blobs, "acme", form, "a", inline=False) as writer:
        for _ in range(2):
            writer.write(rows(count, text=text))
        fragment = writer.finish()
    assert fragment is not None
    assert isinstance(fragment.at, Blob)
    assert check_object(blobs, fragment.at) == fragment.bytes
    assert read(blobs, fragment).num_rows == 2 * count


# ------------------------------------------------------------------------------- records and pages


def test_what_the_second_release_wrote_is_still_read() -> None:
    """A fragment in an object, compaction and a page, none of which has a digest."""
    fragment = "9a000000020392a17000a1739199cf000001000000000701000102cca0cca101c30102"
    (read,) = MACHINE.decode_diff(bytes.fromhex(f"920191{fragment}"), 2).records
    assert read.at == Blob(path="p")
    compact = MACHINE.decode_diff(bytes.fromhex("950500" + "02a17103"), 2)
    assert (compact.path, compact.bytes, compact.digest) == ("q", 3, None)
    assert decode_page(bytes.fromhex(f"920191{fragment}")) == (read,)
    seal_ = MACHINE.decode_diff(bytes.fromhex("920698a1700002010203" + "0505"), 2)
    assert (seal_.page.path, seal_.page.digest) == ("p", None)


def test_every_bit_of_a_page_counts(tmp_path: Path) -> None:
    async def scene() -> None:
        async with world(tmp_path) as here:
            for n in range(6):
                await publish(here, [n], text=8)
            (journal,) = await here.journals.list()
            await seal(here.journals, here.blobs, journal.name, journal.state.records)
            (journal,) = await here.journals.list()
            (page,) = journal.state.pages
            assert page.digest is not None
            right, file = await here.read(), tmp_path / "blobs" / page.path
            records = read_page(here.blobs, page)
            data = file.read_bytes()
            for position in range(0, len(data), 7):
                file.write_bytes(flipped(data, position, position % 8))
                with pytest.raises(CorruptBlob) as caught:
                    await here.read()
                assert page.path in caught.value.what
                assert f"{journal.name}, offsets 0 to {page.end}" in str(caught.value.where)
            with pytest.raises(CorruptBlob):  # or it would take what the page names for garbage
                await collect_garbage(here.journals, here.blobs, now_s=4e9)
            file.write_bytes(encode_page(records[:-1]))
            with pytest.raises(CorruptBlob, match=page.path):
                read_page(here.blobs, structs.replace(page, digest=None))
            file.write_bytes(data)
            assert await here.read() == right

    asyncio.run(scene())


def test_a_compacted_object_has_a_digest_in_each_of_its_fragments(tmp_path: Path) -> None:
    async def scene() -> None:
        async with world(tmp_path) as here:
            for n in range(3):
                await publish(here, [n], text=6_000)
            await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            (journal,) = await here.journals.list()
            places = [r.at for r in journal.state.records if isinstance(r, Fragment)]
            assert len({at.path for at in places if isinstance(at, Blob)}) == 1
            assert len({at.digest for at in places if isinstance(at, Blob)}) == 1
            for at in places:
                assert isinstance(at, Blob)
                check_object(here.blobs, at)
            state = MACHINE.decode_state(MACHINE.encode_state(journal.state), 3, 9)
            assert state == journal.state

    asyncio.run(scene())


def test_compaction_does_not_make_damage_look_sound(tmp_path: Path) -> None:
    """And goes on with other journals."""

    async def scene() -> None:
        async with world(tmp_path) as here:
            for n in range(6):
                await publish(here, [n], text=6_000, region="us" if n % 2 else "eu")
            sick, sound = await here.journals.list()
            damage(tmp_path / "blobs/acme/orders/region=eu")
            with pytest.raises(CorruptBlob) as caught:
                await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            assert f"journal {sick.name}, offsets" in str(caught.value.where)
            now = await here.journals.list()
            assert now[0] == sick
            assert now[1] != sound

    asyncio.run(scene())


async def publish(here: World, numbers: list[int], *, text: int, region: str | None = "eu") -> None:
    publisher = here.publisher()
    documents = [{"id": n, "region": region, "text": os.urandom(text).hex()} for n in numbers]
    await publisher.publish(0, batch(documents))
    await publisher.commit_now()


def damage(directory: Path) -> None:
    """One bit of the first object, in the middle of it."""
    file = min(directory.rglob("*.parquet"))
    data = file.read_bytes()
    file.write_bytes(flipped(data, len(data) // 2, 3))


# ------------------------------------------------------------------------------------------ Spark


def positions(file: Path) -> Iterator[tuple[str, int]]:
    chance = random.Random(4)
    for region, ranges in regions(file).items():
        every = [position for some in ranges for position in some]
        for position in chance.sample(every, min(3, len(every))):
            yield region, position


@pytest.mark.spark
@pytest.mark.parametrize(
    ("appends", "text", "compacted"),
    [
        pytest.param([40], 400, False, id="a small object"),
        pytest.param([15_000], 16, False, id="a large object"),
        pytest.param([5_000, 5_000, 5_000], 16, True, id="compacted"),
    ],
)
def test_spark_shows_the_right_documents_or_none(
    tmp_path: Path, spark: SparkSession, appends: list[int], text: int, compacted: bool
) -> None:
    async def scene() -> None:
        async with world(tmp_path) as here:
            first = 0
            for count in appends:
                await publish(here, list(range(first, first + count)), text=text)
                first += count
            if compacted:
                await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            (journal,) = await here.journals.list()
            at = journal.state.records[0]
            assert isinstance(at, Fragment)
            assert isinstance(at.at, Blob)
            file = tmp_path / "blobs" / at.at.path

            async def total() -> tuple[Any, ...]:
                frame = await read_collection(
                    spark, here.journals, here.blobs, here.schemas, ORDERS, meta=True
                )
                [row] = await asyncio.to_thread(
                    lambda: frame.selectExpr(
                        "count(*)",
                        "sum(xxhash64(id, region, text, size(_x)) % 1000003)",
                        "sum(_clock % 1000003)",
                    ).collect()
                )
                return tuple(row)

            right, data = await total(), file.read_bytes()
            errors: list[Exception] = []
            for region, position in positions(file):
                file.write_bytes(flipped(data, position, position % 8))
                try:
                    assert await total() == right, region
                except (CorruptBlob, PySparkException, Py4JJavaError) as error:
                    errors.append(error)
            file.write_bytes(data)
            assert len(errors) >= 10
            assert all(at.at.path in str(error) for error in errors)
            places = [error.where or "" for error in errors if isinstance(error, CorruptBlob)]
            assert places
            assert all(f"{journal.name}, offsets 0 to" in place for place in places)
            assert await total() == right

    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    asyncio.run(scene())


@pytest.mark.spark
@pytest.mark.parametrize("count", [40, 15_000], ids=["a small object", "a large object"])
def test_the_source_shows_the_right_documents_or_none(
    tmp_path: Path, spark: SparkSession, count: int
) -> None:
    """Arrow in tasks."""
    from pyspark.errors import PySparkException

    async def deploy() -> None:
        async with world(tmp_path, f"sqlite:///{tmp_path}/consensus.db") as here:
            await desired.apply(here.journals.store, Catalog(collections=(ORDERS,)))
            await publish(here, list(range(count)), text=400 if count < 100 else 16)

    def total() -> int:
        frame = spark.read.format("penstock").options(data=tmp_path, collection=ORDERS.name).load()
        [row] = frame.selectExpr("sum(xxhash64(id, region, text) % 1000003)").collect()
        return int(row[0])

    asyncio.run(deploy())
    (file,) = (tmp_path / "blobs").rglob("*.parquet")
    right, data = total(), file.read_bytes()
    for region in ("pages", "footer"):
        places = regions(file)[region]
        position = places[len(places) // 2][5]
        file.write_bytes(flipped(data, position, 1))
        with pytest.raises(PySparkException, match="an object is damaged"):
            total()
        file.write_bytes(data)
    assert total() == right
