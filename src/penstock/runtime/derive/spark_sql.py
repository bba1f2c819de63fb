"""PURE: judges a Spark lambda by its text, before anything runs.

The text that people wrote is the text that Spark runs. It is parsed to find what is wrong with it
and what it depends on; text is added to it only where a column must travel unseen: the order of a
document, with each row that stems from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from penstock.model import pointer
from penstock.model.json_order import ABSENT
from penstock.model.reduce import Strategy, fixed_rule
from penstock.model.schema import compiled
from penstock.model.shape import Shape, locate
from penstock.model.spec import CollectionSpec
from penstock.native.plan import Members, Value, compile_reduction, walk
from penstock.runtime.derive.mistakes import Mistake
from penstock.runtime.derive.spark_columns import (
    UUID_LOCATION,
    SourceColumns,
    cast_hint,
    fits,
    output_location,
    said,
    target_column,
    write_layout,
)
from penstock.runtime.derive.spark_functions import ADDS_UP
from penstock.runtime.derive.spark_query import SOURCE, Output, QueryWalk, Result
from penstock.runtime.derive.spark_text import QueryText, SyntaxMistake, insert

_CASES: Final = re.compile(r"\b(?:lower|upper|lcase|ucase|initcap)\s*\(|\bilike\b", re.IGNORECASE)
_SUBSTITUTED: Final = re.compile(r"\$\{")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputColumn:
    """A column of a lambda's result, and the location that it writes."""

    name: str
    location: str
    type: str | None
    """None if it is not known before the lambda runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkLambda:
    """A lambda that may run. Picklable."""

    written: str
    """The text as people wrote it."""
    text: str
    """What Spark runs if order does not travel."""
    ordered_text: str | None
    """What Spark runs if it does; None if it cannot."""
    order_column: str
    """The name that the order has inside of the query."""
    views: tuple[tuple[str, str], ...]
    fields: tuple[str, ...]
    """The fields of the source that it names."""
    whole: bool
    """It reads all members of documents, with a star."""
    order_matters: bool
    """What the target reduces of this lambda's documents depends on their order."""
    one_to_one: bool
    """A document never becomes several rows."""
    multiplies: bool
    """There may be more rows than documents."""
    grouped: bool
    """It adds up documents of one transaction."""
    linear: bool
    """Each document is processed by itself, however documents are put into transactions."""
    outputs: tuple[OutputColumn, ...] | None
    """None if the columns are not known before it runs."""

    @property
    def may_change_case(self) -> bool:
        """It seems to make letters small or large; told from words, which may mean others."""
        return any(_CASES.search(text) for text in (self.text, *(view for _, view in self.views)))

    def explain(self) -> str:
        """One sentence, for people."""
        if self.linear and self.grouped:
            how = "adds up the documents of a transaction"
        elif self.linear:
            rows = "at most one row per document" if self.one_to_one else "any number of rows"
            how = f"acts on each document by itself ({rows})"
        else:
            how = "sees the documents of one transaction together"
        order = "order is kept" if self.order_matters else "order does not matter"
        return f"native Spark SQL: {how}; {order}"


def check_views(views: Mapping[str, str]) -> dict[str, list[Mistake]]:
    """Judge the constant tables of a derivation; those that are sound have no mistakes."""
    found: dict[str, list[Mistake]] = {}
    known: dict[str, Result] = {}
    for name in _view_order(views):
        found[name], result = _view(name, views[name], known)
        if name != SOURCE:
            known[name] = result
    return found


def _view_order(views: Mapping[str, str]) -> list[str]:
    """The names of views, those first that others read; views of a circle in any order."""
    waiting: dict[str, set[str]] = {}
    for name, text in views.items():
        parsed = _parsed(text)
        tables = [] if isinstance(parsed, list) else parsed.tables()
        waiting[name] = {table for table in tables if table in views and table != name}
    ordered: list[str] = []
    while waiting:
        ready = [name for name, needs in waiting.items() if needs <= set(ordered)]
        for name in ready or list(waiting)[:1]:
            ordered.append(name)
            del waiting[name]
    return ordered


