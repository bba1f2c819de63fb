"""A blob store gets one mark, whoever races for it, and whatever dies on the way."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.publishing import batch, world
from penstock.consensus.committer.access import check_access
from penstock.consensus.open import open_consensus
from penstock.consensus.store import CasResult, VersionedData
from penstock.journal import ownership
from penstock.journal.blobs import BlobInfo, BlobStore, open_blobs
from penstock.journal.journals import Journals
from penstock.journal.ownership import (
    MARK,
    ForeignBlobs,
    Ownership,
    _put_first_mark,
    read_mark,
)
from penstock.journal.sealing import seal, seal_if_long
from penstock.journal.upkeep import CompactionOptions, compact_all
from penstock.servicekit.rpc.tokens import EVERYTHING, Access, Principal
from support.s3 import running_s3

A, B = "a" * 32, "b" * 32


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with running_s3() as url:
        yield url


@pytest.fixture(params=["disk", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "disk":
        return open_blobs(str(tmp_path / "blobs"))
    base, _, query = request.getfixturevalue("s3_url").partition("?")
    return open_blobs(f"{base}/{uuid.uuid4().hex}?{query}")


# ---------------------------------------------------------------------------------------- replace


def test_an_object_can_be_replaced(blobs: BlobStore) -> None:
    for content in (b"one", b"", b"three"):
        blobs.replace("d/mark", content)
        assert blobs.read("d/mark") == content
        assert [info.path for info in blobs.list()] == ["d/mark"]


def test_of_many_that_replace_an_object_at_once_one_is_last(blobs: BlobStore) -> None:
    contents = [bytes([n]) * 1000 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: blobs.replace("mark", content), contents))
    assert blobs.read("mark") in contents
    assert [info.path for info in blobs.list()] == ["mark"]


# --------------------------------------------------------------------------------- the first mark


def test_of_many_deployments_at_once_one_has_the_store_at_most(blobs: BlobStore) -> None:
    stores = [secrets.token_hex(16) for _ in range(4)] * 2

    def claim(store: str) -> str | None:
        try:
            _put_first_mark(blobs, store)
        except ForeignBlobs:
            return None
        return store

    with ThreadPoolExecutor(8) as pool:
        won = set(pool.map(claim, stores)) - {None}
    mark = read_mark(blobs)
    assert won == ({mark.store} if mark else set())
    assert [info.path for info in blobs.list()] == ([MARK] if mark else [])
    if mark is None:
        _put_first_mark(blobs, A)  # nobody had it, and nobody is in the way


class _Died(BaseException):
    pass


class Stepped(BlobStore):
    """Does one operation each time it is told to, and dies when told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.ready, self.permit = threading.Semaphore(0), threading.Semaphore(0)
        self.dies = False

    def _gate(self) -> None:
        self.ready.release()
        self.permit.acquire()
        if self.dies:
            raise _Died

    def write(self, path: str, data: bytes) -> None:
        self._gate()
        super().write(path, data)

    def replace(self, path: str, data: bytes) -> None:
        self._gate()
        super().replace(path, data)

    def delete(self, path: str) -> None:
        self._gate()
        super().delete(path)

    def read(self, path: str) -> bytes:
        self._gate()
        return super().read(path)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        self._gate()
        return iter(list(super().list(prefix)))


class Claimant:
    """A process that claims a store, operation by operation."""

    def __init__(self, root: str, store: str) -> None:
        self.store, self.won, self.ended = store, False, False
        self._blobs = Stepped(Path(root).as_uri())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._blobs.ready.acquire()

    def _run(self) -> None:
        try:
            _put_first_mark(self._blobs, self.store)
            self.won = True
        except (ForeignBlobs, _Died):
            pass
        self.ended = True
        self._blobs.ready.release()

    def step(self, *, dies: bool = False) -> None:
        if not self.ended:
            self._blobs.dies = dies
            self._blobs.permit.release()
            self._blobs.ready.acquire()


@given(
    schedule=st.lists(st.integers(0, 2), max_size=24),
    death=st.none() | st.tuples(st.integers(0, 24), st.integers(0, 2)),
)
def test_however_they_take_turns_nobody_believes_in_a_mark_that_is_another(
    schedule: list[int], death: tuple[int, int] | None
) -> None:
    with tempfile.TemporaryDirectory() as root:
        claimants = [Claimant(root, store) for store in (A, B, A)]
        for step, who in enumerate([*schedule, *([0, 1, 2] * 12)]):
            claimants[who].step(dies=death == (step, who))
        assert all(claimant.ended for claimant in claimants)
        mark = read_mark(open_blobs(root))
        won = {claimant.store for claimant in claimants if claimant.won}
        assert len(won) <= 1
        assert won <= ({mark.store} if mark else set())


def test_a_claim_of_one_that_crashed_stops_others_and_not_its_own(blobs: BlobStore) -> None:
    blobs.write(f"=claim/{A}-0123456789abcdef", b"")
    with pytest.raises(ForeignBlobs, match="claimed by another") as caught:
        _put_first_mark(blobs, B)
    assert "aaaaaaaa" in str(caught.value)
    _put_first_mark(blobs, A)
    assert [info.path for info in blobs.list()] == [MARK]


# -------------------------------------------------------------------------------- a whole process

_LARGE = {"id": 1, "region": "eu", "text": secrets.token_hex(8192)}
_DYING = """
import asyncio, sys
from pathlib import Path
from journal.publishing import batch, world
from penstock import failpoints

async def main(directory, url, text):
    failpoints.arm(sys.argv[3])
    async with world(Path(directory), url) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch([{"id": 1, "region": "eu", "text": text}]))
        await publisher.commit_now()

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[4]))
"""


