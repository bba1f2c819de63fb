"""Hypothesis strategies: schemas with reductions, and documents that match them.

A closed grammar of the reduction strategies. Values come from small pools, so that keys, elements
and extremes collide; the pools hold awkward values: null beside a value, text beyond the Basic
Multilingual Plane, neighbours of negative zero, empty containers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from penstock.model.json_order import Json

Values = st.SearchStrategy[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A schema, and a strategy of values that are valid under it."""

    schema: dict[str, Any]
    values: Values


INTEGERS = st.sampled_from([0, 1, -1, 2, 7, -40, 2**40])
NUMBERS = st.sampled_from([0, 1, -3, 0.5, -1.25, 2.75, 1e9])
STRINGS = st.sampled_from(["", "a", "b", "Z", "é", "\uffff", "\U0001f600", 'q"\\/\n'])
INTEGER_TEXTS = ("0", "-0", "007", "9", "10", "-10", "-9", "1" * 30, "123456789012")
NUMBER_TEXTS = (
    *("0", "-0.00", "10.10", "9.9", "0.9", "-0.25", "-0.250", "100", "99999999999.99"),
    *("1e3", "1000", "2.5E-14", "-1e-3", "12345678901234567890.123456789"),
)
NAMES = ("a", "b", "c", "d/e", "f~g", "h.i", "`j`")

_SCALARS: dict[str, Values] = {
    "integer": INTEGERS,
    "number": NUMBERS,
    "string": STRINGS,
    "boolean": st.booleans(),
}
_WINNERS = ("lastWriteWins", "firstWriteWins", "minimize", "maximize")

_ANYTHING: Values = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    STRINGS,
    st.lists(INTEGERS, max_size=2),
    st.dictionaries(st.sampled_from("xy"), INTEGERS, max_size=2),
)


@st.composite
def _scalar(draw: st.DrawFn) -> Grown:
    kind = draw(st.sampled_from(sorted(_SCALARS)))
    numeric = kind in ("integer", "number")
    strategy = draw(st.sampled_from((*_WINNERS, "sum", "sum") if numeric else _WINNERS))
    schema: dict[str, Any] = {"type": kind, "reduce": {"strategy": strategy}}
    values = _SCALARS[kind]
    if strategy != "sum" and draw(st.booleans()):
        schema["type"] = [kind, "null"]
        values = st.one_of(st.none(), values)
    if strategy == "lastWriteWins" and draw(st.booleans()):
        del schema["reduce"]
    return Grown(schema=schema, values=values)


@st.composite
def _opaque(draw: st.DrawFn) -> Grown:
    strategy = draw(st.sampled_from(_WINNERS))
    return Grown(schema={"reduce": {"strategy": strategy}}, values=_ANYTHING)


@st.composite
def _numeric_text(draw: st.DrawFn) -> Grown:
    strategy = draw(st.sampled_from(["sum", "bigSum"]))
    values = st.one_of(INTEGERS, st.sampled_from(["1", "-0.25", "1e3", "99999999999999999999"]))
    return Grown(
        schema={"type": ["integer", "string"], "reduce": {"strategy": strategy}}, values=values
    )


@st.composite
def _cents(draw: st.DrawFn) -> Grown:
    """Draw numbers that a DECIMAL column holds."""
    schema = {"type": "number", "multipleOf": 0.01, "minimum": -99999, "maximum": 99999}
    strategy = draw(st.sampled_from([*_WINNERS, "sum", "sum"]))
    values = st.integers(-1000, 1000).map(lambda cents: cents / 100)
    return Grown(schema={**schema, "reduce": {"strategy": strategy}}, values=values)


@st.composite
def _money(draw: st.DrawFn) -> Grown:
    """Draw numbers that are written as text, few of which Spark's own decimals cannot add."""
    form = draw(st.sampled_from(["number", "integer"]))
    strategy = draw(st.sampled_from([*_WINNERS, "sum", "sum"]))
    values = st.sampled_from(INTEGER_TEXTS if form == "integer" else NUMBER_TEXTS)
    kind: Any = "string"
    if strategy != "sum" and draw(st.booleans()):
        kind, values = ["string", "null"], st.one_of(st.none(), values)
    return Grown(
        schema={"type": kind, "format": form, "reduce": {"strategy": strategy}}, values=values
    )


@st.composite
def _list(draw: st.DrawFn) -> Grown:
    kind = draw(st.sampled_from(["integer", "string", "number"]))
    strategy = draw(st.sampled_from(["append", "append", "lastWriteWins", "firstWriteWins"]))
    return Grown(
        schema={"type": "array", "items": {"type": kind}, "reduce": {"strategy": strategy}},
        values=st.lists(_SCALARS[kind], max_size=3),
    )


