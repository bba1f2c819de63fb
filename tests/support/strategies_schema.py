"""Random JSON Schemas from a closed grammar, and documents that are likely to match them.

Domains are small on purpose: a handful of member names and values, so that required members are
present, enumerations are hit, patterns match and alternatives overlap. `values_of` aims at valid
documents and sometimes misses, which is also wanted; a validator decides which are valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = ("a", "b", "c", "d", "_n", "_x", "é/~", "")
FORMATS = ("date", "date-time", "uuid", "integer", "number", "ipv4")
TEXTS = (
    "",
    "a",
    "b",
    "abc",
    "7",
    "-12",
    "1.5",
    "NaN",
    "2024-02-29",
    "2023-02-29",
    "2024-01-01T00:00:00Z",
    "6f1c1f0e-3b1a-4b6e-9c57-0d6f6f0f5a11",
    "10.0.0.1",
    'é"\\\n\u2028😀',
)

names = st.sampled_from(NAMES)
texts = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
integers = st.integers(-3, 12) | st.sampled_from([-(2**63), 2**63 - 1, 2**53, -(2**53) - 1])
floats = st.sampled_from([0.0, -0.5, 0.1, 1.0, 2.5, 44.099999999999994, 1e300, 5e-324, -12.0])
scalars = st.none() | st.booleans() | integers | floats | texts
json_values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(names, below, max_size=3),
    max_leaves=6,
)


@st.composite
def _numeric(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": draw(st.sampled_from(["integer", "number"]))}
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = draw(st.integers(-3, 3))
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = draw(st.integers(2, 12))
    if draw(st.integers(0, 3)) == 0:
        schema["multipleOf"] = draw(st.sampled_from([1, 2, 0.5, 0.1, 0.01]))
    return schema


@st.composite
def _textual(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "string"}
    match draw(st.integers(0, 4)):
        case 0:
            schema["format"] = draw(st.sampled_from(FORMATS))
        case 1:
            schema["maxLength"] = draw(st.integers(0, 5))
        case 2:
            schema["minLength"] = draw(st.integers(0, 3))
        case 3:
            schema["pattern"] = draw(st.sampled_from(["^a", "^[0-9-]+$", "b|c", "^.{0,3}$"]))
        case _:
            pass
    return schema


_listed = st.builds(
    lambda values: {"enum": values}, st.lists(scalars, min_size=1, max_size=4)
) | st.builds(lambda value: {"const": value}, scalars)
_plain = st.sampled_from([{"type": "null"}, {"type": "boolean"}, {}, True, False])


@st.composite
def _objects(draw: st.DrawFn, below: st.SearchStrategy[Any], plain: bool = False) -> Schema:
    schema: Schema = {"type": "object"}
    named = draw(st.dictionaries(names, below, max_size=4))
    if named:
        schema["properties"] = named
    if draw(st.booleans()):
        schema["required"] = draw(
            st.lists(st.sampled_from(sorted(named)) if named else names, unique=True, max_size=3)
        )
    match draw(st.integers(0, 5)):
        case 0 | 1:
            schema["additionalProperties"] = False
        case 2:
            schema["additionalProperties"] = draw(below)
        case 3 if not plain:
            schema["patternProperties"] = {draw(st.sampled_from(["^a", "c|d", "^_"])): draw(below)}
        case _:
            pass
    return schema


@st.composite
def _arrays(draw: st.DrawFn, below: st.SearchStrategy[Any], plain: bool = False) -> Schema:
    schema: Schema = {"type": "array", "items": draw(below)}
    if not plain and draw(st.integers(0, 4)) == 0:
        schema["items"] = draw(st.lists(below, min_size=1, max_size=2))
        if draw(st.booleans()):
            schema["additionalItems"] = draw(below)
    if draw(st.integers(0, 2)) == 0:
        schema["minItems"] = draw(st.integers(0, 2))
    if draw(st.integers(0, 2)) == 0:
        schema["maxItems"] = draw(st.integers(0, 3))
    if not plain and draw(st.integers(0, 5)) == 0:
        schema["contains"] = draw(below)
    return schema


@st.composite
def _combined(draw: st.DrawFn, below: st.SearchStrategy[Any]) -> Schema:
    schema: Schema = {}
    if draw(st.booleans()):
        beside = draw(below)
        schema = dict(beside) if isinstance(beside, dict) else {}
    match draw(st.integers(0, 5)):
        case 0:
            schema["anyOf"] = draw(st.lists(below, min_size=1, max_size=3))
        case 1:
            schema["oneOf"] = draw(st.lists(below, min_size=1, max_size=3))
        case 2:
            schema["allOf"] = draw(st.lists(below, min_size=1, max_size=2))
        case 3:
            schema["if"] = draw(below)
            schema["then"] = draw(below)
            schema["else"] = draw(below)
        case 4:
            schema["not"] = draw(below)
        case _:
            schema["$ref"] = draw(st.sampled_from(["#/$defs/x", "#/$defs/y", "#z"]))
    return schema


@st.composite
def _nullable(draw: st.DrawFn, below: st.SearchStrategy[Any]) -> Any:  # noqa: ANN401
    schema = draw(below)
    if isinstance(schema, dict) and isinstance(schema.get("type"), str):
        other = draw(st.sampled_from(["null", "null", "null", "string", "integer"]))
        if other != schema["type"]:
            return {**schema, "type": [schema["type"], other]}
    return schema


_simple = st.one_of(_numeric(), _textual(), _listed, _plain)


def _compound(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(_objects(below), _arrays(below), _nullable(below), _combined(below))


_bodies: st.SearchStrategy[Any] = st.recursive(_simple, _compound, max_leaves=6)


def _structured(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(_objects(below), _arrays(below), _nullable(below))


def _plainly(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        _objects(below, plain=True), _arrays(below, plain=True), _nullable(below), _nullable(below)
    )


_structures: st.SearchStrategy[Any] = st.recursive(_simple, _structured, max_leaves=8)

plain_bodies: st.SearchStrategy[Any] = st.recursive(
    st.one_of(_numeric(), _textual(), _listed, _nullable(st.one_of(_numeric(), _textual()))),
    _plainly,
    max_leaves=8,
)
"""Schemas without tuples, name patterns, references and alternatives."""


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Draw any schema of the grammar, with definitions that it and they may refer to."""
    body = draw(_bodies)
    schema = dict(body) if isinstance(body, dict) else {"allOf": [body]}
    z = draw(_bodies)
    schema["$defs"] = {
        "x": draw(_bodies),
        "y": draw(_bodies),
        "z": {**z, "$anchor": "z"} if isinstance(z, dict) else {"$anchor": "z", "allOf": [z]},
    }
    return schema


