"""Parse YAML to values that know their position.

The dialect is YAML whose scalars are JSON's: `null` (also `~` and an empty value), `true`, `false`,
decimal numbers, and strings. `no`, `12:30`, `2019-01-16` and `0o7` are strings. Values are built
from the parser's events rather than by a stock loader, which would fix the dialect and lose the
positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from penstock.catalog.diagnostics import Diagnostic, Diagnostics, FilePosition
from penstock.model import pointer as pointers
from penstock.model.json_order import Json

NODES_MAX = 1_000_000
"""Limit of values in a file after its aliases are expanded, against alias bombs."""
DEPTH_MAX = 100


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A value, its position, and its JSON pointer within its file.

    Nodes are an immutable tree: what an alias or a merge key repeats is repeated here, so pointers
    are unique. `key_at` is the position of the member's name, or `at` for a value without one.
    """

    value: bool | int | float | str | tuple[Node, ...] | Mapping[str, Node] | None
    at: FilePosition
    key_at: FilePosition
    pointer: str

    @property
    def members(self) -> Mapping[str, Node]:
        """The members of a mapping; empty for anything else, whose type is reported elsewhere."""
        return self.value if isinstance(self.value, Mapping) else {}

    @property
    def items(self) -> tuple[Node, ...]:
        """The items of a list; empty for anything else, whose type is reported elsewhere."""
        return self.value if isinstance(self.value, tuple) else ()

    @property
    def text(self) -> str | None:
        """The value, if it is a string."""
        return self.value if isinstance(self.value, str) else None

    def get(self, name: str) -> Node | None:
        return self.members.get(name)

    def text_of(self, name: str) -> str | None:
        """Return the member of that name, if it is a string."""
        member = self.members.get(name)
        return member.text if member else None

    def plain(self) -> Json:
        """Return the bare JSON value; a new object each time."""
        match self.value:
            case tuple() as items:
                return [item.plain() for item in items]
            case Mapping() as members:
                return {name: member.plain() for name, member in members.items()}
            case scalar:
                return scalar

    def find(self, pointer: str) -> Node | None:
        """Return the value at a JSON pointer relative to this one."""
        node: Node | None = self
        for token in pointers.parse(pointer):
            node = node.child(token) if node else None
        return node

    def closest(self, pointer: str) -> Node:
        """Return the value at a JSON pointer, or the last existing one on the way to it."""
        node = self
        for token in pointers.parse(pointer):
            node = node.child(token) or node
        return node

    def child(self, token: str) -> Node | None:
        """Return the member or item that one token of a pointer names."""
        if isinstance(self.value, tuple):
            at = pointers.index(token)
            return self.value[at] if at is not None and at < len(self.value) else None
        return self.members.get(token)

    def walk(self) -> Iterator[Node]:
        """Yield this value and all below it."""
        yield self
        for child in self.items or self.members.values():
            yield from child.walk()

    def describe(self) -> str:
        """Describe the value, for "expected …, found …"."""
        match self.value:
            case None:
                return "null"
            case bool():
                return "true" if self.value else "false"
            case int() | float():
                return f"the number {self.value}"
            case str():
                short = self.value if len(self.value) <= 40 else self.value[:39] + "…"
                return f'the string "{short}"' if "\n" not in short else "a string of several lines"
            case tuple():
                return "a list"
            case Mapping():
                return "a mapping"


def parse(text: str, file: str, diagnostics: Diagnostics) -> Node | None:
    """Parse the one document of a YAML text; None if it cannot be read, which is reported."""
    try:
        raw = _Composer(text, file).document()
        return _Expander(file, diagnostics).expand(raw, "", None)
    except _Unreadable as e:
        diagnostics.report(
            Diagnostic(
                at=e.at, pointer="", code="E-YAML", message=e.message, hint=e.hint, see=e.see
            )
        )
        return None


def parse_json(text: str, file: str, diagnostics: Diagnostics) -> Node | None:
    """Parse JSON, which unlike YAML allows tabs between tokens and escaped surrogate pairs."""

    def pair(match: re.Match[str]) -> str:
        return match[1] + bytes.fromhex(match[2] + match[3]).decode("utf-16-be")

    return parse(_SURROGATES.sub(pair, text.replace("\t", " ")), file, diagnostics)


