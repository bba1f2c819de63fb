"""Shapes: what a schema says about each location of a document.

A `Shape` stands for a set of JSON values: those it `admits`. Operations may make that set too
large, never too small: a shape inferred from a schema (`penstock.model.infer`) admits every value
that is valid under it, whatever keywords inference does not understand. So a shape can promise a
column type, but not validity.

`union` and `intersect` follow the sets: a union admits what either operand admits, an intersection
admits what both do. Facets belong to a type: bounds to numbers, properties to objects. A facet of a
type that a shape does not have says nothing, so the union of null with "a number from 0 to 9" still
has the bounds 0 and 9.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias, TypeVar

import jsonschema_rs

from penstock.model.json_order import ABSENT, Absent, Json
from penstock.model.pointer import index, parse

JsonType: TypeAlias = Literal["null", "boolean", "integer", "number", "string", "array", "object"]
"""`integer` is all integral numbers, including 1.0; `number` includes integers."""

Number: TypeAlias = int | float
Redact: TypeAlias = Literal["block", "sha256"]

TYPES: tuple[JsonType, ...] = (
    "null",
    "boolean",
    "integer",
    "number",
    "string",
    "array",
    "object",
)

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Facets of numbers. Bounds are inclusive; an exclusive bound is stored as inclusive."""

    minimum: Number | None = None
    maximum: Number | None = None
    multiple_of: Number | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strings:
    """Facets of strings. Lengths are in code points."""

    format: str | None = None
    content_encoding: str | None = None
    min_length: int = 0
    max_length: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Facets of arrays: the first items by position (`prefix`), then `items` for all others.

    `items` None means "any value", so that a shape can be built before ANY exists.
    """

    items: Shape | None = None
    prefix: tuple[Shape, ...] = ()
    min_items: int = 0
    max_items: int | None = None

    def item(self, at: int) -> Shape:
        """Return the shape of the item at a position; NOTHING beyond `max_items`."""
        if self.max_items is not None and at >= self.max_items:
            return NOTHING
        return self.prefix[at] if at < len(self.prefix) else self.items or ANY

    @property
    def rest(self) -> Shape:
        """The shape of every item beyond the prefix."""
        return self.item(len(self.prefix))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """A named member. `required` means present in documents, which a default does not ensure."""

    shape: Shape
    required: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """Facets of objects: named members, else members by pattern, else `additional`.

    The shape of a named member already includes the patterns that its name matches. A name that
    matches several patterns has the shape of all of them. `additional` None means "any value": an
    open object.
    """

    properties: Mapping[str, Property] = dataclasses.field(default_factory=dict)
    patterns: tuple[tuple[str, Shape], ...] = ()
    additional: Shape | None = None

    def member(self, name: str) -> Shape:
        """Return the shape of the member `name` where it is present."""
        if name in self.properties:
            return self.properties[name].shape
        matching = [shape for pattern, shape in self.patterns if matches(pattern, name)]
        return functools.reduce(intersect, matching) if matching else self.additional or ANY

    def required(self, name: str) -> bool:
        return name in self.properties and self.properties[name].required

    @property
    def closed(self) -> bool:
        """True if only named members are allowed."""
        return not self.patterns and self.additional is not None and self.additional.impossible


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One `reduce` annotation that may act at a location.

    `depth` counts the in-place applicators ($ref, allOf, anyOf, oneOf, if, then, else) between it
    and the location. `always` means that it is active for every valid value there.
    """

    annotation: Mapping[str, Json]
    depth: int
    always: bool
    origin: str = dataclasses.field(default="", compare=False)
    """Pointer to the annotation in the schema."""

    @property
    def strategy(self) -> str:
        return str(self.annotation.get("strategy", ""))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The values that one location may have. `types` never holds both `integer` and `number`."""

    types: frozenset[JsonType]
    numbers: Numbers = Numbers()
    strings: Strings = Strings()
    arrays: Arrays = Arrays()
    objects: Objects = Objects()
    enum: tuple[Json, ...] | None = None
    """All possible values, if the schema lists them."""
    default: Json | Absent = ABSENT
    title: str | None = None
    description: str | None = None
    secret: bool = False
    redact: Redact | None = None
    extensions: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    """The `x-…` keywords."""
    reductions: tuple[Reduction, ...] = ()
    """Every annotation that may be active here, in schema order; `fixed_reduction` ranks them."""
    cut: bool = False
    """Inference stopped here because of recursion: more may be annotated below."""
    origin: str | None = dataclasses.field(default=None, compare=False)
    """Pointer to this location's description in the schema."""

    @property
    def impossible(self) -> bool:
        return not self.types

    @property
    def nullable(self) -> bool:
        return "null" in self.types

    @property
    def not_null(self) -> frozenset[JsonType]:
        """The types other than null, which decide the column type."""
        return self.types - {"null"}

    @property
    def is_numeric_text(self) -> bool:
        """True if all values are texts that write numbers; redacted ones do not."""
        form = self.strings.content_encoding or self.strings.format
        return self.not_null == {"string"} and self.redact is None and form in ("integer", "number")

    @property
    def properties(self) -> Mapping[str, Property]:
        return self.objects.properties

    def children(self) -> Iterator[tuple[str | int | None, bool, Shape]]:
        """Yield every location directly below, as (name or index, required, shape).

        The name is None for items and members that have none of their own.
        """
        for name, member in self.properties.items():
            yield name, member.required, member.shape
        for at, item in enumerate(self.arrays.prefix):
            yield at, at < self.arrays.min_items, item
        for _, shape in self.objects.patterns:
            yield None, False, shape
        for unnamed in (self.objects.additional, self.arrays.items):
            if unnamed is not None:
                yield None, False, unnamed

    def fixed_reduction(self) -> Reduction | Literal["conditional"] | None:
        """Return the annotation that acts here in every document; None if none ever does.

        "conditional" if documents differ: the annotation that ranks first is not always active.
        """
        if not self.reductions:
            return None
        best = _rank(self.reductions)[0]
        if best.always:
            return best
        agree = all(r.annotation == best.annotation for r in self.reductions)
        if agree and any(r.always for r in self.reductions):
            return best
        return "conditional"


