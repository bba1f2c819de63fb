"""The machine of the state-log tests: a list of what was applied, in order.

Whatever is lost, doubled or reordered shows in such a state.
"""

from __future__ import annotations

import dataclasses
import random

import msgspec

from penstock.consensus.replica import Author

Ledger = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LedgerMachine:
    format: int = 1
    noise_bytes: int = 0
    """Makes states larger than their diffs, and keeps compression from helping."""

    def initial(self) -> Ledger:
        return ()

    def apply(self, state: Ledger, diff: str, revision: int) -> Ledger:
        return (*state, diff)

    def encode_diff(self, diff: str) -> bytes:
        return diff.encode()

    def decode_diff(self, data: bytes, format: int) -> str:  # noqa: A002
        assert format <= self.format
        return data.decode()

    def encode_state(self, state: Ledger) -> bytes:
        return msgspec.msgpack.encode((state, random.Random(0).randbytes(self.noise_bytes)))

    def decode_state(self, data: bytes, format: int, revision: int) -> Ledger:  # noqa: A002
        assert format <= self.format
        return msgspec.msgpack.decode(data, type=tuple[Ledger, bytes])[0]


def author(name: str, writer_seq: int, token: str | None = None) -> Author:
    return Author(
        writer=name.encode().ljust(16),
        writer_seq=writer_seq,
        token=(token or f"{name}{writer_seq}").encode().ljust(16),
        epoch=0,
        wall_ms=0,
    )


@dataclasses.dataclass(frozen=True)
class CounterMachine:
    """For long logs: the state stays small."""

    format: int = 1

    def initial(self) -> int:
        return 0

    def apply(self, state: int, diff: int, revision: int) -> int:
        return state + diff

    def encode_diff(self, diff: int) -> bytes:
        return b"%d" % diff

    def decode_diff(self, data: bytes, format: int) -> int:  # noqa: A002
        assert format == 1
        return int(data)

    encode_state = encode_diff

    def decode_state(self, data: bytes, format: int, revision: int) -> int:  # noqa: A002
        return self.decode_diff(data, format)


Revisions = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class RevisionMachine:
    """Each diff with the revision that committed it."""

    format: int = 1

    def initial(self) -> Revisions:
        return ()

    def apply(self, state: Revisions, diff: str, revision: int) -> Revisions:
        return (*state, (diff, revision))

    def encode_diff(self, diff: str) -> bytes:
        return diff.encode()

    def decode_diff(self, data: bytes, format: int) -> str:  # noqa: A002
        assert format == 1
        return data.decode()

    def encode_state(self, state: Revisions) -> bytes:
        return msgspec.msgpack.encode(state)

    def decode_state(self, data: bytes, format: int, revision: int) -> Revisions:  # noqa: A002
        assert format == 1
        decoded = msgspec.msgpack.decode(data, type=Revisions)
        return tuple((diff, known or revision) for diff, known in decoded)
