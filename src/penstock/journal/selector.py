"""PURE: which journals: by their labels, and by the partition values in their names.

A **label selector** is what people type:

    region=eu,env!=test            both hold
    region in (eu, us)             one of them
    tier notin (gold), !retired    none of them; has no such label
    city="São Paulo", active=%_true    text in quotes; other values as in a journal's name

As elsewhere, `!=` and `notin` also hold for a journal that has no such label. A value may be
written as it is or as it stands in a journal's name: `a%20b` and `"a b"` are the same.

A **partition filter** is what a task reads of its source. It walks the segments of a name beside
the collection's partition fields, so the same function serves listing and the hints of an ACK,
which have names and no labels.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from penstock.errors import UserError
from penstock.journal.names import decode_value, encode_value
from penstock.model.spec import FieldValues, Selector

# --------------------------------------------------------------------------------------- labels


class Operator(enum.Enum):
    """The condition that a requirement puts on one label."""

    IN = "in"
    NOT_IN = "notin"
    EXISTS = "exists"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One part of a selector; values in their encoded text."""

    label: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.label)
        match self.operator:
            case Operator.IN:
                return value is not None and value in self.values
            case Operator.NOT_IN:
                return value is None or value not in self.values
            case Operator.EXISTS:
                return value is not None
            case Operator.ABSENT:
                return value is None


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """Requirements that all hold; none at all select everything."""

    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """The selector that a person wrote."""
        return cls(tuple(_Parser(text).requirements()))

    def check_known(self, known: Iterable[str]) -> None:
        """Raise if no journal can have a label that is required: it is a typo."""
        names = sorted(known)
        for requirement in self.requirements:
            if requirement.label in names:
                continue
            close = difflib.get_close_matches(requirement.label, names, n=1)
            listed = f"labels: {', '.join(names)}" if names else "its journals have no labels"
            raise UserError(
                f"there is no label {requirement.label}",
                fix=f"did you mean {close[0]}?" if close else listed,
            )

    def matches(self, labels: Iterable[tuple[str, str]]) -> bool:
        if not self.requirements:
            return True
        canonical = {name: _canonical(value) for name, value in labels}
        return all(requirement.holds(canonical) for requirement in self.requirements)


EVERYTHING: Final = LabelSelector()


def _canonical(text: str) -> str:
    """The encoded text of a value, however it is written."""
    try:
        return encode_value(decode_value(text))
    except ValueError:  # not a value of a name: an operator's label, taken as it is
        return encode_value(text)


_TOKEN: Final = re.compile(
    r"""\s* (?:
        (?P<sign> == | != | = | ! | , | \( | \) )
      | "(?P<quoted> (?: [^"\\] | \\. )* )"
      | (?P<word> [^\s=!,()"]+ )
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


class _Parser:
    """Requirements, read from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._next = 0

    def requirements(self) -> Iterable[Requirement]:
        if self._peek().kind == "end":
            return
        yield self._requirement()
        while self._peek().kind != "end":
            self._take(",")
            yield self._requirement()

    def _requirement(self) -> Requirement:
        if self._peek().text == "!" and self._peek().kind == "sign":
            self._next += 1
            return Requirement(label=self._label(), operator=Operator.ABSENT)
        label = self._label()
        token = self._peek()
        if token.kind == "sign" and token.text in ("=", "==", "!="):
            self._next += 1
            operator = Operator.NOT_IN if token.text == "!=" else Operator.IN
            return Requirement(label=label, operator=operator, values=frozenset([self._value()]))
        if token.kind == "word" and token.text in ("in", "notin"):
            self._next += 1
            return Requirement(label=label, operator=Operator(token.text), values=self._values())
        return Requirement(label=label, operator=Operator.EXISTS)

    def _values(self) -> frozenset[str]:
        self._take("(")
        values = [self._value()]
        while self._peek().text != ")":
            self._take(",")
            values.append(self._value())
        self._take(")")
        return frozenset(values)

    def _label(self) -> str:
        token = self._advance()
        if token.kind not in ("word", "quoted"):
            raise self._wrong(token, "the name of a label")
        return token.text

    def _value(self) -> str:
        token = self._advance()
        if token.kind == "quoted":
            return encode_value(token.text)
        if token.kind != "word":
            raise self._wrong(token, "a value")
        try:
            return encode_value(decode_value(token.text))
        except ValueError:
            raise self._wrong(token, "a value") from None

    def _take(self, sign: str) -> None:
        token = self._advance()
        if token.kind != "sign" or token.text != sign:
            raise self._wrong(token, f'"{sign}"')

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _advance(self) -> _Token:
        token = self._peek()
        self._next += token.kind != "end"
        return token

    def _split(self) -> Iterable[_Token]:
        position, end = 0, len(self._text.rstrip())
        while position < end:
            match = _TOKEN.match(self._text, position)
            if match is None:
                raise self._wrong(_Token("quoted", self._text[position:], position), 'a closing "')
            kind = str(match.lastgroup)
            text = match[kind]
            if kind == "quoted":
                text = re.sub(r"\\(.)", r"\1", text)
            yield _Token(kind, text, match.start(kind))
            position = match.end()
        yield _Token("end", "the end", end)

    def _wrong(self, token: _Token, expected: str) -> UserError:
        found = token.text if token.kind == "end" else f'"{token.text}"'
        return UserError(
            f"the label selector cannot be read: expected {expected}, found {found}",
            where=f"{self._text}, character {token.at + 1}",
            fix="for example: region=eu,env!=test or region in (eu, us)",
        )


# ----------------------------------------------------------------------------------- partitions


class MisnamedJournal(ValueError):
    """A name that does not have the partition fields of its collection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFilter:
    """Some partitions of a collection: any included value of every field, and no excluded one.

    Values and field names are encoded text, as in names. What is said of a field that is not one of
    the collection's does not count.
    """

    fields: tuple[str, ...]
    """In the order of names."""
    include: Mapping[str, frozenset[str]]
    exclude: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, fields: Iterable[str], selector: Selector) -> Self:
        """The filter that a catalog's selector means for a collection with these fields."""
        return cls(
            fields=tuple(encode_value(field) for field in sorted(fields)),
            include=_encoded(selector.include),
            exclude=_encoded(selector.exclude),
        )

    def matches(self, suffix: str) -> bool:
        """True if it takes the journal whose name ends so, behind its collection and a slash."""
        *segments, _pivot = suffix.split("/")
        if len(segments) != len(self.fields):
            raise MisnamedJournal(
                f"{suffix!r} has {len(segments)} field segments, its collection has "
                f"{len(self.fields)} partition fields"
            )
        taken = True
        for field, segment in zip(self.fields, segments, strict=True):
            name, equals, value = segment.partition("=")
            if not equals:
                raise MisnamedJournal(f"segment {segment!r} of {suffix!r} has no =")
            if name != field:
                raise MisnamedJournal(f"segment {segment!r} of {suffix!r} is not of field {field}")
            included = self.include.get(field)
            if (included and value not in included) or value in self.exclude.get(field, ()):
                taken = False  # and go on: the name must be right in any case
        return taken


def _encoded(values: Iterable[FieldValues]) -> Mapping[str, frozenset[str]]:
    return {encode_value(item.field): frozenset(map(encode_value, item.values)) for item in values}