def judge_lambda(
    text: str,
    *,
    source: CollectionSpec,
    target: CollectionSpec,
    views: Mapping[str, str] | None = None,
    nonlinear: bool = False,
) -> SparkLambda | list[Mistake]:
    """Judge one lambda. Views are judged by `check_views`: here, a broken one has any columns."""
    views = views or {}
    views = {name: views[name] for name in _view_order(views)}
    tables: dict[str, Result] = {}
    for name, view in views.items():
        tables[name] = _view(name, view, tables)[1]
    parsed = _parsed(text)
    if isinstance(parsed, list):
        return parsed
    columns = SourceColumns(source)
    order = _free_name([*columns.names, *columns.star])
    judge = QueryWalk(
        parsed, source=columns, order=order, nonlinear=nonlinear, collection=source.name
    )
    result = judge.query(parsed.statements[0], tables, top=True)
    if not result.carries and not judge.mistakes:
        judge.constant(result.start)
    checks = _OutputChecks(parsed, target, nonlinear=nonlinear)
    mistakes = [*judge.mistakes, *checks.run(result, judge.broken)]
    matters = _order_matters(result, target)
    if not mistakes and matters and judge.order_trouble:
        mistakes = [_untold(parsed, at, why, target) for at, why in judge.order_trouble[:1]]
    if mistakes:
        return _distinct(mistakes)
    plain = judge.star_insertions(ordered=False)
    ordered = [*judge.star_insertions(ordered=True), *judge.order_insertions]
    closed = parsed.closed
    return SparkLambda(
        written=text,
        text=insert(closed, plain),
        ordered_text=None if judge.order_trouble else insert(closed, ordered),
        order_column=order,
        views=tuple(views.items()),
        fields=tuple(sorted(judge.fields)),
        whole=judge.whole,
        order_matters=matters,
        one_to_one=result.one_to_one,
        multiplies=result.multiplies,
        grouped=result.grouped,
        linear=judge.linear,
        outputs=_output_columns(result, target),
    )


def _view(name: str, text: str, known: Mapping[str, Result]) -> tuple[list[Mistake], Result]:
    # A view begins before everything: that is how a WITH query of the same name is found out.
    anything = Result(outputs=None, carries=False, start=-1)
    if name == SOURCE:
        message = '"source" is what a lambda reads; it cannot be a view'
        return [Mistake(code="E-LAMBDA", offset=0, message=message)], anything
    parsed = _parsed(text)
    if isinstance(parsed, list):
        return parsed, anything
    judge = QueryWalk(parsed, source=None, order="", nonlinear=True)
    result = judge.query(parsed.statements[0], known)
    return _distinct(judge.mistakes), Result(outputs=result.outputs, carries=False, start=-1)


def _parsed(text: str) -> QueryText | list[Mistake]:
    if found := _SUBSTITUTED.search(text):
        return [
            Mistake(
                code="E-LAMBDA",
                offset=found.start(),
                message=f"line {_line(text, found.start())}: Spark would replace ${{…}}",
                hint="write '$' || '{…}' if a text must have it",
            )
        ]
    try:
        parsed = QueryText.parse(text)
    except SyntaxMistake as e:
        message = f"line {_line(text, e.offset)}: {e.message}"
        return [Mistake(code="E-LAMBDA", offset=e.offset, message=message, hint=e.hint)]
    if len(parsed.statements) > 1:
        second = parsed.second_statement()
        message = f"line {_line(text, second)}: a lambda is one query, and here another one begins"
        hint = "put them together with UNION ALL, or write a transform for each"
        return [Mistake(code="E-LAMBDA", offset=second, message=message, hint=hint)]
    return parsed


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _free_name(taken: Sequence[str]) -> str:
    name = "$ord"
    while name in taken:
        name = f"${name}"
    return name


