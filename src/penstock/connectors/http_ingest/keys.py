"""PURE: the idempotency keys of the last day, as they are kept in the connector's state.

The state of a binding is `{"keys": {"1794913574123": "…", …}}`: a member for each sequence that has
keys, named by the time of it in milliseconds, and of no other. Its value is the base64 of 24 bytes
for each key:

    16  digest of the key
     4  digest of the body, to tell a repeat from another request with the same key
     4  number of documents that were published

So a sequence adds one member, and forgetting old keys removes whole members.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.model.json_order import Json

KEPT_MS: Final = 24 * 3600 * 1000
"""Milliseconds that a key is kept, at least, if there are not too many."""

KEPT_MAX: Final = 100_000
"""Keys of one binding; the oldest are forgotten beyond that."""

_DIGEST_BYTES: Final = 16
_BODY_BYTES: Final = 4
_ENTRY_BYTES: Final = _DIGEST_BYTES + _BODY_BYTES + 4


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request that has a key, by what identifies it."""

    digest: bytes
    body: bytes

    @classmethod
    def of(cls, key: str, body: bytes) -> KeyedRequest:
        return cls(
            hashlib.sha256(key.encode()).digest()[:_DIGEST_BYTES],
            hashlib.sha256(body).digest()[:_BODY_BYTES],
        )


@dataclass(frozen=True, slots=True)
class Remembered:
    """The outcome of a request with a key: it was committed."""

    body: bytes
    published: int


def encode(entries: Iterable[tuple[KeyedRequest, int]]) -> str:
    """Encode keys, and how many documents each published."""
    data = b"".join(
        request.digest + request.body + published.to_bytes(4, "big")
        for request, published in entries
    )
    return base64.b64encode(data).decode()


def decode(text: str) -> list[tuple[bytes, Remembered]]:
    """Decode keys; raises `ValueError` if it is not what `encode` made."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    if len(data) % _ENTRY_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of keys")
    found = []
    for at in range(0, len(data), _ENTRY_BYTES):
        entry = data[at : at + _ENTRY_BYTES]
        body = entry[_DIGEST_BYTES : _DIGEST_BYTES + _BODY_BYTES]
        published = int.from_bytes(entry[_DIGEST_BYTES + _BODY_BYTES :], "big")
        found.append((entry[:_DIGEST_BYTES], Remembered(body, published)))
    return found


class KeyLog:
    """The keys of one binding: those that are committed, and those on their way."""

    def __init__(self, state: Json, *, kept_max: int = KEPT_MAX) -> None:
        """Begin with a binding's part of the state."""
        self._kept_max = kept_max
        self._members: OrderedDict[str, list[bytes]] = OrderedDict()
        """The digests of each member of the state, oldest first; those on their way too."""
        self._committed: dict[bytes, Remembered] = {}
        self._count = 0
        kept = state.get("keys") if isinstance(state, dict) else None
        for name, text in sorted(kept.items()) if isinstance(kept, dict) else ():
            entries = decode(str(text))
            self._members[name] = [digest for digest, _ in entries]
            self._count += len(entries)
            self._committed.update(entries)

    def __len__(self) -> int:
        return self._count

    def find(self, digest: bytes) -> Remembered | None:
        """Return the outcome of a request that is committed."""
        return self._committed.get(digest)

    def add(self, entries: Sequence[tuple[KeyedRequest, int]], now_ms: int) -> dict[str, Json]:
        """Take the keys of a sequence in; returns the change of the binding's part of the state."""
        changes: dict[str, Json] = {}
        newest = next(reversed(self._members)) if self._members else "0"
        name = f"{max(now_ms, int(newest) + 1):013d}"
        changes[name] = encode(entries)
        self._members[name] = [request.digest for request, _ in entries]
        self._count += len(entries)
        while len(self._members) > 1:
            oldest = next(iter(self._members))
            if self._count <= self._kept_max and int(oldest) > now_ms - KEPT_MS:
                break
            changes[oldest] = None
            digests = self._members.pop(oldest)
            self._count -= len(digests)
            for digest in digests:
                self._committed.pop(digest, None)
        return {"keys": changes}

    def commit(self, entries: Iterable[tuple[KeyedRequest, int]]) -> None:
        """Remember the outcome of requests that were taken in by `add`."""
        for request, published in entries:
            self._committed[request.digest] = Remembered(request.body, published)


def is_over(state: Json, now_ms: int) -> bool:
    """True if a binding's part of the state has only keys that need not be kept any more."""
    kept = state.get("keys") if isinstance(state, dict) else None
    return all(int(name) <= now_ms - KEPT_MS for name in (kept if isinstance(kept, dict) else ()))