async def publish(directory: Path, url: str) -> list[int]:
    async with world(directory, url) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch([_LARGE]))
        await publisher.commit_now()
        return [d["id"] for documents in (await here.read()).values() for d in documents]


@pytest.mark.parametrize("failpoint", ["blobs.claimed", "blobs.marked", "publisher.object"])
async def test_after_a_crash_on_the_way_to_the_first_object_the_same_goes_on_and_others_do_not(
    tmp_path: Path, failpoint: str
) -> None:
    ours, theirs = (f"sqlite:///{tmp_path}/{name}.db" for name in ("ours", "theirs"))
    dying = [sys.executable, "-c", _DYING, str(tmp_path), ours, failpoint, _LARGE["text"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    died = await asyncio.to_thread(subprocess.run, dying, env=environment, check=False)  # type: ignore[call-overload]
    assert died.returncode == 137
    with pytest.raises(ForeignBlobs):
        await publish(tmp_path, theirs)
    assert await publish(tmp_path, ours) == [1]
    async with world(tmp_path, ours) as here:
        await Ownership(here.journals, here.blobs).take_turn()
        assert not list(here.blobs.list("=claim")), "a collection removes what was left"
    with pytest.raises(ForeignBlobs, match="marked"):
        await publish(tmp_path, theirs)


async def test_documents_that_are_inline_need_no_mark(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch([{"id": 1, "region": "eu"}]))
        await publisher.commit_now()
        assert not list(here.blobs.list())


async def test_many_publishers_of_one_deployment_may_come_first_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as here:

        async def one(n: int) -> None:
            publisher = here.publisher()
            await publisher.publish(0, batch([{**_LARGE, "id": n}]))
            await publisher.commit_now()

        await asyncio.gather(*(one(n) for n in range(8)))
        found = [d["id"] for documents in (await here.read()).values() for d in documents]
        assert sorted(found) == list(range(8))
        assert [info.path for info in here.blobs.list() if info.path.startswith("=")] == [MARK]


async def test_a_publisher_that_lives_long_notices_that_the_store_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch([_LARGE]))
        await publisher.commit_now()
        here.blobs.replace(MARK, b'{"version":1,"store":"%s"}' % (B.encode()))
        monkeypatch.setattr(ownership, "RECHECK_S", -1)
        await publisher.publish(0, batch([_LARGE]))
        with pytest.raises(ForeignBlobs, match="marked"):
            await publisher.commit_now()


# ------------------------------------------------------------------------------------------ turns


async def test_turns_of_many_at_once_are_all_known_and_old_ones_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "TURNS_KEPT", 4)
    async with world(tmp_path) as here:
        owners = [Ownership(here.journals, here.blobs) for _ in range(6)]
        for _ in range(4):
            await asyncio.gather(*(owner.take_turn() for owner in owners))
        await Ownership(here.journals, here.blobs).check()
        assert 4 <= len(await here.journals.store.scan("blobs/turns", 0)) <= 9


class Scoped:
    """A consensus store as somebody sees it whose token is for the journals of one collection."""

    def __init__(self, store: object) -> None:
        self._store = store
        self._who = Principal(name="writer", access=EVERYTHING, prefix="journal/acme/")

    async def incarnation(self) -> bytes:
        return await self._store.incarnation()  # type: ignore[attr-defined,no-any-return]

    async def scan(self, key: str, from_: int) -> object:
        check_access(self._who, Access.READ, key)
        return await self._store.scan(key, from_)  # type: ignore[attr-defined]

    def snapshot(self, prefix: str) -> object:
        check_access(self._who, Access.READ, prefix)
        return self._store.snapshot(prefix)  # type: ignore[attr-defined]


async def test_a_token_for_some_keys_is_enough_once_the_store_is_marked(tmp_path: Path) -> None:
    store = await open_consensus("memory:")
    blobs = open_blobs(str(tmp_path))
    whole, scoped = Journals(store), Journals(Scoped(store))  # type: ignore[arg-type]
    try:
        blobs.write(f"acme/{'0' * 32}-x.parquet", b"of somebody")
        with pytest.raises(ForeignBlobs, match="not that of these journals") as caught:
            await Ownership(scoped, blobs).claim()
        assert "token" in str(caught.value)
        blobs.delete(f"acme/{'0' * 32}-x.parquet")
        await Ownership(whole, blobs).take_turn()
        await Ownership(scoped, blobs).claim()
    finally:
        await store.close()


async def test_a_turn_that_was_recorded_and_never_marked_does_no_harm(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await Ownership(here.journals, here.blobs).take_turn()
        done = await here.journals.store.compare_and_set("blobs/turns", VersionedData(1, b"lost"))
        assert done is CasResult.COMMITTED
        await Ownership(here.journals, here.blobs).check()
        await Ownership(here.journals, here.blobs).take_turn()


async def test_pages_and_compacted_objects_are_not_written_under_a_foreign_mark(
    tmp_path: Path,
) -> None:
    one = "acme/orders/region=eu/pivot=00"
    async with world(tmp_path) as here:
        for n in range(6):
            publisher = here.publisher()
            await publisher.publish(0, batch([{"id": n, "region": "eu"}]))
            await publisher.commit_now()
        records = (await here.journals.load(one)).records
        here.blobs.replace(MARK, b'{"version":1,"store":"%s"}' % B.encode())
        options = CompactionOptions(inputs_min=2)
        with pytest.raises(ForeignBlobs, match="marked"):
            await seal(here.journals, here.blobs, one, records[:4])
        with pytest.raises(ForeignBlobs, match="marked"):
            await compact_all(here.journals, here.blobs, here.schemas, options=options)
        await seal_if_long(here.journals, here.blobs, one, 2)  # which is told, and no more
        assert [info.path for info in here.blobs.list()] == [MARK]
        assert len((await here.read())[one]) == 6
