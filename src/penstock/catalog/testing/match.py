"""PURE: compares the documents of a collection with the ones that a test expects.

An expected document says what matters: it must be *contained* in the actual one. Members that it
names must be there and be contained themselves, and others are free. Arrays have equal length, and
their items are contained one by one. Null is contained in null only, absence in nothing.

Numbers are compared as people write them: 44.1 is 23.2 + 20.9, which is 44.099999999999994. Two
integers are equal or not, however large: they are often identifiers.

There must be as many documents as expected. They are paired by key if every expected document has
the whole key, and else by position, in the order of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, TypeAlias

from penstock.model.json_order import ABSENT, Absent, Json, canonical_json, sort_key
from penstock.model.pointer import child, get

RELATIVE: Final = 1e-9
ABSOLUTE: Final = 1e-12
"""How far two numbers may be apart if one of them is no integer."""

HUNKS_MAX: Final = 20
_SHOWN_MAX: Final = 400
"""Documents shown in a difference, and characters of each value."""

State: TypeAlias = "Json | Absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A location at which the actual document is not what was expected."""

    pointer: str
    expected: Json
    actual: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An expected document and its partner. At most one of the two is absent."""

    expected: State
    actual: State
    differences: tuple[Difference, ...] = ()

    @property
    def matches(self) -> bool:
        return ABSENT not in (self.expected, self.actual) and not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All documents of a collection beside all that are expected."""

    key: tuple[str, ...]
    expected: int
    actual: int
    pairs: tuple[Pair, ...]

    @property
    def matches(self) -> bool:
        return all(pair.matches for pair in self.pairs)

    def render(self, names: tuple[str, str] = ("expected", "actual")) -> list[str]:
        """A unified diff, with a hunk for each document that differs, and lines by location."""
        if self.matches:
            return []
        lines = [f"--- {names[0]}: {_documents(self.expected)}"]
        lines += [f"+++ {names[1]}: {_documents(self.actual)}"]
        wrong = [pair for pair in self.pairs if not pair.matches]
        for pair in wrong[:HUNKS_MAX]:
            lines.append(f"@@ {self._named(pair)} @@")
            lines += _hunk(pair)
        if len(wrong) > HUNKS_MAX:
            lines.append(f"@@ and {len(wrong) - HUNKS_MAX} more documents that differ @@")
        return lines

    def to_json(self) -> list[dict[str, Json]]:
        """Each difference, for programs; a member is missing where a document is."""
        return [entry for pair in self.pairs if not pair.matches for entry in self._entries(pair)]

    def _entries(self, pair: Pair) -> Iterator[dict[str, Json]]:
        named: dict[str, Json] = {"key": self._key_of(pair)}
        whole = () if pair.differences else (("expected", pair.expected), ("actual", pair.actual))
        if whole:
            yield {**named, "pointer": "", **{n: v for n, v in whole if v is not ABSENT}}
        for found in pair.differences:
            actual = {} if found.actual is ABSENT else {"actual": found.actual}
            yield {**named, "pointer": found.pointer, "expected": found.expected, **actual}

    def _key_of(self, pair: Pair) -> list[Json]:
        document = pair.expected if pair.actual is ABSENT else pair.actual
        parts = [get(document, part) for part in self.key if document is not ABSENT]
        return [None if part is ABSENT else part for part in parts]

    def _named(self, pair: Pair) -> str:
        key = f"key {_shown(self._key_of(pair))}"
        if pair.actual is ABSENT:
            return f"{key}: missing"
        return f"{key}: not expected" if pair.expected is ABSENT else key


def compare(
    expected: Sequence[Json], actual: Sequence[Json], key: tuple[str, ...], *, whole: bool = False
) -> Comparison:
    """Pair documents, and find where they differ.

    `actual` is sorted by key, without two documents of one. With `whole`, actual documents may
    have no more than the expected ones.
    """
    keyed = all(get(document, part) is not ABSENT for document in expected for part in key)
    paired = (
        _by_key(expected, actual, key) if keyed else zip_longest(expected, actual, fillvalue=ABSENT)
    )
    return Comparison(
        key=key,
        expected=len(expected),
        actual=len(actual),
        pairs=tuple(_pair(wanted, found, whole=whole) for wanted, found in paired),
    )


