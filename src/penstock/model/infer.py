"""Infer the shape of documents from their JSON Schema, and render a shape as a schema.

Schemas that apply together intersect (`allOf`, `$ref`, siblings); alternatives unite (`anyOf`,
`oneOf`, the two outcomes of `if`). Unknown keywords are ignored, which only widens the shape: it
admits every document that is valid under the schema. A reference into a schema that is already
being read becomes "any value", marked `cut`.

Competing `reduce` annotations keep their schema order, which must be the same in a sorted copy of
the schema. So it is a fixed order, not that of the text: `$ref`, `allOf`, `anyOf`, `oneOf`, `if`,
`then`, `else`, dependents, and the schema's own keywords last: the outermost is the latest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, cast

from penstock.model.draft import Schema
from penstock.model.json_order import ABSENT, Json
from penstock.model.refs import DanglingRef, Place, Refs
from penstock.model.shape import (
    ANY,
    NOTHING,
    TYPES,
    Arrays,
    JsonType,
    Number,
    Numbers,
    Objects,
    Property,
    Redact,
    Reduction,
    Shape,
    Strings,
    intersect,
    matches,
    narrow,
    of_type,
    of_values,
    union,
)

PLACES_MAX = 10_000
"""Limit of schemas read; the rest count as "any value". References can double at every step."""

UNFOLDED_MAX = 4
"""How often a recursive definition is unfolded: a dozen that refer to each other have millions of
paths through them. Other definitions are read at every reference to them."""


def infer(schema: Schema) -> Shape:
    """Infer the shape of a self-contained schema. A dangling `$ref` adds nothing to it."""
    return _Inference(schema).shape()


class _Inference:
    """One reading of one schema document."""

    def __init__(self, schema: Schema) -> None:
        self._refs = Refs(schema)
        self._draft = self._refs.root.draft
        self._active: set[str] = set()
        self._places_left = PLACES_MAX
        self._unfoldings_left = dict.fromkeys(self._refs.recursive(), UNFOLDED_MAX)

    def shape(self) -> Shape:
        return self._read(self._refs.root)

    def _read(self, place: Place) -> Shape:
        if isinstance(place.schema, bool):
            return ANY if place.schema else NOTHING
        unfoldings_left = self._unfoldings_left.get(place.pointer, 1)
        if place.pointer in self._active or not self._places_left or not unfoldings_left:
            return dataclasses.replace(ANY, cut=True, origin=place.pointer)
        self._places_left -= 1
        if place.pointer in self._unfoldings_left:
            self._unfoldings_left[place.pointer] -= 1
        self._active.add(place.pointer)
        try:
            return self._conjunction(place, place.schema)
        finally:
            self._active.remove(place.pointer)

    def _conjunction(self, place: Place, schema: Mapping[str, Any]) -> Shape:
        """Intersect everything that `schema` demands, its own keywords last."""
        found = ANY
        for applied in self._applied(place, schema):
            found = intersect(found, applied)
        if "$ref" in schema and not self._draft.ref_has_siblings:
            return dataclasses.replace(found, origin=place.pointer)
        found = intersect(found, self._own(place, schema))
        return dataclasses.replace(found, origin=place.pointer)

    def _applied(self, place: Place, schema: Mapping[str, Any]) -> Iterable[Shape]:
        """Yield the schemas applied in place, in the fixed order, each one level deeper."""
        if isinstance(ref := schema.get("$ref"), str):
            try:
                yield _deeper(self._read(self._refs.resolve(ref, place.base)))
            except DanglingRef:
                yield ANY
            if not self._draft.ref_has_siblings:
                return
        if self._draft.dynamic_refs & schema.keys():
            yield dataclasses.replace(ANY, cut=True)
        for i in range(_length(schema, "allOf")):
            yield _deeper(self._read(place.step("allOf", i)))
        for keyword in ("anyOf", "oneOf"):
            if count := _length(schema, keyword):
                yield _any_of(_deeper(self._read(place.step(keyword, i))) for i in range(count))
        if "if" in schema and self._draft.has_if:
            yes = _deeper(self._read(place.step("if")))
            if "then" in schema:
                yes = intersect(yes, _deeper(self._read(place.step("then"))))
            no = _deeper(self._read(place.step("else"))) if "else" in schema else ANY
            yield union(yes, no)
        for keyword in self._draft.dependents & schema.keys():
            for name in sorted(schema[keyword]):
                if isinstance(schema[keyword][name], Mapping):
                    yield union(_deeper(self._read(place.step(keyword, name))), ANY)

    def _own(self, place: Place, schema: Mapping[str, Any]) -> Shape:
        """Return the shape that this schema's own keywords describe."""
        own = Shape(
            types=_types(schema),
            numbers=self._numbers(schema),
            strings=_strings(schema),
            arrays=self._arrays(place, schema),
            objects=self._objects(place, schema),
            default=schema.get("default", ABSENT),
            title=_text(schema, "title"),
            description=_text(schema, "description"),
            secret=schema.get("secret") is True or schema.get("airbyte_secret") is True,
            redact=_redact(schema),
            extensions={k: v for k, v in schema.items() if k.startswith("x-")},
            reductions=_reductions(place, schema),
            origin=place.pointer,
        )
        listed: list[Shape] = []
        if isinstance(values := schema.get("enum"), list):
            listed.append(of_values(values))
        if "const" in schema and self._draft.has_const:
            listed.append(of_values([schema["const"]]))
        for values_shape in listed:
            own = intersect(values_shape, own)
        return narrow(own)

    def _numbers(self, schema: Mapping[str, Any]) -> Numbers:
        integral = "number" not in _types(schema)
        low, high = _number(schema, "minimum"), _number(schema, "maximum")
        if (above := _number(schema, "exclusiveMinimum")) is not None:
            above = above + 1 if integral and isinstance(above, int) else above
            low = above if low is None else max(low, above)
        if (below := _number(schema, "exclusiveMaximum")) is not None:
            below = below - 1 if integral and isinstance(below, int) else below
            high = below if high is None else min(high, below)
        return Numbers(minimum=low, maximum=high, multiple_of=_number(schema, "multipleOf"))

    def _arrays(self, place: Place, schema: Mapping[str, Any]) -> Arrays:
        prefix, rest = self._draft.item_keywords(schema)
        shapes = [self._read(place.step(prefix, i)) for i in range(_length(schema, prefix or ""))]
        items = self._read(place.step(rest)) if rest in schema else ANY
        if self._draft.has_unevaluated and "unevaluatedItems" in schema:
            items = intersect(
                items, self._unevaluated(place, schema, "unevaluatedItems", rest in schema)
            )
        if isinstance(schema.get("contains"), Mapping):
            optional = union(self._read(place.step("contains")), ANY)
            shapes = [intersect(optional, shape) for shape in shapes]
            items = intersect(optional, items)
        return Arrays(
            items=None if items == ANY else items,
            prefix=tuple(shapes),
            min_items=_count(schema, "minItems") or 0,
            max_items=_count(schema, "maxItems"),
        )

    def _objects(self, place: Place, schema: Mapping[str, Any]) -> Objects:
        patterns = tuple(
            (pattern, self._read(place.step("patternProperties", pattern)))
            for pattern in sorted(_mapping(schema, "patternProperties"))
        )
        additional = ANY
        if "additionalProperties" in schema:
            additional = self._read(place.step("additionalProperties"))
        if self._draft.has_unevaluated and "unevaluatedProperties" in schema:
            evaluated = "additionalProperties" in schema
            additional = intersect(
                additional, self._unevaluated(place, schema, "unevaluatedProperties", evaluated)
            )
        unnamed = Objects(patterns=patterns, additional=additional)
        listed = schema.get("required")
        required = set(listed) if isinstance(listed, list) else set()
        properties: dict[str, Property] = {}
        named = _mapping(schema, "properties")
        for name in sorted(named.keys() | required):
            shape = unnamed.member(name)
            if name in named:
                shape = self._read(place.step("properties", name))
                for pattern, patterned in patterns:
                    if matches(pattern, name):
                        shape = intersect(shape, patterned)
            properties[name] = Property(shape=shape, required=name in required)
        return dataclasses.replace(
            unnamed, properties=properties, additional=None if additional == ANY else additional
        )

    def _unevaluated(
        self, place: Place, schema: Mapping[str, Any], keyword: str, evaluated: bool
    ) -> Shape:
        """Return the shape of the rest by `unevaluated…`; wider if another keyword may apply."""
        if evaluated:
            return ANY
        shape = self._read(place.step(keyword))
        alone = not any(k in schema for k in self._draft.in_place) and "contains" not in schema
        return shape if alone else union(shape, ANY)