def _rank(candidates: Iterable[Reduction]) -> list[Reduction]:
    """Sort competing annotations, winner first: fewest applicators, then later in the schema."""
    ordered = list(enumerate(candidates))
    return [r for _, r in sorted(ordered, key=lambda at: (at[1].depth, -at[0]))]


ANY = Shape(types=frozenset({"null", "boolean", "number", "string", "array", "object"}))
NOTHING = Shape(types=frozenset())


def of_type(*types: JsonType) -> Shape:
    """Return the shape of all values of the given types."""
    return Shape(types=_normal(frozenset(types)))


def of_values(values: Iterable[Json]) -> Shape:
    """Return the shape of exactly these values, with the bounds that follow."""
    listed = tuple(values)
    numbers = [v for v in listed if isinstance(v, int | float) and not isinstance(v, bool)]
    lengths = [len(v) for v in listed if isinstance(v, str)]
    return Shape(
        types=_normal(frozenset(type_of(v) for v in listed)),
        numbers=Numbers(minimum=min(numbers), maximum=max(numbers)) if numbers else Numbers(),
        strings=Strings(min_length=min(lengths), max_length=max(lengths)) if lengths else Strings(),
        enum=listed,
    )


def type_of(value: Json) -> JsonType:
    """Return the narrowest type of a JSON value: 1.0 is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "integer" if value == value // 1 else "number"


def json_equal(a: Json, b: Json) -> bool:
    """True if two JSON values are equal: 1 equals 1.0, and true equals neither."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(json_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(json_equal(v, b[k]) for k, v in a.items())
    return bool(a == b)


@functools.lru_cache(maxsize=4096)
def _pattern(pattern: str) -> Callable[[Json], bool]:
    return jsonschema_rs.Draft201909Validator({"pattern": pattern}).is_valid


def matches(pattern: str, text: str) -> bool:
    """True if a JSON Schema regular expression matches, exactly as in validation."""
    return _pattern(pattern)(text)


