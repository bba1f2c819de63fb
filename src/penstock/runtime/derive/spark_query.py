"""PURE: walks a Spark query: what it names, whether it acts row by row, where order travels.

A **linear** query acts on each document by itself, so it does not matter how documents are put
into transactions. A relation **carries** if each of its rows stems from one document; then the
order of that document can travel with the row, as one more column at the end of each select list.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlglot import exp
from sqlglot.tokenizer_core import TokenType

from penstock.native import sql
from penstock.runtime.derive.mistakes import Mistake
from penstock.runtime.derive.spark_columns import NUMBERS, SourceColumns, SqlType
from penstock.runtime.derive.spark_expressions import expression_type
from penstock.runtime.derive.spark_functions import (
    ADDS_UP,
    AGGREGATES,
    CHOICES,
    CONSTANT_TABLES,
    FUNCTIONS,
    GENERATORS,
    NUMERIC_FUNCTIONS,
    ORDERED_AGGREGATES,
    OUTSIDE,
    SPECIAL_MOMENTS,
    UNREPEATABLE,
)
from penstock.runtime.derive.spark_text import Insertion, QueryText

SOURCE: Final = "source"
ALLOW_HINT: Final = "drop it, or set nonlinear: allow if results may depend on transactions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A column of a query's result."""

    name: str
    offset: int
    type: SqlType | None = None
    aggregate: str | None = None
    """The aggregate that it is, by itself."""
    hidden: bool = False
    """Where a document keeps what has no column, copied by a star."""
    starred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a query gives."""

    outputs: tuple[Output, ...] | None
    """None: its columns are not known."""
    carries: bool
    one_to_one: bool = False
    """True if a document never becomes several rows."""
    grouped: bool = False
    multiplies: bool = True
    """False if there are never more rows than documents."""
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relation:
    """A table in a FROM clause. Columns None: not known."""

    alias: str | None
    columns: Mapping[str, SqlType | None] | None
    carries: bool = False
    one_to_one: bool = True
    source: SourceColumns | None = None
    hidden: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Scope:
    """The names that expressions of one select see."""

    tables: Mapping[str, Result]
    relations: list[_Relation] = field(default_factory=list)
    aliases: dict[str, SqlType | None] = field(default_factory=dict)
    outer: _Scope | None = None
    merged: bool = False
    """A join merges columns of one name."""


class QueryWalk:
    """Judges one text. Mistakes and insertions are collected, in no order."""

    def __init__(
        self,
        text: QueryText,
        *,
        source: SourceColumns | None,
        order: str,
        nonlinear: bool,
        collection: str = SOURCE,
    ) -> None:
        self._text = text
        self._source = source
        self._order = order
        self._nonlinear = nonlinear
        self._collection = collection
        self._types: dict[int, SqlType | None] = {}
        self._stars: list[tuple[exp.Expr, list[_Relation]]] = []
        self.mistakes: list[Mistake] = []
        self.order_insertions: list[Insertion] = []
        self.order_trouble: list[tuple[int, str]] = []
        self.fields: set[str] = set()
        self.broken: set[int] = set()
        """Where columns begin that nothing is known about."""
        self.whole = False
        """A star reads all members of documents."""
        self.linear = True

    # --- results ---

    def star_insertions(self, *, ordered: bool) -> list[Insertion]:
        """What keeps columns that people did not ask for out of stars."""
        found = []
        for star, relations in self._stars:
            names = [
                f"{sql.name(r.alias)}.{sql.name(name)}" if r.alias else sql.name(name)
                for r in relations
                for name in self._unwanted(r, ordered=ordered)
            ]
            if not names:
                continue
            after = self._text.after(star)
            if star.args.get("except_"):
                found.append(Insertion(self._text.closing(after), f", {', '.join(names)}"))
            else:
                found.append(Insertion(after, f" except ({', '.join(names)})"))
        return found

    def _unwanted(self, relation: _Relation, *, ordered: bool) -> Iterator[str]:
        if relation.source is not None:
            yield from sorted(self.fields - set(relation.source.star))
        if ordered and relation.carries:
            yield self._order

    def constant(self, offset: int) -> None:
        """Report a query that reads no documents."""
        self._depends(
            offset,
            "this does not read source: its rows would be published in every transaction",
            "add `from source`",
        )
        self.order_trouble.append((offset, "the query does not read source"))

    # --- reporting ---

    def _wrong(self, offset: int, message: str, hint: str | None = None) -> None:
        line = f"line {self._text.line(offset)}: "
        self.mistakes.append(
            Mistake(code="E-LAMBDA", offset=offset, message=line + message, hint=hint)
        )

    def _depends(self, offset: int, message: str, hint: str | None = ALLOW_HINT) -> None:
        """Report something that makes results depend on transactions."""
        self.linear = False
        if self._source is None or self._nonlinear:
            return
        line = f"line {self._text.line(offset)}: "
        self.mistakes.append(
            Mistake(code="E-NONLINEAR", offset=offset, message=line + message, hint=hint)
        )

    def _unrepeatable(self, offset: int, message: str, hint: str | None = None) -> None:
        """Report something that a retry could not repeat; no option allows it."""
        line = f"line {self._text.line(offset)}: "
        self.mistakes.append(
            Mistake(code="E-NONLINEAR", offset=offset, message=line + message, hint=hint)
        )

    # --- queries ---

    def query(
        self,
        node: exp.Expr,
        tables: Mapping[str, Result],
        outer: _Scope | None = None,
        *,
        top: bool = False,
    ) -> Result:
        """Walk a query. At the top, or in a branch of a union there, aggregates may add up."""
        tables = self._ctes(node, tables)
        match node:
            case exp.Subquery():
                self._modifiers(node)
                return self.query(node.this, tables, outer, top=top)
            case exp.SetOperation():
                return self._set_operation(node, tables, outer, top=top)
            case exp.Select():
                return self._select(node, tables, outer, top=top)
            case exp.Values():
                self._expressions(node.expressions, _Scope(tables, outer=outer))
                return Result(outputs=None, carries=False, start=self._text.start(node))
            case _:
                self._wrong(self._text.start(node), "only queries can be used here")
                return Result(outputs=None, carries=False)

    def _ctes(self, node: exp.Expr, tables: Mapping[str, Result]) -> Mapping[str, Result]:
        clause = node.args.get("with_")
        if clause is None:
            return tables
        if clause.args.get("recursive"):
            at = self._text.start(clause)
            self._wrong(at, "WITH RECURSIVE is not supported")
        tables = dict(tables)
        for cte in clause.expressions:
            alias = cte.args["alias"]
            name, at = alias.name, self._text.start(alias)
            if name == SOURCE or (name in tables and tables[name].start < 0):
                self._wrong(at, f'"{name}" is taken', "give the WITH query another name")
                continue
            result = self.query(cte.this, tables)
            tables[name] = self._renamed(result, alias)
        return tables

    def _renamed(self, result: Result, alias: exp.Expr) -> Result:
        """The result under the column names of `name(a, b)`."""
        names = alias.args.get("columns") or []
        if not names:
            return result
        if result.carries:
            after = self._text.after(names[-1])
            self.order_insertions.append(Insertion(after, f", {sql.name(self._order)}"))
        known = result.outputs
        if known is None or len(known) != len(names):
            outputs = [Output(name=n.name, offset=self._text.start(n)) for n in names]
        else:
            outputs = [replace(o, name=n.name) for o, n in zip(known, names, strict=True)]
        return replace(result, outputs=tuple(outputs))

    def _set_operation(
        self,
        node: exp.SetOperation,
        tables: Mapping[str, Result],
        outer: _Scope | None,
        *,
        top: bool,
    ) -> Result:
        left = self.query(node.this, tables, outer, top=top)
        right = self.query(node.expression, tables, outer, top=top)
        self._modifiers(node)
        kind = {exp.Union: TokenType.UNION, exp.Except: TokenType.EXCEPT}.get(
            type(node), TokenType.INTERSECT
        )
        if left.carries or right.carries:
            self._check_set(node, kind, left, right)
        return Result(
            outputs=self._united(left, right, by_name=bool(node.args.get("by_name"))),
            carries=left.carries or right.carries,
            grouped=left.grouped or right.grouped,
            start=left.start,
        )

    def _check_set(
        self, node: exp.SetOperation, kind: TokenType, left: Result, right: Result
    ) -> None:
        at = self._text.keyword(node, kind, words=("UNION", "EXCEPT", "MINUS", "INTERSECT"))
        if not isinstance(node, exp.Union):
            word = "EXCEPT" if isinstance(node, exp.Except) else "INTERSECT"
            self._depends(at, f"{word} compares the documents of one transaction")
            self.order_trouble.append((at, f"{word} compares rows whole"))
        elif node.args.get("distinct"):
            message = "UNION drops rows that are equal within one transaction"
            self._depends(at, message, "write UNION ALL")
            self.order_trouble.append((at, "UNION compares rows whole"))
        elif not (left.carries and right.carries):
            lacking = right if left.carries else left
            self._depends(
                lacking.start,
                "this part does not read source: its rows would be published in every transaction",
                "put constant rows into views, and join them",
            )
            self.order_trouble.append((lacking.start, "a part of UNION ALL does not read source"))

    def _united(self, left: Result, right: Result, *, by_name: bool) -> tuple[Output, ...] | None:
        if left.outputs is None or right.outputs is None:
            return None
        if by_name:
            names = {o.name for o in left.outputs}
            return (*left.outputs, *(o for o in right.outputs if o.name not in names))
        if len(left.outputs) != len(right.outputs):
            counts = f"{len(left.outputs)} and {len(right.outputs)}"
            self._wrong(right.start, f"the parts of UNION have {counts} columns")
            return left.outputs
        united = []
        for one, other in zip(left.outputs, right.outputs, strict=True):
            if one.type is not None and other.type is not None:
                texts = {one.type.word, other.type.word}
                if "json" in texts and texts - {"json", "null"}:
                    self._wrong(
                        other.offset,
                        f'"{one.name}" is a value of any type in one part of UNION, '
                        "and of one type in another",
                        "take it apart with get_json_object first",
                    )
                numeral = one.type.numeral or other.type.numeral
                if numeral and texts & set(NUMBERS):
                    self._wrong(
                        other.offset,
                        f'"{one.name}" is text that writes a number in one part of UNION, and a '
                        "number in another: Spark would take both as DOUBLE",
                        "cast it to decimal in both parts",
                    )
            united.append(
                replace(
                    one,
                    type=one.type if one.type == other.type else _wider(one.type, other.type),
                    aggregate=one.aggregate if one.aggregate == other.aggregate else None,
                )
            )
        return tuple(united)

    # --- select ---

    def _select(
        self, node: exp.Select, tables: Mapping[str, Result], outer: _Scope | None, *, top: bool
    ) -> Result:
        scope = _Scope(tables, outer=outer)
        list_end = self._text.list_end(node)
        if list_end is None:
            at = self._text.start(node)
            self._wrong(at, "there is no select list", "write select * from … for a whole table")
            return Result(outputs=None, carries=False, start=at)
        start = self._text.start(node.expressions[0])
        carrier = self._from(node, scope)
        if node.args.get("kind") or node.find(exp.QueryTransform):
            self._wrong(start, "SELECT TRANSFORM runs programs")
        for projection in node.expressions:
            self._projection(projection, scope)
        outputs = self._outputs(node.expressions, scope)
        for part in (
            "where",
            "group",
            "having",
            "order",
            "sort",
            "cluster",
            "distribute",
            "qualify",
        ):
            if (clause := node.args.get(part)) is not None:
                self._expressions([clause], scope)
        self._expressions(node.args.get("windows") or (), scope)
        self._modifiers(node, carries=carrier is not None)
        aggregates = self._aggregates(node)
        grouped = bool(node.args.get("group")) or bool(aggregates)
        if grouped and carrier is not None:
            self._grouping(node, outputs, aggregates, top=top)
        if (distinct := node.args.get("distinct")) is not None and carrier is not None:
            at = self._text.keyword(distinct, TokenType.DISTINCT)
            self._depends(at, "DISTINCT drops rows that are equal within one transaction")
            self.order_trouble.append((at, "DISTINCT compares rows whole"))
        if carrier is not None:
            self._thread(carrier, list_end, grouped=grouped)
        generates = any(self._generates(p) for p in node.expressions)
        plain = carrier is not None and carrier.one_to_one and not generates
        return Result(
            outputs=outputs,
            carries=carrier is not None,
            one_to_one=plain and not grouped,
            grouped=grouped,
            multiplies=not plain or _groups_often(node.args.get("group")),
            start=start,
        )

    def _thread(self, carrier: _Relation, list_end: int, *, grouped: bool) -> None:
        order = sql.name(self._order)
        column = f"{sql.name(carrier.alias)}.{order}" if carrier.alias else order
        added = f", max({column}) as {order}" if grouped else f", {column}"
        self.order_insertions.append(Insertion(list_end, added))

    def _projection(self, node: exp.Expr, scope: _Scope) -> None:
        self._expressions([node], scope)
        if isinstance(node, exp.Alias):
            scope.aliases[node.alias] = self._type(node.this)

    def _outputs(self, projections: Sequence[exp.Expr], scope: _Scope) -> tuple[Output, ...] | None:
        outputs: list[Output] = []
        for node in projections:
            star = _star_of(node)
            if star is not None:
                expanded = self._expanded(node, star, scope)
                if expanded is None:
                    return None
                outputs += expanded
            elif isinstance(node, exp.Aliases) or self._generates(node):
                return None  # a generator names its columns itself
            else:
                outputs.append(self._output(node))
        return tuple(outputs)

    def _output(self, node: exp.Expr) -> Output:
        value = node.this if isinstance(node, exp.Alias) else node
        at = self._text.start(node.args["alias"] if isinstance(node, exp.Alias) else node)
        name = node.alias_or_name if isinstance(node, exp.Alias | exp.Column | exp.Dot) else ""
        if isinstance(node, exp.Dot):
            name = node.expression.name
        written = self._text.written(value).lower()
        return Output(
            name=name,
            offset=at,
            type=self._type(value),
            aggregate=written if written in AGGREGATES else None,
        )

    def _expanded(self, node: exp.Expr, star: exp.Expr, scope: _Scope) -> list[Output] | None:
        """The columns of a star; None if they are not known."""
        wanted = node.table if isinstance(node, exp.Column) else None
        relations = [r for r in scope.relations if wanted in (None, "", r.alias)]
        left_out = {c.name for c in star.args.get("except_") or ()}
        at = self._text.start(star)
        outputs: list[Output] = []
        for relation in relations:
            if relation.columns is None or scope.merged:
                return None
            names = relation.source.star if relation.source is not None else relation.columns
            outputs += (
                Output(
                    name=name,
                    offset=at,
                    type=relation.columns.get(name),
                    hidden=name in relation.hidden,
                    starred=True,
                )
                for name in names
                if name not in left_out
            )
        return outputs

    # --- FROM ---

    def _from(self, node: exp.Select, scope: _Scope) -> _Relation | None:
        """Fill the scope with relations; return the one that carries documents."""
        clause = node.args.get("from_")
        carrier: _Relation | None = None
        if clause is not None:
            carrier = self._carrier(self._relation(clause.this, scope))
            for lateral in clause.this.args.get("laterals") or ():
                carrier = self._lateral(lateral, scope, carrier)
            for join in [*(clause.this.args.get("joins") or ()), *(node.args.get("joins") or ())]:
                carrier = self._join(join, scope, carrier)
        for lateral in node.args.get("laterals") or ():
            carrier = self._lateral(lateral, scope, carrier)
        return carrier

    @staticmethod
    def _carrier(relation: _Relation) -> _Relation | None:
        return relation if relation.carries else None

    def _lateral(
        self, node: exp.Expr, scope: _Scope, carrier: _Relation | None
    ) -> _Relation | None:
        self._relation(node, scope)
        return None if carrier is None else replace(carrier, one_to_one=False)

    def _relation(self, node: exp.Expr, scope: _Scope) -> _Relation:
        relation = self._table(node, scope)
        scope.relations.append(relation)
        for pivot in node.args.get("pivots") or ():
            at = self._text.keyword(pivot, words=("PIVOT", "UNPIVOT"))
            self._wrong(at, "PIVOT and UNPIVOT are not supported", "write a case for each column")
        if (sample := node.args.get("sample")) is not None:
            at = self._text.keyword(sample, words=("TABLESAMPLE",))
            self._unrepeatable(at, "TABLESAMPLE depends on chance")
        return relation

    def _table(self, node: exp.Expr, scope: _Scope) -> _Relation:
        alias = node.args.get("alias")
        name = alias.name if alias is not None and alias.name else None
        if isinstance(node, exp.Lateral):
            return self._lateral_table(node, name, scope)
        if isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier):
            return self._named(node, name, alias, scope)
        if isinstance(node, exp.Table):
            self._expressions([node.this], scope)
            self._table_function(node.this)
            return _Relation(alias=name, columns=None)
        inner = self.query(
            node, scope.tables, scope if isinstance(node, exp.Lateral) else scope.outer
        )
        if alias is not None and not isinstance(node, exp.Values):
            inner = self._renamed(inner, alias)
        return _as_relation(inner, name)

    def _lateral_table(self, node: exp.Lateral, name: str | None, scope: _Scope) -> _Relation:
        if isinstance(node.this, exp.Subquery):
            inner = self.query(node.this, scope.tables, scope)
            if inner.carries:
                self._depends(self._text.start(node), "a subquery reads source once more")
            return replace(_as_relation(inner, name), carries=False)
        self._expressions([node.this], scope)
        self._table_function(node.this)
        alias = node.args.get("alias")
        names = (alias.args.get("columns") or []) if alias is not None else []
        if not names:
            return _Relation(alias=name, columns=None)
        kind = self._type(node.this.this) if isinstance(node.this, exp.Explode) else None
        element = kind.element if kind is not None and kind.word == "array" else None
        only = len(names) == 1
        return _Relation(alias=name, columns={n.name: element if only else None for n in names})

    def _named(
        self, node: exp.Table, name: str | None, alias: exp.Expr | None, scope: _Scope
    ) -> _Relation:
        at = self._text.start(node.this)
        if node.args.get("db") or node.args.get("catalog"):
            first = self._text.start(node)
            whole = ".".join(part.name for part in node.parts)
            self._wrong(first, f"{whole} is outside of this derivation", self._table_hint(scope))
            return _Relation(alias=name or node.name, columns=None)
        if node.name in scope.tables:
            result = scope.tables[node.name]
            if alias is not None:
                result = self._renamed(result, alias)
            return _as_relation(result, name or node.name)
        if node.name == SOURCE and self._source is not None:
            if alias is not None and alias.args.get("columns"):
                self._wrong(at, "columns of source have names", "rename them in the select list")
            return _Relation(
                alias=name or SOURCE,
                columns=dict.fromkeys(self._source.hidden)
                | {n: self._source.type(n) for n in self._source.names},
                carries=True,
                source=self._source,
                hidden=frozenset(self._source.hidden),
            )
        self._wrong(at, f'there is no table "{node.name}"', self._table_hint(scope))
        return _Relation(alias=name or node.name, columns=None)

    def _table_hint(self, scope: _Scope) -> str:
        known = sorted({*scope.tables, *([SOURCE] if self._source is not None else [])})
        if not known:
            return "a view has constant rows only, such as select * from values …"
        return f"a query reads {', '.join(known)}"

    def _table_function(self, node: exp.Expr) -> None:
        name = self._text.written(node).lower()
        reported = name in UNREPEATABLE or name not in FUNCTIONS
        if not reported and name not in GENERATORS | CONSTANT_TABLES:
            self._wrong(self._text.start(node), f"{name}() is not a table")

    _LEFT: Final = frozenset(["", "INNER", "CROSS", "LEFT", "SEMI", "ANTI"])
    _RIGHT: Final = frozenset(["", "INNER", "CROSS", "RIGHT"])

    def _join(self, node: exp.Join, scope: _Scope, carrier: _Relation | None) -> _Relation | None:
        if isinstance(node.this, exp.Lateral):
            return self._lateral(node.this, scope, carrier)
        relation = self._relation(node.this, scope)
        side, kind = (node.side or "").upper(), (node.kind or "").upper()
        if kind in ("SEMI", "ANTI"):
            scope.relations.pop()
        if node.args.get("using") or (node.args.get("method") or "").upper() == "NATURAL":
            scope.merged = True
        if (condition := node.args.get("on")) is not None:
            joined = [*scope.relations, relation] if kind in ("SEMI", "ANTI") else scope.relations
            self._expressions([condition], replace(scope, relations=list(joined)))
        at = self._text.start(node.this)
        word = kind if kind in ("SEMI", "ANTI") else side or kind
        if carrier is not None and relation.carries:
            self._depends(
                at,
                "this joins documents of one transaction with each other",
                "keep documents of one key in the state of a sqlite or python derivation, "
                "or let reductions join them",
            )
            self.order_trouble.append((at, "rows of a join of source with itself have two orders"))
            return replace(carrier, one_to_one=False)
        if carrier is None and not relation.carries:
            return None
        allowed = self._LEFT if carrier is not None else self._RIGHT
        if word not in allowed:
            self._depends(
                at,
                f"{word} JOIN gives rows of a view that no document of the transaction matches",
            )
            self.order_trouble.append((at, f"rows of {word} JOIN may stem from no document"))
        if kind in ("SEMI", "ANTI"):
            return carrier
        return replace(carrier or relation, one_to_one=False)

    # --- clauses ---

    _CLAUSES: Final = (
        ("limit", TokenType.LIMIT, "LIMIT depends on how documents are batched"),
        ("offset", TokenType.OFFSET, "OFFSET depends on how documents are batched"),
        ("order", TokenType.ORDER_BY, "ORDER BY sorts the documents of one transaction only"),
        ("sort", TokenType.SORT_BY, "SORT BY sorts the documents of one transaction only"),
        ("cluster", TokenType.CLUSTER_BY, "CLUSTER BY sorts the documents of one transaction only"),
        ("qualify", TokenType.QUALIFY, "QUALIFY depends on how documents are batched"),
    )

    def _modifiers(self, node: exp.Expr, *, carries: bool = True) -> None:
        for part, kind, message in self._CLAUSES:
            if (clause := node.args.get(part)) is not None and carries:
                words = ("FETCH", "LIMIT") if part == "limit" else (part,)
                self._depends(self._text.keyword(clause, kind, words=words), message)

    def _aggregates(self, node: exp.Select) -> list[exp.Expr]:
        """The aggregates of a select itself; a window's function is none."""
        found: list[exp.Expr] = []
        for projection in [*node.expressions, node.args.get("having")]:
            if projection is None:
                continue
            found += (
                inner
                for inner in projection.walk(prune=lambda n: isinstance(n, exp.Query | exp.Window))
                if isinstance(inner, exp.Func) and self._text.written(inner).lower() in AGGREGATES
            )
        return found

    def _grouping(
        self,
        node: exp.Select,
        outputs: tuple[Output, ...] | None,
        aggregates: Sequence[exp.Expr],
        *,
        top: bool,
    ) -> None:
        """Report aggregates that do not add up over transactions, whatever the target is."""
        group = node.args.get("group")
        at = self._text.keyword(group, TokenType.GROUP_BY) if group is not None else None
        for aggregate in aggregates:
            name, here = self._text.written(aggregate).lower(), self._text.start(aggregate)
            if name in ORDERED_AGGREGATES:
                why = f"{name}() depends on the order in which Spark reads rows"
                self._unrepeatable(here, why, "publish each document, and let the target reduce")
            elif name not in ADDS_UP:
                self._depends(here, f"{name}() of two transactions does not add up")
            elif aggregate.find(exp.Distinct) is not None:
                self._depends(here, f"{name}(distinct …) of two transactions does not add up")
        if group is None:
            self._depends(
                self._text.start(aggregates[0]),
                "an aggregate without GROUP BY gives a row in every transaction",
            )
            return
        assert at is not None  # noqa: S101 - the clause is there
        if any(group.args.get(p) for p in ("rollup", "cube", "grouping_sets", "totals", "all")):
            self._depends(at, "GROUP BY with grouping sets does not add up over transactions")
        if not top:
            message = "an aggregate inside of a query does not add up over transactions"
            self._depends(at, message, "aggregate in the outermost query")
        if (having := node.args.get("having")) is not None:
            here = self._text.keyword(having, TokenType.HAVING)
            self._depends(here, "HAVING sees the documents of one transaction only")
        for projection in node.expressions:
            value = projection.this if isinstance(projection, exp.Alias) else projection
            inside = [a for a in aggregates if a is not value and value in _ancestors(a)]
            if inside:
                self._depends(
                    self._text.start(inside[0]),
                    "an expression over aggregates does not add up over transactions",
                    "give each aggregate a column of its own",
                )

    def _generates(self, node: exp.Expr) -> bool:
        value = node.this if isinstance(node, exp.Alias | exp.Aliases) else node
        return isinstance(value, exp.Func) and self._text.written(value).lower() in GENERATORS

    # --- expressions ---

    def _expressions(self, nodes: Iterable[exp.Expr], scope: _Scope) -> None:
        for node in nodes:
            self._expression(node, scope)

    def _expression(self, node: exp.Expr, scope: _Scope) -> None:
        match node:
            case exp.Subquery() | exp.Query():
                self._subquery(node, scope)
                return
            case exp.Column() if isinstance(node.this, exp.Star):
                self._star(node.this, node.table, scope)
                return
            case exp.Column():
                self._types[id(node)] = self._resolve(node, scope)
                return
            case exp.Star():
                if not isinstance(node.parent, exp.Count):
                    self._star(node, "", scope)
                return
            case exp.Placeholder() | exp.Parameter() | exp.SessionParameter():
                self._wrong(self._text.start(node), "a lambda has no parameters: write columns")
            case exp.Window():
                self._depends(
                    self._text.start(node.this),
                    "a window sees the documents of one transaction only",
                )
            case exp.Cast() if isinstance(node.this, exp.Literal):
                self._moment(node)
            case exp.Func():
                self._function(node)
            case _:
                pass
        for child in node.iter_expressions():
            self._expression(child, scope)
        self._numerals(node)

    def _numerals(self, node: exp.Expr) -> None:
        """Report text that writes a number where Spark would make it DOUBLE, or compare letters."""
        name = self._text.written(node).lower() if isinstance(node, exp.Func) else ""
        operands = list(node.iter_expressions())
        chooses = isinstance(node, exp.Case | exp.If) or name in CHOICES
        if chooses:
            operands = [
                inner
                for operand in operands
                for inner in ([operand.args["true"]] if isinstance(operand, exp.If) else [operand])
                if not isinstance(inner, exp.Predicate | exp.Connector)
            ]
        elif not isinstance(node, _ARITHMETIC) and name not in NUMERIC_FUNCTIONS:
            return
        kinds = [(operand, self._type(operand)) for operand in operands]
        found = next(
            (operand for operand, kind in kinds if kind is not None and kind.numeral), None
        )
        mixed = any(kind is not None and kind.word in NUMBERS for _, kind in kinds)
        if found is None or (chooses and not mixed):
            return
        column = found.name or "…"
        does = "compare letter by letter" if name in ("min", "max") else "take as DOUBLE"
        self._wrong(
            self._text.start(found),
            f"{column} is text that writes a number, which Spark would {does}",
            f"write cast({column} as decimal(38,2)), with as many digits as the numbers have",
        )

    def _subquery(self, node: exp.Expr, scope: _Scope) -> None:
        result = self.query(node, scope.tables, scope)
        if result.carries:
            self._depends(
                result.start, "a subquery over source sees the documents of one transaction only"
            )
        carried = result.outputs
        self._types[id(node)] = carried[0].type if carried and len(carried) == 1 else None

    def _moment(self, node: exp.Cast) -> None:
        text = str(node.this.this).strip().lower() if node.this.is_string else ""
        if text in SPECIAL_MOMENTS and node.to.this in exp.DataType.TEMPORAL_TYPES:
            at = self._text.keyword(node, words=[str(node.this.this)])
            self._unrepeatable(at, f"'{text}' depends on the time of the run")

    def _function(self, node: exp.Func) -> None:
        name = self._text.written(node).lower() or _UNWRITTEN.get(type(node), "")
        at = (
            self._text.start(node)
            if "start" in node.meta
            else self._text.keyword(node, words=[name])
        )
        if name == "unix_timestamp" and not node.args.get("this") and not node.expressions:
            self._unrepeatable(at, f"{name}() depends on the time of the run")
        elif name in UNREPEATABLE:
            hint = "use flow_published_at" if "time of the run" in UNREPEATABLE[name] else None
            self._unrepeatable(at, f"{name}() depends on {UNREPEATABLE[name]}", hint)
        elif name in OUTSIDE:
            self._wrong(at, f"{name}() reaches outside of this derivation")
        elif name.isidentifier() and name not in FUNCTIONS:
            close = difflib.get_close_matches(name, FUNCTIONS, n=1)
            hint = f"did you mean {close[0]}()?" if close else None
            self._wrong(at, f"Spark has no function {name}()", hint)

    def _star(self, node: exp.Expr, table: str, scope: _Scope) -> None:
        relations = [r for r in scope.relations if table in ("", r.alias)]
        if table and not relations:
            return self._no_column(node, table, scope)
        if any(r.source is not None for r in relations):
            self.whole = True
            if renamed := [name for r in relations if r.source for name in r.source.renamed]:
                message = f"* is not clear: a projection calls another location {renamed[0]}"
                hint = "list the columns, or give the projection another name"
                self._wrong(self._text.start(node), message, hint)
        self._stars.append((node, relations))
        return None

    def _resolve(self, node: exp.Column, scope: _Scope) -> SqlType | None:
        """The type of a column, which must be known to the scope."""
        parts = [part.name for part in node.parts]
        here: _Scope | None = scope
        while here is not None:
            found = self._found(parts, here, node)
            if found is not None:
                return found[0]
            here = here.outer
        self._no_column(node, parts[0], scope)
        return None

    def _found(
        self, parts: list[str], scope: _Scope, node: exp.Column
    ) -> tuple[SqlType | None] | None:
        first, *rest = parts
        for relation in scope.relations:
            if rest and relation.alias == first:
                if relation.columns is None:
                    return (None,)
                if rest[0] in relation.columns:
                    return (self._use(relation, rest, node),)
        matches = [r for r in scope.relations if r.columns is not None and first in r.columns]
        if len(matches) > 1 and not scope.merged:
            named = " and ".join(r.alias or "a query" for r in matches)
            self._wrong(self._text.start(node), f'"{first}" is a column of {named}')
        if matches:
            return (self._use(matches[0], parts, node),)
        if first in scope.aliases:
            return (scope.aliases[first] if not rest else None,)
        if any(r.columns is None for r in scope.relations):
            return (None,)
        return None

    def _use(self, relation: _Relation, parts: list[str], node: exp.Column) -> SqlType | None:
        """Note that a column is used, and go into its members."""
        name, *members = parts
        if relation.source is not None and name not in relation.hidden:
            self.fields.add(name)
        assert relation.columns is not None  # noqa: S101 - the caller's
        kind = relation.columns[name]
        for member in members:
            if kind is None or kind.word != "struct" or kind.members is None:
                return None
            if member not in dict(kind.members):
                known = [n for n, t in kind.members if t is not None]
                self._wrong(
                    self._text.start(node.this),
                    f'{name} has no member "{member}"',
                    _meant(member, known),
                )
                self.broken.add(self._text.start(node))
                return None
            kind = kind.member(member)
        return kind

    def _no_column(self, node: exp.Expr, name: str, scope: _Scope) -> None:
        known: list[str] = []
        for relation in scope.relations:
            names = relation.source.names if relation.source is not None else relation.columns
            known += names or ()
        only = scope.relations[0] if len(scope.relations) == 1 else None
        at = self._text.start(node)
        self.broken.add(at)
        if isinstance(node, exp.Column) and len(node.parts) > 1:
            written = ".".join(part.name for part in node.parts)
            named = next((r for r in scope.relations if r.alias == node.parts[0].name), None)
            if named is not None:
                names = [n for n in named.columns or () if n not in named.hidden]
                where = self._called(named)
                wanted = node.parts[1].name
                message, hint = f'{where} has no column "{wanted}"', _meant(wanted, names)
            else:
                aliases = [r.alias for r in scope.relations if r.alias]
                message = f'there is no table or column "{name}" for {written}'
                hint = _meant(name, [*aliases, *known])
            return self._wrong(at, message, hint)
        if not scope.relations:
            return self._wrong(at, f'there is no column "{name}": the query reads no table')
        where = self._called(only) if only is not None else "no table of the query"
        verb = "has no" if only is not None else "has a"
        return self._wrong(at, f'{where} {verb} column "{name}"', _meant(name, known))

    def _called(self, relation: _Relation) -> str:
        if relation.source is not None:
            return f"source ({self._collection})"
        return relation.alias or "the query in FROM"

    def _type(self, node: exp.Expr | None) -> SqlType | None:
        return expression_type(node, lambda n: self._types.get(id(n)), self._text.written)


