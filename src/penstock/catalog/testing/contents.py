"""The documents of one collection, in memory: what a publisher does on the way in, and a reader."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from penstock.catalog.collection_lookup import salt_of
from penstock.catalog.testing.match import without_uuid
from penstock.errors import UsageError, UserError
from penstock.journal.names import encode_value
from penstock.journal.selector import PartitionFilter
from penstock.model.clock import Clock, DocumentId, Flag, Producer
from penstock.model.columns import as_stored, columns, unstorable
from penstock.model.json_order import ABSENT, Json, canonical_json, sort_key
from penstock.model.pointer import get
from penstock.model.redact import redact
from penstock.model.reduce import combine, reduce_full, why_not_combined
from penstock.model.schema import compiled
from penstock.model.shape import locate
from penstock.model.spec import Catalog, CollectionSpec, Selector
from penstock.runtime.derive.engine import Document

PRODUCER: Final = Producer(Producer.MULTICAST)
"""All documents of a world are one writer's."""

_SALT: Final = "AA=="


class DocumentRefused(UserError):
    """A document that does not fit the schema of its collection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A document on its way into a collection."""

    document: Document
    origin: str
    """The step, or the transform, that it comes from."""
    hops: int = 0
    """Derivations that it came through since a step ingested what it was made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A document of a collection, without its UUID."""

    clock: Clock
    document: Document
    partition: str
    """The name of its journal, behind that of the collection."""
    hops: int

    def with_uuid(self) -> Document:
        """As a transform reads it."""
        stamp = DocumentId(producer=PRODUCER, clock=self.clock, flags=Flag.CONTINUE_TXN)
        meta = self.document.get("_meta")
        members = meta if isinstance(meta, dict) else {}
        return {**self.document, "_meta": {**members, "uuid": str(stamp.uuid)}}


class Contents:
    """A collection: an append-only list of documents, each in its partition."""

    def __init__(self, spec: CollectionSpec, catalog: Catalog) -> None:
        self.spec = spec
        self.log: list[Stored] = []
        self.reads = compiled(spec.read_schema.text)
        self._writes = compiled(spec.write_schema.text)
        self._columns = columns(self._writes.shape)
        self._same_schema = spec.read_schema == spec.write_schema
        # Readers reduce by the read schema: another one may tell apart what this one would fold.
        self._combines = self._same_schema and why_not_combined(self.reads.shape) is None
        self._salt = salt_of(spec, catalog, salt_given(spec, catalog))

    def prepare(self, published: Iterable[Published]) -> list[Published]:
        """Check, combine and redact the documents of one transaction."""
        return [self._as_read_back(each) for each in self.combined(published)]

    def combined(self, published: Iterable[Published]) -> list[Published]:
        """Check the documents of one transaction, and combine those of one key and partition."""
        accepted = [self._accepted(each) for each in published]
        if not self._combines:
            return accepted
        groups: dict[Any, list[Published]] = {}
        for each in accepted:
            identity = (self._partition(each.document), *map(sort_key, self.key_of(each.document)))
            groups.setdefault(identity, []).append(each)
        return [self._one(group) for group in groups.values()]

    def append(self, document: Published, clock: Clock) -> None:
        """Store a document that was prepared."""
        self.log.append(
            Stored(
                clock=clock,
                document=document.document,
                partition=self._partition(document.document),
                hops=document.hops,
            )
        )

    def select(self, selector: Selector) -> list[Document]:
        """The documents of some partitions, checked against the read schema."""
        chosen = PartitionFilter.of((field.name for field in self.spec.partitions), selector)
        some = [each.document for each in self.log if chosen.matches(each.partition)]
        for document in some:
            self.check_read(document)
        return some

    def check_read(self, document: Document) -> None:
        """Raise if the read schema refuses what the write schema has admitted."""
        if self._same_schema or self.reads.is_valid(document):
            return
        violations = self.reads.violations(document)
        raise DocumentRefused(
            f"a document of {self.spec.name} does not fit its readSchema: {violations[0]}",
            where=f"key {canonical_json(list(self.key_of(document)))}",
            why="; ".join(map(str, violations[1:])) or None,
            fix="let the readSchema admit what the writeSchema does",
        )

    def key_of(self, document: Document) -> tuple[Json, ...]:
        """The values of its key; a default stands for one that is missing."""
        return self.values_at(document, self.spec.key)

    def values_at(self, document: Document, locations: Sequence[str]) -> tuple[Json, ...]:
        """The values at locations, as documents are routed by them."""
        values = []
        for location in locations:
            value = get(document, location)
            if value is ABSENT:
                value = locate(self.reads.shape, location)[0].default
            values.append(None if value is ABSENT else value)
        return tuple(values)

    def _accepted(self, published: Published) -> Published:
        document = cast("Document", without_uuid(published.document))
        violations = tuple(map(str, self._writes.violations(document)))
        if not violations and (found := unstorable(document, self._columns)) is not None:
            violations = (f"{found[0]}: {found[1]}",)
        if violations:
            raise DocumentRefused(
                f"a document does not fit the schema of {self.spec.name}: {violations[0]}",
                where=published.origin,
                why="; ".join(violations[1:]) or None,
                fix="correct what publishes it, or the schema",
            )
        return replace(published, document=document)

    def _one(self, group: Sequence[Published]) -> Published:
        if len(group) == 1:
            return group[0]
        documents = [each.document for each in group]
        key = list(self.key_of(documents[0]))
        one = cast("Document", combine(documents, self.reads.active_rules, key))
        return replace(group[0], document=one, hops=max(each.hops for each in group))

    def _as_read_back(self, published: Published) -> Published:
        """The document redacted, and with its numbers as columns keep them."""
        hidden = redact(published.document, self._writes.shape, self._salt)
        stored = json.loads(canonical_json(as_stored(hidden, self._columns)))
        return replace(published, document=stored)

    def _partition(self, document: Document) -> str:
        fields = self.spec.partitions
        values: Any = self.values_at(document, [field.location for field in fields])
        segments = [
            f"{encode_value(field.name)}={encode_value(value)}"
            for field, value in zip(fields, values, strict=True)
        ]
        return "/".join([*segments, "pivot=00"])


def salt_given(spec: CollectionSpec, catalog: Catalog) -> str | None:
    """Return a salt for a collection whose tasks have none, or not the same.

    A test shows that a value is hashed, and not what its hash is.
    """
    try:
        salt_of(spec, catalog)
    except UsageError:
        return _SALT
    return None


def reduced(spec: CollectionSpec, documents: Iterable[Document]) -> list[Json]:
    """Reduce all documents of a collection fully; sorted by key, without deleted ones."""
    schema = compiled(spec.read_schema.text)
    groups: dict[Any, list[Json]] = {}
    for document in documents:
        parts = [get(document, part) for part in spec.key]
        values = [
            locate(schema.shape, at)[0].default if part is ABSENT else part
            for at, part in zip(spec.key, parts, strict=True)
        ]
        groups.setdefault(tuple(map(sort_key, values)), []).append(document)
    states = []
    for identity in sorted(groups):
        same = groups[identity]
        key = [None if (part := get(same[0], at)) is ABSENT else part for at in spec.key]
        state = reduce_full(same, schema.active_rules, key)
        if state is not ABSENT:
            states.append(state)
    return states