# --- events to raw values, which aliases share: a bomb is counted and never built ---

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CORE = "tag:yaml.org,2002:"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_SURROGATES = re.compile(r"((?<!\\)(?:\\\\)*)\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.I)
_DIGITS_MAX = 4000  # Python refuses to read longer integers
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(slots=True)
class _Raw:
    """A value before aliases are expanded; `pairs` keeps order, repetitions and merge keys."""

    at: FilePosition
    scalar: bool | int | float | str | None = None
    items: list[_Raw] | None = None
    pairs: list[tuple[_Raw, _Raw]] | None = None
    is_merge: bool = False
    key: str | None = None
    size: int = 1
    height: int = 1


class _Unreadable(Exception):
    def __init__(
        self,
        at: FilePosition,
        message: str,
        hint: str | None = None,
        see: tuple[FilePosition, ...] = (),
    ) -> None:
        super().__init__(message)
        self.at = at
        self.message = message
        self.hint = hint
        self.see = see


class _Composer:
    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._lines = text
        self._events = self._parse_events(text)
        self._anchors: dict[str, _Raw | None] = {}  # None while the anchored value is being read

    def _parse_events(self, text: str) -> Iterator[Any]:
        try:
            yield from yaml.parse(text, Loader=_LOADER)
        except yaml.MarkedYAMLError as e:
            marks = [m for m in (e.problem_mark, e.context_mark) if m]
            at, *others = [self._position(m) for m in marks] or [FilePosition(self._file, 1, 1)]
            see = tuple(other for other in others if other.line != at.line)
            problem = e.problem or "cannot be read"
            message = f"{e.context}, {problem}" if e.context else problem
            raise _Unreadable(at, message, self._explain(problem, at), see) from None
        except yaml.reader.ReaderError as e:
            before = text[: e.position] if isinstance(e.position, int) else ""
            at = FilePosition(self._file, before.count("\n") + 1, len(before) - before.rfind("\n"))
            raise _Unreadable(at, f"character U+{_code(e.character):04X} is not allowed") from None

    def _explain(self, problem: str, at: FilePosition) -> str | None:
        lines = self._lines.splitlines()
        line = lines[at.line - 1] if at.line <= len(lines) else ""
        if "\t" in line[: len(line) - len(line.lstrip())]:
            return "indent with spaces: YAML does not allow tabs here"
        if "mapping values are not allowed" in problem:
            return 'quote a value that contains ": ", and check the indentation'
        if "cannot start any token" in problem:
            return "quote a value that begins with @, `, % or a tab"
        if "escape code" in problem:
            return "half of a surrogate pair is not a character: write both halves, or U+FFFD"
        if "block" in problem or "expected ':'" in problem:
            return "check the indentation, and that every key is followed by a colon"
        return None

    def document(self) -> _Raw:
        result: _Raw | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if result is not None:
                    raise _Unreadable(
                        self._position(event.start_mark),
                        "a second document begins here",
                        "a file holds one document: move the other to a separate file",
                    )
                result = self._value(next(self._events), 1)
        if result is None:
            return _Raw(FilePosition(self._file, 1, 1))
        if result.size > NODES_MAX:
            raise _Unreadable(
                result.at,
                f"aliases expand to {result.size} values, which exceeds {NODES_MAX}",
                "use fewer aliases: an alias of an alias multiplies",
            )
        return result

    def _value(self, event: Any, depth: int) -> _Raw:  # noqa: ANN401 - PyYAML has no event base type
        at = self._position(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), at)
        if depth > DEPTH_MAX:
            raise _Unreadable(at, f"values nest deeper than {DEPTH_MAX} levels")
        if event.anchor:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            raw = self._scalar(event, at)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._expect_tag(event.tag, "seq", at)
            raw = self._sequence(at, depth)
        else:
            self._expect_tag(event.tag, "map", at)
            raw = self._mapping(at, depth)
        if event.anchor:
            self._anchors[event.anchor] = raw
        return raw

    def _alias(self, name: str, at: FilePosition) -> _Raw:
        if name not in self._anchors:
            raise _Unreadable(at, f"alias *{name} has no anchor &{name} before it")
        target = self._anchors[name]
        if target is None:
            raise _Unreadable(at, f"alias *{name} is inside the value it repeats")
        return target

    def _sequence(self, at: FilePosition, depth: int) -> _Raw:
        items = []
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._value(event, depth + 1))
        return self._container(_Raw(at, items=items), items)

    def _mapping(self, at: FilePosition, depth: int) -> _Raw:
        pairs = []
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._value(event, depth + 1)
            if key.key is None:
                raise _Unreadable(key.at, "a mapping key must be a string")
            pairs.append((key, self._value(next(self._events), depth + 1)))
        return self._container(_Raw(at, pairs=pairs), [value for _, value in pairs])

    def _container(self, raw: _Raw, values: list[_Raw]) -> _Raw:
        raw.size += sum(v.size for v in values)
        raw.height += max((v.height for v in values), default=0)
        if raw.height > DEPTH_MAX:  # reached through aliases, which the parser's depth does not see
            raise _Unreadable(raw.at, f"values nest deeper than {DEPTH_MAX} levels")
        return raw

    def _scalar(self, event: Any, at: FilePosition) -> _Raw:  # noqa: ANN401
        text: str = event.value
        plain = event.tag is None and event.implicit[0]
        if plain:
            return _Raw(at, self._plain(text, at), is_merge=text == "<<", key=text)
        if event.tag in (None, "!", f"{_CORE}str"):
            return _Raw(at, text, key=text)
        value = self._plain(text, at)
        if event.tag != _tag_of(value) and not (
            event.tag == f"{_CORE}float" and type(value) is int
        ):
            self._expect_tag(event.tag, "str", at)
        return _Raw(at, value, key=text)

    def _plain(self, text: str, at: FilePosition) -> bool | int | float | str | None:
        if text in _WORDS:
            return _WORDS[text]
        match = _NUMBER.fullmatch(text)
        if match is None:
            return text
        if match[2] is None and match[3] is None:
            if len(text) > _DIGITS_MAX:
                raise _Unreadable(at, f"a number of {len(text)} digits is too long", "quote it")
            return int(text)
        number = float(text)
        if math.isinf(number):
            raise _Unreadable(at, f"{text} is out of range", "quote it")
        return number

    def _expect_tag(self, tag: str | None, kind: str, at: FilePosition) -> None:
        if tag not in (None, "!", _CORE + kind):
            shown = tag.replace(_CORE, "!!") if tag else ""
            raise _Unreadable(
                at, f"unknown tag {shown}", "remove the tag: values are those of JSON"
            )

    def _position(self, mark: Any) -> FilePosition:  # noqa: ANN401 - two unrelated classes of PyYAML
        return FilePosition(self._file, mark.line + 1, mark.column + 1)