_ARITHMETIC: Final = (exp.Neg, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.IntDiv)
_UNWRITTEN: Final[Mapping[type, str]] = {
    exp.CurrentDate: "current_date",
    exp.CurrentTimestamp: "current_timestamp",
    exp.CurrentTime: "current_time",
    exp.CurrentUser: "current_user",
    exp.Localtimestamp: "localtimestamp",
    exp.Localtime: "localtime",
    exp.Rand: "rand",
    exp.Uuid: "uuid",
}
"""Functions whose place sqlglot does not always keep."""


def _star_of(node: exp.Expr) -> exp.Expr | None:
    if isinstance(node, exp.Star):
        return node
    if isinstance(node, exp.Column) and isinstance(node.this, exp.Star):
        return node.this
    return None


def _groups_often(group: exp.Expr | None) -> bool:
    """True if a row may be part of several groups."""
    return group is not None and group.find(exp.Cube, exp.GroupingSets, exp.Rollup) is not None


def _as_relation(result: Result, alias: str | None) -> _Relation:
    known = result.outputs
    return _Relation(
        alias=alias,
        columns=None if known is None else {o.name: o.type for o in known},
        carries=result.carries,
        one_to_one=result.one_to_one,
        hidden=frozenset(o.name for o in known or () if o.hidden),
    )


def _ancestors(node: exp.Expr) -> list[Any]:
    found = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


def _wider(one: SqlType | None, other: SqlType | None) -> SqlType | None:
    """The type of a column of a union, if both parts have one that says it."""
    if one is not None and one.word == "null":
        return other
    return one if other is not None and other.word == "null" else None


def _meant(name: str, known: Iterable[str]) -> str | None:
    """The hint for an unknown name: those that are near, or some of those that there are."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(_shown(c) for c in close)}?"
    return f"there are {', '.join(map(_shown, names[:5]))}" if names else None


def _shown(name: str) -> str:
    return name if name.isidentifier() else sql.name(name)
