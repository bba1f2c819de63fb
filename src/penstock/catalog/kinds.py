"""The kinds of value a grammar is made of, how they are checked, and their JSON Schema.

A grammar is data: a tree of kinds. `check` walks a positioned value along it and reports what does
not fit; `json_schema` renders the same tree for editors. Checking is about form only: what names
refer to is decided by `penstock.catalog.build`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.catalog.diagnostics import Diagnostic, Diagnostics, did_you_mean
from penstock.catalog.nodes import Node
from penstock.journal.names import encode_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A string; of a special form if `pattern` says so."""

    expected: str = "a string"
    pattern: str = ""
    code: str = "E-TYPE"
    hint: str | None = None
    path_bytes_max: int | None = None
    """The most bytes it may have where it is one part of a path (`journal.names`)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    expected: str = "true or false"


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer that is not negative."""

    minimum: int = 0

    @property
    def expected(self) -> str:
        return f"a whole number, {self.minimum} or more"


@dataclass(frozen=True, slots=True)
class Null:
    """The value null."""

    expected: str = "null"


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value: what it must be is said elsewhere, by a schema or a connector."""

    expected: str = "any value"


@dataclass(frozen=True, slots=True)
class AnyMapping:
    """A mapping whose members are not the grammar's concern."""

    expected: str = "a mapping"


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of equal kinds."""

    expected: str
    item: Kind
    at_least: int = 0


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping from names that people choose to equal kinds."""

    expected: str
    value: Kind
    names: Text = field(default_factory=Text)