def admits(shape: Shape, value: Json) -> bool:
    """True if `value` belongs to the shape. This defines every other operation here."""
    kind = type_of(value)
    if kind not in shape.types and not (kind == "integer" and "number" in shape.types):
        return False
    if shape.enum is not None and not any(json_equal(value, listed) for listed in shape.enum):
        return False
    match value:
        case bool() | None:
            return True
        case str():
            longest = shape.strings.max_length
            return shape.strings.min_length <= len(value) and (
                longest is None or len(value) <= longest
            )
        case list():
            arrays = shape.arrays
            return arrays.min_items <= len(value) and all(
                admits(arrays.item(i), item) for i, item in enumerate(value)
            )
        case dict():
            objects = shape.objects
            return all(
                name in value for name, prop in objects.properties.items() if prop.required
            ) and all(admits(objects.member(name), item) for name, item in value.items())
        case _:
            low, high = shape.numbers.minimum, shape.numbers.maximum
            return (low is None or low <= value) and (high is None or value <= high)


def locate(shape: Shape, pointer: str) -> tuple[Shape, bool]:
    """Return the shape at `pointer`, and True if every document has a value there.

    That needs `required`, or `minItems` above an index, at every step; or a default at the location
    itself, which a missing value is read as.
    """
    exists = True
    for token in parse(pointer):
        sides: list[Shape] = []
        present = True
        if "object" in shape.types:
            sides.append(shape.objects.member(token))
            present = shape.objects.required(token)
        if "array" in shape.types and (at := index(token)) is not None:
            sides.append(shape.arrays.item(at))
            present = present and at < shape.arrays.min_items
        exists = exists and present and shape.types <= {"object", "array"}
        exists = exists and len(sides) == len(shape.types)
        shape = functools.reduce(union, sides, NOTHING)
    return shape, exists or shape.default is not ABSENT


def union(a: Shape, b: Shape) -> Shape:
    """Return a shape that admits everything that either admits."""
    if a is b:
        return a  # and so ANY, whose items and members are ANY again, ends the descent
    if a.impossible or b.impossible:
        return b if a.impossible else a
    return Shape(
        types=_normal(a.types | b.types),
        numbers=_either(a, b, ("integer", "number"), a.numbers, b.numbers, _union_numbers),
        strings=_either(a, b, ("string",), a.strings, b.strings, _union_strings),
        arrays=_either(a, b, ("array",), a.arrays, b.arrays, _union_arrays),
        objects=_either(a, b, ("object",), a.objects, b.objects, _union_objects),
        enum=_union_enum(_values(a), _values(b)),
        default=a.default if _same_default(a, b) else ABSENT,
        title=a.title if a.title == b.title else None,
        description=a.description if a.description == b.description else None,
        secret=a.secret or b.secret,
        redact=_stricter(a.redact, b.redact),
        extensions={**a.extensions, **b.extensions},
        reductions=_union_reductions(a, b),
        cut=a.cut or b.cut,
        origin=_blame(b, a),
    )


def intersect(a: Shape, b: Shape) -> Shape:
    """Return a shape that admits everything that both admit.

    Of single annotations (title, default, format) that of `b` wins, so callers pass the outer
    schema second.
    """
    if a is ANY or b is ANY:
        return b if a is ANY else a
    types = _meet_types(a.types, b.types)
    enum = a.enum if b.enum is None else b.enum
    if a.enum is not None and b.enum is not None:
        enum = tuple(v for v in b.enum if any(json_equal(v, w) for w in a.enum))
    both = Shape(
        types=types,
        numbers=_intersect_numbers(a.numbers, b.numbers),
        strings=_intersect_strings(a.strings, b.strings),
        arrays=_intersect_arrays(a.arrays, b.arrays) if "array" in types else Arrays(),
        objects=_intersect_objects(a.objects, b.objects) if "object" in types else Objects(),
        default=a.default if b.default is ABSENT else b.default,
        title=b.title or a.title,
        description=b.description or a.description,
        secret=a.secret or b.secret,
        redact=_stricter(a.redact, b.redact),
        extensions={**a.extensions, **b.extensions},
        reductions=a.reductions + b.reductions,
        cut=a.cut or b.cut,
        origin=_blame(a, b),
    )
    return narrow(dataclasses.replace(both, enum=enum))