def _tag_of(value: object) -> str:
    names = {type(None): "null", bool: "bool", int: "int", float: "float"}
    return _CORE + names.get(type(value), "str")


def _code(character: object) -> int:
    return ord(character) if isinstance(character, str) else int(str(character))


# --- raw values to nodes ---


class _Expander:
    def __init__(self, file: str, diagnostics: Diagnostics) -> None:
        self._file = file
        self._diagnostics = diagnostics

    def expand(self, raw: _Raw, pointer: str, key_at: FilePosition | None) -> Node:
        at = raw.at
        if raw.items is not None:
            items = tuple(self.expand(v, f"{pointer}/{i}", None) for i, v in enumerate(raw.items))
            return Node(items, at, key_at or at, pointer)
        if raw.pairs is not None:
            members = {
                name: self.expand(value, pointers.child(pointer, name), name_at)
                for name, (name_at, value) in self._members(raw, pointer).items()
            }
            return Node(members, at, key_at or at, pointer)
        return Node(raw.scalar, at, key_at or at, pointer)

    def _members(self, raw: _Raw, pointer: str) -> dict[str, tuple[FilePosition, _Raw]]:
        """Return own members, and those of merged mappings that are not among them."""
        own: dict[str, tuple[FilePosition, _Raw]] = {}
        merged: dict[str, tuple[FilePosition, _Raw]] = {}
        for key, value in raw.pairs or ():
            name = str(key.key)
            if key.is_merge:
                for source in value.items if value.items is not None else [value]:
                    if source.pairs is None:
                        self._error(source.at, pointer, "<< merges mappings, and this is not one")
                    for inherited, found in self._members(source, pointer).items():
                        merged.setdefault(inherited, found)
            elif name in own:
                self._error(key.at, pointer, f'mapping key "{name}" appears twice', own[name][0])
            else:
                own[name] = (key.at, value)
        return merged | own

    def _error(self, at: FilePosition, pointer: str, message: str, *see: FilePosition) -> None:
        self._diagnostics.report(
            Diagnostic(at=at, pointer=pointer, code="E-YAML", message=message, see=see)
        )
