"""What is wrong with a document or a schema, in words: where, what was expected, what was found.

Values at locations that are secret or redacted are never shown, nor are objects and arrays, which
may hold some.
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
"""Characters of a value that a message shows."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing wrong with one document. `message` reads after the pointer: `/n: "x" is not …`."""

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


def explain(
    error: jsonschema_rs.ValidationError, document: Json, shape: Shape
) -> Iterator[Violation]:
    """A validator's error as violations: one for each member that is missing or too many."""
    at = pointer.render(error.instance_path)
    schema_at = pointer.render(error.schema_path)
    match error.kind:
        case Kind.Required(name):
            yield Violation(
                pointer=pointer.child(at, str(name)),
                schema_pointer=schema_at,
                message="is required and missing",
            )
        case Kind.AdditionalProperties(names) | Kind.UnevaluatedProperties(names):
            yield from _unexpected(names, at, schema_at)
        case Kind.FalseSchema() if schema_at.endswith("/additionalProperties"):
            # Where nothing else is allowed, the validator names the object and not the member.
            members = pointer.get(document, at)
            yield from _unexpected(
                list(members) if isinstance(members, dict) else [], at, schema_at
            )
        case _:
            found = show(error.instance, hidden=hidden(shape, at))
            yield Violation(pointer=at, schema_pointer=schema_at, message=phrase(error, found))


def _unexpected(names: list[str], at: str, schema_at: str) -> Iterator[Violation]:
    for name in names:
        yield Violation(
            pointer=pointer.child(at, name),
            schema_pointer=schema_at,
            message="is not a member that the schema allows",
        )


def phrase(error: jsonschema_rs.ValidationError, found: str) -> str:
    """An error as a phrase about `found`, which is how the value at fault is called."""
    match error.kind:
        case Kind.Type(types):
            return f"{found} is not {one_of_types(types)}"
        case Kind.Enum(options):
            return f"{found} is not one of {', '.join(map(show, options))}"
        case Kind.Constant(value):
            return f"{found} is not {show(value)}"
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
            return f"{found} has an item twice"
        case Kind.Contains():
            return f"{found} has no item of the kind that it must contain"
        case Kind.FalseSchema():
            return "must not be there"
        case Kind.Not():
            return f"{found} is what the schema excludes"
        case Kind.AnyOf(context) | Kind.OneOfNotValid(context):
            return f"{found} fits none of {_plural(len(context), 'alternative')}"
        case Kind.OneOfMultipleValid():
            return f"{found} fits more than one alternative of oneOf"
        case _:
            return f"{found} does not satisfy {error.kind.name}"


def show(value: object, *, hidden: bool = False) -> str:
    """A value as messages call it."""
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


def hidden(shape: Shape, at: str) -> bool:
    """Whether the value at a location must not be shown: it, or something it is in, is secret.

    So is a value where the schema allows none at all, as nothing is known of it.
    """
    tokens = pointer.parse(at)
    around = [locate(shape, pointer.render(tokens[:n]))[0] for n in range(len(tokens) + 1)]
    return any(step.secret or step.redact or step.impossible for step in around)


def one_of_types(types: list[str]) -> str:
    """Types as prose: "a number", "an integer or null"."""
    names = [
        t if t == "null" else f"an {t}" if t[0] in "aeiou" else f"a {t}" for t in sorted(types)
    ]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
