"""The files of a derivation's state, in the blob store.

They lie under `=state/`, by task: names that begin with `=` are no objects of journals. A file is
written once, by an attempt of a Spark task, under a name that nobody else uses. It counts if the
connector state in the recovery log names it; everything else there is garbage, which the leader
removes: what a commit made obsolete, and, when a session begins, what attempts left behind.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.journal.blobs import BlobStore
from penstock.model.json_order import Json

STATE: Final = "=state"

LOCAL: Final = Path("~/.cache/penstock/state")
"""Where copies of states are kept on other machines than the leader's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobStateFiles:
    """State files of one task (`engine.StateFiles`); picklable."""

    blobs: BlobStore
    task: str
    epoch: int
    beside: Path
    """A directory of the leader's machine, which tasks on it use for their copies."""

    @property
    def _directory(self) -> str:
        return f"{STATE}/{self.task.encode().hex()}"

    @property
    def local_dir(self) -> Path:
        """A directory of this machine and user, for copies that may be lost at any time."""
        name = hashlib.sha256(f"{self.blobs} {self.task}".encode()).hexdigest()[:32]
        here = self.beside.is_dir()
        return (self.beside if here else LOCAL.expanduser()) / name

    def read(self, name: str) -> bytes:
        return self.blobs.read(f"{self._directory}/{name}")

    def write(self, data: bytes) -> str:
        name = f"{self.epoch}-{secrets.token_hex(12)}"
        self.blobs.write(f"{self._directory}/{name}", data)
        return name

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that no committed state names any more."""
        for name in names:
            self.blobs.delete(f"{self._directory}/{name}")

    def sweep(self, state: Json) -> None:
        """Remove files of earlier epochs that the committed state does not name.

        Those of later ones may be committed: a leader that slept does not know that it is deposed.
        """
        named = set(texts(state))
        for found in list(self.blobs.list(self._directory)):
            name = found.path.rpartition("/")[2]
            epoch = int(name.partition("-")[0])
            if name not in named and epoch < self.epoch:
                self.blobs.delete(found.path)

    def remove_all(self) -> None:
        """Remove the files of a task that is over for good."""
        for found in list(self.blobs.list(self._directory)):
            self.blobs.delete(found.path)


def texts(state: Json) -> Iterable[str]:
    """Yield every text in a state: the names of its files are among them."""
    match state:
        case str():
            yield state
        case dict():
            for value in state.values():
                yield from texts(value)
        case list():
            for value in state:
                yield from texts(value)
        case _:
            pass
