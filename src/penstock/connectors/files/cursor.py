"""PURE: which files are to be read now, and what is remembered of those that were.

A binding's part of the state is `{"files": {path: [size, version]}}`. A version is the time of the
last change, to the nanosecond. Files are read in the order of their versions, then of their paths.

With `monotonic`, a new file is never older than one that was read: then only the files of the
newest version are remembered, and what is older counts as read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.model.json_order import Json


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A file as it was listed."""

    version: int
    path: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A file that is not what it was when it was read."""

    path: str
    size_then: int
    size_now: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """What a binding has read."""

    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Size and version by path."""
    monotonic: bool = False

    @classmethod
    def decode(cls, state: Json, *, monotonic: bool) -> Cursor:
        files = state.get("files", {}) if isinstance(state, dict) else {}
        known: dict[str, tuple[int, int]] = {}
        if isinstance(files, dict):
            for path, value in files.items():
                if isinstance(value, list) and len(value) == 2:
                    size, version = value
                    known[path] = (int(str(size)), int(str(version)))
        return cls(known, monotonic)

    @property
    def newest(self) -> int:
        return max((version for _, version in self.files.values()), default=-1)

    def fresh(self, listed: Iterable[Found]) -> list[Found]:
        """Return the files that were not read, in order."""
        newest = self.newest if self.monotonic else -1
        return sorted(
            found for found in listed if found.path not in self.files and (found.version >= newest)
        )

    def changed(self, listed: Iterable[Found]) -> list[Changed]:
        """Return the files that were read and are others now."""
        return [
            Changed(path=found.path, size_then=then[0], size_now=found.size)
            for found in listed
            if (then := self.files.get(found.path)) is not None
            and then != (found.size, found.version)
        ]

    def read(self, files: Sequence[Found]) -> tuple[Cursor, Json]:
        """Return the cursor after these files, and the patch that says so."""
        added: dict[str, Json] = {each.path: [each.size, each.version] for each in files}
        known = {**self.files, **{each.path: (each.size, each.version) for each in files}}
        if self.monotonic:
            newest = max(version for _, version in known.values())
            for path in [path for path, (_, version) in known.items() if version < newest]:
                del known[path]
                if path in self.files:
                    added[path] = None
                else:
                    added.pop(path, None)
        return Cursor(known, self.monotonic), {"files": added}


def settled(files: Sequence[Found], *, now_ns: int, settle_s: float) -> list[Found]:
    """Return the files, in order, up to the first that may still be written."""
    limit = now_ns - int(settle_s * 1e9)
    for at, each in enumerate(files):
        if each.version > limit:
            return list(files[:at])
    return list(files)


def take(files: Sequence[Found], *, bytes_max: int, files_max: int) -> list[Found]:
    """Return the first files, whose sizes come to no more than a limit; one at least."""
    taken: list[Found] = []
    total = 0
    for each in files[:files_max]:
        if taken and total + each.size > bytes_max:
            break
        taken.append(each)
        total += each.size
    return taken
