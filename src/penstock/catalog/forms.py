"""The forms of values that a grammar is made of, and how to check them.

A grammar is data: a tree of forms. `check` walks a positioned value along it and reports what does
not fit; `editor_schema` renders the same tree for editors, and `make docs` for readers. Only the
form is checked here: names are resolved by `penstock.catalog.build`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.catalog.diagnostics import Diagnostic, Diagnostics, did_you_mean
from penstock.catalog.nodes import Node
from penstock.journal.names import encode_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A string, which matches `pattern` if there is one."""

    expected: str = "a string"
    pattern: str = ""
    code: str = "E-TYPE"
    hint: str | None = None
    path_bytes_max: int | None = None
    """Limit of its bytes as one segment of a path (`journal.names`)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class BooleanValue:
    """true or false."""

    expected: str = "true or false"


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """An integer of at least `minimum`."""

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
    """Any value: a schema or a connector decides what it must be."""

    expected: str = "any value"


@dataclass(frozen=True, slots=True)
class AnyMapping:
    """A mapping with any members."""

    expected: str = "a mapping"


@dataclass(frozen=True, slots=True)
class SchemaMapping:
    """A JSON Schema; `penstock.model.schema_check` checks it."""

    expected: str = "a mapping"


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list whose items have one form."""

    expected: str
    item: Form
    at_least: int = 0
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping of free names to values of one form."""

    expected: str
    value: Form
    names: Text = field(default_factory=Text)


@dataclass(frozen=True, slots=True)
class Either:
    """One of several forms with distinct JSON types."""

    expected: str
    forms: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """A known key of a mapping. `accepted` keys are allowed, but have no effect.

    `default` is a value that means the same as leaving the key out, if there is one.
    """

    about: str
    form: Form
    required: bool = False
    accepted: bool = False
    default: str | int | bool | None = None


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A key that other or older tools support; the hint says what to write instead.

    A hint may be computed from the enclosing values, outermost first, ending in the key's own.
    """

    code: str
    message: str
    hint: str | Callable[[Sequence[Node]], str]


@dataclass(frozen=True, slots=True)
class KeyedMapping:
    """A mapping with known keys. It has exactly one of `one_of`, and both or none of `together`."""

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


Form: TypeAlias = (
    Text
    | Choice
    | BooleanValue
    | WholeNumber
    | Null
    | Anything
    | AnyMapping
    | SchemaMapping
    | ListOf
    | MapOf
    | Either
    | KeyedMapping
)


def check(root: Node, form: Form, diagnostics: Diagnostics) -> None:
    """Report everything in `root` that does not have this form."""
    _Checker(diagnostics).check(root, form)


