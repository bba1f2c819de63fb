"""The database of one shard between transactions: a base, and deltas upon it.

The connector state names the pieces of every shard. A piece is a file of `StateFiles`, or, below
`INLINE_BYTES_MAX`, its bytes in base64:

    {"sqlite": {"0": {"shards": 3, "base": {"file": name, "size": n},
                      "deltas": {"0001": {"inline": text, "size": n}}}}}

A transaction works on a database file that no other attempt uses. It takes the file that the last
transaction left in the local directory by renaming it, which only one attempt can do, or builds it
from the pieces. That file's name holds the hash of its pieces, which names of `StateFiles` make
unique: a file of another state is never taken. So the local files may vanish at any time.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from penstock.errors import Bug, UserError
from penstock.model.json_order import Json
from penstock.runtime.derive.engine import ShardContext, StateFiles
from penstock.runtime.derive.sqlite_delta import Torn, apply, delta
from penstock.runtime.patches import Patches

INLINE_BYTES_MAX: Final = 4096
"""Larger pieces are files."""
DELTAS_MAX: Final = 64
DELTAS_BYTES_MIN: Final = 16 * 1024
"""Deltas up to this size never ask for a new base, however small the base is."""
_ABANDONED_S: Final = 24 * 3600
_HEADER: Final = b"SQLite format 3\0"


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A base or a delta. Exactly one of `file` and `inline` is set."""

    size: int
    file: str | None = None
    inline: str | None = None

    def read(self, files: StateFiles) -> bytes:
        """Return what it holds."""
        if self.file is not None:
            return files.read(self.file)
        return base64.b64decode(self.inline or "")


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The pieces of one shard's database."""

    shards: int
    base: Piece
    deltas: dict[str, Piece] = {}

    @property
    def hash(self) -> str:
        """Equal for equal pieces in equal order only."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:32]

    @property
    def wants_base(self) -> bool:
        """True if a new base is better than another delta."""
        changed = sum(piece.size for piece in self.deltas.values())
        return len(self.deltas) >= DELTAS_MAX or changed > max(self.base.size, DELTAS_BYTES_MIN)


def chain_of(context: ShardContext, task: str) -> Chain | None:
    """Return the pieces of a shard; None before its first commit.

    Raises `UserError` if the state was split over another number of shards.
    """
    state = context.state.get("sqlite") if isinstance(context.state, dict) else None
    if not isinstance(state, Mapping):
        return None
    chains = {name: msgspec.convert(found, Chain) for name, found in state.items()}
    for chain in chains.values():
        if chain.shards != context.shards:
            raise UserError(
                f"the state of {task} is split over {chain.shards} shards, not {context.shards}",
                where=task,
                why="rows are in the database of the shard that their documents were routed to",
                fix=f"set shards: {{count: {chain.shards}}}; to split it otherwise, derive a "
                "collection of another name",
            )
    return chains.get(str(context.shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The local files of one shard of one derivation."""

    directory: Path
    prefix: str

    @classmethod
    def of(cls, context: ShardContext, task: str) -> Home:
        digest = hashlib.sha256(task.encode()).hexdigest()[:12]
        return cls(directory=context.files.local_dir, prefix=f"{digest}-{context.shard}")

    def cached(self, chain: Chain) -> Path:
        return self.directory / f"{self.prefix}-{chain.hash}.sqlite"

    def private(self) -> Path:
        """A path that no other attempt has."""
        return self.directory / f"{self.prefix}-{secrets.token_hex(8)}.attempt"

    def sweep(self, kept: Path) -> None:
        """Remove files of other states, and those of attempts that ended long ago."""
        abandoned = time.time() - _ABANDONED_S
        for path in self.directory.glob(f"{self.prefix}-*"):
            with contextlib.suppress(OSError):
                if path != kept and (path.suffix == ".sqlite" or path.stat().st_mtime < abandoned):
                    path.unlink()


