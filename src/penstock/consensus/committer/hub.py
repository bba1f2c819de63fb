"""Followers of the store: the tail of recent commits, and the readers that hear of them.

There are two kinds of readers, which differ in what they hold:

- A **subscriber** follows one key. It has a bounded buffer of its own, registered *before* it
  reads history, so that no commit falls between the two. Overflow is not an error: the buffer is
  dropped and the entries are read from the store again.
- A **watcher** follows a prefix in revision order. Revisions have no gaps, so a watcher holds
  nothing but the last revision it delivered and pulls the next one: from the shared tail of
  recent commits if it is there, from the store if not. No commit can be missed or repeated,
  whichever process made it, and a slow watcher costs no memory. A commit that has nothing for it
  only tells it how far the store is, which may come a moment later, with others.

Commits of other committers are never published here. The poller finds them by comparing the
store's revision with what was published: watchers then read the gap, subscribers of keys whose
head moved scan again, and cached heads that turn out to be behind become suspect.

Used on the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

from penstock.consensus.backend import Backend
from penstock.consensus.store import Determinate, ErrorKind, VersionedData

BUFFER_ENTRIES_MAX = 256
BUFFER_BYTES_MAX = 4 << 20
"""Limits on a subscriber's buffer; beyond them it reads from the store again."""

PUBLISHED_ENTRY_BYTES_MAX = 1 << 20
"""Larger entries are announced, not carried: the subscriber scans for them."""

TAIL_ENTRIES_MAX = 16_384
TAIL_BYTES_MAX = 32 << 20
"""Limits on the tail that all watchers share; one further behind reads from the store."""

HEADS_CHUNK = 1_000

REORDER_S = 0.05
"""How long to wait for a missing revision before reading the store.

Two concurrent transactions may be published in either order; a commit of another committer is not
published here at all.
"""

PROGRESS_S = 0.001
"""How long a watcher waits to hear of commits that have nothing for it, times the watchers.

Some twenty times what it takes to tell one of them: so telling all of them takes a twentieth of the
time, at most, however many there are and however often others commit.
"""

Entries = tuple[tuple[str, VersionedData], ...]


