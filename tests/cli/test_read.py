"""`penstock read`, as people run it."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from cli.documents import jsonl, penstock, start, with_catalog
from journal.publishing import batch, world
from penstock.model.clock import DocumentId


@pytest.fixture
def data(tmp_path: Path) -> Path:
    data = with_catalog(tmp_path)
    append(data, range(6))
    return data


def append(data: Path, ids: range) -> None:
    documents = [{"region": ("eu", "us")[i % 2], "id": i} for i in ids]
    done = penstock(
        "append", "acme/orders", "--redact-salt", "c2FsdA==", data=data, stdin=jsonl(documents)
    )
    assert done.returncode == 0, done.stderr


def test_documents_come_in_order_with_their_members_in_order(data: Path) -> None:
    append(data, range(6, 8))
    done = penstock("read", "acme/orders", data=data)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == '{"id":0,"region":"eu"}'
    assert [line["id"] for line in done.lines] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_limit_and_selector(data: Path) -> None:
    limited = penstock("read", "acme/orders", "--limit", "4", data=data)
    assert [line["id"] for line in limited.lines] == [0, 2, 4, 1]
    assert penstock("read", "acme/orders", "--limit", "0", data=data).stdout == ""
    every = penstock("read", "acme/orders", "--limit", "9" * 20, data=data)
    assert (every.returncode, len(every.lines)) == (0, 6), every.stderr
    us = penstock("read", "acme/orders", "--selector", "region=us", data=data)
    assert [line["id"] for line in us.lines] == [1, 3, 5]


def test_with_meta_shows_who_wrote_a_document_and_when(data: Path) -> None:
    lines = penstock("read", "acme/orders", "--with-meta", data=data).lines
    written = [DocumentId.parse(line["_meta"]["uuid"]) for line in lines]
    assert len({each.producer for each in written}) == 1
    by_id = sorted(zip((line["id"] for line in lines), written, strict=True))
    clocks = [each.clock for _, each in by_id]
    assert clocks == list(range(clocks[0], clocks[0] + 6))


async def test_uncommitted_shows_what_somebody_left_behind(data: Path) -> None:
    async with world(data, f"sqlite:///{data / 'consensus.db'}") as here:
        publisher = here.publisher()
        await publisher.publish(0, batch([{"id": 100, "region": "eu"}]))
        await publisher.flush()
    committed, everything = await asyncio.to_thread(
        lambda: [
            penstock("read", "acme/orders", *options, data=data).lines
            for options in ([], ["--uncommitted"])
        ]
    )
    assert [line["id"] for line in committed] == [0, 2, 4, 1, 3, 5]
    assert [line["id"] for line in everything] == [0, 2, 4, 100, 1, 3, 5]
    assert DocumentId.parse(everything[3]["_meta"]["uuid"]).producer == publisher.producer


def test_times_and_offsets_say_where_to_begin(data: Path) -> None:
    later = penstock("read", "acme/orders", "--from", "2999-01-01T00:00:00Z", data=data)
    assert (later.returncode, later.stdout) == (0, "")
    always = penstock("read", "acme/orders", "--from", "2020-01-01T00:00:00Z", data=data)
    assert len(always.lines) == 6
    journal = "acme/orders/region=eu/pivot=00"
    rest = penstock("read", "acme/orders", "--from", f"{journal}@100", data=data)
    assert [line["id"] for line in rest.lines] == [1, 3, 5]
    wrong = penstock("read", "acme/orders", "--from", "monday", data=data)
    assert wrong.returncode == 2
    assert "not a place to begin" in wrong.stderr


def test_a_collection_without_documents_is_empty_and_an_unknown_one_is_a_mistake(
    data: Path,
) -> None:
    empty = penstock("read", "acme/plain", data=data)
    assert (empty.returncode, empty.stdout) == (0, "")
    unknown = penstock("read", "acme/order", data=data)
    assert unknown.returncode == 1
    assert "did you mean acme/orders?" in unknown.stderr


def test_following_shows_what_others_append(data: Path) -> None:
    with start("read", "acme/orders", "--follow", data=data) as process:
        assert process.stdout is not None
        try:
            seen = [json.loads(process.stdout.readline())["id"] for _ in range(6)]
            append(data, range(6, 8))
            seen += [json.loads(process.stdout.readline())["id"] for _ in range(2)]
            assert seen == [0, 2, 4, 1, 3, 5, 6, 7]
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()


def test_a_reader_that_goes_away_is_no_error(data: Path) -> None:
    stdin = jsonl([{"id": i} for i in range(20_000)])
    assert penstock("append", "acme/plain", data=data, stdin=stdin).returncode == 0
    with start("read", "acme/plain", data=data) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b'{"id":0}\n'
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("selector", "fix"),
    [("regoin=eu", "did you mean region?"), ("!colour", "labels: region")],
)
def test_an_unknown_label_is_an_error(data: Path, selector: str, fix: str) -> None:
    result = penstock("read", "acme/orders", "-l", selector, data=data)
    assert (result.returncode, result.stdout) == (1, "")
    assert "there is no label" in result.stderr
    assert fix in result.stderr
