"""A compiled schema: which documents are valid, and which reductions they activate.

Validation is jsonschema-rs, with formats as assertions and two more formats of strings: `integer`
and `number`. Findings are values (`Violation`), never exceptions, because a bad document must not
stop the good ones beside it. A compiled schema does not cross processes: send `text`, and let
`compiled(text)` compile it once per process.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from penstock.model import pointer
from penstock.model.columns import is_decimal
from penstock.model.draft import Draft
from penstock.model.infer import infer
from penstock.model.json_order import Json, canonical_json
from penstock.model.reduce import Rule
from penstock.model.shape import Shape, locate
from penstock.model.violations import Violation, explain_error

_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|NaN|-?Infinity")

FORMATS: Final = {
    "integer": lambda text: _INTEGER.fullmatch(text) is not None,
    "number": lambda text: _NUMBER.fullmatch(text) is not None,
}
"""Formats beyond the standard ones: digits, and JSON numbers with NaN and infinities."""

_ORDER: Final = {
    keyword: at
    for at, keyword in enumerate(
        (
            "$ref",
            "$recursiveRef",
            "$dynamicRef",
            "allOf",
            "anyOf",
            "oneOf",
            "if",
            "then",
            "else",
            "dependencies",
            "dependentSchemas",
            "contains",
            "properties",
            "patternProperties",
            "prefixItems",
            "items",
            "additionalItems",
            "additionalProperties",
            "unevaluatedItems",
            "unevaluatedProperties",
        )
    )
}
"""Schema order of keywords that apply a schema: as `infer` reads them, not as written."""

_IN_PLACE: Final = frozenset(list(_ORDER)[: list(_ORDER).index("contains")])
_NAMED: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})


class CompiledSchema:
    """A self-contained schema in which `check_schema` found no error, ready for documents."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self._validator = Draft.of(schema).validator(
            dict(schema), formats=FORMATS, validate_formats=True, offline=True
        )
        self.is_valid = self._validator.is_valid

    @functools.cached_property
    def text(self) -> str:
        """The schema as canonical JSON: equal text, equal meaning."""
        return canonical_json(dict(self.schema))

    @functools.cached_property
    def shape(self) -> Shape:
        return infer(self.schema)

    def violations(self, document: Json) -> tuple[Violation, ...]:
        """Return everything that is wrong with a document, sorted by location."""
        found = [
            violation
            for error in self._validator.iter_errors(document)
            for violation in explain_error(error, document, self.shape)
        ]
        return tuple(sorted(set(found), key=lambda v: (v.pointer, v.schema_pointer, v.message)))

    def active_rules(self, document: Json) -> Mapping[str, Rule]:
        """Return the reduction that acts at each location of a valid document.

        Of the annotations that validation passes through at a location, the one with the fewest
        in-place applicators above it acts; of equals, the later in the schema. Finding the
        applicators of an annotation is expensive, so it is done only where two can meet.
        """
        if not self._annotated:
            return {}
        evaluation = self._validator.evaluate(document)
        if not self._competing:
            return self._shaped(
                {
                    found["instanceLocation"]: rule
                    for found in evaluation.annotations()
                    if (rule := _rule(found["annotations"])) is not None
                }
            )
        best: dict[str, tuple[tuple[int, _Path], Rule]] = {}
        for unit in evaluation.list()["details"]:
            rule = _rule(unit.get("annotations")) if unit["valid"] else None
            if rule is None:
                continue
            depth, path = _position(unit["evaluationPath"])
            at = unit["instanceLocation"]
            if at not in best or (-depth, path) > best[at][0]:
                best[at] = (-depth, path), rule
        return self._shaped({at: rule for at, (_, rule) in best.items()})

    def _shaped(self, rules: dict[str, Rule]) -> dict[str, Rule]:
        if not self._has_exact_numbers:
            return rules
        return {at: rule.on(locate(self.shape, at)[0]) for at, rule in rules.items()}

    @functools.cached_property
    def _has_exact_numbers(self) -> bool:
        """True if decimals, or texts that write numbers, are reduced somewhere: shapes matter."""
        return any(
            shape.reductions and (shape.is_numeric_text or is_decimal(shape))
            for shape in _locations(self.shape)
        )

    @functools.cached_property
    def _annotated(self) -> bool:
        return any(shape.reductions or shape.cut for shape in _locations(self.shape))

    @functools.cached_property
    def _competing(self) -> bool:
        return any(len(shape.reductions) > 1 or shape.cut for shape in _locations(self.shape))


@functools.lru_cache(maxsize=64)
def compiled(text: str) -> CompiledSchema:
    """Compile the schema of this canonical text, once per process."""
    return CompiledSchema(json.loads(text))


def _rule(annotations: object) -> Rule | None:
    if not isinstance(annotations, dict) or "reduce" not in annotations:
        return None
    return _parsed(canonical_json(annotations["reduce"]))


@functools.lru_cache(maxsize=4096)
def _parsed(annotation: str) -> Rule:
    return Rule.parse(json.loads(annotation))


def _locations(shape: Shape) -> Iterator[Shape]:
    """Yield the shape and everything below it."""
    yield shape
    for _, _, below in shape.children():
        yield from _locations(below)


_Path = tuple[tuple[int, int, str], ...]


@functools.lru_cache(maxsize=65536)
def _position(evaluation_path: str) -> tuple[int, _Path]:
    """Count the in-place applicators that end a path; return it with a key in schema order."""
    steps: list[tuple[int, int, str]] = []
    depth = 0
    tokens = iter(pointer.parse(evaluation_path))
    keyword = next(tokens, None)
    while keyword is not None:
        following = next(tokens, None)
        at, name = -1, ""
        if keyword in _NAMED:
            name, following = following or "", next(tokens, None)
        elif following is not None and (index := pointer.index(following)) is not None:
            at, following = index, next(tokens, None)
        depth = depth + 1 if keyword in _IN_PLACE else 0
        steps.append((_ORDER.get(keyword, len(_ORDER)), at, name))
        keyword = following
    return depth, tuple(steps)


def read_documents(
    schema: CompiledSchema, texts: Iterable[str | bytes]
) -> Iterator[tuple[Json, tuple[Violation, ...]]]:
    """Parse and validate documents. Yield each with its violations: none if it is valid.

    Of a repeated member, the last one counts. Text that JSON's grammar allows but no value can
    represent is refused: half a surrogate pair, a number beyond every double.
    """
    decode, is_valid = _decoder.decode, schema.is_valid
    for text in texts:
        try:
            document = decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as e:
            half = _half_a_pair(text)
            why = str(e) if half is None else f"{half} is half of a surrogate pair"
            message = f"is not a JSON document: {why}"
            yield None, (Violation(pointer="", schema_pointer="", message=message),)
            continue
        yield document, () if is_valid(document) else schema.violations(document)


_ESCAPE = re.compile(rb"\\\\|\\u(d[89ab]..)\\u(d[c-f]..)|\\u(d[89a-f]..)", re.IGNORECASE)
"""An escaped backslash, which starts no other escape; a surrogate pair; or half of one."""


def _half_a_pair(text: str | bytes) -> str | None:
    """Return the first escape that is half of a surrogate pair; msgspec calls it truncated."""
    data = text.encode(errors="replace") if isinstance(text, str) else text
    halves = (found[3] for found in _ESCAPE.finditer(data) if found[3])
    return next((f"\\u{half.decode(errors='replace')}" for half in halves), None)


_decoder = msgspec.json.Decoder()
"""Exact for integers of any size, and six times as fast as the standard library's."""
