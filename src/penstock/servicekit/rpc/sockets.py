"""Unix sockets: a user who may enter the directory may connect.

gRPC for Python exposes neither a connection's descriptor nor SO_PEERCRED, so the file system, not
the socket, keeps other users out. Without tokens the directory belongs to its owner alone (0700),
and every caller is the user of the service, or root. With tokens the directory may let others in,
and the token identifies them. In neither case may others write to it: they could put a socket of
their own in its place.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable, UsageError
from penstock.servicekit.guarded import check_directories

_PATH_BYTES_MAX: Final = 107
"""Limit on the path of a Unix socket on Linux."""


@contextmanager
def socket_file(path: Path, bind: Callable[[], object], *, tokens: bool) -> Iterator[None]:
    """Place a socket at `path` while the block runs, and remove it afterwards.

    `bind` creates it, once the place is known to be safe and free.
    """
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise UsageError(
            f"the path of the socket has more than {_PATH_BYTES_MAX} bytes", where=str(path)
        )
    _check_place(path, tokens=tokens)
    _make_room(path)
    bind()
    path.chmod(0o666 if tokens else 0o600)
    ours = _identity(path)
    try:
        yield
    finally:
        with suppress(OSError):  # gRPC removes it, as a rule, and another may be there by now
            if _identity(path) == ours:
                path.unlink()


def check_owned_socket(path: Path) -> None:
    """Check, for a client, that only the owner of its directory can have created the socket."""
    with suppress(OSError):  # not there yet, perhaps
        check_directories(path, trusted=frozenset({path.parent.stat().st_uid}))


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_ctime_ns


def _check_place(path: Path, *, tokens: bool) -> None:
    directory = path.parent
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        check_directories(path)
        mode = directory.stat().st_mode
    except OSError as error:
        raise UsageError(
            f"cannot listen in {directory}", why=error.strerror, fix=f"mkdir -m 700 {directory}"
        ) from error
    if not tokens and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"refusing to listen on {path} without tokens",
            why=f"others may enter its directory, whose mode is {stat.filemode(mode)}",
            fix=f"chmod 700 {directory}, or add --token-file",
        )


def _make_room(path: Path) -> None:
    """Remove a socket that a dead process left; refuse anything else, and a socket in use."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"{path} exists, and is no socket", fix="choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise Unavailable(f"cannot listen on {path}", why=error.strerror) from error
    raise Unavailable(
        f"cannot listen on {path}", why="another process does", fix="end it, or choose another path"
    )