class Buffer:
    """Entries a subscriber has not taken yet; `behind` if it must read from the store instead."""

    def __init__(self) -> None:
        self.behind = False
        self.overflowed = False
        self.upto = -1
        """Greatest seqno that this buffer was offered or its subscriber has delivered."""
        self._entries: deque[VersionedData] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()

    def offer(self, entry: VersionedData) -> None:
        size = len(entry.data)
        self.upto = max(self.upto, entry.seqno)
        if self.behind:
            return
        if size > PUBLISHED_ENTRY_BYTES_MAX:
            self.fall_behind()
        elif len(self._entries) >= BUFFER_ENTRIES_MAX or self._bytes + size > BUFFER_BYTES_MAX:
            self.overflowed = True
            self.fall_behind()
        else:
            self._entries.append(entry)
            self._bytes += size
            self._wake.set()

    def fall_behind(self) -> None:
        """Drop the entries: the store has more than this buffer will."""
        self.behind = True
        self._entries.clear()
        self._bytes = 0
        self._wake.set()

    def restart(self) -> None:
        """Collect entries from here on: the subscriber is about to read everything before."""
        self.behind = False
        self._entries.clear()
        self._bytes = 0

    def take(self) -> list[VersionedData]:
        taken = list(self._entries)
        self._entries.clear()
        self._bytes = 0
        self._wake.clear()
        return taken

    def wake(self) -> None:
        self._wake.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for an entry; False if there was none within `timeout_s`."""
        return await wait_for_event(self._wake, timeout_s)


class Tail:
    """The most recent commits of this committer by revision, for all watchers together.

    A commit is kept until as many watchers have taken it as there were when it was made, so it
    costs memory only while a watcher is behind. That is a guess: some of them may have read it from
    the store, or have gone. A watcher that does not find a commit here reads the store.
    """

    def __init__(self) -> None:
        self._commits: OrderedDict[int, Entries] = OrderedDict()
        self._awaited: dict[int, int] = {}
        """Watchers that have yet to take a commit, by revision."""
        self._entries = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._entries

    def get(self, revision: int) -> Entries | None:
        """Return a commit to one watcher, which will not ask for it again."""
        entries = self._commits.get(revision)
        if entries is not None:
            self._awaited[revision] -= 1
            if not self._awaited[revision]:
                self._drop(revision)
        return entries

    def add(self, revision: int, entries: Entries, *, watchers: int) -> None:
        self._commits[revision] = entries
        self._awaited[revision] = watchers
        self._entries += len(entries)
        self._bytes += _size(entries)
        while self._entries > TAIL_ENTRIES_MAX or self._bytes > TAIL_BYTES_MAX:
            self._drop(next(iter(self._commits)))

    def _drop(self, revision: int) -> None:
        gone = self._commits.pop(revision)
        del self._awaited[revision]
        self._entries -= len(gone)
        self._bytes -= _size(gone)

    def clear(self) -> None:
        self._commits.clear()
        self._awaited.clear()
        self._entries = self._bytes = 0


class Hub:
    """The registry of followers, fed by commits (`publish`) and by the poller (`poll`)."""

    def __init__(self, backend: Backend, *, on_foreign: Callable[[str, int], None]) -> None:
        self.backend = backend
        self.tail = Tail()
        self.revision = 0
        """Greatest revision known, from our own commits and from polls."""
        self.retired = False
        """True once the store is gone: its followers have to end."""
        self._on_foreign = on_foreign
        self._subscribers: dict[str, set[Buffer]] = {}
        self._watchers: dict[asyncio.Event, str] = {}
        """With the prefix that each of them follows."""
        self._telling: asyncio.TimerHandle | None = None
        self._polled = 0
        self._own: set[int] = set()
        self._closed = False

    @property
    def followed(self) -> bool:
        return bool(self._subscribers or self._watchers)

    def publish(self, revision: int, entries: Sequence[tuple[str, VersionedData]]) -> None:
        """Hand one committed transaction to all followers, before its callers are answered."""
        self.revision = max(self.revision, revision)
        if self._watchers:
            sorted_ = tuple(sorted(entries, key=_by_key_and_seqno))
            self.tail.add(revision, sorted_, watchers=len(self._watchers))
            self._wake_concerned([key for key, _ in sorted_])
        if self.followed:
            self._own.add(revision)
        if self._subscribers:
            for key, entry in entries:
                for buffer in self._subscribers.get(key, ()):
                    buffer.offer(entry)

    async def poll(self) -> bool:
        """Look for commits of other processes; True if there are any."""
        revision = await self.backend.revision()
        if revision <= self._polled:
            return False
        if foreign := self._unheard(revision):
            # A commit of our own is in the store a moment before it is published.
            await asyncio.sleep(REORDER_S)
            foreign = self._unheard(revision)
        self._own = {r for r in self._own if r > revision}
        self._polled = revision
        self.revision = max(self.revision, revision)
        if not foreign:
            return False
        self._wake_watchers()
        keys = list(self._subscribers)
        for start in range(0, len(keys), HEADS_CHUNK):
            heads = await self.backend.heads(keys[start : start + HEADS_CHUNK])
            for key, seqno in heads.items():
                self._on_foreign(key, seqno)
                for buffer in self._subscribers.get(key, ()):
                    if seqno > buffer.upto:
                        buffer.fall_behind()
        return True

    def _unheard(self, revision: int) -> bool:
        """True if some revision since the last poll, up to this one, is not our own.

        The newest commit being ours says nothing about those before it: a process that commits all
        the time always has a newer one than the store reported.
        """
        own = sum(self._polled < r <= revision for r in self._own)
        return revision - self._polled > own

    def retire(self) -> None:
        """End all followers: the store is gone."""
        self.retired = True
        self._wake_everybody()

    def close(self) -> None:
        self._closed = True
        self._wake_everybody()

    def check_open(self) -> None:
        if self._closed:
            raise Determinate(ErrorKind.UNAVAILABLE, "the committer is shutting down")
        if self.retired:
            raise Determinate(ErrorKind.STORE_RESET, "the store was created again; start over")

    @contextlib.contextmanager
    def subscriber(self, key: str) -> Iterator[Buffer]:
        buffer = Buffer()
        self._subscribers.setdefault(key, set()).add(buffer)
        try:
            yield buffer
        finally:
            self._subscribers[key].discard(buffer)
            if not self._subscribers[key]:
                del self._subscribers[key]

    @contextlib.contextmanager
    def watcher(self, prefix: str) -> Iterator[asyncio.Event]:
        wake = asyncio.Event()
        self._watchers[wake] = prefix
        try:
            yield wake
        finally:
            del self._watchers[wake]
            if not self._watchers:
                self.tail.clear()

    def _wake_concerned(self, keys: Sequence[str]) -> None:
        """Wake the watchers of these keys; all others soon."""
        concerned = 0
        for wake, prefix in self._watchers.items():
            if any(key.startswith(prefix) for key in keys):
                wake.set()
                concerned += 1
        others = len(self._watchers) - concerned
        if others and self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(others * PROGRESS_S, self._wake_watchers)

    def _wake_watchers(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for wake in self._watchers:
            wake.set()

    def _wake_everybody(self) -> None:
        self._wake_watchers()
        for buffers in self._subscribers.values():
            for buffer in buffers:
                buffer.wake()


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event`; False if it was not set within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _by_key_and_seqno(item: tuple[str, VersionedData]) -> tuple[str, int]:
    return item[0], item[1].seqno


def _size(entries: Sequence[tuple[str, VersionedData]]) -> int:
    return sum(len(entry.data) for _, entry in entries)