def _distinct(mistakes: Sequence[Mistake]) -> list[Mistake]:
    """Each mistake once, in the order of the text."""
    return sorted(dict.fromkeys(mistakes), key=lambda m: (m.offset, m.code, m.message))


def _output_columns(result: Result, target: CollectionSpec) -> tuple[OutputColumn, ...] | None:
    if result.outputs is None:
        return None
    return tuple(
        OutputColumn(
            name=output.name,
            location=output_location(output.name, target),
            type=None if output.type is None else output.type.word,
        )
        for output in result.outputs
        if not output.hidden
    )


# --- order ---

_FREE_OF_ORDER: Final = (Strategy.SUM, Strategy.MINIMIZE, Strategy.MAXIMIZE)


def _order_matters(result: Result, target: CollectionSpec) -> bool:
    """False if every location that is written is part of the key, or reduces in any order."""
    plan = compile_reduction(compiled(target.read_schema.text), target.key)
    if plan.fold is not None or plan.barrier is not None or plan.apart is not None:
        return True
    if not isinstance(plan.root, Members) or result.outputs is None:
        return True
    nodes = {node.at: node for node in walk(plan.root)}
    for output in result.outputs:
        if output.hidden:
            return True  # other members, of which the last one wins
        location = output_location(output.name, target)
        concerned = [
            node
            for at, node in nodes.items()
            if at == location or at.startswith(f"{location}/") or location.startswith(f"{at}/")
        ]
        free = [
            isinstance(node, Value)
            and (node.at in target.key or (node.strategy in _FREE_OF_ORDER and not node.ordered))
            for node in concerned
        ]
        if not concerned or not all(free):
            return True
    return False


def _untold(text: QueryText, at: int, why: str, target: CollectionSpec) -> Mistake:
    return Mistake(
        code="E-NONLINEAR",
        offset=at,
        message=f"line {text.line(at)}: the reduction of {target.name} depends on the order of "
        f"documents, which is lost here: {why}",
        hint="let the target reduce by sum, minimize or maximize only, or drop this",
    )


# --- the result against the target ---