@st.composite
def members(draw: st.DrawFn, children: st.SearchStrategy[Grown], size_min: int = 0) -> Grown:
    """Draw an object of named members, some required, without a reduction of its own."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=size_min, max_size=3))
    grown = {name: draw(children) for name in names}
    required = [name for name in names if draw(st.booleans())]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: child.schema for name, child in grown.items()},
        "required": required,
    }
    optional = {name: grown[name].values for name in names if name not in required}
    mandatory = {name: grown[name].values for name in required}
    values: Values = st.fixed_dictionaries(mandatory, optional=optional)
    if draw(st.booleans()):
        schema["additionalProperties"] = False
    elif draw(st.booleans()):
        unknown = st.dictionaries(st.sampled_from(["x1", "x2"]), _ANYTHING, max_size=2)
        values = st.tuples(values, unknown).map(lambda both: both[1] | both[0])
    return Grown(schema=schema, values=values)


@st.composite
def _object(draw: st.DrawFn, children: st.SearchStrategy[Grown]) -> Grown:
    grown = draw(members(children))
    strategy = draw(st.sampled_from(["merge", "merge", "merge", "lastWriteWins"]))
    return _with(grown, {"strategy": strategy})


@st.composite
def _map(draw: st.DrawFn, children: st.SearchStrategy[Grown]) -> Grown:
    child = draw(children)
    return Grown(
        schema={
            "type": "object",
            "additionalProperties": child.schema,
            "reduce": {"strategy": draw(st.sampled_from(["merge", "merge", "lastWriteWins"]))},
        },
        values=st.dictionaries(st.sampled_from(NAMES), child.values, max_size=3),
    )


@st.composite
def _array(draw: st.DrawFn, children: st.SearchStrategy[Grown]) -> Grown:
    child = draw(children)
    return Grown(
        schema={"type": "array", "items": child.schema, "reduce": {"strategy": "merge"}},
        values=st.lists(child.values, max_size=3),
    )


@st.composite
def _keyed(draw: st.DrawFn, children: st.SearchStrategy[Grown]) -> Grown:
    """Draw a keyed array merge, or the minimum or maximum of objects by a key."""
    key = _with(Grown(schema={"type": "integer"}, values=st.integers(0, 2)), {})
    body = draw(members(children))
    item = Grown(
        schema={
            **body.schema,
            "properties": {**body.schema["properties"], "k": key.schema},
            "required": [*body.schema["required"], "k"],
        },
        values=st.tuples(body.values, key.values).map(lambda both: {**both[0], "k": both[1]}),
    )
    if draw(st.booleans()):
        strategy = draw(st.sampled_from(["minimize", "maximize"]))
        return _with(item, {"strategy": strategy, "key": ["/k"]})
    return Grown(
        schema={
            "type": "array",
            "items": _with(item, {"strategy": "merge"}).schema,
            "reduce": {"strategy": "merge", "key": ["/k"]},
        },
        values=st.lists(item.values, max_size=4),
    )


@st.composite
def _items_as_keys(draw: st.DrawFn) -> Grown:
    kind = draw(st.sampled_from(["integer", "string"]))
    return Grown(
        schema={
            "type": "array",
            "items": {"type": kind},
            "reduce": {"strategy": "merge", "key": [""]},
        },
        values=st.lists(_SCALARS[kind], max_size=4),
    )


@st.composite
def _set(draw: st.DrawFn, children: st.SearchStrategy[Grown]) -> Grown:
    child = draw(children)
    terms = ["add", "remove", *(["intersect"] if draw(st.booleans()) else [])]
    term = st.dictionaries(st.sampled_from(NAMES[:4]), child.values, max_size=3)

    def value(chosen: Sequence[str]) -> Values:
        return st.fixed_dictionaries(dict.fromkeys(chosen, term))

    choices = [(), ("add",), ("remove",), ("add", "remove")]
    if "intersect" in terms:
        choices += [("intersect",), ("add", "intersect")]
    return Grown(
        schema={
            "type": "object",
            "properties": {
                name: {"type": "object", "additionalProperties": child.schema} for name in terms
            },
            "additionalProperties": False,
            "reduce": {"strategy": "set"},
        },
        values=st.sampled_from(choices).flatmap(value),
    )


def _with(grown: Grown, reduce: dict[str, Json]) -> Grown:
    schema = {**grown.schema, **({"reduce": reduce} if reduce else {})}
    return Grown(schema=schema, values=grown.values)


def leaves() -> st.SearchStrategy[Grown]:
    """Locations whose reduction treats the value as a whole."""
    return st.one_of(
        *(_scalar(), _scalar(), _cents(), _money()),
        *(_list(), _opaque(), _numeric_text(), _items_as_keys()),
    )


def flat_leaves() -> st.SearchStrategy[Grown]:
    """Leaves that every engine can reduce with a plain aggregate."""
    return st.one_of(_scalar(), _cents(), _money(), _list())


def locations() -> st.SearchStrategy[Grown]:
    """Any location: leaves, and containers of them, to a small depth."""
    below = leaves()
    for _ in range(2):
        below = st.one_of(
            leaves(), _object(below), _map(below), _array(below), _keyed(below), _set(below)
        )
    return below


@st.composite
def documents(draw: st.DrawFn, children: st.SearchStrategy[Grown] | None = None) -> Grown:
    """Draw documents whose key `/id` is always "k"; callers replace it as they like."""
    grown = draw(members(locations() if children is None else children, size_min=1))
    schema = {
        **grown.schema,
        "properties": {**grown.schema["properties"], "id": {"type": "string"}},
        "required": [*grown.schema["required"], "id"],
        "reduce": {"strategy": "merge"},
    }
    return Grown(schema=schema, values=grown.values.map(lambda members: {**members, "id": "k"}))


@st.composite
def starting_over(draw: st.DrawFn) -> Grown:
    """Draw documents whose `/op` makes them merge, replace the previous state, or delete it."""
    grown = draw(documents(flat_leaves()))
    rules: dict[str, Any] = {
        "m": {"strategy": "merge"},
        "r": {"strategy": "lastWriteWins"},
        "d": {"strategy": draw(st.sampled_from(["merge", "lastWriteWins"])), "delete": True},
    }
    starts = draw(st.sampled_from(["r", "d"]))
    members = {name: value for name, value in grown.schema.items() if name != "reduce"}
    op = {"enum": ["m", starts]}
    schema = {
        **members,
        "properties": {**members["properties"], "op": op},
        "required": [*members["required"], "op"],
    }
    if draw(st.booleans()):
        schema |= {
            "if": {"properties": {"op": {"const": starts}}},
            "then": {"reduce": rules[starts]},
            "else": {"reduce": rules["m"]},
        }
    else:
        schema["oneOf"] = [
            {"properties": {"op": {"const": name}}, "reduce": rules[name]}
            for name in draw(st.permutations(["m", starts]))
        ]
    ops = st.sampled_from(["m", "m", starts])
    return Grown(
        schema=schema,
        values=st.tuples(grown.values, ops).map(lambda both: {**both[0], "op": both[1]}),
    )


@st.composite
def deciding(draw: st.DrawFn) -> Grown:
    """Draw documents in which a condition, on `/op` or on the value itself, picks the reduction.

    Conditions are of any kind, including those that a combined document would meet differently.
    """
    rules = st.sampled_from(
        [
            *({"strategy": name} for name in ("sum", "minimize", *_WINNERS[:2])),
            {"strategy": "lastWriteWins", "delete": True},
        ]
    )
    by_value = {
        "type": "integer",
        "if": {"const": draw(st.sampled_from([0, 1, 2]))},
        "then": {"reduce": draw(rules)},
        "else": {"reduce": draw(rules)},
    }
    ops = {name: {"properties": {"n": {"reduce": draw(rules)}}} for name in ("x", "y")}
    schema: dict[str, Any] = {
        "type": "object",
        "required": ["id", "op"],
        "properties": {
            "id": {"type": "string"},
            "op": {"enum": ["x", "y"]},
            "n": {"type": "integer"},
            "v": by_value,
        },
        "if": {"properties": {"op": {"const": "x"}}},
        "then": ops["x"],
        "else": ops["y"],
    }
    if draw(st.booleans()):
        schema["reduce"] = {"strategy": "merge"}
    else:
        schema["then"] = {**ops["x"], "reduce": {"strategy": "merge"}}
        schema["else"] = {**ops["y"], "reduce": draw(st.sampled_from(_ROOT_RULES))}
    small = st.integers(-2, 2)
    values = st.fixed_dictionaries(
        {"id": st.just("k"), "op": st.sampled_from("xy")}, optional={"n": small, "v": small}
    )
    return Grown(schema=schema, values=values)


_ROOT_RULES: list[dict[str, Any]] = [
    {"strategy": "merge"},
    {"strategy": "lastWriteWins"},
    {"strategy": "merge", "delete": True},
    {"strategy": "merge", "associative": False},
]
