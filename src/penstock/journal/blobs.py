"""The blob store: immutable objects under paths, on a local disk or an object store.

    /var/lib/penstock, blobs, file:///…     a directory, made when first written to
    s3://bucket/prefix                      Amazon S3; with ?endpoint_override=host:9000&scheme=http
                                            any server that speaks its protocol
    gs://bucket/prefix, abfss://…           Google Cloud Storage, Azure
    hdfs://namenode:8020/prefix             HDFS

Objects are written once, under names that are never used again (but for the mark, see `ownership`),
and they appear whole or not at all: an object store publishes on close, and on a disk a file gets
its name after its bytes are durable. What a crash leaves behind is listed like everything else, and
no state names it, so it is garbage like everything else.

A store is its URL: executors receive it pickled and connect on their own. The URL may hold a
password, so no error and no `repr` shows it unmasked.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow
from pyarrow import fs

from penstock.errors import Bug, PenstockError, Unavailable, UsageError
from penstock.servicekit.secrets import mask_url

_SCHEMES: Final = ("file", "s3", "gs", "abfs", "abfss", "hdfs", "viewfs")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PARTIAL: Final = ".partial"


class MissingBlob(Unavailable):
    """An object that a state names is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobInfo:
    """An object as listed."""

    path: str
    bytes: int
    modified_s: float
    """Unix time of its last change, by the clock of the store."""


def open_blobs(url: str) -> BlobStore:
    """The store that `url` names: a directory, or a URL of one of the schemes above."""
    match = _SCHEME.match(url)
    if match is None and url:
        return BlobStore(Path(url).absolute().as_uri())
    if match is None or match[1].lower() not in _SCHEMES:
        raise UsageError(
            f"this is not a blob store: {mask_url(url)!r}",
            fix=f"name a directory, or write {', '.join(f'{s}://…' for s in _SCHEMES)}",
        )
    return BlobStore(url)


