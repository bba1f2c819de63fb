"""PURE: journal names, made of a collection and partition values, that cannot escape.

    acme/orders/region=eu/pivot=00          a string value, percent-encoded
    acme/orders/active=%_true/pivot=00      any other value: `%_` and its JSON text
    acme/orders/pivot=80                    a second physical partition, from key hash 0x80000000 on

Names become consensus keys and paths in the blob store. Every character outside of letters,
digits and `-_.` of a value is percent-encoded, so a value has no separator and no way up; and a
segment with a value always contains `=`, so it is never `.` or `..` itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import unquote

from penstock.errors import UserError

PartitionValue = str | int | bool | None

NAME_BYTES_MAX: Final = 480
"""Leaves room for the prefixes of consensus keys, which have at most 512 bytes."""

SEGMENT_BYTES_MAX: Final = 240
"""Of each part between slashes: file systems allow names of 255 bytes."""

KEY_HASH_MAX: Final = 0xFFFFFFFF

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_COMPONENT: Final = re.compile(r"[\w\-.]+")
_PIVOT: Final = re.compile(r"[0-9a-f]{2}(?:[0-9a-f]{6})?")


def encode_value(value: PartitionValue) -> str:
    """The text of a partition value; two values have the same text only if they are equal."""
    if not isinstance(value, str):
        return "%_" + json.dumps(value)
    return "".join(chr(b) if b in _PLAIN else f"%{b:02X}" for b in value.encode())


def decode_value(text: str) -> PartitionValue:
    """The value that `encode_value` wrote."""
    if text.startswith("%_"):
        value = json.loads(text[2:])
        if value is None or isinstance(value, bool | int):
            return value
        raise ValueError(f"{text!r} is not a partition value")
    return unquote(text, errors="strict")


def check_collection(name: str) -> None:
    """A collection's name is `/`-separated components of letters, digits and `-_.`."""
    components = name.split("/")
    if not all(_COMPONENT.fullmatch(c) and c.strip(".") for c in components):
        raise UserError(
            f'"{name}" is not a collection name',
            why="a name is components of letters, digits, - _ and . with / between them",
            fix="for example acme/orders",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalName:
    """One partition of a collection: its values by field, and where its range of hashes begins."""

    collection: str
    partitions: tuple[tuple[str, PartitionValue], ...] = ()
    """Sorted by field."""
    key_begin: int = 0

    def __post_init__(self) -> None:
        check_collection(self.collection)
        fields = [field for field, _ in self.partitions]
        if fields != sorted(set(fields)):
            raise ValueError(f"partition fields {fields} are not sorted and unique")
        if not 0 <= self.key_begin <= KEY_HASH_MAX:
            raise ValueError(f"key_begin {self.key_begin:#x} has more than 32 bits")
        if (size := len(str(self).encode())) > NAME_BYTES_MAX:
            raise UserError(
                f"the name of a partition of {self.collection} has {size} bytes",
                where=f"{str(self)[:120]}…",
                why=f"a journal's name has at most {NAME_BYTES_MAX} bytes",
                fix="partition by a field with shorter values",
            )

    @classmethod
    def of(
        cls, collection: str, partitions: Mapping[str, PartitionValue], key_begin: int = 0
    ) -> Self:
        """The partition with these values, in whatever order they are given.

        A new journal: unlike one that is there, it must not be refused by a file system later on.
        """
        for field, value in sorted(partitions.items()):
            size = len(encode_value(field)) + len("=") + len(encode_value(value))
            if size > SEGMENT_BYTES_MAX:
                raise UserError(
                    f"a value of the partition {field} of {collection} is too long",
                    where=f"{field}={str(value)[:60]}…",
                    why=f"it takes {size} bytes in the name of a journal, and {SEGMENT_BYTES_MAX} "
                    "are the most; characters beyond letters, digits and -_. take three and more",
                    fix="partition by a field with shorter values",
                )
        return cls(
            collection=collection,
            partitions=tuple(sorted(partitions.items())),
            key_begin=key_begin,
        )

    @classmethod
    def parse(cls, name: str, collection: str) -> Self:
        """The parts of a journal's name; they begin behind `collection`."""
        rest = name.removeprefix(f"{collection}/")
        if rest == name:
            raise ValueError(f"journal {name!r} is not one of collection {collection!r}")
        *values, last = rest.split("/")
        pivot = last.removeprefix("pivot=")
        if pivot == last or not _PIVOT.fullmatch(pivot):
            raise ValueError(f"journal {name!r} does not end in pivot= and 2 or 8 hex digits")
        pairs = []
        for segment in values:
            field, equals, text = segment.partition("=")
            if not equals or not field:
                raise ValueError(f"segment {segment!r} of journal {name!r} is not field=value")
            pairs.append((str(decode_value(field)), decode_value(text)))
        return cls(
            collection=collection,
            partitions=tuple(pairs),
            key_begin=int(pivot.ljust(8, "0"), 16),
        )

    @property
    def prefix(self) -> str:
        """The prefix of all physical partitions of the same values, with its closing slash."""
        values = (f"{encode_value(f)}={encode_value(v)}/" for f, v in self.partitions)
        return f"{self.collection}/{''.join(values)}"

    def __str__(self) -> str:
        pivot = f"{self.key_begin:08x}"
        return f"{self.prefix}pivot={pivot[:2] if pivot.endswith('000000') else pivot}"


# ------------------------------------------------------------------------------------ consensus

_KEY_PREFIX: Final = "journal/"


def journal_key(name: str) -> str:
    """The consensus key of a journal's state log."""
    return _KEY_PREFIX + name


def journal_of_key(key: str) -> str:
    """The journal whose state log has this key."""
    return key.removeprefix(_KEY_PREFIX)


def collection_prefix(collection: str) -> str:
    """Keys under it are those of the collection's journals; a longer name's are not among them."""
    return f"{_KEY_PREFIX}{collection}/"
