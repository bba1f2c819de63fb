"""Resolve the references inside one JSON Schema.

A schema here is self-contained: what it refers to is inside it, possibly under an `$id` of its own.
So resolving needs no IO, and a Spark task compiles the same schema that was checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from penstock.model import pointer
from penstock.model.draft import Draft, Schema
from penstock.model.json_order import ABSENT, Json

_VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords that hold documents: an `$id` or `$ref` inside them is data."""


class DanglingRef(LookupError):
    """A reference to nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A schema inside a schema document: its location, and the base URI of its references."""

    schema: Schema
    pointer: str
    base: str
    draft: Draft

    def step(self, *tokens: str | int) -> Place:
        """Return the schema below this one at `tokens`."""
        schema: Any = self.schema
        for token in tokens:
            schema = schema[token]
        return dataclasses.replace(
            self,
            schema=schema,
            pointer=self.pointer + pointer.render(tokens),
            base=_base(schema, self.base, self.draft),
        )


class Refs:
    """The resources and anchors of one schema document."""

    def __init__(self, schema: Schema) -> None:
        draft = Draft.of(schema)
        self.root = Place(schema=schema, pointer="", base=_base(schema, "", draft), draft=draft)
        self._resources: dict[str, Place] = {"": self.root, self.root.base: self.root}
        self._anchors: dict[tuple[str, str], Place] = {}
        for place in _walk(self.root):
            self._note(place)

    def _note(self, place: Place) -> None:
        """Index the names that a schema gives itself."""
        assert isinstance(place.schema, Mapping)  # noqa: S101 - _walk yields mappings
        identity = place.schema.get(place.draft.id_keyword)
        if isinstance(identity, str):
            uri, fragment = urldefrag(_join(place.base, identity))
            if fragment:
                self._anchors.setdefault((place.base, fragment), place)
            else:
                self._resources.setdefault(uri, place)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := place.schema.get(keyword), str):
                self._anchors.setdefault((place.base, anchor), place)

    def resolve(self, ref: str, base: str) -> Place:
        """Return the schema that `ref` refers to, where the base URI is `base`."""
        uri, fragment = urldefrag(_join(base, ref))
        fragment = unquote(fragment)
        resource = self._resources.get(uri)
        if resource is None:
            raise DanglingRef(f'$ref "{ref}" points to nothing: no document has the URI {uri}')
        if fragment and not fragment.startswith("/"):
            anchored = self._anchors.get((resource.base, fragment))
            if anchored is None:
                raise DanglingRef(f'$ref "{ref}" points to nothing: no anchor "{fragment}"')
            return anchored
        value: Json = resource.schema  # type: ignore[assignment]
        base = resource.base
        for token in pointer.parse(fragment):
            found = pointer.get(value, (token,))
            if found is ABSENT:
                raise DanglingRef(f'$ref "{ref}" points to nothing')
            value = found
            base = _base(value, base, resource.draft)
        if not isinstance(value, dict | bool):
            raise DanglingRef(f'$ref "{ref}" points to something that is not a schema')
        return dataclasses.replace(
            resource, schema=value, pointer=resource.pointer + fragment, base=base
        )

    def recursive(self) -> frozenset[str]:
        """Return the pointers of schemas that refer to themselves, directly or through others."""
        targets: list[tuple[str, str]] = []  # location of the reference, and of its target
        for ref, base, at in references(self.root.schema):
            with contextlib.suppress(DanglingRef):
                targets.append((at, self.resolve(ref, base).pointer))
        reached = {
            target: {to for at, to in targets if at.startswith(f"{target}/")}
            for _, target in targets
        }
        for via in reached:  # transitive closure
            for found in reached.values():
                if via in found:
                    found |= reached[via]
        return frozenset(target for target, found in reached.items() if target in found)


def references(schema: Schema) -> Iterator[tuple[str, str, str]]:
    """Yield every `$ref` of a schema document as (reference, base URI, pointer to the keyword)."""
    draft = Draft.of(schema)
    root = Place(schema=schema, pointer="", base=_base(schema, "", draft), draft=draft)
    for place in _walk(root):
        assert isinstance(place.schema, Mapping)  # noqa: S101 - _walk yields mappings
        if isinstance(ref := place.schema.get("$ref"), str):
            yield ref, place.base, pointer.child(place.pointer, "$ref")


def _walk(root: Place) -> Iterator[Place]:
    """Yield every mapping that may be a schema: definitions may sit under any keyword."""
    pending: list[tuple[Any, str, str]] = [(root.schema, root.pointer, root.base)]
    while pending:
        value, at, base = pending.pop()
        if isinstance(value, list):
            pending += [(item, pointer.child(at, i), base) for i, item in enumerate(value)]
        elif isinstance(value, Mapping):
            base = _base(value, base, root.draft)
            yield Place(schema=value, pointer=at, base=base, draft=root.draft)
            pending += [
                (item, pointer.child(at, name), base)
                for name, item in value.items()
                if name not in _VALUES
            ]


def _base(schema: object, base: str, draft: Draft) -> str:
    """Return the base URI inside a schema: its `$id`, unless that only names an anchor."""
    if not isinstance(schema, Mapping):
        return base
    identity = schema.get(draft.id_keyword)
    if not isinstance(identity, str) or identity.startswith("#"):
        return base
    return urldefrag(_join(base, identity))[0]


def _join(base: str, ref: str) -> str:
    """`urljoin` that also handles schemes it does not know to be hierarchical."""
    return urldefrag(base)[0] + ref if ref.startswith("#") else urljoin(base, ref)