def differences(
    expected: Json, actual: State, at: str = "", *, whole: bool = False
) -> Iterator[Difference]:
    """Find where `expected` is not contained in `actual`; with `whole`, where they are not equal.

    Where `whole` finds a member that is not expected, the difference is that of its object.
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        if whole and actual.keys() - expected.keys():
            yield Difference(pointer=at, expected=expected, actual=actual)
            return
        for name, member in expected.items():
            there = actual.get(name, ABSENT)
            yield from differences(member, there, child(at, name), whole=whole)
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for i, (wanted, found) in enumerate(zip(expected, actual, strict=True)):
            yield from differences(wanted, found, child(at, i), whole=whole)
    elif not _same(expected, actual):
        yield Difference(pointer=at, expected=expected, actual=actual)


def without_uuid(document: Json) -> Json:
    """Remove `/_meta/uuid`, and `_meta` with it if nothing else is there."""
    if not (isinstance(document, dict) and isinstance(document.get("_meta"), dict)):
        return document
    meta: Any = document["_meta"]
    if "uuid" not in meta:
        return document
    rest = {name: value for name, value in meta.items() if name != "uuid"}
    others = {name: value for name, value in document.items() if name != "_meta"}
    return {**others, "_meta": rest} if rest else others


def _same(expected: Json, actual: State) -> bool:
    if _is_number(expected) and _is_number(actual):
        if isinstance(expected, int) and isinstance(actual, int):
            return expected == actual
        try:
            return math.isclose(expected, actual, rel_tol=RELATIVE, abs_tol=ABSOLUTE)  # type: ignore[arg-type]
        except OverflowError:  # an integer beyond every double
            return False
    return actual is not ABSENT and sort_key(expected) == sort_key(actual)


def _is_number(value: State) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _identity(document: Json, key: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(sort_key(get(document, part)) for part in key)


def _by_key(
    expected: Sequence[Json], actual: Sequence[Json], key: tuple[str, ...]
) -> Iterator[tuple[State, State]]:
    """Pair documents of equal key; sorted by key. A key that is expected twice is found once."""
    left = {_identity(document, key): document for document in actual}
    pairs: list[tuple[Any, State, State]] = []
    for document in expected:
        identity = _identity(document, key)
        pairs.append((identity, document, left.pop(identity, ABSENT)))
    pairs += [(identity, ABSENT, document) for identity, document in left.items()]
    pairs.sort(key=lambda pair: pair[0])
    return ((wanted, found) for _, wanted, found in pairs)


def _pair(expected: State, actual: State, *, whole: bool) -> Pair:
    if expected is ABSENT or actual is ABSENT:
        return Pair(expected=expected, actual=actual)
    found = tuple(differences(expected, actual, whole=whole))
    return Pair(expected=expected, actual=actual, differences=found)


def _hunk(pair: Pair) -> Iterator[str]:
    """Every location that is expected: once if it is there, and else with both values."""
    if pair.actual is ABSENT and pair.expected is not ABSENT:
        yield f"-{_shown(pair.expected)}"
    elif pair.expected is ABSENT:
        yield f"+{_shown(pair.actual)}"
    else:
        found = {difference.pointer: difference for difference in pair.differences}
        yield from _locations(pair.expected, "", found)


def _locations(value: Json, at: str, found: dict[str, Difference]) -> Iterator[str]:
    if (difference := found.get(at)) is not None:
        yield f"-{at or 'the document'}: {_shown(difference.expected)}"
        if difference.actual is not ABSENT:
            yield f"+{at or 'the document'}: {_shown(difference.actual)}"
        return
    inner: Sequence[tuple[str | int, Json]] = ()
    if isinstance(value, dict):
        inner = tuple(value.items())
    elif isinstance(value, list):
        inner = tuple(enumerate(value))
    if not inner:
        yield f" {at or 'the document'}: {_shown(value)}"
    for token, below in inner:
        yield from _locations(below, child(at, token), found)


def _shown(value: State) -> str:
    text = "nothing" if value is ABSENT else canonical_json(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def _documents(count: int) -> str:
    return f"{count} document{'s' if count != 1 else ''}"
