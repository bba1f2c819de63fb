from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from journal.publishing import ORDERS, SCHEMA, Document, World, batch, collection, seal_as, world
from penstock.errors import UsageError, UserError
from penstock.journal.blobs import MissingBlob
from penstock.journal.codec import encode_page
from penstock.journal.evolve import UnreadableDocument
from penstock.journal.names import JournalName
from penstock.journal.publisher import Mapped, PublisherOptions
from penstock.journal.reader import Start
from penstock.journal.rows import to_lines
from penstock.journal.schemas import layout
from penstock.journal.selector import LabelSelector
from penstock.journal.state import AckRecord, Compact, Fragment, Page
from penstock.model.clock import DocumentId, from_unix
from penstock.model.spec import CollectionSpec

EU, US = (str(JournalName.of("acme/orders", {"region": r})) for r in ("eu", "us"))


def orders(*ids: int) -> list[Document]:
    """Odd ones are of the US."""
    return [{"id": i, "region": ("eu", "us")[i % 2]} for i in ids]


async def commit(here: World, *ids: int, spec: CollectionSpec = ORDERS) -> None:
    publisher = here.publisher(Mapped(spec=spec))
    await publisher.publish(0, batch(orders(*ids), spec))
    await publisher.commit_now()


async def read_ids(here: World, **options: Any) -> list[int]:  # noqa: ANN401 - the reader's
    found = await here.read(**options)
    return [document["id"] for name in sorted(found) for document in found[name]]


# ----------------------------------------------------------------------------------------- what


