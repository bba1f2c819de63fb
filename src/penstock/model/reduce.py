"""The reference reducer: what a reduction means, over plain JSON values.

A reduction is a left fold. LHS is what was reduced so far and RHS the next document of the same
key, in read order. The strategy at a location comes from the `reduce` annotations that are active
there when *the RHS* is validated, so the reducer is handed a lookup from a document to its active
annotations and never sees a schema. A location without one is replaced: last write wins.

Two forms:

- *full*: the LHS is the whole prior state, or provably nothing precedes it. Deleted locations
  disappear, and what a set remembers of removals is dropped.
- *partial* ("combine"): more may precede. What a set removed stays, so that reducing the combined
  document later gives what reducing each of them would have:
  `reduce(reduce(a, b), c) == reduce(a, combine(b, c))`. Only documents whose rules are all alike
  are combined (`model.acting`).

Native Spark plans are optimisations of this module, proven equal to it by property tests. So it is
written to be obviously right: one function per strategy, no caching, no cleverness.
"""

from __future__ import annotations

import decimal
import difflib
import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

from penstock.errors import Bug, UserError
from penstock.model.infer import infer, to_schema
from penstock.model.json_order import (
    ABSENT,
    Absent,
    Json,
    canonical_json,
    sort_key,
)
from penstock.model.pointer import child, get
from penstock.model.shape import union

INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**64 - 1
"""What a sum of integers may be: signed or unsigned 64 bits, as JSON writers agree on."""

_SHOWN_BYTES_MAX = 512
_DECIMALS = decimal.Context(prec=100_000, traps=[decimal.Inexact, decimal.InvalidOperation])
_NUMERIC = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class Strategy(enum.Enum):
    """How two values at one location become one; the value is the catalog's spelling."""

    APPEND = "append"
    FIRST_WRITE_WINS = "firstWriteWins"
    LAST_WRITE_WINS = "lastWriteWins"
    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"
    MERGE = "merge"
    SET = "set"
    SUM = "sum"
    BIG_SUM = "bigSum"
    JSON_SCHEMA_MERGE = "jsonSchemaMerge"


