"""Files that grant access or prove an identity: tokens, keys, certificates.

A user who can replace such a file can grant themselves access. So it is read only if root and the
user of this process alone can change it: by writing to it, by renaming another file into its place,
in its directory or one above it, or through a symbolic link.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from penstock.errors import UsageError

_LINKS_MAX: Final = 40
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def read_guarded(path: Path) -> bytes:
    """Return the file's contents; `UsageError` if others may change it, `OSError` if missing."""
    check_guarded(path)
    return path.read_bytes()


def check_guarded(path: Path) -> None:
    """Refuse a file that a user other than root and this one may change or replace."""
    found = _walk(path)
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is not a file", fix="name a regular file")
    _check_owner(path, found)
    if found.st_mode & _OTHERS_WRITE:
        raise UsageError(
            f"refusing to use {path}: others may write to it",
            why=f"its mode is {stat.filemode(found.st_mode)}",
            fix=f"chmod go-w {path}",
        )


def check_directories(path: Path, *, trusted: frozenset[int] = frozenset()) -> None:
    """Refuse a path that others may redirect; the file at its end is not checked.

    `trusted`: user ids besides root and the user of this process.
    """
    found = _walk(path.parent, trusted)
    _check_directory(path.parent, found, trusted)


def _walk(path: Path, trusted: frozenset[int] = frozenset()) -> os.stat_result:
    """Stat the end of `path`, after checking every directory and link on the way."""
    first, *rest = path.absolute().parts
    at = Path(first)
    found = at.lstat()
    pending = rest[::-1]
    links = 0
    while pending:
        _check_directory(at, found, trusted)
        part = pending.pop()
        here = at.parent if part == ".." else at / part
        found = here.lstat()
        if not stat.S_ISLNK(found.st_mode):
            at = here
            continue
        _check_owner(here, found, trusted)
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = here.readlink()
        parts = target.parts
        if target.is_absolute():
            at, parts = Path(parts[0]), parts[1:]
        found = at.lstat()
        pending.extend(reversed(parts))
    return found


def _check_directory(path: Path, found: os.stat_result, trusted: frozenset[int]) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    _check_owner(path, found, trusted)
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise UsageError(
            f"refusing to use what is in {path}: others may replace it",
            why=f"the directory's mode is {stat.filemode(found.st_mode)}",
            fix=f"chmod go-w {path}, or keep the file elsewhere",
        )


def _check_owner(path: Path, found: os.stat_result, trusted: frozenset[int] = frozenset()) -> None:
    me = os.geteuid()
    if found.st_uid not in (0, me, *trusted):
        raise UsageError(
            f"refusing to use {path}: it belongs to another user",
            why=f"its owner is user {found.st_uid}, and this process runs as user {me}",
            fix=f"chown {me} {path}, or give it to root",
        )