async def test_spans_that_are_open_are_held_back_until_they_are_committed(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        slow = here.publisher()
        await slow.publish(0, batch(orders(0, 2)))
        await slow.flush()
        await commit(here, 4)
        assert await read_ids(here) == [4]
        await slow.publish(0, batch(orders(6)))
        await slow.commit_now()
        assert await read_ids(here) == [4, 0, 2, 6]


async def test_uncommitted_shows_everything_as_it_was_written_with_its_uuid(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        slow = here.publisher()
        await slow.publish(0, batch(orders(0)))
        await slow.flush()
        await commit(here, 2)
        lines = [
            json.loads(line)
            async for rows in here.reader(uncommitted=True).read()
            for line in to_lines(rows.batch, rows.root, uuid=True)
        ]
        assert [line["id"] for line in lines] == [0, 2]
        written_by = DocumentId.parse(UUID(lines[0]["_meta"]["uuid"]))
        assert written_by.producer == slow.producer


async def test_a_selector_chooses_partitions(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await commit(here, 0, 1, 2, 3)
        assert await read_ids(here, selector=LabelSelector.parse("region=us")) == [1, 3]


async def test_batches_are_small_whatever_the_fragment(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await commit(here, *range(0, 200, 2))
        sizes = [rows.batch.num_rows async for rows in here.reader(batch_rows=30).read()]
        assert sum(sizes) == 100
        assert max(sizes) <= 30


# ----------------------------------------------------------------------------------------- where


async def test_a_reader_that_begins_where_it_ended_gets_every_document_once(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        slow = here.publisher()
        await slow.publish(0, batch(orders(0)))
        await slow.flush()
        await commit(here, 2)
        state = await here.journals.load(EU)
        assert await read_ids(here) == [2]
        await slow.commit_now()
        await commit(here, 4)
        by_offset = Start(offsets={EU: state.end})
        assert await read_ids(here, start=by_offset) == [0, 4]
        by_revision = Start(revision=max(r.revision for r in state.records) + 1)
        assert await read_ids(here, start=by_revision) == [0, 4]
        assert await read_ids(here, start=Start(offset=state.end)) == [0, 4]


async def test_a_time_is_when_documents_were_published(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for second in (10, 20, 30):
            publisher = here.publisher(now=from_unix(second))
            await publisher.publish(0, batch(orders(second, second + 2)))
            await publisher.commit_now()
        assert await read_ids(here, start=Start(clock=from_unix(20))) == [20, 22, 30, 32]
        # Within a fragment, by row.
        assert await read_ids(here, start=Start(clock=from_unix(20) + 1)) == [22, 30, 32]


@pytest.mark.parametrize(
    ("texts", "start"),
    [
        ([], Start()),
        (["revision=12", "offset=3"], Start(revision=12, offset=3)),
        ([f"{EU}@7", f"{US}@0"], Start(offsets={EU: 7, US: 0})),
        (["1970-01-01T00:00:10.5Z"], Start(clock=from_unix(10, 500_000_000))),
        (["1970-01-01T01:00:00+01:00"], Start(clock=from_unix(0))),
    ],
)
def test_places_to_begin_are_written_as(texts: list[str], start: Start) -> None:
    assert Start.parse(texts) == start


@pytest.mark.parametrize("text", ["yesterday", "2026-01-01", "revision=x", "journal@", "offset=-1"])
def test_other_texts_are_not_places_to_begin(text: str) -> None:
    with pytest.raises(UsageError, match="not a place to begin"):
        Start.parse([text])


async def test_an_offset_of_no_journal_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await commit(here, 0)
        with pytest.raises(UserError, match="has no journal"):
            await here.read(start=Start(offsets={US: 1}))


# -------------------------------------------------------------------------------------- following


async def test_following_goes_on_with_new_partitions_and_whole_transactions(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        await commit(here, 0)
        slow = here.publisher()
        await slow.publish(0, batch(orders(2)))
        await slow.flush()
        async with aclosing(here.reader().follow()) as found:
            seen: list[int] = []

            async def see(count: int) -> list[int]:
                while len(seen) < count:
                    rows = await asyncio.wait_for(anext(found), 30)
                    seen.extend(json.loads(t)["id"] for t in to_lines(rows.batch, rows.root))
                return seen

            assert await see(1) == [0]
            await commit(here, 4, 5)
            assert await see(3) == [0, 4, 5]
            await slow.commit_now()
            assert await see(4) == [0, 4, 5, 2]
            await here.journals.drop(US)
            await commit(here, 7)
            assert await see(5) == [0, 4, 5, 2, 7]


# ------------------------------------------------------------------------- upkeep, and what is lost


async def test_readers_do_not_notice_pages_and_compaction(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        slow = here.publisher()
        await slow.publish(0, batch(orders(0)))
        await slow.flush()
        for i in (2, 4, 6):
            await commit(here, i)
        state = await here.journals.load(EU)
        sealed = state.records[:3]
        here.blobs.write("pages/1", encode_page(sealed))
        page = Page(
            path="pages/1",
            begin=sealed[0].begin,
            end=sealed[-1].end,
            records=len(sealed),
            rows=2,
            bytes=0,
            revision_min=sealed[0].revision,
            revision_max=sealed[-1].revision,
        )
        await seal_as(here.journals, EU, page)
        assert await read_ids(here) == [2, 4, 6]
        await slow.commit_now()
        assert await read_ids(here) == [2, 4, 6, 0]
        assert await read_ids(here, start=Start(offset=sealed[-1].end)) == [4, 6, 0]


async def test_a_missing_object_is_named_with_its_journal_and_offset(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await commit(here, 0)
        state = await here.journals.load(EU)
        (fragment,) = (r for r in state.records if isinstance(r, Fragment))
        compact = Compact(begin=0, end=fragment.end, path="acme/gone.parquet", bytes=1)
        await here.journals.compact(EU, compact)
        with pytest.raises(MissingBlob) as caught:
            await here.read()
        told = str(caught.value)
        assert "acme/gone.parquet" in told
        assert f"journal {EU}, offsets 0 to 1" in told


async def test_a_missing_object_of_somebody_elses_open_span_is_no_concern(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        slow = here.publisher()
        await slow.publish(0, batch([{"id": 0, "region": "eu", "text": "x" * 40}]))
        await slow.flush()
        await here.journals.compact(EU, Compact(begin=0, end=1, path="acme/gone.parquet", bytes=1))
        await commit(here, 2)
        assert await read_ids(here) == [2]


# -------------------------------------------------------------------------------------- evolution


async def test_documents_of_an_older_schema_are_read_under_the_new_one(tmp_path: Path) -> None:
    properties = {**SCHEMA["properties"], "id": {"type": "number"}, "more": {"type": "string"}}  # type: ignore[dict-item]
    wider = collection(schema={**SCHEMA, "properties": properties})
    async with world(tmp_path) as here:
        await commit(here, 0)
        await commit(here, 2, spec=wider)
        root = layout(wider.write_schema.text)
        found = [rows async for rows in here.reader(root=root).read()]
        assert {rows.root for rows in found} == {root}
        assert len({rows.batch.schema for rows in found}) == 1
        assert await read_ids(here, root=root) == [0, 2]
        as_written = [rows async for rows in here.reader().read()]
        assert len({rows.root for rows in as_written}) == 2


async def test_a_document_that_does_not_fit_the_new_schema_is_named(tmp_path: Path) -> None:
    properties = {**SCHEMA["properties"], "text": {"type": "integer"}}  # type: ignore[dict-item]
    other = collection(schema={**SCHEMA, "properties": properties})
    async with world(tmp_path) as here:
        publisher = here.publisher(options=PublisherOptions())
        await publisher.publish(0, batch([{"id": 0, "region": "eu", "text": "x"}]))
        await publisher.commit_now()
        with pytest.raises(UnreadableDocument) as caught:
            await here.read(root=layout(other.write_schema.text))
        assert EU in str(caught.value)
        assert "/text" in str(caught.value)


def test_where_to_begin_is_about_the_record_that_commits() -> None:
    """What `Start.begun` compares is the record that commits: an ACK as well as a fragment."""
    ack = AckRecord(begin=5, revision=3, producer=_PRODUCER, clock=from_unix(0))
    assert Start(offset=5, revision=3).begun(EU, ack)
    assert not Start(offset=6).begun(EU, ack)
    assert not Start(revision=4).begun(EU, ack)
    assert not Start(offset=1, offsets={EU: 6}).begun(EU, ack)


_PRODUCER = DocumentId.parse("04afc000-833b-11ee-8001-010000000001").producer
