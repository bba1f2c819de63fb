"""The reference reducer: the meaning of reductions, over plain JSON values.

A reduction is a left fold. LHS is what was reduced so far, RHS the next document of the same key in
read order. The strategy at a location comes from the `reduce` annotations that are active there
when *the RHS* is validated, so the reducer gets a lookup from a document to its active annotations
and never sees a schema. A location without an annotation is replaced: last write wins.

Two forms:

- *full*: the LHS is the whole prior state, or provably nothing precedes it. Deleted locations
  disappear, and the removals that a set remembers are dropped.
- *partial* ("combine"): more may precede. A set keeps its removals, so that reducing the combined
  document later gives the same as reducing its parts one by one:
  `reduce(reduce(a, b), c) == reduce(a, combine(b, c))`. Only documents whose rules are all alike
  are combined (`why_not_combined`).

Native Spark plans are optimizations of this module, and property tests hold them equal to it. So it
is written to be obviously right: one function per strategy, no caching, no cleverness.
"""

from __future__ import annotations

import decimal
import difflib
import enum
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

from penstock.errors import Bug, UserError
from penstock.model.columns import is_decimal
from penstock.model.infer import infer, to_schema
from penstock.model.json_order import (
    ABSENT,
    Absent,
    Json,
    canonical_json,
    numeric_key,
    sort_key,
)
from penstock.model.pointer import child, get
from penstock.model.shape import Reduction, Shape, union

INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**64 - 1
"""Range of a sum of integers: signed or unsigned 64 bits, which JSON writers agree on."""

_SHOWN_BYTES_MAX = 512
_DECIMALS = decimal.Context(prec=100_000, traps=[decimal.Inexact, decimal.InvalidOperation])
_NUMERIC = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class Strategy(enum.Enum):
    """How two values at one location become one. Values are the catalog's spelling."""

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
    """A parsed `reduce` annotation.

    `key` pointers are relative to the location, or to each item of the array there.
    """

    strategy: Strategy = Strategy.LAST_WRITE_WINS
    key: tuple[str, ...] = ()
    delete: bool = False
    associative: bool = True
    numeric: bool = False
    """Of minimize and maximize: texts compare by the numbers they write. Of a sum: numbers add as
    decimals, exactly. The schema of the location says so."""

    @property
    def descends(self) -> bool:
        """True if the rule reduces what is inside its values; those of equal key merge."""
        return bool(self.key) or self.strategy in (Strategy.MERGE, Strategy.SET)

    @classmethod
    def of(cls, reduction: Reduction) -> Rule:
        """Read the annotation that a shape carries."""
        return cls.parse(dict(reduction.annotation))

    def on(self, shape: Shape) -> Rule:
        """Return the rule as it acts on values of a shape."""
        compares = self.strategy in (Strategy.MINIMIZE, Strategy.MAXIMIZE) and not self.key
        numeric = (compares and shape.is_numeric_text) or (
            self.strategy is Strategy.SUM and is_decimal(shape)
        )
        return replace(self, numeric=True) if numeric else self

    @classmethod
    def parse(cls, annotation: Json) -> Rule:
        """Parse an annotation as schemas write it; raises UserError."""
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
"""Validates a document as an RHS and returns its active rules."""


State: TypeAlias = "Json | Absent"
"""The value at a location; absent is not null."""


class ReductionError(UserError):
    """Two values that their strategy cannot reduce. The task stops."""

    @classmethod
    def at(
        cls, pointer: str, why: str, lhs: State, rhs: State, key: State = ABSENT
    ) -> ReductionError:
        """Name the location, the key of the document, and both sides, shortened to be readable."""
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
    """Reduce all documents of one key, in read order; ABSENT if they end in a deletion.

    `stored` is the state before them. It is not a document: no rule acts on it again, even if it
    looks like a document that deletes. `at` is the location of the documents if they are values
    inside others; the pointers of `lookup` then begin there.
    """
    state = stored
    for document in documents:
        state = _Step(active=lookup(document), full=True, key=key).reduce(state, document, at)
    return ABSENT if state is ABSENT else _settle(state, at, key)