def narrow(shape: Shape) -> Shape:
    """Return the same set without types that the facets leave no value of.

    A listed value that the facets refuse is dropped from the list, a type without listed values
    from the types, and the facets of dropped types are reset.
    """
    types = set(shape.types)
    if shape.enum is not None:
        unlisted = dataclasses.replace(shape, enum=None)
        listed = tuple(v for v in shape.enum if admits(unlisted, v))
        exact = of_values(listed)
        types = set(_meet_types(shape.types, exact.types))
        shape = dataclasses.replace(
            shape,
            enum=listed,
            numbers=_intersect_numbers(shape.numbers, exact.numbers),
            strings=_intersect_strings(shape.strings, exact.strings),
        )
    low, high = shape.numbers.minimum, shape.numbers.maximum
    if low is not None and high is not None and low > high:
        types -= {"integer", "number"}
    longest = shape.strings.max_length
    if longest is not None and shape.strings.min_length > longest:
        types.discard("string")
    if any(shape.arrays.item(i).impossible for i in range(min(shape.arrays.min_items, 1000))):
        types.discard("array")
    if any(p.required and p.shape.impossible for p in shape.properties.values()):
        types.discard("object")
    kept = frozenset(types)
    return dataclasses.replace(
        shape,
        types=kept,
        enum=shape.enum if kept else None,
        numbers=shape.numbers if kept & {"integer", "number"} else Numbers(),
        strings=shape.strings if "string" in kept else Strings(),
        arrays=shape.arrays if "array" in kept else Arrays(),
        objects=shape.objects if "object" in kept else Objects(),
    )


def _normal(types: frozenset[JsonType]) -> frozenset[JsonType]:
    return types - {"integer"} if "number" in types else types


def _meet_types(a: frozenset[JsonType], b: frozenset[JsonType]) -> frozenset[JsonType]:
    both = a & b
    numeric: frozenset[JsonType] = frozenset({"integer", "number"})
    return both | {"integer"} if (a | b) >= numeric and a & numeric and b & numeric else both


def _either(
    a: Shape,
    b: Shape,
    types: tuple[JsonType, ...],
    left: _T,
    right: _T,
    join: Callable[[_T, _T], _T],
) -> _T:
    """Return a facet of a union: joined if both sides have the type, else of the side with it."""
    if not a.types.intersection(types):
        return right
    return join(left, right) if b.types.intersection(types) else left


def _tighter(a: _T | None, b: _T | None, choose: Callable[[_T, _T], _T]) -> _T | None:
    """Choose between two bounds that both hold; None is "no bound"."""
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)


def _looser(a: _T | None, b: _T | None, choose: Callable[[_T, _T], _T]) -> _T | None:
    """Choose between two bounds of which one holds."""
    return None if a is None or b is None else choose(a, b)


def _union_numbers(a: Numbers, b: Numbers) -> Numbers:
    return Numbers(
        minimum=_looser(a.minimum, b.minimum, min),
        maximum=_looser(a.maximum, b.maximum, max),
        multiple_of=a.multiple_of if a.multiple_of == b.multiple_of else None,
    )


def _intersect_numbers(a: Numbers, b: Numbers) -> Numbers:
    return Numbers(
        minimum=_tighter(a.minimum, b.minimum, max),
        maximum=_tighter(a.maximum, b.maximum, min),
        multiple_of=_tighter(a.multiple_of, b.multiple_of, max),
    )


def _union_strings(a: Strings, b: Strings) -> Strings:
    return Strings(
        format=a.format if a.format == b.format else None,
        content_encoding=a.content_encoding if a.content_encoding == b.content_encoding else None,
        min_length=min(a.min_length, b.min_length),
        max_length=_looser(a.max_length, b.max_length, max),
    )


def _intersect_strings(a: Strings, b: Strings) -> Strings:
    return Strings(
        format=b.format or a.format,
        content_encoding=b.content_encoding or a.content_encoding,
        min_length=max(a.min_length, b.min_length),
        max_length=_tighter(a.max_length, b.max_length, min),
    )


