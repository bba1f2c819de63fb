"""Check a schema before any document is seen. Each finding has a pointer into the schema.

Codes that begin with `E-` refuse the schema, `W-` only warn. Findings are values: the caller knows
which file and line a pointer leads to.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jsonschema_rs

from penstock.errors import UserError
from penstock.model import pointer
from penstock.model.columns import FLOAT_DIGITS, check_columns, inexact_digits
from penstock.model.draft import Draft, is_known_draft
from penstock.model.infer import infer
from penstock.model.json_order import ABSENT
from penstock.model.reduce import Rule, Strategy
from penstock.model.refs import DanglingRef, Refs, references
from penstock.model.schema import FORMATS, CompiledSchema
from penstock.model.shape import TYPES, Reduction, Shape, locate
from penstock.model.violations import Problem, describe_error, show_value

_ONE: Final = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_LISTS: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAPS: Final = frozenset(
    {
        "$defs",
        "definitions",
        "dependencies",
        "dependentSchemas",
        "patternProperties",
        "properties",
    }
)
_WORDS: Final = (
    _ONE
    | _LISTS
    | _MAPS
    | frozenset(
        [
            "$anchor",
            "$comment",
            "$dynamicAnchor",
            "$dynamicRef",
            "$id",
            "$recursiveAnchor",
            "$recursiveRef",
            "$ref",
            "$schema",
            "$vocabulary",
            "airbyte_secret",
            "const",
            "contentEncoding",
            "contentMediaType",
            "default",
            "dependentRequired",
            "deprecated",
            "description",
            "enum",
            "examples",
            "exclusiveMaximum",
            "exclusiveMinimum",
            "format",
            "maxContains",
            "maxItems",
            "maxLength",
            "maxProperties",
            "maximum",
            "minContains",
            "minItems",
            "minLength",
            "minProperties",
            "minimum",
            "multipleOf",
            "pattern",
            "readOnly",
            "redact",
            "reduce",
            "required",
            "secret",
            "title",
            "type",
            "uniqueItems",
            "writeOnly",
        ]
    )
)


_FORMATS: Final = (
    "date",
    "date-time",
    "time",
    "duration",
    "uuid",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "regex",
    "json-pointer",
    *FORMATS,
)
_DECIMAL: Final = (
    "write type: string, format: number (exact, as text), or type: number with multipleOf: 0.01, "
    "minimum and maximum (DECIMAL)"
)
_INSTANT: Final = "write type: string, format: date-time"
_FOREIGN_TYPES: Final = {
    **dict.fromkeys(("decimal", "numeric", "money", "bigdecimal"), _DECIMAL),
    **dict.fromkeys(("timestamp", "timestamptz", "datetime", "date-time"), _INSTANT),
    "date": "write type: string, format: date",
    "time": "write type: string, format: time",
    "uuid": "write type: string, format: uuid",
    "json": "write {}, which is any value",
    **dict.fromkeys(("int", "bigint", "long", "int64", "smallint"), "write type: integer"),
    **dict.fromkeys(("float", "double", "real"), "write type: number"),
    **dict.fromkeys(("text", "varchar", "char"), "write type: string"),
    "bool": "write type: boolean",
    **dict.fromkeys(("bytes", "binary"), "write type: string, contentEncoding: base64"),
    **dict.fromkeys(("struct", "record", "map"), "write type: object"),
    "list": "write type: array",
}
"""What people write who know SQL, Spark or Python, and what it is here."""


def check_schema(schema: object, key: Sequence[str] = ()) -> list[Problem]:
    """Return every problem of a collection's schema. `key` locations must not be redacted.

    Checks come in order of dependence: what is not a valid schema has no shape to check.
    """
    if not isinstance(schema, Mapping):
        return [Problem(code="E-SCHEMA", pointer="", message="a schema must be an object")]
    problems = [*_not_a_schema(schema), *_misspelt(schema), *_dangling(schema)]
    if problems:
        return problems
    if (problem := _uncompilable(schema)) is not None:
        return [problem]
    problems = [*_bad_reductions(schema), *_bad_redactions(schema)]
    shape = infer(schema)
    if shape.types != {"object"}:
        return [*problems, _root(shape)]
    for at, required, location in locations(shape):
        problems += _impossible(at, location)
        problems += _misapplied(at, location)
        problems += _unredactable(at, location, required or at in key)
    if not any(p.code == "E-REDUCE" for p in problems):
        problems += _never_acting(shape)
    return [*problems, *_misspelt_formats(schema), *check_columns(shape)]


def schemas_in(schema: object, at: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every schema inside a schema by pointer, itself first."""
    if not isinstance(schema, Mapping):
        return
    yield at, schema
    for word, value in schema.items():
        below = pointer.child(at, word)
        if word in _MAPS and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from schemas_in(inner, pointer.child(below, name))
        elif word in _LISTS and isinstance(value, list):
            for i, inner in enumerate(value):
                yield from schemas_in(inner, pointer.child(below, i))
        elif word in _ONE:
            yield from schemas_in(value, below)