class _Checker:
    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._warned: set[str] = set()
        self._trail: list[Node] = []

    def check(self, node: Node, form: Form) -> None:
        self._trail.append(node)
        self._check(node, form)
        self._trail.pop()

    def _check(self, node: Node, form: Form) -> None:
        match form, node.value:
            case Either(), _:
                chosen = next((k for k in form.forms if _fits(node, k)), None)
                if chosen is None:
                    self._mismatch(node, form)
                else:
                    self._check(node, chosen)
            case ListOf(), tuple() as items:
                if len(items) < form.at_least:
                    self._mismatch(node, form, "an empty list")
                for item in items:
                    self.check(item, form.item)
            case MapOf(), Mapping() as members:
                for name, member in members.items():
                    self._check_name(name, member, form.names)
                    self.check(member, form.value)
            case KeyedMapping(), Mapping():
                self._check_mapping(node, form)
            case Text(), str() as text:
                if form.pattern and not re.fullmatch(form.pattern, text):
                    self._mismatch(node, form)
                else:
                    self._check_size(text, node, form, at_key=False)
            case Choice(), str() as word:
                if word not in form.words:
                    hint = did_you_mean(word, form.words)
                    self._report(
                        node, "E-TYPE", f"expected {form.expected}, found {node.describe()}", hint
                    )
            case WholeNumber(), int() as number if not isinstance(number, bool):
                if number < form.minimum:
                    self._mismatch(node, form)
            case _:
                if not _fits(node, form):
                    self._mismatch(node, form)

    def _check_name(self, name: str, member: Node, names: Text) -> None:
        if not re.fullmatch(names.pattern or ".+", name, re.DOTALL):
            self._report(
                member, names.code, f'"{name}" is not {names.expected}', names.hint, at_key=True
            )
        else:
            self._check_size(name, member, names, at_key=True)

    def _check_size(self, text: str, node: Node, form: Text, *, at_key: bool) -> None:
        limit = form.path_bytes_max
        if limit is None or (size := len(encode_value(text))) <= limit:
            return
        message = f'"{text[:40]}…" is too long: {size} bytes in a path, of at most {limit}'
        hint = "shorten it; / and letters beyond ASCII count as three bytes or more"
        self._report(node, form.code, message, hint, at_key=at_key)

    def _check_mapping(self, node: Node, record: KeyedMapping) -> None:
        for name, member in node.members.items():
            match record.keys.get(name):
                case None:
                    known = record.known
                    hint = did_you_mean(name, known, f"{record.what} has: {', '.join(known)}")
                    self._report(member, "E-KEY", f'unknown key "{name}"', hint, at_key=True)
                case Unsupported() as unsupported:
                    trail = [*self._trail, member]
                    hint = (
                        unsupported.hint
                        if isinstance(unsupported.hint, str)
                        else unsupported.hint(trail)
                    )
                    self._report(member, unsupported.code, unsupported.message, hint, at_key=True)
                case Key() as key:
                    if key.accepted and name not in self._warned:
                        self._warned.add(name)
                        message = f'"{name}" is accepted, but has no effect here'
                        self._report(member, "W-NO-EFFECT", message, at_key=True)
                    self.check(member, key.form)
        if not any(isinstance(record.keys.get(name), Unsupported) for name in node.members):
            self._check_presence(node, record)  # the hint of an unsupported key says what to write

    def _check_presence(self, node: Node, record: KeyedMapping) -> None:
        given = node.members.keys()
        for name, key in record.keys.items():
            if isinstance(key, Key) and key.required and name not in given:
                self._report(
                    node, "E-REQUIRED", f'{record.what} needs "{name}"', key.about, at_key=True
                )
        chosen = [name for name in record.one_of if name in given]
        if record.one_of and len(chosen) != 1:
            found = f"it has {' and '.join(chosen)}" if chosen else "it has none of them"
            message = f"{record.what} must have exactly one of {', '.join(record.one_of)}; {found}"
            self._report(node, "E-REQUIRED", message, at_key=True)
        for a, b in record.together:
            if (a in given) != (b in given):
                there, missing = (a, b) if a in given else (b, a)
                message = f'"{there}" needs "{missing}" beside it'
                self._report(node.members[there], "E-REQUIRED", message, at_key=True)
        for a, b in record.exclusive:
            if a in given and b in given:
                message = f'"{a}" and "{b}" are mutually exclusive'
                self._report(node.members[b], "E-KEY", message, "keep one of them", at_key=True)

    def _mismatch(self, node: Node, form: Form, found: str | None = None) -> None:
        message = f"expected {form.expected}, found {found or node.describe()}"
        code = form.code if isinstance(form, Text) and node.text is not None else "E-TYPE"
        hint = form.hint if isinstance(form, Text | ListOf) else None
        if isinstance(form, BooleanValue) and node.text is not None:
            hint = "write true or false, in lower case and without quotes"
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


def _fits(node: Node, form: Form) -> bool:
    """True if the value has the JSON type of the form, which is enough to choose between forms."""
    match form:
        case Anything():
            return True
        case Text() | Choice():
            return isinstance(node.value, str)
        case BooleanValue():
            return isinstance(node.value, bool)
        case WholeNumber():
            return isinstance(node.value, int) and not isinstance(node.value, bool)
        case Null():
            return node.value is None
        case ListOf():
            return isinstance(node.value, tuple)
        case AnyMapping() | SchemaMapping() | MapOf() | KeyedMapping():
            return isinstance(node.value, Mapping)
        case Either():
            return any(_fits(node, k) for k in form.forms)
