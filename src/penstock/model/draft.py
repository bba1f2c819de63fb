"""The drafts of JSON Schema, where their keywords differ.

A schema without `$schema` is read as draft 2019-09: `items` may be an array, and keywords beside a
`$ref` count.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jsonschema_rs

Schema: TypeAlias = Mapping[str, Any] | bool


class Draft(enum.IntEnum):
    """A draft; later ones compare greater."""

    DRAFT_4 = 4
    DRAFT_6 = 6
    DRAFT_7 = 7
    DRAFT_2019_09 = 2019
    DRAFT_2020_12 = 2020

    @classmethod
    def of(cls, schema: Schema) -> Draft:
        """Return the draft that `$schema` names; 2019-09 if it is absent or unknown."""
        uri = schema.get("$schema") if isinstance(schema, Mapping) else None
        return _BY_URI.get(_bare(uri), cls.DRAFT_2019_09)

    @property
    def validator(self) -> type[jsonschema_rs.Validator]:
        return _VALIDATORS[self]

    @property
    def meta_validator(self) -> jsonschema_rs.Validator:
        """Validates schemas of this draft."""
        return _meta_validator(self)

    @property
    def id_keyword(self) -> str:
        return "id" if self is Draft.DRAFT_4 else "$id"

    @property
    def ref_has_siblings(self) -> bool:
        return self >= Draft.DRAFT_2019_09

    @property
    def has_const(self) -> bool:
        return self >= Draft.DRAFT_6

    @property
    def has_if(self) -> bool:
        return self >= Draft.DRAFT_7

    @property
    def has_unevaluated(self) -> bool:
        return self >= Draft.DRAFT_2019_09

    @property
    def dependents(self) -> frozenset[str]:
        """Keywords that apply a schema where a member is present."""
        if self >= Draft.DRAFT_2019_09:
            return frozenset({"dependentSchemas"})
        return frozenset({"dependencies"})

    @property
    def dynamic_refs(self) -> frozenset[str]:
        """References whose target depends on the path taken to them."""
        if self is Draft.DRAFT_2020_12:
            return frozenset({"$dynamicRef"})
        return frozenset({"$recursiveRef"} if self is Draft.DRAFT_2019_09 else ())

    @property
    def in_place(self) -> frozenset[str]:
        """Keywords that apply a schema to the location itself."""
        return (
            frozenset({"$ref", "allOf", "anyOf", "oneOf"})
            | (frozenset({"if", "then", "else"}) if self.has_if else frozenset())
            | self.dependents
            | self.dynamic_refs
        )

    def item_keywords(self, schema: Mapping[str, Any]) -> tuple[str, str]:
        """Return the keywords of the first items by position ("" if none), and of the rest."""
        if self is Draft.DRAFT_2020_12:
            return ("prefixItems" if "prefixItems" in schema else ""), "items"
        return (
            ("items", "additionalItems") if isinstance(schema.get("items"), list) else ("", "items")
        )


def is_known_draft(uri: object) -> bool:
    """True if a `$schema` names one of the drafts."""
    return _bare(uri) in _BY_URI


def _bare(uri: object) -> str:
    if not isinstance(uri, str):
        return ""
    return uri.removeprefix("http://").removeprefix("https://").rstrip("#")


@functools.cache
def _meta_validator(draft: Draft) -> jsonschema_rs.Validator:
    uri = next(uri for uri, known in _BY_URI.items() if known is draft)
    scheme = "https" if draft >= Draft.DRAFT_2019_09 else "http"
    return draft.validator({"$ref": f"{scheme}://{uri}"}, offline=True)


_VALIDATORS: Mapping[Draft, type[jsonschema_rs.Validator]] = {
    Draft.DRAFT_4: jsonschema_rs.Draft4Validator,
    Draft.DRAFT_6: jsonschema_rs.Draft6Validator,
    Draft.DRAFT_7: jsonschema_rs.Draft7Validator,
    Draft.DRAFT_2019_09: jsonschema_rs.Draft201909Validator,
    Draft.DRAFT_2020_12: jsonschema_rs.Draft202012Validator,
}

_BY_URI: Mapping[str, Draft] = {
    "json-schema.org/draft-04/schema": Draft.DRAFT_4,
    "json-schema.org/draft-06/schema": Draft.DRAFT_6,
    "json-schema.org/draft-07/schema": Draft.DRAFT_7,
    "json-schema.org/draft/2019-09/schema": Draft.DRAFT_2019_09,
    "json-schema.org/draft/2020-12/schema": Draft.DRAFT_2020_12,
}