@dataclass(frozen=True, slots=True)
class Either:
    """Several kinds that JSON types tell apart."""

    expected: str
    kinds: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """A known key of a record. `accepted` keys are kept, but have no effect."""

    about: str
    kind: Kind
    required: bool = False
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A key that means something elsewhere; the hint says what to write instead.

    A hint may be made from the values that it lies in, from the outermost to itself.
    """

    code: str
    message: str
    hint: str | Callable[[Sequence[Node]], str]


@dataclass(frozen=True, slots=True)
class Record:
    """A mapping with known keys. Exactly one of `one_of` is given; of a pair `together`, both."""

    what: str
    keys: Mapping[str, Key | Unsupported]
    one_of: tuple[str, ...] = ()
    together: tuple[tuple[str, str], ...] = ()
    exclusive: tuple[tuple[str, str], ...] = ()

    @property
    def expected(self) -> str:
        return f"a mapping: {self.what}"

    @property
    def known(self) -> list[str]:
        return [name for name, key in self.keys.items() if isinstance(key, Key)]


Kind: TypeAlias = (
    Text | Choice | Flag | Whole | Null | Anything | AnyMapping | ListOf | MapOf | Either | Record
)


def check(root: Node, kind: Kind, diagnostics: Diagnostics) -> None:
    """Report everything in `root` that does not have the form of `kind`."""
    _Checker(diagnostics).check(root, kind)


class _Checker:
    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._warned: set[str] = set()
        self._trail: list[Node] = []

    def check(self, node: Node, kind: Kind) -> None:
        self._trail.append(node)
        self._check(node, kind)
        self._trail.pop()

    def _check(self, node: Node, kind: Kind) -> None:
        match kind, node.value:
            case Either(), _:
                chosen = next((k for k in kind.kinds if _fits(node, k)), None)
                if chosen is None:
                    self._mismatch(node, kind)
                else:
                    self._check(node, chosen)
            case ListOf(), tuple() as items:
                if len(items) < kind.at_least:
                    self._mismatch(node, kind, "an empty list")
                for item in items:
                    self.check(item, kind.item)
            case MapOf(), Mapping() as members:
                for name, member in members.items():
                    self._check_name(name, member, kind.names)
                    self.check(member, kind.value)
            case Record(), Mapping():
                self._check_record(node, kind)
            case Text(), str() as text:
                if kind.pattern and not re.fullmatch(kind.pattern, text):
                    self._mismatch(node, kind)
                else:
                    self._check_size(text, node, kind, at_key=False)
            case Choice(), str() as word:
                if word not in kind.words:
                    hint = did_you_mean(word, kind.words)
                    self._report(
                        node, "E-TYPE", f"expected {kind.expected}, found {node.describe()}", hint
                    )
            case Whole(), int() as number if not isinstance(number, bool):
                if number < kind.minimum:
                    self._mismatch(node, kind)
            case _:
                if not _fits(node, kind):
                    self._mismatch(node, kind)

    def _check_name(self, name: str, member: Node, names: Text) -> None:
        if not re.fullmatch(names.pattern or ".+", name, re.DOTALL):
            self._report(
                member, names.code, f'"{name}" is not {names.expected}', names.hint, at_key=True
            )
        else:
            self._check_size(name, member, names, at_key=True)

    def _check_size(self, text: str, node: Node, kind: Text, *, at_key: bool) -> None:
        limit = kind.path_bytes_max
        if limit is None or (size := len(encode_value(text))) <= limit:
            return
        message = f'"{text[:40]}…" is too long: {size} bytes in a path, and {limit} are the most'
        hint = "shorten it; / and letters beyond ASCII count three bytes and more"
        self._report(node, kind.code, message, hint, at_key=at_key)

    def _check_record(self, node: Node, record: Record) -> None:
        for name, member in node.members.items():
            match record.keys.get(name):
                case None:
                    known = record.known
                    hint = did_you_mean(name, known, f"{record.what} has: {', '.join(known)}")
                    self._report(member, "E-KEY", f'unknown key "{name}"', hint, at_key=True)
                case Unsupported() as form:
                    trail = [*self._trail, member]
                    hint = form.hint if isinstance(form.hint, str) else form.hint(trail)
                    self._report(member, form.code, form.message, hint, at_key=True)
                case Key() as key:
                    if key.accepted and name not in self._warned:
                        self._warned.add(name)
                        message = f'"{name}" is accepted, and has no effect here'
                        self._report(member, "W-NO-EFFECT", message, at_key=True)
                    self.check(member, key.kind)
        if not any(isinstance(record.keys.get(name), Unsupported) for name in node.members):
            self._check_presence(node, record)  # an unsupported form has said what to write instead

    def _check_presence(self, node: Node, record: Record) -> None:
        given = node.members.keys()
        for name, key in record.keys.items():
            if isinstance(key, Key) and key.required and name not in given:
                self._report(
                    node, "E-REQUIRED", f'{record.what} needs "{name}"', key.about, at_key=True
                )
        chosen = [name for name in record.one_of if name in given]
        if record.one_of and len(chosen) != 1:
            found = f"it has {' and '.join(chosen)}" if chosen else "it has none of them"
            message = f"{record.what} has exactly one of {', '.join(record.one_of)}; {found}"
            self._report(node, "E-REQUIRED", message, at_key=True)
        for a, b in record.together:
            if (a in given) != (b in given):
                there, missing = (a, b) if a in given else (b, a)
                message = f'"{there}" needs "{missing}" beside it'
                self._report(node.members[there], "E-REQUIRED", message, at_key=True)
        for a, b in record.exclusive:
            if a in given and b in given:
                message = f'"{a}" and "{b}" exclude each other'
                self._report(node.members[b], "E-KEY", message, "keep one of them", at_key=True)

    def _mismatch(self, node: Node, kind: Kind, found: str | None = None) -> None:
        message = f"expected {kind.expected}, found {found or node.describe()}"
        code = kind.code if isinstance(kind, Text) and node.text is not None else "E-TYPE"
        hint = kind.hint if isinstance(kind, Text) else None
        if isinstance(kind, Flag) and node.text is not None:
            hint = "write true or false, without quotes and in small letters"
        self._report(node, code, message, hint)

    def _report(
        self, node: Node, code: str, message: str, hint: str | None = None, *, at_key: bool = False
    ) -> None:
        self._diagnostics.report(
            Diagnostic(
                at=node.key_at if at_key else node.at,
                pointer=node.pointer,
                code=code,
                message=message,
                hint=hint,
            )
        )


def _fits(node: Node, kind: Kind) -> bool:
    """Whether the JSON type of the value is one of the kind; enough to choose between kinds."""
    match kind:
        case Anything():
            return True
        case Text() | Choice():
            return isinstance(node.value, str)
        case Flag():
            return isinstance(node.value, bool)
        case Whole():
            return isinstance(node.value, int) and not isinstance(node.value, bool)
        case Null():
            return node.value is None
        case ListOf():
            return isinstance(node.value, tuple)
        case AnyMapping() | MapOf() | Record():
            return isinstance(node.value, Mapping)
        case Either():
            return any(_fits(node, k) for k in kind.kinds)


def json_schema(kind: Kind) -> dict[str, Any]:
    """The JSON Schema of a kind: editors use it for completion and for errors while typing."""
    match kind:
        case Text():
            return {"type": "string"} | ({"pattern": f"^{kind.pattern}$"} if kind.pattern else {})
        case Choice():
            return {"enum": list(kind.words)}
        case Flag():
            return {"type": "boolean"}
        case Whole():
            return {"type": "integer", "minimum": kind.minimum}
        case Null():
            return {"type": "null"}
        case Anything():
            return {}
        case AnyMapping():
            return {"type": "object"}
        case ListOf():
            return {"type": "array", "items": json_schema(kind.item), "minItems": kind.at_least}
        case MapOf():
            names = {"propertyNames": json_schema(kind.names)} if kind.names.pattern else {}
            return {"type": "object", "additionalProperties": json_schema(kind.value)} | names
        case Either():
            return {"anyOf": [json_schema(k) for k in kind.kinds]}
        case Record():
            return _record_schema(kind)


def _record_schema(record: Record) -> dict[str, Any]:
    keys = {name: key for name, key in record.keys.items() if isinstance(key, Key)}
    schema: dict[str, Any] = {
        "type": "object",
        "title": record.what,
        "properties": {
            name: {"description": key.about} | json_schema(key.kind) for name, key in keys.items()
        },
        "additionalProperties": False,
    }
    if required := [name for name, key in keys.items() if key.required]:
        schema["required"] = required
    if record.one_of:
        schema["oneOf"] = [{"required": [n]} for n in record.one_of if n in keys]
    if record.together:
        schema["dependentRequired"] = {
            name: [other] for a, b in record.together for name, other in ((a, b), (b, a))
        }
    if record.exclusive:
        schema["not"] = {"anyOf": [{"required": [a, b]} for a, b in record.exclusive]}
    return schema