def _any_of(branches: Iterable[Shape]) -> Shape:
    found = NOTHING
    for branch in branches:
        found = union(found, branch)
    return found


def _deeper(shape: Shape) -> Shape:
    """Return the shape as seen through one more in-place applicator."""
    return dataclasses.replace(
        shape,
        reductions=tuple(dataclasses.replace(r, depth=r.depth + 1) for r in shape.reductions),
    )


def _types(schema: Mapping[str, Any]) -> frozenset[JsonType]:
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list):
        return ANY.types
    return of_type(*(cast(JsonType, name) for name in names if name in TYPES)).types


def _strings(schema: Mapping[str, Any]) -> Strings:
    return Strings(
        format=_text(schema, "format"),
        content_encoding=_text(schema, "contentEncoding"),
        min_length=_count(schema, "minLength") or 0,
        max_length=_count(schema, "maxLength"),
    )


def _reductions(place: Place, schema: Mapping[str, Any]) -> tuple[Reduction, ...]:
    annotation = schema.get("reduce")
    if not isinstance(annotation, Mapping):
        return ()
    at = f"{place.pointer}/reduce"
    return (Reduction(annotation=dict(annotation), depth=0, always=True, origin=at),)


def _redact(schema: Mapping[str, Any]) -> Redact | None:
    declared = schema.get("redact")
    strategy = declared.get("strategy") if isinstance(declared, Mapping) else None
    return strategy if strategy in ("block", "sha256") else None


