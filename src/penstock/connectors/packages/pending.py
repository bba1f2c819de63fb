"""Documents that a package has given and nobody has taken yet, by binding; no IO.

A state that the package sends **closes** the documents before it. Closed documents are given with
the state patch that closed them. Others wait for their state, unless there are too many of them, or
the run ends: then they are given without one, and may come again. So memory is limited whatever the
package does, and nothing is ever passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pyarrow

from penstock.model.json_order import Json
from penstock.model.schema import compiled
from penstock.runtime.connector.capture import (
    GIVEN_BYTES_MAX,
    CaptureSequence,
    Documents,
    Given,
    SourceBinding,
)

DOCUMENTS_MAX: Final = 4_000
"""Documents of a sequence."""

ROW_ID: Final = "id"
"""The member of `/_meta/source` that is a hash of the document: the key of streams without one."""

pa: Any = pyarrow


@dataclass(slots=True)
class _Stream:
    """What one binding has pending."""

    binding: SourceBinding
    name: str
    wants_meta: bool
    wants_id: bool
    given: int = 0
    """Documents that were given in this run."""
    texts: list[bytes] = field(default_factory=list)
    emitted: list[int | str | None] = field(default_factory=list)
    sizes: int = 0
    closed: int = 0
    """How many of the first are closed."""
    closed_bytes: int = 0
    schema: Json = None
    """To be given with the next documents."""


class Pending:
    """The documents of one run."""

    def __init__(self, bindings: Mapping[int, tuple[SourceBinding, str]], emitted: str) -> None:
        """`bindings` have the names of their streams; `emitted` is how `/_meta/source` calls it."""
        self._emitted = emitted
        self._streams = {
            at: _Stream(binding, name, binding.wants_meta, _wants_id(binding))
            for at, (binding, name) in bindings.items()
        }
        self._patch: dict[str, Json] = {}
        self._documents = 0
        self._bytes = 0

    def add(self, at: int, text: bytes, emitted: int | str | None = None) -> None:
        """One more document of a binding."""
        stream = self._streams[at]
        stream.texts.append(text)
        if stream.wants_meta:
            stream.emitted.append(emitted)
        stream.sizes += len(text)
        self._documents += 1
        self._bytes += len(text)

    def describe(self, at: int, schema: Json) -> None:
        """Note what the package says of a binding's documents."""
        self._streams[at].schema = schema

    def close(self, bindings: Iterable[int]) -> None:
        """A state covers the documents of these bindings."""
        for at in bindings:
            stream = self._streams[at]
            stream.closed, stream.closed_bytes = len(stream.texts), stream.sizes

    def close_all(self) -> None:
        self.close(self._streams)

    def patch(self, patch: Mapping[str, Json]) -> None:
        """The state changes by this, together with all that is closed.

        A later patch of a member replaces an earlier one: each says all that there is to it.
        """
        self._patch.update(patch)

    @property
    def is_full(self) -> bool:
        """Enough for a sequence, closed or not."""
        return self._documents >= DOCUMENTS_MAX or self._bytes >= GIVEN_BYTES_MAX

    @property
    def has_documents(self) -> bool:
        return self._documents > 0

    @property
    def has_closed(self) -> bool:
        return bool(self._patch) or any(each.closed for each in self._streams.values())

    def take(self, *, everything: bool = False) -> CaptureSequence | None:
        """Return what is closed, and the patches; `everything` is what is not closed as well."""
        if everything:
            self.close_all()
        if not self.has_closed:
            return None
        given, schemas = [], {}
        for at, stream in self._streams.items():
            if stream.closed:
                if stream.schema is not None:
                    schemas[at], stream.schema = stream.schema, None
                given.append(self._given(at, stream))
        patch, self._patch = self._patch, {}
        patches = (patch,) if patch else ()
        return CaptureSequence(given=tuple(given), patches=patches, schemas=schemas)

    def _given(self, at: int, stream: _Stream) -> Given:
        texts, stream.texts = stream.texts[: stream.closed], stream.texts[stream.closed :]
        emitted, stream.emitted = stream.emitted[: len(texts)], stream.emitted[len(texts) :]
        size, first, name = stream.closed_bytes, stream.given + 1, stream.name
        stream.given += len(texts)
        stream.sizes -= size
        stream.closed = stream.closed_bytes = 0
        self._documents -= len(texts)
        self._bytes -= size
        documents = Documents(
            texts=texts,
            meta=self._meta(stream, texts, emitted) if stream.wants_meta else None,
            origin=lambda position: f"{name}, record {first + position}",
        )
        return Given(binding=at, documents=documents, bytes=size)

    def _meta(
        self, stream: _Stream, texts: list[bytes], emitted: list[int | str | None]
    ) -> pyarrow.RecordBatch:
        """Where the documents come from, as `/_meta`."""
        kind = pa.int64() if self._emitted == "emitted_at" else pa.string()
        members = {
            "stream": pa.array([stream.name] * len(texts), pa.string()),
            self._emitted: pa.array(emitted, kind),
        }
        if stream.wants_id:
            members[ROW_ID] = pa.array(list(map(row_id, texts)), pa.string())
        source = pa.StructArray.from_arrays(list(members.values()), names=list(members))
        batch: pyarrow.RecordBatch = pa.RecordBatch.from_arrays([source], names=["source"])
        return batch


def row_id(text: bytes) -> str:
    """Return a hash of a document, whatever the order of its members."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):  # what is no JSON is refused
        text = msgspec.json.encode(msgspec.json.decode(text), order="deterministic")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _wants_id(binding: SourceBinding) -> bool:
    """True if the schema names `/_meta/source/id`."""
    shape = compiled(binding.collection.write_schema.text).shape
    for name in ("_meta", "source", ROW_ID):
        found = shape.objects.properties.get(name)
        if found is None:
            return False
        shape = found.shape
    return True