class ShardFile:
    """The database file of one attempt at a transaction; its owner opens and closes SQLite."""

    def __init__(self, context: ShardContext, task: str) -> None:
        self._files = context.files
        self._shard = str(context.shard)
        self._shards = context.shards
        self._home = Home.of(context, task)
        self._home.directory.mkdir(parents=True, exist_ok=True)
        self._chain = chain_of(context, task)
        self.path = self._home.private()
        if self._chain is not None and not self._claim(self._chain):
            self._build(self._chain)

    def staged(self) -> tuple[Patches, Chain | None]:
        """Write what the committed log beside the file changed; return the patches that name it.

        Called after SQLite committed, and before it copies the log into the file.
        """
        changed = self._delta()
        if not changed and self._chain is not None:
            return (), self._chain
        if self._chain is None or self._chain.wants_base:
            return (), None
        piece = self._piece(changed)
        name = f"{len(self._chain.deltas) + 1:04d}"
        deltas = {**self._chain.deltas, name: piece}
        patch: Json = {"sqlite": {self._shard: {"deltas": {name: msgspec.to_builtins(piece)}}}}
        return (patch,), msgspec.structs.replace(self._chain, deltas=deltas)

    def rebased(self) -> tuple[Patches, Chain]:
        """Write the whole file as a new base; return the patches that name it.

        Called after SQLite copied the log into the file.
        """
        base = self._piece(zlib.compress(self.path.read_bytes(), 1))
        chain = Chain(shards=self._shards, base=base)
        patch: Json = {"sqlite": {self._shard: msgspec.to_builtins(chain)}}
        forget: Json = {"sqlite": {self._shard: None}}
        return (patch,) if self._chain is None else (forget, patch), chain

    def keep(self, chain: Chain) -> None:
        """Leave the closed file to the next transaction, which begins from `chain`."""
        with contextlib.suppress(OSError):
            with self.path.open("rb") as file:
                os.fsync(file.fileno())  # a name must not survive a power cut that its bytes do not
            kept = self._home.cached(chain)
            self.path.replace(kept)
            self._home.sweep(kept)

    def give_back(self) -> None:
        """Leave the closed file as it was taken; nothing was committed."""
        if self._chain is None:
            self.discard()
        else:
            with contextlib.suppress(OSError):
                self.path.replace(self._home.cached(self._chain))

    def discard(self) -> None:
        """Remove the closed file: the next transaction builds its own from the pieces."""
        self.path.unlink(missing_ok=True)

    def _claim(self, chain: Chain) -> bool:
        """Take the file that the last transaction left here, if it is whole."""
        try:
            self._home.cached(chain).rename(self.path)
        except OSError:
            return False
        if _is_whole(self.path):
            return True
        self.path.unlink(missing_ok=True)
        return False

    def _build(self, chain: Chain) -> None:
        try:
            self.path.write_bytes(zlib.decompress(chain.base.read(self._files)))
            with self.path.open("r+b") as file:
                for _, piece in sorted(chain.deltas.items()):
                    apply(piece.read(self._files), file)
        except (zlib.error, Torn) as e:
            self.path.unlink(missing_ok=True)
            raise Bug(
                "the committed state of a SQLite derivation cannot be read",
                where=f"shard {self._shard} of {self._shards}",
                why=str(e),
            ) from None

    def _delta(self) -> bytes:
        log = self.path.with_name(self.path.name + "-wal")
        if not log.exists():
            return b""
        with log.open("rb") as appended, self.path.open("rb") as former:
            return delta(appended, former)

    def _piece(self, data: bytes) -> Piece:
        if len(data) < INLINE_BYTES_MAX:
            return Piece(size=len(data), inline=base64.b64encode(data).decode())
        return Piece(size=len(data), file=self._files.write(data))


def _is_whole(path: Path) -> bool:
    """True if a database file has as many pages as its header counts."""
    with path.open("rb") as file:
        head = file.read(100)
        length = file.seek(0, os.SEEK_END)
    page_size = int.from_bytes(head[16:18], "big")
    page_size = 65536 if page_size == 1 else page_size
    return head.startswith(_HEADER) and length == page_size * int.from_bytes(head[28:32], "big")