def combine(documents: Iterable[Json], lookup: Lookup, key: State = ABSENT, at: str = "") -> Json:
    """Return one document that reduces into any prior state as `documents` would.

    There is at least one document, and `why_not_combined` of their schema is None.
    """
    state: State = ABSENT
    for document in documents:
        state = _Step(active=lookup(document), full=False, key=key).reduce(state, document, at)
    if state is ABSENT:
        raise Bug("documents that delete are not combined")
    return _settle(state, at, key)


class _Total(int):
    """A sum of integers: it may leave the 64-bit range on the way, but not at the end."""


class _Rounded(float):
    """A sum of decimals, exactly as they are written, and rounded to a float at the end alone.

    So a sum of amounts in cents is an amount in cents, however many there are.
    """

    exact: decimal.Decimal

    @classmethod
    def of(cls, exact: decimal.Decimal) -> _Rounded:
        rounded = cls(exact)
        rounded.exact = exact
        return rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The reduction of one RHS into a state. Locations are pointers into the RHS."""

    active: Active
    full: bool
    key: State

    def reduce(self, lhs: State, rhs: Json, at: str) -> State:
        """Reduce one location. An absent `lhs` takes the RHS, sorted as the strategy sorts."""
        rule = self.active.get(at, _REPLACE)
        if rule.delete:
            return ABSENT
        match rule.strategy:
            case Strategy.LAST_WRITE_WINS:
                return rhs
            case Strategy.FIRST_WRITE_WINS:
                return rhs if lhs is ABSENT else lhs
            case Strategy.MINIMIZE:
                return self._extreme(lhs, rhs, at, rule, sign=-1)
            case Strategy.MAXIMIZE:
                return self._extreme(lhs, rhs, at, rule, sign=1)
            case Strategy.SUM:
                return rhs if lhs is ABSENT else self._sum(lhs, rhs, at, decimals=rule.numeric)
            case Strategy.BIG_SUM:
                return rhs if lhs is ABSENT else self._sum(lhs, rhs, at, as_text=True)
            case Strategy.APPEND:
                return rhs if lhs is ABSENT else self._append(lhs, rhs, at)
            case Strategy.MERGE:
                return self._merge(lhs, rhs, at, rule.key)
            case Strategy.SET:
                return self._set(lhs, rhs, at, rule.key or ("",))
            case Strategy.JSON_SCHEMA_MERGE:
                return rhs if lhs is ABSENT else self._merge_schemas(lhs, rhs, at)

    def _extreme(self, lhs: State, rhs: Json, at: str, rule: Rule, sign: int) -> State:
        """Return the smaller (sign -1) or greater (sign 1) side; of equals, merge or replace."""
        key = rule.key
        if lhs is not ABSENT:
            left, right = _identity(lhs, key or ("",)), _identity(rhs, key or ("",))
            if rule.numeric and isinstance(lhs, str) and isinstance(rhs, str):
                left, right = numeric_key(lhs), numeric_key(rhs)
            order = sign * ((left > right) - (left < right))
            if order > 0:
                return lhs
            if order < 0:
                lhs = ABSENT
        return self._merge(lhs, rhs, at, ()) if key else rhs

    def _sum(
        self, lhs: Json, rhs: Json, at: str, *, as_text: bool = False, decimals: bool = False
    ) -> Json:
        if not (_is_numeric(lhs) and _is_numeric(rhs)):
            raise self._error(at, "sum expects numbers", lhs, rhs)
        try:
            if as_text or isinstance(lhs, str) or isinstance(rhs, str):
                exact = _DECIMALS.add(_decimal(lhs), _decimal(rhs))
                return format(exact if exact else abs(exact), "f")  # zero has no sign
            if isinstance(lhs, int) and isinstance(rhs, int):
                return _Total(lhs + rhs)
            if decimals:
                return _Rounded.of(_DECIMALS.add(_decimal(lhs), _decimal(rhs)))
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
        """Return every element of both sides, sorted; one on both sides is reduced by its strategy.

        An element that occurs several times in `rhs` is reduced into the one before it.
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
        """Check one side of a set: only `add`, and either `remove` or `intersect`."""
        if not isinstance(side, dict):
            raise self._error(at, "set expects an object of add, remove, intersect", lhs, rhs)
        if unknown := sorted(side.keys() - {"add", "remove", "intersect"}):
            raise self._error(at, f"set has no term {_shown(unknown[0])}", lhs, rhs)
        if "remove" in side and "intersect" in side:
            raise self._error(at, "set cannot both remove and intersect", lhs, rhs)
        if not all(isinstance(term, dict | list) for term in side.values()):
            raise self._error(at, "set terms must be arrays or objects", lhs, rhs)
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
    """A part of an RHS container: its identity, value, and location."""

    name: Any
    value: Json
    at: str


