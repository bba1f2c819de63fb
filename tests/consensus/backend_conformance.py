"""The suite of `Backend`, which the committer relies on: pages, snapshots, truncation."""

from __future__ import annotations

import asyncio

from consensus.conformance import COMMITTED, MISMATCH, V, new_key, refused
from penstock.consensus.backend import PAGE_ENTRIES, Backend, RevisionPage, Unit
from penstock.consensus.store import SCAN_ALL, ErrorKind


def chain(key: str, start: int, stop: int, size: int = 1) -> list[Unit]:
    return [((key, V(n, bytes(size))),) for n in range(start, stop)]


async def read_all(backend: Backend, prefix: str, revision: int) -> list[RevisionPage]:
    pages = [await backend.entries_since(prefix, revision)]
    while pages[-1].more:
        pages.append(await backend.entries_since(prefix, pages[-1].upto))
    return pages


async def expect_another_store(backend: Backend) -> None:
    """Every call of a handle whose store is not the one it was opened on is refused."""
    for call in (
        backend.revision(),
        backend.list_page("", ""),
        backend.head("k"),
        backend.head(new_key()),
        backend.heads(["k"]),
        backend.heads_under(""),
        backend.scan("k", 0, SCAN_ALL),
        backend.scan("k", 0, SCAN_ALL, bytes_max=1_000),
        backend.floor("k"),
        backend.commit([((new_key(), V(0, b"")),)]),
        backend.commit([(("k", V(3, b"")),)]),
        backend.commit([(("k", V(9, b"")),)]),
        backend.truncate("k", 1),
        backend.entries_since("", 0),
        backend.live_page("", ("", -1)),
    ):
        await refused(call, ErrorKind.STORE_RESET)


