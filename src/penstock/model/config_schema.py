"""The schema of an endpoint's configuration or of a resource, and what is wrong with one.

Messages hold no values: configurations have secrets in them, at places that nobody expected. A
`title` says what a member is, as a noun that follows "expected", and limits after a semicolon;
`examples` become hints.

References to secrets (`${env:NAME}`) are texts. What they stand for is checked where they are
resolved, so a text with one in it is only compared with the type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import jsonschema_rs
from jsonschema_rs import ValidationErrorKind as Kind

from penstock.errors import UserError
from penstock.model import pointer
from penstock.model.json_order import Json, canonical_json
from penstock.model.spec import SECRET_REFERENCE
from penstock.model.violations import Problem

_TYPES: Final = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "a mapping",
    "string": "a text",
}


class ConfigSchema:
    """A JSON Schema of an object whose members are known: `value`, for documentation too."""

    def __init__(self, properties: Mapping[str, Json], *, required: tuple[str, ...] = ()) -> None:
        self.value: dict[str, Any] = {
            "type": "object",
            "title": "a mapping",
            "properties": dict(properties),
            "required": list(required),
            "additionalProperties": False,
        }

    @classmethod
    def of(cls, schema: Mapping[str, Json]) -> Self:
        """Return the schema of a user's module, which may say anything."""
        made = cls({})
        made.value = dict(schema)
        return made

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The members that are paths (`"path": True`), as pointers."""
        return tuple(_marked(self.value, "path", ""))

    def identity(self, given: Json) -> Json:
        """Return what tells a resource from others of its endpoint; all of it if nothing is said.

        Those are the members with `"identity": True`, or their defaults.
        """
        marked = tuple(_marked(self.value, "identity", ""))
        if not marked or not isinstance(given, dict):
            return given
        members = self.value["properties"]
        names = [pointer.parse(each)[0] for each in marked]
        return {name: given.get(name, members[name].get("default")) for name in names}

    def exclusive(self, given: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
        """Yield values that one task at a time can have (`"exclusive": True`), with their names.

        Port 0 is any port that is free.
        """
        for each in _marked(self.value, "exclusive", ""):
            (name,) = pointer.parse(each)
            value = given.get(name, self.value["properties"][name].get("default"))
            if value is not None and not str(value).endswith(":0"):
                yield name, value

    def problems(self, given: Json) -> tuple[Problem, ...]:
        """Return everything that is wrong, as E-CONFIG at pointers into `given`."""
        found = [
            problem
            for error in self._validator.iter_errors(given)
            for problem in self._explained(error)
        ]
        return tuple(sorted(set(found), key=lambda p: (p.pointer, p.message)))

    def read(self, given: Json, *, where: str) -> dict[str, Any]:
        """Return an object without problems; raises `UserError`."""
        problems = self.problems(given)
        if problems or not isinstance(given, dict):
            shown = [f"{p.pointer}: {p.message}" if p.pointer else p.message for p in problems]
            raise UserError("; ".join(shown), where=where, fix=problems[0].hint)
        return given

    @cached_property
    def _validator(self) -> jsonschema_rs.Validator:
        return jsonschema_rs.Draft201909Validator(self.value)

    def _explained(self, error: jsonschema_rs.ValidationError) -> Iterator[Problem]:
        at = pointer.render(error.instance_path)
        match error.kind:
            case Kind.Required(name):
                example = self._example(str(name))
                yield _problem(at, f'"{name}" is missing', example and f"for example {example}")
            case Kind.AdditionalProperties(names):
                for name in names:
                    hint = self._instead(name, at)
                    yield _problem(pointer.child(at, name), f'unknown key "{name}"', hint)
            case Kind.Type():
                yield self._unexpected(at, f", found {_describe(error.instance)}")
            case _ if isinstance(error.instance, str) and SECRET_REFERENCE.search(error.instance):
                return
            case Kind.Enum(options):
                yield _problem(at, f"expected one of {', '.join(map(str, options))}", None)
            case _:
                yield self._unexpected(at, "")

    def _unexpected(self, at: str, found: str) -> Problem:
        """Describe a value at fault by the title of its innermost member."""
        part, name = self._part(at), next(reversed(pointer.parse(at)), None)
        example = self._example(name) if name else None
        title = part.get("title") or _TYPES.get(str(part.get("type")), "another value")
        return _problem(
            at,
            f"expected {title.partition(';')[0] if found else title}{found}",
            f"for example {example}" if example else None,
        )

    def _part(self, at: str) -> dict[str, Any]:
        part = self.value
        for token in pointer.parse(at):
            inner = part.get("properties", {}).get(token, part)
            part = inner if isinstance(inner, dict) else part
        return part

    def _example(self, name: str) -> str | None:
        member = self.value.get("properties", {}).get(name)
        examples = member.get("examples") if isinstance(member, dict) else None
        if not examples:
            return None
        example = examples[0]
        return f"{name}: {example if isinstance(example, str) else canonical_json(example)}"

    def _instead(self, name: str, at: str) -> str:
        known = self._part(at).get("properties", {})
        by_folded = {k.casefold(): k for k in known}
        close = difflib.get_close_matches(name.casefold(), by_folded, n=1)
        return f'did you mean "{by_folded[close[0]]}"?' if close else f"known: {', '.join(known)}"


def _marked(schema: Mapping[str, Any], mark: str, at: str) -> Iterator[str]:
    for name, member in schema.get("properties", {}).items():
        if member.get(mark) is True:
            yield pointer.child(at, name)
        yield from _marked(member, mark, pointer.child(at, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSchemas:
    """What a connector accepts from a catalog."""

    config: ConfigSchema
    resource: ConfigSchema


def _problem(at: str, message: str, hint: str | None) -> Problem:
    return Problem(code="E-CONFIG", pointer=at, message=message, hint=hint)


def _describe(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
        case _:
            return "a mapping"
