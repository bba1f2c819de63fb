"""The committer's cache of heads: bounded, monotonic, and aware of what it does not know.

A cached head may answer `head(fresh=False)`, and nothing else. In particular it never refuses a
compare-and-set: the cache may lag behind another committer, and a refusal from a stale value would
repeat until the head is refreshed.

Invariants, for one key through one cache:

- **Answers never go backwards.** An insert with a smaller seqno changes nothing, and an insert that
  was on its way while the key was evicted is dropped (the *late-insert guard*): its value could be
  older than one already served.
- A contradiction makes the cached head *suspect*: it stays, so that answers never go backwards, but
  is not served until a read that began after the contradiction has confirmed or replaced it.
- The absence of a key is never cached.

Both guards work by tickets. A ticket is the state of one of 1,024 striped counters, taken before
the backend is asked; evicting, clearing or suspecting a key moves the counter of its stripe. Keys
that share a stripe cost each other a read now and then, never a wrong answer.

Used on the event-loop thread only, so there are no locks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock.consensus.store import VersionedData

_STRIPES = 1_024

CACHED_ENTRY_BYTES_MAX = 1 << 20
"""Larger heads are not worth the thousands of small ones they would push out."""

_ENTRY_OVERHEAD_BYTES = 256
"""Memory that a cached head takes besides its bytes: key, objects, a slot of the map."""


@dataclass(slots=True)
class _Cached:
    data: VersionedData
    suspect: bool


class ShardCache:
    """Latest known head per key; least recently used keys go first."""

    def __init__(self, *, shards_max: int, bytes_max: int) -> None:
        self._shards_max = shards_max
        self._bytes_max = bytes_max
        self._entries: OrderedDict[str, _Cached] = OrderedDict()
        self._stripes = [0] * _STRIPES
        self.bytes_total = 0
        self.late_inserts_dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    def ticket(self, key: str) -> int:
        """Return the ticket to take before a read, and to hand to `put` with the answer."""
        return self._stripes[hash(key) % _STRIPES]

    def get(self, key: str) -> VersionedData | None:
        """Return the head to answer with, None to ask the backend. Counts as a use of the key."""
        cached = self._entries.get(key)
        if cached is None or cached.suspect:
            return None
        self._entries.move_to_end(key)
        return cached.data

    def known(self, key: str) -> int:
        """Return the greatest seqno cached for the key, suspect or not; -1 if none."""
        cached = self._entries.get(key)
        return -1 if cached is None else cached.data.seqno

    def put(self, key: str, data: VersionedData, ticket: int) -> None:
        """Cache a head that was read or committed by an operation that began with `ticket`."""
        current = ticket == self.ticket(key)
        cached = self._entries.get(key)
        if cached is None:
            if not current:
                self.late_inserts_dropped += 1
            elif len(data.data) <= CACHED_ENTRY_BYTES_MAX:
                self._entries[key] = _Cached(data, suspect=False)
                self.bytes_total += _cost(key, data)
                self._shrink()
            return
        self._entries.move_to_end(key)
        if data.seqno > cached.data.seqno:
            if len(data.data) > CACHED_ENTRY_BYTES_MAX:
                self._remove(key)
                return
            self.bytes_total += len(data.data) - len(cached.data.data)
            cached.data = data
            self._shrink()
        if current and data.seqno >= cached.data.seqno:
            cached.suspect = False

    def suspect(self, key: str, seqno: int) -> bool:
        """Note that a compare-and-set for `seqno` lost; True if the cached head became suspect.

        A cached head at `seqno` or above explains the loss, and shows the loser what it missed.
        """
        cached = self._entries.get(key)
        if cached is not None and cached.data.seqno >= seqno:
            return False
        # Also for an absent key: a read that is under way may return the head that just lost.
        self._stripes[hash(key) % _STRIPES] += 1
        if cached is None or cached.suspect:
            return False
        cached.suspect = True
        return True

    def clear(self) -> None:
        """Forget everything, including inserts on their way: the store is another one now."""
        self._entries.clear()
        self._stripes = [n + 1 for n in self._stripes]
        self.bytes_total = 0

    def _shrink(self) -> None:
        while len(self._entries) > self._shards_max or self.bytes_total > self._bytes_max:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: str) -> None:
        cached = self._entries.pop(key)
        self.bytes_total -= _cost(key, cached.data)
        self._stripes[hash(key) % _STRIPES] += 1


def _cost(key: str, data: VersionedData) -> int:
    return len(key) + len(data.data) + _ENTRY_OVERHEAD_BYTES
