"""Describe what is wrong with a document or a schema: where, what was expected, what was found.

Values at secret or redacted locations are never shown, nor are objects and arrays, which may hold
some.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import jsonschema_rs
from jsonschema_rs import ValidationErrorKind as Kind

from penstock.model import pointer
from penstock.model.json_order import Json
from penstock.model.shape import Shape, locate

SHOWN_MAX = 120
"""Characters of a value shown in a message."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing wrong with a document. `message` reads after the pointer: `/n: "x" is not …`."""

    pointer: str
    schema_pointer: str
    message: str

    def __str__(self) -> str:
        return f"{self.pointer or 'the document'}: {self.message}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding about a schema, at a pointer into it. `E-` codes refuse it, `W-` codes warn."""

    code: str
    pointer: str
    message: str
    hint: str | None = None


def explain_error(
    error: jsonschema_rs.ValidationError, document: Json, shape: Shape
) -> Iterator[Violation]:
    """Convert a validator's error to violations, one for each missing or unexpected member."""
    at = pointer.render(error.instance_path)
    schema_at = pointer.render(error.schema_path)
    match error.kind:
        case Kind.Required(name):
            yield Violation(
                pointer=pointer.child(at, str(name)),
                schema_pointer=schema_at,
                message="is required but missing",
            )
        case Kind.AdditionalProperties(names) | Kind.UnevaluatedProperties(names):
            yield from _unexpected(names, at, schema_at)
        case Kind.FalseSchema() if schema_at.endswith("/additionalProperties"):
            # Here the validator names the object, not the member.
            members = pointer.get(document, at)
            yield from _unexpected(
                list(members) if isinstance(members, dict) else [], at, schema_at
            )
        case _:
            found = show_value(error.instance, hidden=is_hidden(shape, at))
            yield Violation(
                pointer=at, schema_pointer=schema_at, message=describe_error(error, found)
            )


def _unexpected(names: list[str], at: str, schema_at: str) -> Iterator[Violation]:
    for name in names:
        yield Violation(
            pointer=pointer.child(at, name),
            schema_pointer=schema_at,
            message="is not allowed by the schema",
        )


def describe_error(error: jsonschema_rs.ValidationError, found: str) -> str:
    """Describe an error as a phrase about `found`, the text for the value at fault."""
    match error.kind:
        case Kind.Type(types):
            return f"{found} is not {one_of_types(types)}"
        case Kind.Enum(options):
            return f"{found} is not one of {', '.join(map(show_value, options))}"
        case Kind.Constant(value):
            return f"{found} is not {show_value(value)}"
        case Kind.Format(name):
            return f"{found} does not have the format {name}"
        case Kind.Pattern(pattern):
            return f"{found} does not match the pattern {pattern}"
        case Kind.Minimum(limit):
            return f"{found} is less than {limit}"
        case Kind.Maximum(limit):
            return f"{found} is greater than {limit}"
        case Kind.ExclusiveMinimum(limit):
            return f"{found} is not greater than {limit}"
        case Kind.ExclusiveMaximum(limit):
            return f"{found} is not less than {limit}"
        case Kind.MultipleOf(step):
            return f"{found} is not a multiple of {step}"
        case Kind.MinLength(limit):
            return f"{found} is shorter than {_plural(limit, 'character')}"
        case Kind.MaxLength(limit):
            return f"{found} is longer than {_plural(limit, 'character')}"
        case Kind.MinItems(limit):
            return f"{found} has fewer than {_plural(limit, 'item')}"
        case Kind.MaxItems(limit) | Kind.AdditionalItems(limit):
            return f"{found} has more than {_plural(limit, 'item')}"
        case Kind.MinProperties(limit):
            return f"{found} has fewer than {_plural(limit, 'member')}"
        case Kind.MaxProperties(limit):
            return f"{found} has more than {_plural(limit, 'member')}"
        case Kind.UniqueItems():
            return f"{found} has duplicate items"
        case Kind.Contains():
            return f"{found} contains no item that matches `contains`"
        case Kind.FalseSchema():
            return "must not be present"
        case Kind.Not():
            return f"{found} is excluded by `not`"
        case Kind.AnyOf(context) | Kind.OneOfNotValid(context):
            return f"{found} matches none of {_plural(len(context), 'alternative')}"
        case Kind.OneOfMultipleValid():
            return f"{found} matches more than one alternative of oneOf"
        case _:
            return f"{found} does not satisfy {error.kind.name}"


def show_value(value: object, *, hidden: bool = False) -> str:
    """Return a value as messages show it."""
    match value:
        case dict():
            return "the object"
        case list():
            return f"the array of {_plural(len(value), 'item')}"
        case _ if hidden:
            return "the value, which is secret,"
        case _:
            text = json.dumps(value, ensure_ascii=False, default=str)
            return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def is_hidden(shape: Shape, at: str) -> bool:
    """True if the value at a location must not be shown: it, or a value around it, is secret.

    A value where the schema allows none is hidden too, because nothing is known about it.
    """
    tokens = pointer.parse(at)
    around = [locate(shape, pointer.render(tokens[:n]))[0] for n in range(len(tokens) + 1)]
    return any(step.secret or step.redact or step.impossible for step in around)


def one_of_types(types: list[str]) -> str:
    """Render types as prose: "a number", "an integer or null"."""
    names = [
        t if t == "null" else f"an {t}" if t[0] in "aeiou" else f"a {t}" for t in sorted(types)
    ]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