class BackendConformance:
    """Inherited, with a fixture `backend`, by the tests of each backend."""

    async def test_units_of_one_transaction_have_outcomes_of_their_own(
        self, backend: Backend
    ) -> None:
        a, b, c = new_key("a"), new_key("b"), new_key("c")
        commit = await backend.commit(
            [
                ((a, V(0, b"")),),
                ((a, V(0, b"")),),
                ((b, V(0, b"")), (c, V(1, b""))),
                ((a, V(1, b"")), (c, V(0, b""))),
                ((c, V(1, b"")),),
            ]
        )
        assert commit.outcomes == (COMMITTED, MISMATCH, MISMATCH, COMMITTED, COMMITTED)
        assert await backend.heads([a, b, c]) == {a: 1, c: 1}
        assert commit.revision == await backend.revision()
        assert {e.revision for e in (await backend.scan(a, 0, SCAN_ALL)).entries} == {
            commit.revision
        }

    async def test_a_transaction_without_a_winner_takes_no_revision(self, backend: Backend) -> None:
        before = await backend.revision()
        commit = await backend.commit([((new_key(), V(1, b"")),)])
        assert (commit.revision, commit.outcomes) == (None, (MISMATCH,))
        key = new_key()
        assert (await backend.commit(chain(key, 0, 3))).revision == before + 1

    async def test_a_scan_ends_behind_the_entry_that_passes_the_limit_in_bytes(
        self, backend: Backend
    ) -> None:
        key = new_key()
        await backend.commit(chain(key, 0, 10, size=100))
        for bytes_max, count in [(0, 1), (99, 1), (100, 2), (450, 5), (10_000, 10)]:
            page = await backend.scan(key, 0, SCAN_ALL, bytes_max=bytes_max)
            assert [e.seqno for e in page.entries] == list(range(count))
            assert page.more == (count < 10)
        limited = await backend.scan(key, 2, 3, bytes_max=10_000)
        assert ([e.seqno for e in limited.entries], limited.more) == ([2, 3, 4], False)
        empty = await backend.scan(new_key(), 0, SCAN_ALL, bytes_max=10)
        assert (empty.entries, empty.more) == ((), False)

    async def test_pages_of_a_long_scan_join(self, backend: Backend) -> None:
        key = new_key()
        for start in range(0, 5_000, 1_000):
            await backend.commit(chain(key, start, start + 1_000))
        seen: list[int] = []
        more = True
        while more:
            page = await backend.scan(key, len(seen), SCAN_ALL, bytes_max=4_600)
            seen += [e.seqno for e in page.entries]
            more = page.more
        assert seen == list(range(5_000))

    async def test_revision_pages_are_whole_and_complete(self, backend: Backend) -> None:
        prefix, start = new_key("/"), await backend.revision()
        revisions = []
        for n in range(6):  # more than one page of them, and none fills one
            units: list[Unit] = [((f"{prefix}{i:03}", V(n, b"")),) for i in range(900)]
            units.append(((new_key(), V(0, b"")),))
            revisions.append((await backend.commit(units)).revision)
        pages = await read_all(backend, prefix, start)
        assert len(pages) >= 900 * 6 // PAGE_ENTRIES
        entries = [item for page in pages for item in page.entries]
        assert entries == [(f"{prefix}{i:03}", V(n, b"")) for n in range(6) for i in range(900)]
        assert [e.revision for _, e in entries] == [r for r in revisions for _ in range(900)]
        for page in pages:
            assert {e.revision for _, e in page.entries} <= set(revisions)
            assert page.upto >= max(e.revision for _, e in page.entries)
            assert not page.lost
        assert pages[-1].upto >= revisions[-1]

    async def test_large_entries_end_a_revision_page(self, backend: Backend) -> None:
        prefix, start = new_key("/"), await backend.revision()
        for n in range(4):
            await backend.commit([((f"{prefix}{n}", V(0, bytes(3 << 20))),)])
        pages = await read_all(backend, prefix, start)
        assert [len(page.entries) for page in pages] == [2, 2]

    async def test_a_revision_page_from_the_end_is_empty(self, backend: Backend) -> None:
        current = await backend.revision()
        page = await backend.entries_since(new_key(), current + 5)
        assert (page.entries, page.upto, page.more, page.lost) == ((), current + 5, False, False)

    async def test_loss_is_reported_exactly(self, backend: Backend) -> None:
        prefix = new_key("/")
        one, two = f"{prefix}one", f"{prefix}two"
        revisions = [
            (await backend.commit([((one, V(n, b"")), (two, V(n, b"")))])).revision or 0
            for n in range(5)
        ]
        assert await backend.truncate(one, 3) == 3
        for position, revision in enumerate(revisions):
            # Entries 0, 1 and 2 of `one` are gone: lost to a reader that has not seen revisions[2].
            assert (await backend.entries_since(prefix, revision)).lost == (position < 2)
            assert (await backend.entries_since(one, revision)).lost == (position < 2)
            assert not (await backend.entries_since(two, revision)).lost
        assert (await backend.floor(one), await backend.floor(two)) == (3, 0)
        assert await backend.truncate(one, 2) == 0
        assert await backend.floor(one) == 3

    async def test_heads_under_a_prefix_are_as_of_their_revision(self, backend: Backend) -> None:
        prefix = new_key("/")
        keys = [f"{prefix}{n}" for n in range(5)]
        stop = asyncio.Event()

        async def write() -> None:
            for n in range(30):
                await backend.commit([tuple((key, V(n, b"")) for key in keys)])
            stop.set()

        async def read() -> None:
            while not stop.is_set():
                revision, heads = await backend.heads_under(prefix)
                assert len(set(heads.values())) <= 1
                page = await backend.entries_since(prefix, revision)
                assert all(entry.seqno > heads.get(key, -1) for key, entry in page.entries)

        await asyncio.gather(write(), read())
        assert (await backend.heads_under(prefix))[1] == dict.fromkeys(keys, 29)
        assert await backend.heads([*keys, new_key()]) == dict.fromkeys(keys, 29)
        assert await backend.heads([]) == {}