class _OutputChecks:
    """Finds columns of a result that no document of the target can have, and what it lacks."""

    def __init__(self, text: QueryText, target: CollectionSpec, *, nonlinear: bool) -> None:
        self._text = text
        self._target = target
        self._nonlinear = nonlinear
        self._shape = compiled(target.write_schema.text).shape
        self._layout = write_layout(target)

    def run(self, result: Result, broken: AbstractSet[int]) -> Iterator[Mistake]:
        """Yield mistakes; columns that begin at the offsets `broken` have been reported."""
        outputs = result.outputs
        if outputs is None:
            return
        locations: dict[str, Output] = {}
        forbidden: dict[int, list[str]] = {}
        for output in outputs:
            if output.hidden:
                continue
            location = output_location(output.name, self._target)
            if output.starred and locate(self._shape, location)[0].impossible:
                forbidden.setdefault(output.offset, []).append(output.name)
            elif output.offset not in broken:
                yield from self._column(output, location, locations)
            locations.setdefault(location, output)
        for at, names in forbidden.items():
            yield self._wrong(
                at,
                f"* gives {', '.join(names)}, which {self._target.name} does not have",
                f"write * except ({', '.join(names)})",
            )
        starred = any(output.hidden for output in outputs)
        if not starred:
            yield from self._lacking(locations, result.start)
        if result.grouped and not self._nonlinear:
            yield from self._grouped(outputs, locations, result.start)

    def _wrong(self, offset: int, message: str, hint: str | None = None) -> Mistake:
        line = f"line {self._text.line(offset)}: "
        return Mistake(code="E-LAMBDA", offset=offset, message=line + message, hint=hint)

    def _column(
        self, output: Output, location: str, before: Mapping[str, Output]
    ) -> Iterator[Mistake]:
        at, name = output.offset, self._target.name
        if not output.name:
            yield self._wrong(at, "this column has no name", "add `as` and the name of a member")
            return
        if location == "":
            hint = "write select * for the document, or the members that are wanted"
            yield self._wrong(at, f'"{output.name}" is the whole document', hint)
            return
        if location == UUID_LOCATION:
            yield self._wrong(at, f'"{output.name}" is set when a document is published')
            return
        for other in before:
            if other == location:
                yield self._wrong(at, f"{location} is written twice")
                return
            if other.startswith(f"{location}/") or location.startswith(f"{other}/"):
                yield self._wrong(at, f"{location} and {other} are written, one inside the other")
                return
        column = target_column(location, self._layout)
        if locate(self._shape, location)[0].impossible:
            message = f"{name} does not have {location}"
            yield self._wrong(at, message, _members_hint(self._shape, location))
        elif not fits(output.type, column):
            message = f"{location} of {name} is {said(column)}, and this is {output.type}"
            yield self._wrong(at, message, cast_hint(column))

    def _lacking(self, locations: Mapping[str, Output], start: int) -> Iterator[Mistake]:
        name = self._target.name
        for part in self._target.key:
            if not _given(part, locations) and locate(self._shape, part)[0].default is ABSENT:
                yield self._wrong(
                    start,
                    f"no column gives {part}, the key of {name}",
                    f"add `as {part[1:]}` to one"
                    if "/" not in part[1:]
                    else f"add `as `{part[1:]}``",
                )
        for member in self._layout.members:
            location = pointer.child("", member.name)
            in_key = any(f"{part}/".startswith(f"{location}/") for part in self._target.key)
            needed = member.required and not member.nullable and not in_key
            if needed and not _written(location, locations):
                yield self._wrong(start, f"no column gives {location}, which {name} requires")

    def _grouped(
        self, outputs: Sequence[Output], locations: Mapping[str, Output], start: int
    ) -> Iterator[Mistake]:
        for location, output in locations.items():
            if output.aggregate is None or location in self._target.key:
                continue
            wanted = ADDS_UP.get(output.aggregate)
            found = _strategy(self._target, location)
            if wanted is not None and found != wanted:
                yield Mistake(
                    code="E-NONLINEAR",
                    offset=output.offset,
                    message=f"line {self._text.line(output.offset)}: {output.aggregate}() of each "
                    f"transaction is published, and {location} does not add up: it has "
                    f"{found or 'no one strategy'}",
                    hint=f"reduce: {{strategy: {wanted}}} at {location}, and merge above it",
                )
        for part in self._target.key:
            output_at = locations.get(part)
            if output_at is not None and output_at.aggregate is not None:
                yield Mistake(
                    code="E-NONLINEAR",
                    offset=output_at.offset,
                    message=f"line {self._text.line(output_at.offset)}: the key {part} is an "
                    "aggregate, so it depends on how documents are batched",
                    hint="group by the key",
                )


def _given(location: str, locations: Mapping[str, Output]) -> bool:
    """True if a column writes a location, or something that it is inside of."""
    return any(location == at or location.startswith(f"{at}/") for at in locations)


def _written(location: str, locations: Mapping[str, Output]) -> bool:
    """True if a column writes a location, or a part of it."""
    return any(at == location or at.startswith(f"{location}/") for at in locations)


def _strategy(target: CollectionSpec, location: str) -> str | None:
    """The strategy that acts at a location, if all objects above it merge."""
    shape = compiled(target.read_schema.text).shape
    above = ""
    for token in pointer.parse(location):
        rule = fixed_rule(locate(shape, above)[0])
        if rule is None or rule.strategy is not Strategy.MERGE:
            return Strategy.LAST_WRITE_WINS.value
        above = pointer.child(above, token)
    rule = fixed_rule(locate(shape, location)[0])
    return None if rule is None else rule.strategy.value


def _members_hint(shape: Shape, location: str) -> str | None:
    parent, _, _ = location.rpartition("/")
    names = sorted(locate(shape, parent)[0].properties)
    return f"it has {', '.join(names[:8])}" if names else None