def locations(
    shape: Shape, at: str = "", required: bool = True
) -> Iterator[tuple[str, bool, Shape]]:
    """Yield every location that a shape describes, as (pointer, required, shape).

    Items, and members without a name, are written `*`.
    """
    yield at, required, shape
    for below, needed, inner in _children(shape, at):
        yield from locations(inner, below, needed)


def _children(shape: Shape, at: str) -> Iterator[tuple[str, bool, Shape]]:
    for token, required, below in shape.children():
        yield (f"{at}/*" if token is None else pointer.child(at, token)), required, below


def _not_a_schema(schema: Mapping[str, Any]) -> Iterator[Problem]:
    if "$schema" in schema and not is_known_draft(schema["$schema"]):
        yield Problem(
            code="E-SCHEMA",
            pointer="/$schema",
            message=f"{show_value(schema['$schema'])} is not a supported draft of JSON Schema",
            hint="supported: 4, 6, 7, 2019-09 (the default) and 2020-12",
        )
        return
    for error in Draft.of(schema).meta_validator.iter_errors(dict(schema)):
        found = show_value(error.instance)
        is_type = [*error.instance_path][-1:] == ["type"]
        given = error.instance if isinstance(error.instance, list) else [error.instance]
        wrong = next((str(name) for name in given if name not in TYPES), "") if is_type else ""
        known = _FOREIGN_TYPES.get(wrong.lower())
        near = difflib.get_close_matches(wrong, TYPES, n=1)
        yield Problem(
            code="E-SCHEMA",
            pointer=pointer.render(error.instance_path),
            message=f"schema is not valid: {show_value(wrong) if wrong else found} is not a type"
            if is_type
            else f"schema is not valid: {describe_error(error, found)}",
            hint=known or (f"did you mean {near[0]}?" if near else None),
        )


def _misspelt(schema: Mapping[str, Any]) -> Iterator[Problem]:
    """The standard ignores unknown keywords; one that is nearly a known one is a mistake."""
    for at, inner in schemas_in(schema):
        for word in inner:
            if word in _WORDS or word.startswith("x-"):
                continue
            if near := difflib.get_close_matches(word, _WORDS, n=1, cutoff=0.85):
                yield Problem(
                    code="E-SCHEMA",
                    pointer=pointer.child(at, word),
                    message=f'schema is not valid: unknown keyword "{word}"',
                    hint=f'did you mean "{near[0]}"? Custom keywords begin with x-',
                )


def _misspelt_formats(schema: Mapping[str, Any]) -> Iterator[Problem]:
    """Formats that nobody knows say nothing; one that is nearly a known one is a mistake."""
    for at, inner in schemas_in(schema):
        given = inner.get("format")
        if not isinstance(given, str) or given in _FORMATS:
            continue
        if near := difflib.get_close_matches(given.lower(), _FORMATS, n=1, cutoff=0.85):
            yield Problem(
                code="W-FORMAT",
                pointer=pointer.child(at, "format"),
                message=f'format "{given}" is not known, and says nothing',
                hint=f'did you mean "{near[0]}"?',
            )


def _dangling(schema: Mapping[str, Any]) -> Iterator[Problem]:
    refs = Refs(schema)
    for ref, base, at in references(schema):
        try:
            refs.resolve(ref, base)
        except DanglingRef as e:
            yield Problem(code="E-SCHEMA-REF", pointer=at, message=str(e))