def _text(schema: Mapping[str, Any], keyword: str) -> str | None:
    return value if isinstance(value := schema.get(keyword), str) else None


def _number(schema: Mapping[str, Any], keyword: str) -> Number | None:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(schema: Mapping[str, Any], keyword: str) -> int | None:
    value = _number(schema, keyword)
    return None if value is None else int(value)


def _length(schema: Mapping[str, Any], keyword: str) -> int:
    return len(value) if isinstance(value := schema.get(keyword), list) else 0


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    return value if isinstance(value := schema.get(keyword), Mapping) else {}


def to_schema(shape: Shape) -> dict[str, Json] | bool:
    """Render a shape as a JSON Schema (2019-09) from which `infer` gives the same shape.

    Only what a shape holds is written: a schema that goes through `infer` and back loses what
    inference ignores.
    """
    if shape.impossible:
        return False
    schema: dict[str, Any] = {}
    _put(schema, "title", shape.title)
    _put(schema, "description", shape.description)
    if shape.types != ANY.types:
        names = [t for t in TYPES if t in shape.types]
        schema["type"] = names[0] if len(names) == 1 else sorted(names)
    if shape.enum is not None:
        schema["enum"] = list(shape.enum)
    _put_facets(schema, shape)
    if shape.default is not ABSENT:
        schema["default"] = shape.default
    if shape.secret:
        schema["secret"] = True
    if shape.redact:
        schema["redact"] = {"strategy": shape.redact}
    schema.update(shape.extensions)
    fixed = shape.fixed_reduction()
    if isinstance(fixed, Reduction):
        schema["reduce"] = dict(fixed.annotation)
    return schema


def _put_facets(schema: dict[str, Any], shape: Shape) -> None:
    numbers, strings, arrays, objects = shape.numbers, shape.strings, shape.arrays, shape.objects
    _put(schema, "minimum", numbers.minimum)
    _put(schema, "maximum", numbers.maximum)
    _put(schema, "multipleOf", numbers.multiple_of)
    _put(schema, "format", strings.format)
    _put(schema, "contentEncoding", strings.content_encoding)
    _put(schema, "minLength", strings.min_length or None)
    _put(schema, "maxLength", strings.max_length)
    if arrays.prefix:
        schema["items"] = [_sub(item) for item in arrays.prefix]
        _put(schema, "additionalItems", None if arrays.items is None else _sub(arrays.items))
    else:
        _put(schema, "items", None if arrays.items is None else _sub(arrays.items))
    _put(schema, "minItems", arrays.min_items or None)
    _put(schema, "maxItems", arrays.max_items)
    if objects.properties:
        schema["properties"] = {n: _sub(p.shape) for n, p in sorted(objects.properties.items())}
    if required := sorted(n for n, p in objects.properties.items() if p.required):
        schema["required"] = required
    if objects.patterns:
        schema["patternProperties"] = {}
        for pattern, below in objects.patterns:
            merged = schema["patternProperties"].get(pattern)
            schema["patternProperties"][pattern] = (
                _sub(below) if merged is None else {"allOf": [merged, _sub(below)]}
            )
    if objects.additional is not None:
        schema["additionalProperties"] = _sub(objects.additional)


def _sub(shape: Shape) -> dict[str, Json] | bool:
    return to_schema(shape) or not shape.impossible


def _put(schema: dict[str, Any], keyword: str, value: Json) -> None:
    if value is not None:
        schema[keyword] = value
