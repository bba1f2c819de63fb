"""Check the stores of a deployment before they are opened, and who runs its tasks.

`penstock up` and `penstock cluster` hold a lock in the data directory while they run: the system
releases it with the process, however that ends. So it says for certain whether there is one on this
machine. It says nothing of other machines; there, the newest takes over (`cluster.claim`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from penstock.consensus.open import Scheme, scheme_of, sqlite_path
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.settings import Settings

_LOCK: Final = "up.lock"
_TAKEN: Final = "taken.lock"


def is_there(settings: Settings) -> bool:
    """True if the consensus store may exist; only SQLite can be ruled out without connecting."""
    url = settings.consensus
    return scheme_of(url) is not Scheme.SQLITE or sqlite_path(url).exists()


def check_not_lost(settings: Settings) -> None:
    """Refuse to start over where the blob store shows that a consensus store existed."""
    from penstock.journal.blobs import open_blobs
    from penstock.journal.ownership import is_used

    if is_there(settings):
        return
    blobs = open_blobs(settings.blob)
    if is_used(blobs):
        file = sqlite_path(settings.consensus)
        raise UserError(
            f"{file.name} is missing, but the blob store has objects",
            where=str(file),
            why=f"the objects are in {blobs}, and cannot be read without {file.name}",
            fix=f"restore {file.name} from a backup; do not apply a catalog. If --data, --blob or "
            "--consensus is wrong, correct it. A new deployment needs its own blob store; to "
            "start over here, remove the objects",
        )


@contextlib.contextmanager
def running_up(settings: Settings, command: str = "up") -> Iterator[None]:
    """Within this, the process runs the tasks of its data directory; refuses a second one."""
    settings.data.mkdir(parents=True, exist_ok=True)
    with (settings.data / _LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{_command(file.fileno())} runs here already",
                where=f"{settings.data}, {_who(file.fileno())}",
                why="two would run the same tasks",
                fix="penstock apply changes what it runs; to run it here, end the other first",
            ) from None
        os.ftruncate(file.fileno(), 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
        os.write(
            file.fileno(), f"penstock {command}: process {os.getpid()}, since {since}".encode()
        )
        yield


def refuse_beside_up(settings: Settings, tasks: Sequence[str]) -> None:
    """Raise if a `penstock up` of this machine runs these tasks: one of both would be fenced."""
    if not tasks:
        return
    with contextlib.suppress(FileNotFoundError), (settings.data / _LOCK).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            more = f" and {len(tasks) - 1} more" if len(tasks) > 1 else ""
            raise UserError(
                f"{_command(file.fileno())} runs {tasks[0]}{more}",
                where=f"{settings.data}, {_who(file.fileno())}",
                why="it processes whatever comes, and a task has one leader",
                fix="nothing is to be done: it does what this would do; --take-over runs it here",
            ) from None


@contextlib.contextmanager
def taking_over(settings: Settings) -> Iterator[None]:
    """Within this, tasks of a `penstock up` of this machine are run here; it takes them back."""
    settings.data.mkdir(parents=True, exist_ok=True)
    with (settings.data / _TAKEN).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_taken_over(settings: Settings) -> bool:
    """True while a command is `taking_over`."""
    with contextlib.suppress(FileNotFoundError), (settings.data / _TAKEN).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _command(descriptor: int) -> str:
    return _said(descriptor).partition(": ")[0]


def _who(descriptor: int) -> str:
    return _said(descriptor).partition(": ")[2]


def _said(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace")