def _uncompilable(schema: Mapping[str, Any]) -> Problem | None:
    try:
        CompiledSchema(schema)
    except jsonschema_rs.ValidationError as e:
        return Problem(
            code="E-SCHEMA",
            pointer=pointer.render(e.instance_path),
            message=f"schema is not valid: {describe_error(e, show_value(e.instance))}",
        )
    except (jsonschema_rs.ReferencingError, ValueError) as e:
        return Problem(code="E-SCHEMA", pointer="", message=f"schema is not valid: {e}")
    return None


def _bad_reductions(schema: Mapping[str, Any]) -> Iterator[Problem]:
    for at, inner in schemas_in(schema):
        if "reduce" in inner:
            try:
                Rule.parse(inner["reduce"])
            except UserError as e:
                yield Problem(
                    code="E-REDUCE", pointer=pointer.child(at, "reduce"), message=e.what, hint=e.fix
                )


def _bad_redactions(schema: Mapping[str, Any]) -> Iterator[Problem]:
    for at, inner in schemas_in(schema):
        given = inner.get("redact", ABSENT)
        if given is not ABSENT and given not in (
            {"strategy": "block"},
            {"strategy": "sha256"},
        ):
            yield Problem(
                code="E-REDACT",
                pointer=pointer.child(at, "redact"),
                message="redact has no known strategy",
                hint="write redact: {strategy: block} or {strategy: sha256}",
            )


def _root(shape: Shape) -> Problem:
    if shape.impossible:
        return Problem(
            code="E-IMPOSSIBLE", pointer="", message="no document can be valid under this schema"
        )
    allowed = ", ".join(sorted(shape.types))
    return Problem(
        code="E-ROOT",
        pointer="/type",
        message=f"the root of the schema must be of type object; it allows [{allowed}]",
        hint="add type: object",
    )


def _impossible(at: str, shape: Shape) -> Iterator[Problem]:
    # `false` has no origin: it is how a schema forbids a member.
    if shape.impossible and shape.origin is not None:
        yield Problem(
            code="E-IMPOSSIBLE",
            pointer=shape.origin,
            message=f"no value can be valid at {_name(at)}: its schemas exclude each other",
            hint="write false to forbid the member",
        )


def _misapplied(at: str, shape: Shape) -> Iterator[Problem]:
    """Find strategies on values that they cannot reduce."""
    for reduction in shape.reductions:
        try:
            rule = Rule.of(reduction)
        except UserError:
            continue  # reported at the annotation
        why = _cannot_apply(rule, shape)
        if why is not None and not shape.cut:
            yield Problem(
                code="E-REDUCE-TYPE",
                pointer=reduction.origin,
                message=f"{rule.strategy.value} at {_name(at)}, {why[0]}",
                hint=why[1],
            )
        elif rule.strategy is Strategy.SUM and (digits := inexact_digits(shape)) is not None:
            yield Problem(
                code="E-REDUCE-DIGITS",
                pointer=reduction.origin,
                message=f"sum at {_name(at)}, whose bounds allow {digits} digits: a JSON number "
                f"keeps {FLOAT_DIGITS}, so the sum would not be exact",
                hint="write type: string, format: number, or bounds of fewer digits",
            )
        elif rule.strategy in (Strategy.MINIMIZE, Strategy.MAXIMIZE) and any(
            locate(shape, part)[0].is_numeric_text for part in rule.key
        ):
            yield Problem(
                code="W-REDUCE-TEXT",
                pointer=reduction.origin,
                message=f"the key of {rule.strategy.value} at {_name(at)} is text, and is compared "
                'as text: "9" is above "10"',
                hint="write the number as type: integer, or type: number with multipleOf",
            )
        elif rule.strategy in (Strategy.SUM, Strategy.BIG_SUM) and _null_reaches(reduction, shape):
            yield Problem(
                code="W-REDUCE-NULL",
                pointer=reduction.origin,
                message=f"{rule.strategy.value} at {_name(at)} fails on null, which is allowed",
                hint="remove null from its type, or choose the strategy with if/then/else",
            )


def _null_reaches(reduction: Reduction, shape: Shape) -> bool:
    return shape.nullable and shape.fixed_reduction() is reduction


