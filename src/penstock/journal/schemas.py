"""Schemas by their content: what a fragment was written under, for later readers.

The consensus key `schema/<fingerprint>` has one entry, the schema as canonical JSON, for ever. Its
name is the hash of its content, so there is nothing to agree on: two writers of one key write the
same bytes, a lost answer is settled by asking again, and a reader checks what it got.
"""

from __future__ import annotations

import functools
import json
from typing import Final

from penstock.consensus.store import Consensus, Indeterminate, VersionedData
from penstock.errors import Bug
from penstock.model.columns import Column, columns
from penstock.model.schema import CompiledSchema, compiled
from penstock.model.spec import Frozen, fingerprint

KNOWN_MAX: Final = 1024
"""Schemas remembered by one registry; all that a deployment has, as a rule."""


def schema_key(of: str) -> str:
    """The consensus key of a schema."""
    return f"schema/{of}"


@functools.lru_cache(maxsize=64)
def layout(text: str) -> Column:
    """The columns of documents of the schema with this canonical text."""
    return columns(compiled(text).shape)


class Schemas:
    """The registry. Not for several threads, as the consensus store itself."""

    def __init__(self, store: Consensus) -> None:
        self._store = store
        self._texts: dict[str, str] = {}

    async def put(self, schema: Frozen) -> str:
        """The schema's fingerprint, after which every reader finds the schema."""
        name = fingerprint(schema)
        if name in self._texts:
            return name
        key = schema_key(name)
        if (found := await self._store.head(key)) is not None:
            _checked(name, found.data)
        else:
            entry = VersionedData(0, schema.text.encode())
            try:
                await self._store.compare_and_set(key, entry)  # a mismatch: it is there already
            except Indeterminate:
                if await self._store.head(key, fresh=True) is None:
                    raise
        self._remember(name, schema.text)
        return name

    async def text(self, name: str) -> str:
        """The canonical text of the schema with this fingerprint."""
        if name not in self._texts:
            entry = await self._store.head(schema_key(name), fresh=True)
            if entry is None:
                raise Bug(
                    f"there is no schema {name}",
                    where=schema_key(name),
                    why="a fragment was recorded before the schema it was written under",
                )
            self._remember(name, _checked(name, entry.data))
        return self._texts[name]

    async def get(self, name: str) -> CompiledSchema:
        """The schema with this fingerprint."""
        return compiled(await self.text(name))

    async def layout(self, name: str) -> Column:
        """The columns of documents that were written under this schema."""
        return layout(await self.text(name))

    def _remember(self, name: str, text: str) -> None:
        if len(self._texts) >= KNOWN_MAX:
            self._texts.pop(next(iter(self._texts)))  # the oldest
        self._texts[name] = text


def _checked(name: str, data: bytes) -> str:
    try:
        schema = Frozen(json.loads(data))
    except ValueError:
        schema = None
    if schema is None or fingerprint(schema) != name:
        raise Bug(
            "a stored schema is not the one it is named after",
            where=schema_key(name),
            why="the entry was damaged, or written by something else",
        )
    return schema.text