_MEMBERS = {
    Strategy.LAST_WRITE_WINS: {"delete", "associative"},
    Strategy.MERGE: {"key", "delete", "associative"},
    Strategy.MINIMIZE: {"key"},
    Strategy.MAXIMIZE: {"key"},
    Strategy.SET: {"key"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A `reduce` annotation, understood.

    `key` pointers are relative to the location, or to each item of the array there.
    """

    strategy: Strategy = Strategy.LAST_WRITE_WINS
    key: tuple[str, ...] = ()
    delete: bool = False
    associative: bool = True

    @classmethod
    def parse(cls, annotation: Json) -> Rule:
        """Read an annotation as schemas write it, refusing what nobody could have meant."""
        if not isinstance(annotation, Mapping) or "strategy" not in annotation:
            raise _bad_annotation(f"reduce is {_shown(annotation)}", "write {strategy: merge}")
        try:
            strategy = Strategy(annotation["strategy"])
        except ValueError:
            names = [known.value for known in Strategy]
            near = difflib.get_close_matches(str(annotation["strategy"]), names, n=1)
            raise _bad_annotation(
                f"unknown strategy {_shown(annotation['strategy'])}",
                f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}",
            ) from None
        allowed = _MEMBERS.get(strategy, set())
        if unknown := sorted(set(annotation) - {"strategy"} - allowed):
            raise _bad_annotation(
                f"{strategy.value} has no member {_shown(unknown[0])}",
                f"it takes {', '.join(sorted(allowed))}" if allowed else "it takes none",
            )
        key = annotation.get("key", [])
        if not isinstance(key, list) or not all(_is_pointer(part) for part in key):
            raise _bad_annotation(
                f"reduce key is {_shown(key)}", 'a list of JSON pointers, such as ["/id"] or [""]'
            )
        delete, associative = annotation.get("delete", False), annotation.get("associative", True)
        if not isinstance(delete, bool):
            raise _bad_annotation(f"delete is {_shown(delete)}", "true or false")
        if not isinstance(associative, bool):
            raise _bad_annotation(f"associative is {_shown(associative)}", "true or false")
        return cls(
            strategy=strategy,
            key=tuple(str(part) for part in key),
            delete=delete,
            associative=associative,
        )


Active: TypeAlias = Mapping[str, Rule]
"""The rules active in one document, by JSON pointer; a location without one is replaced."""

Lookup: TypeAlias = Callable[[Json], Active]
"""Validates a document as an RHS and says which rules are active where."""


State: TypeAlias = "Json | Absent"
"""What a location holds; absent is not the same as null."""


class ReductionError(UserError):
    """Two values that their strategy cannot reduce; stops the task that met them."""

    @classmethod
    def at(
        cls, pointer: str, why: str, lhs: State, rhs: State, key: State = ABSENT
    ) -> ReductionError:
        """Name the location, the key of the document, and both sides, cut to a readable length."""
        of_key = "" if key is ABSENT else f" of key {_shown(key)}"
        return cls(
            f"while reducing {pointer or 'the document'}{of_key}: {why}; "
            f"LHS {_shown(lhs)}, RHS {_shown(rhs)}",
            fix="correct the document at its source, or the reduce annotation in the schema",
        )


def reduce_full(
    documents: Iterable[Json],
    lookup: Lookup,
    key: State = ABSENT,
    at: str = "",
    *,
    stored: State = ABSENT,
) -> State:
    """The state after all documents of one key, in read order; ABSENT if they end in a deletion.

    `stored` is the state before them. It is not a document: no rule acts on it again, though it
    may look like a document that deletes. `at` is where the documents are, if they are values at
    some location and not whole; the pointers of `lookup` then begin there.
    """
    state = stored
    for document in documents:
        state = _Step(active=lookup(document), full=True, key=key).reduce(state, document, at)
    return ABSENT if state is ABSENT else _settled(state, at, key)


def combine(documents: Iterable[Json], lookup: Lookup, key: State = ABSENT, at: str = "") -> Json:
    """The document that reduces, after any prior state, to what `documents` would.

    There is at least one of them, and `why_not_combined` of their schema is None.
    """
    state: State = ABSENT
    for document in documents:
        state = _Step(active=lookup(document), full=False, key=key).reduce(state, document, at)
    if state is ABSENT:
        raise Bug("documents that delete are not combined")
    return _settled(state, at, key)


class _Total(int):
    """An integer that is a sum: it may leave the 64-bit range on the way, but not at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One RHS being reduced into a state. Locations are pointers into the RHS."""

    active: Active
    full: bool
    key: State

    def reduce(self, lhs: State, rhs: Json, at: str) -> State:
        """Reduce one location. A missing `lhs` takes the RHS, brought into the strategy's order."""
        rule = self.active.get(at, _REPLACE)
        if rule.delete:
            return ABSENT
        match rule.strategy:
            case Strategy.LAST_WRITE_WINS:
                return rhs
            case Strategy.FIRST_WRITE_WINS:
                return rhs if lhs is ABSENT else lhs
            case Strategy.MINIMIZE:
                return self._extreme(lhs, rhs, at, rule.key, sign=-1)
            case Strategy.MAXIMIZE:
                return self._extreme(lhs, rhs, at, rule.key, sign=1)
            case Strategy.SUM:
                return rhs if lhs is ABSENT else self._sum(lhs, rhs, at, exact=False)
            case Strategy.BIG_SUM:
                return rhs if lhs is ABSENT else self._sum(lhs, rhs, at, exact=True)
            case Strategy.APPEND:
                return rhs if lhs is ABSENT else self._append(lhs, rhs, at)
            case Strategy.MERGE:
                return self._merge(lhs, rhs, at, rule.key)
            case Strategy.SET:
                return self._set(lhs, rhs, at, rule.key or ("",))
            case Strategy.JSON_SCHEMA_MERGE:
                return rhs if lhs is ABSENT else self._merge_schemas(lhs, rhs, at)

    def _extreme(self, lhs: State, rhs: Json, at: str, key: tuple[str, ...], sign: int) -> State:
        """The smaller (sign -1) or greater (sign 1) side; equal keys merge, else replace."""
        if lhs is not ABSENT:
            left, right = _identity(lhs, key or ("",)), _identity(rhs, key or ("",))
            order = sign * ((left > right) - (left < right))
            if order > 0:
                return lhs
            if order < 0:
                lhs = ABSENT
        return self._merge(lhs, rhs, at, ()) if key else rhs

    def _sum(self, lhs: Json, rhs: Json, at: str, *, exact: bool) -> Json:
        if not (_is_numeric(lhs) and _is_numeric(rhs)):
            raise self._error(at, "sum expects numbers", lhs, rhs)
        try:
            if exact or isinstance(lhs, str) or isinstance(rhs, str):
                return format(_DECIMALS.add(_decimal(lhs), _decimal(rhs)), "f")
            if isinstance(lhs, int) and isinstance(rhs, int):
                return _Total(lhs + rhs)
            total = float(lhs) + float(rhs)
        except (decimal.DecimalException, OverflowError):
            total = math.inf
        if not math.isfinite(total):
            raise self._error(at, "sum overflow", lhs, rhs)
        return total

    def _append(self, lhs: Json, rhs: Json, at: str) -> Json:
        if isinstance(rhs, list):
            if lhs is None:
                return None
            if isinstance(lhs, list):
                return lhs + rhs
        raise self._error(at, "append expects arrays", lhs, rhs)

    def _merge(self, lhs: State, rhs: Json, at: str, key: tuple[str, ...]) -> State:
        match lhs, rhs:
            case (None, dict() | list()):
                return None
            case (Absent.ABSENT, dict()):
                return self._union({}, _members(rhs, at))
            case (dict(), dict()):
                return self._union(lhs, _members(rhs, at))
            case (Absent.ABSENT, list()):
                return list(self._union({}, _items(rhs, at, key)).values())
            case (list(), list()):
                before = {element.name: element.value for element in _items(lhs, at, key)}
                return list(self._union(before, _items(rhs, at, key)).values())
            case (Absent.ABSENT, _):
                return rhs
            case _:
                raise self._error(at, "merge expects two objects or two arrays", lhs, rhs)

    def _union(self, lhs: dict[Any, Json], rhs: Iterable[_Element]) -> dict[Any, Json]:
        """Every element of both sides, in order; one that is on both is reduced by its strategy.

        An element may come several times in `rhs`: each is reduced into the one before it.
        """
        union = dict(lhs)
        for element in rhs:
            state = self.reduce(union.get(element.name, ABSENT), element.value, element.at)
            if state is ABSENT:
                union.pop(element.name, None)
            else:
                union[element.name] = state
        return dict(sorted(union.items()))

    def _set(self, lhs: State, rhs: Json, at: str, key: tuple[str, ...]) -> Json:
        left = {} if lhs is ABSENT else self._terms(lhs, rhs, lhs, at)
        right = self._terms(lhs, rhs, rhs, at)
        kinds = {type(term) for side in (left, right) for term in side.values()}
        if len(kinds) > 1:
            raise self._error(at, "set mixes arrays and objects", lhs, rhs)
        as_array = kinds == {list}

        def elements(side: dict[str, Any], name: str) -> list[_Element]:
            term = side.get(name, [] if as_array else {})
            within = child(at, name)
            return _items(term, within, key) if as_array else _members(term, within)

        def known(name: str) -> dict[Any, Json]:
            return {element.name: element.value for element in elements(left, name)}

        add, remove, intersect = (elements(right, name) for name in ("add", "remove", "intersect"))
        removed = {element.name for element in remove}
        shared = {element.name for element in intersect}
        terms: dict[str, dict[Any, Json]] = {}
        if "intersect" in right:
            kept = {name: item for name, item in known("add").items() if name in shared}
            if "intersect" in left:
                before = known("intersect")
                terms["intersect"] = self._union(
                    {name: item for name, item in before.items() if name in shared},
                    [element for element in intersect if element.name in before],
                )
            else:
                gone = known("remove")
                terms["intersect"] = self._union(
                    {}, [element for element in intersect if element.name not in gone]
                )
        else:
            kept = {name: item for name, item in known("add").items() if name not in removed}
            if "intersect" in left:
                terms["intersect"] = {
                    name: item for name, item in known("intersect").items() if name not in removed
                }
            elif "remove" in left or "remove" in right:
                terms["remove"] = self._union(known("remove"), remove)
        if "add" in left or "add" in right:
            terms["add"] = self._union(kept, add)
        if self.full:
            terms = {name: term for name, term in terms.items() if name == "add"}
        return {
            name: list(term.values()) if as_array else term for name, term in sorted(terms.items())
        }

    def _terms(self, lhs: State, rhs: Json, side: Json, at: str) -> dict[str, Any]:
        """One side of a set, checked: only `add` and either of `remove` and `intersect`."""
        if not isinstance(side, dict):
            raise self._error(at, "set expects an object of add, remove, intersect", lhs, rhs)
        if unknown := sorted(side.keys() - {"add", "remove", "intersect"}):
            raise self._error(at, f"set has no term {_shown(unknown[0])}", lhs, rhs)
        if "remove" in side and "intersect" in side:
            raise self._error(at, "set cannot both remove and intersect", lhs, rhs)
        if not all(isinstance(term, dict | list) for term in side.values()):
            raise self._error(at, "set terms are arrays, or objects", lhs, rhs)
        return side

    def _merge_schemas(self, lhs: Json, rhs: Json, at: str) -> Json:
        if not (isinstance(lhs, dict) and isinstance(rhs, dict)):
            raise self._error(at, "jsonSchemaMerge expects two schemas", lhs, rhs)
        return to_schema(union(infer(lhs), infer(rhs)))

    def _error(self, at: str, why: str, lhs: State, rhs: Json) -> ReductionError:
        return ReductionError.at(at, why, lhs, rhs, self.key)


_REPLACE = Rule()


@dataclass(frozen=True, slots=True)
class _Element:
    """A part of an RHS container: what identifies it, its value, and where it is."""

    name: Any
    value: Json
    at: str


def _members(value: dict[str, Json], at: str) -> list[_Element]:
    return [_Element(name, member, child(at, name)) for name, member in value.items()]


def _items(value: list[Json], at: str, key: tuple[str, ...]) -> list[_Element]:
    """Array items, identified by the values at `key`, or without one by position."""
    return [
        _Element(_identity(item, key) if key else i, item, child(at, i))
        for i, item in enumerate(value)
    ]


def _identity(item: Json, key: tuple[str, ...]) -> tuple[Any, ...]:
    """A value that compares as the item's key does; a pointer to nothing sorts below null."""
    return tuple(sort_key(get(item, pointer)) for pointer in key)


def _is_numeric(value: Json) -> TypeGuard[int | float | str]:
    if isinstance(value, str):
        return _NUMERIC.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimal(value: float | str) -> decimal.Decimal:
    return decimal.Decimal(repr(value) if isinstance(value, float) else value)


def _settled(state: Json, at: str, key: State) -> Json:
    """The final state: sums checked against their range, objects sorted by member name."""
    if isinstance(state, _Total):
        if not INTEGER_MIN <= state <= INTEGER_MAX:
            raise ReductionError.at(at, "sum overflow", int(state), ABSENT, key)
        return int(state)
    if isinstance(state, dict):
        return {
            name: _settled(member, child(at, name), key) for name, member in sorted(state.items())
        }
    if isinstance(state, list):
        return [_settled(item, child(at, i), key) for i, item in enumerate(state)]
    return state


def _is_pointer(value: Json) -> bool:
    return isinstance(value, str) and (value == "" or value.startswith("/"))


def _shown(value: State) -> str:
    """A value as JSON, cut at a length that fits an error message."""
    if value is ABSENT:
        return "nothing"
    text = canonical_json(value)
    raw = text.encode()
    if len(raw) <= _SHOWN_BYTES_MAX:
        return text
    return raw[:_SHOWN_BYTES_MAX].decode(errors="ignore") + "…"


def _bad_annotation(what: str, fix: str) -> UserError:
    return UserError(what, where="reduce", fix=fix)