def _cannot_apply(rule: Rule, shape: Shape) -> tuple[str, str] | None:
    """Return why a strategy never fits the values of a location, and what to do."""
    which = f"which is {_what(shape)}"
    types = shape.types
    match rule.strategy:
        case Strategy.SUM | Strategy.BIG_SUM:
            numeric = "string" in types and shape.strings.format in ("integer", "number")
            if not types & {"integer", "number"} and not numeric:
                return which, "sum numbers, or strings with format: number"
        case Strategy.APPEND:
            if "array" not in types:
                return which, "append is for arrays"
        case Strategy.MERGE:
            if not types & {"array", "object"}:
                return which, "merge is for objects and arrays"
        case Strategy.SET:
            others = sorted(shape.properties.keys() - {"add", "remove", "intersect"})
            if "object" not in types:
                return which, "a set is an object with add, remove or intersect"
            if others:
                return (
                    f'which has a member "{others[0]}"',
                    "a set has only add, remove and intersect",
                )
        case Strategy.JSON_SCHEMA_MERGE:
            if "object" not in types:
                return which, "a JSON Schema is an object"
        case Strategy.MINIMIZE | Strategy.MAXIMIZE:
            if any(rule.key) and not types & {"array", "object"}:
                return which, "a key points into objects or arrays; remove it"
        case _:
            pass
    return None


def _never_acting(shape: Shape) -> Iterator[Problem]:
    """Find annotations below a location that is replaced as a whole because it has none itself.

    An annotation that replaces is what somebody wanted. One that a shared definition brings along
    is no mistake either, if it acts elsewhere.
    """
    reached = list(_reached(shape))
    acting = {reduction.origin for _, each in reached for reduction in each.reductions}
    for at, each in reached:
        if each.reductions or each.cut:
            continue
        for below, _, inner in _children(each, at):
            yield from (p for p in _lost(inner, below, at) if p.pointer not in acting)


def _reached(shape: Shape, at: str = "") -> Iterator[tuple[str, Shape]]:
    """Yield the locations whose annotations act, and the first unannotated ones below them."""
    yield at, shape
    fixed = shape.fixed_reduction()
    rules = [Rule.of(r) for r in ((fixed,) if isinstance(fixed, Reduction) else shape.reductions)]
    if not shape.cut and not any(rule.descends for rule in rules):
        return
    is_set = any(rule.strategy is Strategy.SET for rule in rules)
    for below, _, inner in _children(shape, at):
        if is_set:  # its terms are not values of their own: what they hold is reduced
            for item_at, _, item in _children(inner, below):
                yield from _reached(item, item_at)
        else:
            yield from _reached(inner, below)


def _lost(shape: Shape, at: str, parent: str) -> Iterator[Problem]:
    for reduction in shape.reductions:
        if Rule.of(reduction) != Rule():
            yield Problem(
                code="E-REDUCE-PARENT",
                pointer=reduction.origin,
                message=f"the strategy at {at} never acts: {_name(parent)} is replaced as a whole",
                hint=f"add reduce: {{strategy: merge}} to {_name(parent)}",
            )
    if not shape.reductions:
        for below, _, inner in _children(shape, at):
            yield from _lost(inner, below, at)


def _unredactable(at: str, shape: Shape, required: bool) -> Iterator[Problem]:
    if shape.redact is None:
        return
    origin = pointer.child(shape.origin or "", "redact")
    if shape.redact == "block" and required:
        yield Problem(
            code="E-REDACT",
            pointer=origin,
            message=f"{_name(at)} is blocked, but required in documents",
            hint="remove it from required and key, or use {strategy: sha256}",
        )
    if shape.redact == "sha256" and "string" not in shape.types:
        yield Problem(
            code="E-REDACT",
            pointer=origin,
            message=f"sha256 turns {_name(at)} into a string, but it is {_what(shape)}",
            hint="allow strings there, or use {strategy: block}",
        )


def _name(at: str) -> str:
    return at or "the document"


def _what(shape: Shape) -> str:
    names = [t if t == "null" else f"{'an' if t[0] in 'aeio' else 'a'} {t}" for t in shape.types]
    return " or ".join(sorted(names)) or "never present"