def _union_arrays(a: Arrays, b: Arrays) -> Arrays:
    length = max(len(a.prefix), len(b.prefix))
    return Arrays(
        items=_open(union(a.item(length), b.item(length))),
        prefix=tuple(union(a.item(i), b.item(i)) for i in range(length)),
        min_items=min(a.min_items, b.min_items),
        max_items=_looser(a.max_items, b.max_items, max),
    )


def _intersect_arrays(a: Arrays, b: Arrays) -> Arrays:
    length = max(len(a.prefix), len(b.prefix))
    return Arrays(
        items=_open(intersect(a.item(length), b.item(length))),
        prefix=tuple(intersect(a.item(i), b.item(i)) for i in range(length)),
        min_items=max(a.min_items, b.min_items),
        max_items=_tighter(a.max_items, b.max_items, min),
    )


def _union_objects(a: Objects, b: Objects) -> Objects:
    names = sorted(a.properties.keys() | b.properties.keys())
    unnamed = union(a.additional or ANY, b.additional or ANY)
    patterns: tuple[tuple[str, Shape], ...] = ()
    if [p for p, _ in a.patterns] == [p for p, _ in b.patterns]:
        patterns = tuple(
            (p, union(s, t)) for (p, s), (_, t) in zip(a.patterns, b.patterns, strict=True)
        )
    else:  # a pattern no longer shows which side a name belongs to
        unnamed = functools.reduce(union, (s for _, s in a.patterns + b.patterns), unnamed)
    return Objects(
        properties={
            name: Property(
                shape=union(a.member(name), b.member(name)),
                required=a.required(name) and b.required(name),
            )
            for name in names
        },
        patterns=patterns,
        additional=_open(unnamed),
    )


def _intersect_objects(a: Objects, b: Objects) -> Objects:
    names = sorted(a.properties.keys() | b.properties.keys())
    # A name under a pattern of one side is an additional one of the other, unless that side has
    # patterns too: which of them it matches is then unknown, so take the wider shape.
    patterns = tuple(
        (p, s if other.patterns else intersect(s, other.additional or ANY))
        for side, other in ((a, b), (b, a))
        for p, s in side.patterns
    )
    return Objects(
        properties={
            name: Property(
                shape=intersect(a.member(name), b.member(name)),
                required=a.required(name) or b.required(name),
            )
            for name in names
        },
        patterns=patterns,
        additional=_open(intersect(a.additional or ANY, b.additional or ANY)),
    )


def _open(shape: Shape) -> Shape | None:
    """Spell "any value" as None in facets."""
    return None if shape == ANY else shape


def _values(shape: Shape) -> tuple[Json, ...] | None:
    return (None,) if shape.enum is None and shape.types == {"null"} else shape.enum


def _union_enum(a: tuple[Json, ...] | None, b: tuple[Json, ...] | None) -> tuple[Json, ...] | None:
    if a is None or b is None:
        return None
    return a + tuple(v for v in b if not any(json_equal(v, w) for w in a))


def _same_default(a: Shape, b: Shape) -> bool:
    if a.default is ABSENT or b.default is ABSENT:
        return a.default is b.default
    return json_equal(a.default, b.default)


def _stricter(a: Redact | None, b: Redact | None) -> Redact | None:
    """Err on the side of safety: where two schemas disagree, remove more."""
    return "block" if "block" in (a, b) else a or b


def _blame(a: Shape, b: Shape) -> str | None:
    """Return the origin of two shapes: that of `b`, but an impossible one takes the blame."""
    if a.impossible or b.impossible:
        return b.origin if b.impossible else a.origin
    return a.origin if b.origin is None else b.origin


def _union_reductions(a: Shape, b: Shape) -> tuple[Reduction, ...]:
    """Return both sides' candidates; none is always active unless both sides agree on one."""
    left, right = a.fixed_reduction(), b.fixed_reduction()
    if isinstance(left, Reduction) and left == right:
        others = tuple(r for r in a.reductions + b.reductions if r not in (left, right))
        return (*(dataclasses.replace(r, always=False) for r in others), left)
    return tuple(dataclasses.replace(r, always=False) for r in a.reductions + b.reductions)
