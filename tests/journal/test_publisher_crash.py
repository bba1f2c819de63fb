"""A transaction over three journals, by a process that dies between any two of its steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from journal import crashing
from journal.crashing import DOCUMENTS, Job, intents_file
from journal.publishing import batch, swept, world
from penstock.journal.ownership import own_objects, paths_of
from penstock.journal.state import RECORDS_MAX
from penstock.journal.transaction import Intents

Run = Callable[[Job], int]
KILLED = 137
EU = "acme/orders/region=eu/pivot=00"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a job in a process of its own; how that ended."""
    with subprocess.Popen(
        [sys.executable, crashing.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        },
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run(job: Job) -> int:
            stdin.write(msgspec.json.encode(job) + b"\n")
            stdin.flush()
            return int(stdout.readline())

        yield run
        stdin.close()


async def visible(directory: Path, url: str) -> list[int]:
    """The ids that a reader sees, after somebody else's transaction; one is of that."""
    async with world(directory, url) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch([{"id": 100, "region": "eu"}]))
        await publisher.commit_now()
        found = await here.read()
    return sorted(d["id"] for documents in found.values() for d in documents)


ALL = [*range(len(DOCUMENTS)), 100]
NONE = [100]


@pytest.mark.parametrize(
    "failpoint",
    [
        *(f"publisher.object:{n}" for n in (1, 2, 3)),
        *(f"publisher.rows:{n}" for n in (1, 2, 3)),
        "publisher.flushed",
        "publisher.intents",
        "test.stored",
        *(f"publisher.acks:{n}" for n in (1, 2, 3)),
        "publisher.done",
        *(f"statelog.after-send:{n}" for n in range(1, 8)),
    ],
)
async def test_after_replaying_intents_all_journals_show_all_or_nothing(
    tmp_path: Path, run: Run, failpoint: str
) -> None:
    url = f"sqlite:///{tmp_path / 'consensus.db'}"
    job = Job(directory=str(tmp_path), url=url, now=False, failpoint=failpoint)
    assert run(job) == KILLED
    stored = intents_file(tmp_path)
    if stored.exists():
        async with world(tmp_path, url) as here:
            await here.publisher().write_intents(Intents.decode(stored.read_bytes()))
    assert await visible(tmp_path, url) == (ALL if stored.exists() else NONE)


@pytest.mark.parametrize(
    "failpoint",
    [
        *(f"staging.object:{n}" for n in (1, 2, 3, 4, 9)),
        *(f"publisher.adopted:{n}" for n in (1, 2, 3)),
        *(f"publisher.rows:{n}" for n in (1, 2, 3)),
        "publisher.flushed",
        "publisher.intents",
        "test.stored",
        *(f"publisher.acks:{n}" for n in (1, 2, 3)),
        "publisher.done",
        *(f"statelog.after-send:{n}" for n in range(1, 8)),
    ],
)
async def test_fragments_of_three_tasks_are_seen_together_or_swept(
    tmp_path: Path, run: Run, failpoint: str
) -> None:
    url = f"sqlite:///{tmp_path / 'consensus.db'}"
    job = Job(directory=str(tmp_path), url=url, now=False, failpoint=failpoint, adopt=True)
    assert run(job) == KILLED
    stored = intents_file(tmp_path)
    if stored.exists():
        async with world(tmp_path, url) as here:
            await here.publisher().write_intents(Intents.decode(stored.read_bytes()))
    expected = ALL if stored.exists() else NONE
    assert await visible(tmp_path, url) == expected
    async with world(tmp_path, url) as here:
        named = {
            path
            for journal in await here.journals.list()
            for path in paths_of(journal.state.records)
        }
        collected = await swept(here)
        assert collected.deleted == len(collected.garbage)
        assert named.isdisjoint(collected.garbage)
        assert {found.path for found in own_objects(here.blobs.list())} == named
    assert await visible(tmp_path, url) == sorted([*expected, 100])


@pytest.mark.parametrize(
    ("failpoint", "committed"),
    [
        *((f"publisher.object:{n}", False) for n in (1, 2, 3)),
        # The schema is not a state log; the journals are made first, then it is all one append.
        ("statelog.after-send:1", False),
        ("statelog.after-send:2", True),
        ("publisher.acks", True),
        ("publisher.done", True),
    ],
)
async def test_a_transaction_that_is_one_append_needs_no_replay(
    tmp_path: Path, run: Run, failpoint: str, committed: bool
) -> None:
    url = f"sqlite:///{tmp_path / 'consensus.db'}"
    job = Job(directory=str(tmp_path), url=url, now=True, failpoint=failpoint)
    assert run(job) == KILLED
    assert await visible(tmp_path, url) == (ALL if committed else NONE)


async def test_a_page_that_was_written_and_not_named_is_garbage_and_nothing_else(
    tmp_path: Path, run: Run
) -> None:
    url = f"sqlite:///{tmp_path / 'consensus.db'}"
    own = [{"id": n, "region": "eu"} for n in range(1000, 1000 + RECORDS_MAX // 2)]
    async with world(tmp_path, url) as here:
        publisher = here.publisher()
        for document in own:
            await publisher.publish(0, batch([document]))
            await publisher.commit_now()
    job = Job(directory=str(tmp_path), url=url, now=True, failpoint="seal.written")
    assert run(job) == KILLED
    async with world(tmp_path, url) as here:
        full = await here.journals.load(EU)
        assert (len(full.pages), len(full.records) > RECORDS_MAX) == (0, True)
    expected = sorted([*ALL, *(document["id"] for document in own)])
    assert await visible(tmp_path, url) == expected, "whoever comes next goes on, and seals"
    async with world(tmp_path, url) as here:
        sealed = await here.journals.load(EU)
        assert (len(sealed.pages), len(sealed.records)) == (1, RECORDS_MAX // 4)
        collected = await swept(here)
        [path] = collected.garbage
        assert path.endswith(".page")
    assert await visible(tmp_path, url) == sorted([*expected, 100])


async def test_without_a_crash_point_everything_is_there(tmp_path: Path, run: Run) -> None:
    url = f"sqlite:///{tmp_path / 'consensus.db'}"
    for now, adopt in ((False, False), (True, False), (False, True), (True, True)):
        job = Job(directory=str(tmp_path), url=url, now=now, failpoint=None, adopt=adopt)
        assert run(job) == 0
    assert await visible(tmp_path, url) == sorted([*(4 * list(range(9))), 100])