@st.composite
def collection_schemas(draw: st.DrawFn, bodies: st.SearchStrategy[Any] | None = None) -> Schema:
    """Draw a schema as collections have it: a root object with a few named members."""
    members = st.one_of(_structures, _structures, _bodies) if bodies is None else bodies
    root = draw(_objects(members))
    root.setdefault("properties", {}).setdefault("k", {"type": "string"})
    root["required"] = sorted({*root.get("required", ()), "k"})
    if "#" in repr(root):  # a reference somewhere
        root["$defs"] = {name: draw(_structures) for name in ("x", "y")}
        root["$defs"]["z"] = {"$anchor": "z", **draw(_numeric())}
    return root


def values_of(schema: Any, *, noise: int = 1) -> st.SearchStrategy[Any]:  # noqa: ANN401
    """Values that probably match `schema`; at each location, `noise` of ten are arbitrary."""
    return _Values(schema, noise).of(schema, 0)


class _Values:
    """Strategies of values for one schema document."""

    def __init__(self, root: Any, noise: int) -> None:  # noqa: ANN401
        self._definitions = root.get("$defs", {}) if isinstance(root, dict) else {}
        self._noise = noise

    def of(self, schema: Any, depth: int) -> st.SearchStrategy[Any]:  # noqa: ANN401
        fitting = self._fitting(schema, depth)
        if not self._noise:
            return fitting
        return st.integers(0, 9).flatmap(
            lambda dice: json_values if dice < self._noise else fitting
        )

    def _fitting(self, schema: Any, depth: int) -> st.SearchStrategy[Any]:  # noqa: ANN401
        if isinstance(schema, bool) or not schema or depth > 5:
            return json_values
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "$ref" in schema:
            return self._fitting(self._definitions.get(schema["$ref"][-1], True), depth + 1)
        if "type" not in schema:
            options = [
                o for k in ("anyOf", "oneOf", "allOf", "then", "else") for o in _list(schema, k)
            ]
            if options:
                return st.one_of([self._fitting(option, depth + 1) for option in options])
        types = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
        types = [types] if isinstance(types, str) else types
        return st.sampled_from(types).flatmap(lambda kind: self._typed(kind, schema, depth))

    def _typed(self, kind: str, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        match kind:
            case "null":
                return st.none()
            case "boolean":
                return st.booleans()
            case "integer" | "number":
                return _numbers(schema, integral=kind == "integer")
            case "string":
                long = schema.get("minLength", 0) > 1
                return st.sampled_from([*TEXTS, "aaaa", "ééé"]) if long else texts
            case "array":
                return self._array(schema, depth)
            case _:
                return self.object(schema, depth)

    def _array(self, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        items = schema.get("items", True)
        low = schema.get("minItems", 0)
        high = max(low, schema.get("maxItems", 3))
        if isinstance(items, list):
            heads = st.tuples(*(self.of(item, depth + 1) for item in items)).map(list)
            rest = self.of(schema.get("additionalItems", True), depth + 1)
            return st.builds(lambda head, tail: head + tail, heads, st.lists(rest, max_size=1))
        return st.lists(self.of(items, depth + 1), min_size=low, max_size=high)

    def object(self, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        properties = schema.get("properties", {})
        named = {name: self.of(below, depth + 1) for name, below in properties.items()}
        sure = {name: named.get(name, json_values) for name in schema.get("required", ())}
        maybe = {name: value for name, value in named.items() if name not in sure}
        fixed = st.fixed_dictionaries(sure, optional=maybe)
        additional = schema.get("additionalProperties", True)
        if additional is False:
            return fixed
        others = st.dictionaries(names, self.of(additional, depth + 1), max_size=2)
        return st.builds(lambda extra, known: {**extra, **known}, others | st.just({}), fixed)


def _list(schema: Schema, keyword: str) -> list[Any]:
    said = schema.get(keyword, [])
    return said if isinstance(said, list) else [said]


def _numbers(schema: Schema, *, integral: bool) -> st.SearchStrategy[Any]:
    step = schema.get("multipleOf", 1)
    low, high = schema.get("minimum"), schema.get("maximum")
    near = st.sampled_from([v for v in (low, high, 3, 5) if v is not None])
    if integral:
        return st.one_of(near, integers, st.sampled_from([1.0, 7.0, -12.0]))
    scaled = st.integers(-300, 300).map(lambda i: i * step if step >= 1 else i / round(1 / step))
    return st.one_of(near, integers, scaled, floats)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    documents_max: int = 8,
    bodies: st.SearchStrategy[Any] | None = None,
    widened: Callable[[Schema], Schema] | None = None,
) -> tuple[Schema, list[dict[str, Any]]]:
    """Draw a collection schema, and documents (objects) that match it or nearly do.

    With `widened`, every other document matches the widened schema, and violates the schema.
    """
    schema = draw(collection_schemas(bodies))
    if widened is None:
        documents = _Values(schema, 1).object(schema, 0)
    else:
        wide = _Values({}, 0).object(widened(schema), 0)
        documents = st.one_of(wide, _Values(schema, 0).object(schema, 0))
    return schema, draw(st.lists(documents, min_size=1, max_size=documents_max))
