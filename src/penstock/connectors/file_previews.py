"""Places for previews in a file system: each beside its endpoint, and locked while it lives.

A preview's place is a path that begins with the real one. Whatever begins with the place belongs to
the preview, and is removed at its end. A lock on the file `PLACE.lock` shows that the preview
lives: the kernel releases it when the process ends, in whatever way, so the next preview can remove
the remains.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.runtime.connector.common import ConnectorError

_MARK: Final = ".preview-"
_LOCK: Final = ".lock"


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a place for a preview; first remove what dead ones left beside `path`."""
    with _explained(path):
        _sweep(path)
        place, lock = _claim(path)
    try:
        yield place
    finally:
        with _explained(path):
            _remove(place)
            os.close(lock)


def _claim(path: Path) -> tuple[Path, int]:
    """Return a free place and its lock; nothing is made there before the lock is held."""
    while True:
        place = path.with_name(f"{path.name}{_MARK}{secrets.token_hex(4)}")
        file = place.with_name(place.name + _LOCK)
        lock = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        if _locked(lock) and _is_at(file, lock):
            return place, lock
        os.close(lock)  # a sweep was quicker, and has removed it


def _sweep(path: Path) -> None:
    """Remove the places whose lock is free."""
    for file in path.parent.glob(f"{glob.escape(path.name)}{_MARK}*{_LOCK}"):
        try:
            lock = os.open(file, os.O_RDWR)
        except FileNotFoundError:
            continue  # its preview has ended in the meantime
        try:
            if _locked(lock) and _is_at(file, lock):
                _remove(file.with_name(file.name.removesuffix(_LOCK)))
        finally:
            os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: Path, lock: int) -> bool:
    """True if the locked file is still the one that others find by its name."""
    try:
        return os.path.samestat(file.stat(), os.fstat(lock))
    except FileNotFoundError:
        return False


def _remove(place: Path) -> None:
    """Remove all that begins with a place's name; last its lock, by which a sweep finds it."""
    lock = place.with_name(place.name + _LOCK)
    for found in place.parent.glob(f"{glob.escape(place.name)}*"):
        if found == lock:
            continue
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found, ignore_errors=True)
        else:
            found.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectorError(
            f"a preview has no place beside the endpoint: {error.strerror or error}",
            where=str(path),
            fix="make the directory, and let this user write there",
        ) from error