def _members(value: dict[str, Json], at: str) -> list[_Element]:
    return [_Element(name, member, child(at, name)) for name, member in value.items()]


def _items(value: list[Json], at: str, key: tuple[str, ...]) -> list[_Element]:
    """Return array items, identified by the values at `key`, or by position without a key."""
    return [
        _Element(_identity(item, key) if key else i, item, child(at, i))
        for i, item in enumerate(value)
    ]


def _identity(item: Json, key: tuple[str, ...]) -> tuple[Any, ...]:
    """Return a value that compares as the item's key; a pointer to nothing sorts below null."""
    return tuple(sort_key(get(item, pointer)) for pointer in key)


def _is_numeric(value: Json) -> TypeGuard[int | float | str]:
    if isinstance(value, str):
        return _NUMERIC.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimal(value: float | str) -> decimal.Decimal:
    if isinstance(value, _Rounded):
        return value.exact
    return decimal.Decimal(repr(value) if isinstance(value, float) else value)


def _settle(state: Json, at: str, key: State) -> Json:
    """Finish a state: check sums against their range, sort objects by member name."""
    if isinstance(state, _Total):
        if not INTEGER_MIN <= state <= INTEGER_MAX:
            raise ReductionError.at(at, "sum overflow", int(state), ABSENT, key)
        return int(state)
    if isinstance(state, _Rounded):
        return float(state)
    if isinstance(state, dict):
        return {
            name: _settle(member, child(at, name), key) for name, member in sorted(state.items())
        }
    if isinstance(state, list):
        return [_settle(item, child(at, i), key) for i, item in enumerate(state)]
    return state


def _is_pointer(value: Json) -> bool:
    return isinstance(value, str) and (value == "" or value.startswith("/"))


def _shown(value: State) -> str:
    """Show a value as JSON, shortened to fit an error message."""
    if value is ABSENT:
        return "nothing"
    text = canonical_json(value)
    raw = text.encode()
    if len(raw) <= _SHOWN_BYTES_MAX:
        return text
    return raw[:_SHOWN_BYTES_MAX].decode(errors="ignore") + "…"


def _bad_annotation(what: str, fix: str) -> UserError:
    return UserError(what, where="reduce", fix=fix)


# --- which rules act, known before any document is seen ---


def fixed_rule(shape: Shape) -> Rule | None:
    """The rule that acts at a location in every document; None if documents differ."""
    fixed = shape.fixed_reduction()
    if fixed is None:
        return Rule()
    return Rule.of(fixed).on(shape) if isinstance(fixed, Reduction) else None


def acting_rules(shape: Shape) -> Iterator[Rule | None]:
    """The rules that may act at a location and below it; None where documents differ."""
    rule = fixed_rule(shape)
    yield rule
    if rule is not None and not rule.descends:
        return
    if shape.cut:
        yield None
        return
    for _, _, below in shape.children():
        yield from acting_rules(below)


def why_not_combined(shape: Shape) -> str | None:
    """Why documents cannot be combined before the stored one is known; None if they can.

    `reduce(reduce(a, b), c) == reduce(a, combine(b, c))` holds where the same rules act in every
    document, no rule deletes, and none is declared non-associative. Where a condition decides which
    rule acts, the combined document may meet another rule than the documents it was made of.
    Conditions can be written so that the law holds, but a schema does not show whether they were.
    """
    for rule in acting_rules(shape):
        if rule is None:
            return "what acts in a document depends on it"
        if rule.delete:
            return "documents delete"
        if not rule.associative:
            return "a reduction is not associative"
    return None