class BlobStore:
    """Objects by path, relative to the root that the URL names. Safe to share between threads."""

    def __init__(self, url: str) -> None:
        self._url = url
        with self._explained("cannot open the blob store"):
            try:
                found: tuple[Any, str] = fs.FileSystem.from_uri(_with_defaults(url))
            except pyarrow.ArrowException as error:
                why = self._masked(error)
                raise UsageError("the blob URL is wrong", where=mask_url(url), why=why) from None
        self._fs, root = found
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, fs.LocalFileSystem)

    def __reduce__(self) -> tuple[object, ...]:
        return BlobStore, (self._url,)

    def __repr__(self) -> str:
        return f"BlobStore({mask_url(self._url)!r})"

    def __str__(self) -> str:
        return mask_url(self._url)

    @property
    def directory(self) -> Path | None:
        """Where a local store is."""
        return Path(self._root) if self._local else None

    def url_of(self, path: str) -> str:
        """The location of an object, for messages: without secrets, so nothing opens it."""
        return f"{mask_url(self._url).partition('?')[0].rstrip('/')}/{path}"

    # ------------------------------------------------------------------------------------- write

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[pyarrow.NativeFile]:
        """A stream into a new object, which is durable when the block ends, and not before.

        If the block raises there is no object. The path must never have been used.
        """
        at = self._at(path)
        written = at + _PARTIAL if self._local else at
        with self._explained("cannot write an object", path):
            if self._local:
                _make_directory(Path(at).parent)
            sink = self._fs.open_output_stream(written)
            try:
                yield sink
                sink.close()
                if self._local:
                    _publish(Path(written), Path(at))
            except BaseException:
                with contextlib.suppress(OSError):
                    sink.close()  # an upload cannot be abandoned, only ended
                    self._fs.delete_file(written)
                raise

    def write(self, path: str, data: bytes) -> None:
        """A new object from bytes in memory."""
        with self.create(path) as sink:
            sink.write(data)

    def replace(self, path: str, data: bytes) -> None:
        """An object from bytes in memory, in the place of the one that has this name, if any.

        Whoever reads it meanwhile gets one or the other. Of several writers the last one counts.
        """
        at = Path(self._at(path))
        written = at.with_name(f"{at.name}.{secrets.token_hex(8)}{_PARTIAL}")
        with self._explained("cannot write an object", path):
            if not self._local:
                with self._fs.open_output_stream(self._at(path)) as sink:
                    sink.write(data)
                return
            _make_directory(at.parent)
            try:
                written.write_bytes(data)
                _publish(written, at)
            except BaseException:
                written.unlink(missing_ok=True)
                raise

    def delete(self, path: str) -> None:
        """Remove an object; afterwards it is not there, whether it was or not."""
        at = self._at(path)
        with self._explained("cannot delete an object", path):
            try:
                self._fs.delete_file(at)
            except FileNotFoundError:
                return
            except OSError:
                # Arrow then writes a marker for the parent "directory", which not every store
                # can hold: what counts is that the object is gone.
                if self.exists(path):
                    raise

    # -------------------------------------------------------------------------------------- read

    def open(self, path: str) -> pyarrow.NativeFile:
        """The object for random access."""
        at = self._at(path)
        with self._explained("cannot read an object", path):
            opened: pyarrow.NativeFile = self._fs.open_input_file(at)
            return opened

    def read(self, path: str) -> bytes:
        """The whole object, which the caller knows to be small."""
        with self._explained("cannot read an object", path), self.open(path) as source:
            data: bytes = source.read()
            return data

    def exists(self, path: str) -> bool:
        """True if the object is there."""
        with self._explained("cannot look for an object", path):
            return bool(self._fs.get_file_info(self._at(path)).type == fs.FileType.File)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every object in the directory `prefix` and below, in no order.

        Holds no more than one directory in memory, and on a disk not even that. An object that
        comes or goes meanwhile may be listed or not.
        """
        if prefix:
            check_path(prefix)
        listed = self._list_local if self._local else self._list_remote
        with self._explained("cannot list objects", prefix):
            yield from listed(prefix)

    def _list_local(self, prefix: str) -> Iterator[BlobInfo]:
        below = [prefix]
        while below:
            directory = below.pop()
            with contextlib.suppress(FileNotFoundError), os.scandir(self._in(directory)) as found:
                for entry in found:
                    path = f"{directory}/{entry.name}" if directory else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        below.append(path)
                        continue
                    with contextlib.suppress(FileNotFoundError):  # deleted or renamed since
                        stat = entry.stat(follow_symlinks=False)
                        yield BlobInfo(path=path, bytes=stat.st_size, modified_s=stat.st_mtime)

    def _list_remote(self, prefix: str) -> Iterator[BlobInfo]:
        below = [prefix]
        while below:
            selector = fs.FileSelector(self._in(below.pop()), allow_not_found=True)
            for found in self._fs.get_file_info(selector):
                path = found.path[len(self._root) + 1 :]
                if found.type == fs.FileType.Directory:
                    below.append(path)
                elif found.type == fs.FileType.File:
                    modified_s = (found.mtime_ns or 0) / 1e9
                    yield BlobInfo(path=path, bytes=found.size, modified_s=modified_s)

    # ------------------------------------------------------------------------------------ details

    def _at(self, path: str) -> str:
        check_path(path)
        return f"{self._root}/{path}"

    def _in(self, prefix: str) -> str:
        return f"{self._root}/{prefix}" if prefix else self._root

    @contextlib.contextmanager
    def _explained(self, what: str, path: str | None = None) -> Iterator[None]:
        """Errors of the file system as ours, without the URL's secrets."""
        try:
            yield
        except PenstockError:
            raise
        except FileNotFoundError as error:
            raise MissingBlob(
                f"an object is missing: {path}",
                where=mask_url(self._url),
                why=self._masked(error),
                fix="check that this is the blob store the journal was written to",
            ) from None
        except OSError as error:
            where = mask_url(self._url) if path is None else self.url_of(path)
            raise Unavailable(what, where=where, why=self._masked(error)) from None

    def _masked(self, error: BaseException) -> str:
        text = " ".join(str(error).split()).replace(self._url, mask_url(self._url))
        secret = _password(self._url)
        for spelled in {secret, unquote(secret)} - {""}:
            text = text.replace(spelled, "<redacted>")
        return text


def check_path(path: str) -> None:
    """Paths are names joined by `/`, below the root: nothing empty, no way up, no NUL."""
    if "\0" in path or any(name in ("", ".", "..") for name in path.split("/")):
        raise Bug(f"{path!r} is not the path of an object", why="it may lead out of the blob store")


def _with_defaults(url: str) -> str:
    """One request for a small object instead of three, unless the URL says otherwise."""
    if not url.lower().startswith("s3://") or "allow_delayed_open=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}allow_delayed_open=true"


def _password(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:  # not a URL after all, and then nothing was parsed out of it either
        return ""


# ---------------------------------------------------------------------------------- local disks


def _make_directory(directory: Path) -> None:
    """Make a directory whose name survives a power cut, and those above it."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster
        directory.mkdir()
    _sync(directory.parent)


def _publish(written: Path, name: Path) -> None:
    """Give a file its name once its bytes are on disk, and wait until the name is there too."""
    _sync(written)
    written.rename(name)
    _sync(name.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def spark_root(blobs: BlobStore) -> str | None:
    """The blob store as Spark's file systems call it; None where they lack what its URL says.

    An object store needs a connector that Spark does not come with, and credentials of its own.
    """
    url = urlsplit(blobs.url_of(""))
    match url.scheme:
        case "file":
            return f"file://{unquote(url.path)}"
        case "hdfs" | "viewfs":
            return url.geturl()
        case _:
            return None
