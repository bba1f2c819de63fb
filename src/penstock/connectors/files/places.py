"""File systems, and the files in them that a pattern names."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow
import pyarrow.fs

from penstock.connectors.files.cursor import Found
from penstock.runtime.connector.common import ConnectorError
from penstock.servicekit.secrets import mask

_HIDDEN = re.compile(r"(^|/)[._]")


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A directory, here or in an object store; picklable. Its URL may hold credentials."""

    url: str

    @classmethod
    def of(cls, path: str) -> FilePlace:
        """Return the place of a URL, or of a path relative to where this process runs."""
        if urlsplit(path).scheme:
            return cls(path.rstrip("/"))
        return cls(str(Path(path).absolute()))

    def __repr__(self) -> str:
        return f"FilePlace({self._shown})"

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).scheme in ("", "file")

    @property
    def local(self) -> Path:
        """The directory, if it is one of this machine."""
        return Path(urlsplit(self.url).path if self.url.startswith("file:") else self.url)

    def name(self, path: str) -> str:
        """A file, for people."""
        return str(self.local / path) if self.is_local else f"{self._shown}/{path}"

    @property
    def _shown(self) -> str:
        """The place, for people: without credentials and options."""
        if self.is_local:
            return str(self.local)
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname or ''}{parts.path}".rstrip("/")

    def list(self, pattern: str) -> list[Found]:
        """Return the files that a pattern names. Names that begin with `.` or `_` are no data."""
        fixed = _fixed_part(pattern)
        matches = _matcher(pattern)
        with self._explained("files cannot be listed", fixed):
            listed = self._list_local(fixed) if self.is_local else self._list_remote(fixed)
            return [
                found
                for found in listed
                if matches(found.path) and not _HIDDEN.search(found.path[len(fixed) :])
            ]

    def _list_local(self, fixed: str) -> Iterator[Found]:
        root = self.local
        if not root.is_dir():
            raise FileNotFoundError(str(root))
        below = root / fixed
        if below.is_file():
            yield self._found(root, below)
            return
        for directory, _, names in os.walk(below):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    yield self._found(root, Path(directory) / name)

    def _found(self, root: Path, file: Path) -> Found:
        status = file.stat()
        return Found(status.st_mtime_ns, file.relative_to(root).as_posix(), status.st_size)

    def _list_remote(self, fixed: str) -> Iterator[Found]:
        system, root = self._system()
        base = f"{root}/{fixed}".rstrip("/")
        selector = pyarrow.fs.FileSelector(base, recursive=True, allow_not_found=True)
        infos: Any = [*system.get_file_info(selector), system.get_file_info(base)]
        for info in infos:
            if info.type == pyarrow.fs.FileType.File:
                path = info.path[len(root) :].lstrip("/")
                yield Found(int(info.mtime_ns or 0), path, int(info.size or 0))

    def look(self, path: str) -> Found | None:
        """Return a file as it is now; None if there is none."""
        with self._explained("a file cannot be looked at", path):
            if self.is_local:
                try:
                    return self._found(self.local, self.local / path)
                except FileNotFoundError:
                    return None
            system, root = self._system()
            info: Any = system.get_file_info(f"{root}/{path}")
            if info.type != pyarrow.fs.FileType.File:
                return None
            return Found(int(info.mtime_ns or 0), path, int(info.size or 0))

    def open(self, path: str, compression: str | None = None) -> pyarrow.NativeFile:
        """Open a file for reading; one that is not compressed can be read anywhere."""
        with self._explained("a file cannot be opened", path):
            system, root = self._system()
            where = str(self.local / path) if self.is_local else f"{root}/{path}"
            opened: pyarrow.NativeFile = (
                system.open_input_file(where)
                if compression is None
                else system.open_input_stream(where, compression=compression)
            )
            return opened

    def _system(self) -> tuple[Any, str]:
        return _system(self.url)

    @contextlib.contextmanager
    def _explained(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise ConnectorError(
                what,
                where=self.name(path) if path else self._shown,
                why="there is no such file or directory",
                fix="see whether it was moved or removed, or correct the path",
            ) from None
        except (OSError, pyarrow.ArrowException) as error:
            raise ConnectorError(
                what,
                where=self.name(path) if path else self._shown,
                why=mask(str(error)),
                transient=not isinstance(error, PermissionError),
            ) from None


@functools.lru_cache(maxsize=16)
def _system(url: str) -> tuple[Any, str]:
    if urlsplit(url).scheme in ("", "file"):
        return pyarrow.fs.LocalFileSystem(), url
    system, root = pyarrow.fs.FileSystem.from_uri(url)
    return system, root.rstrip("/")


def _fixed_part(pattern: str) -> str:
    """Return the part of a pattern before its first wildcard, up to a slash."""
    wild = re.search(r"[*?\[]", pattern)
    if wild is None:
        return pattern
    return pattern[: wild.start()].rpartition("/")[0]


def _matcher(pattern: str) -> Any:  # noqa: ANN401 - a predicate
    """Return what tells whether a path fits: `*` is within a name, `**` over directories.

    A pattern without wildcards is a file, or a directory and everything below it.
    """
    if not re.search(r"[*?\[]", pattern):
        prefix = pattern.rstrip("/")
        return lambda path: not prefix or path == prefix or path.startswith(f"{prefix}/")
    parts = []
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern):
        match part:
            case "**/":
                parts.append("(?:.*/)?")
            case "**":
                parts.append(".*")
            case "*":
                parts.append("[^/]*")
            case "?":
                parts.append("[^/]")
            case _ if part.startswith("[") and part.endswith("]"):
                parts.append(part.replace("[!", "[^"))
            case _:
                parts.append(re.escape(part))
    compiled = re.compile("".join(parts))
    return lambda path: compiled.fullmatch(path) is not None
