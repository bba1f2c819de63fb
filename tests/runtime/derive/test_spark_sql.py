"""Spark lambdas by their text: what is accepted, what is refused and where, what is inserted."""
# ruff: noqa: S608 - queries are what is tested

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.spec import CollectionSpec
from penstock.runtime.derive.mistakes import Mistake
from penstock.runtime.derive.spark_sql import SparkLambda, check_views, judge_lambda
from support.spark_lambdas import INTEGER, LAST, LINEAR, NUMBER, SOURCE, SUMS, VIEWS
from support.specs import collection


def judge(
    text: str, target: CollectionSpec = LAST, *, nonlinear: bool = False
) -> SparkLambda | list[Mistake]:
    return judge_lambda(text, source=SOURCE, target=target, views=VIEWS, nonlinear=nonlinear)


def accepted(text: str, target: CollectionSpec = LAST, *, nonlinear: bool = False) -> SparkLambda:
    found = judge(text, target, nonlinear=nonlinear)
    assert isinstance(found, SparkLambda), found
    return found


@pytest.mark.parametrize(("text", "ordered"), LINEAR)
def test_order_is_inserted_and_nothing_else_changes(text: str, ordered: str) -> None:
    found = accepted(text)
    assert found.ordered_text == ordered
    assert found.order_matters
    assert found.linear
    assert found.written == text


def test_aggregates_that_add_up_are_linear() -> None:
    text = (
        "select sender as account, sum(amount) as amount, max(id) last, min(id) as first\n"
        "from source group by sender"
    )
    found = accepted(text, SUMS)
    assert not found.order_matters
    assert found.linear
    assert not found.one_to_one
    assert found.ordered_text == text.replace("first\n", "first, max(`source`.`$ord`) as `$ord`\n")
    assert found.explain() == (
        "native Spark SQL: adds up the documents of a transaction; order does not matter"
    )


@pytest.mark.parametrize(
    ("text", "one"),
    [
        ("select sender as account from source where id > 0", True),
        ("select account from (select sender as account from source) t", True),
        ("select sender as account from source left semi join rates on who = sender", True),
        ("select sender as account from source join rates on who = sender", False),
        ("select sender as account, explode(tags) as city from source", False),
        ("select sender as account from source, lateral explode(tags) as t(x)", False),
        ("select sender as account from source union all select sender from source", False),
    ],
)
def test_one_row_per_document(text: str, one: bool) -> None:
    found = accepted(text)
    assert found.one_to_one == one
    assert found.multiplies != one


@pytest.mark.parametrize(
    ("text", "multiplies"),
    [
        ("select sender as account, sum(amount) as amount from source group by sender", False),
        (
            "select x as account, count(*) as amount from source, lateral explode(tags) as t(x) "
            "group by x",
            True,
        ),
        (
            "select account, count(*) as amount from (select sender as account, explode(tags) as x "
            "from source) group by account",
            True,
        ),
    ],
)
def test_more_rows_than_documents(text: str, multiplies: bool) -> None:
    assert accepted(text, SUMS).multiplies == multiplies


@pytest.mark.parametrize(
    "sets", ["sender with rollup", "cube(sender)", "grouping sets ((sender), ())"]
)
def test_a_document_in_several_groups_becomes_several_rows(sets: str) -> None:
    text = f"select sender as account, sum(amount) as amount from source group by {sets}"
    assert accepted(text, SUMS, nonlinear=True).multiplies


def test_order_matters_only_to_what_is_written() -> None:
    assert not accepted("select sender as account, amount from source", SUMS).order_matters
    assert accepted("select sender as account, town as city from source").order_matters
    ordered = dataclasses.replace(SUMS, key=("/account", "/last"))
    assert not accepted("select sender account, id as last from source", ordered).order_matters


def test_what_is_known_of_a_lambda() -> None:
    found = accepted("select sender as account, `at/city` as `geo/city`, id as count from source")
    assert found.fields == ("at/city", "id", "sender")
    assert not found.whole
    assert found.outputs is not None
    assert [(o.name, o.location, o.type) for o in found.outputs] == [
        ("account", "/account", "string"),
        ("geo/city", "/geo/city", "string"),
        ("count", "/count", "integer"),
    ]
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301 - our own


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("select lower(sender) as account from source", True),
        ("select UPPER (sender) as account from source", True),
        ("select sender as account from source where sender ilike 'a%'", True),
        ("select sender as account, id as lower from source", False),
    ],
)
def test_what_changes_the_case_of_letters(text: str, changes: bool) -> None:
    assert accepted(text).may_change_case == changes


# --- refusals ---

ALLOW = "drop it, or set nonlinear: allow if results may depend on transactions"

WRONG: list[tuple[str, str, str, str | None]] = [
    ("select sender as account frm source", "frm", 'near "frm": syntax error', None),
    ("select sender as account,, id from source", ",, id", 'near ",": nothing follows it', None),
    ("", "", "there is no query", None),
    ("select 'a", "a", "a text or a comment is not closed", None),
    (
        "select sender as account, any from source",
        "from",
        'near "from": syntax error',
        "a name that is a keyword needs backquotes",
    ),
    (
        "drop table x",
        "drop",
        "DROP is not a query",
        "a lambda is one query, such as select … from source",
    ),
    (
        "insert into x select 1",
        "insert",
        "INSERT is not a query",
        "a lambda is one query, such as select … from source",
    ),
    (
        "select sender as account from source; select 1",
        "select 1",
        "a lambda is one query, and here another one begins",
        "put them together with UNION ALL, or write a transform for each",
    ),
    (
        "select sendr as account from source",
        "sendr",
        'source (acme/transfers) has no column "sendr"',
        "did you mean sender?",
    ),
    (
        "select s.sendr as account from source s",
        "s.sendr",
        'source (acme/transfers) has no column "sendr"',
        "did you mean sender?",
    ),
    (
        "select Sender as account from source",
        "Sender",
        'source (acme/transfers) has no column "Sender"',
        "did you mean sender?",
    ),
    ("select at.cty as account from source", "cty", 'at has no member "cty"', "did you mean city?"),
    (
        "select sender as account from sources",
        "sources",
        'there is no table "sources"',
        "a query reads rates, source",
    ),
    (
        "select x as account from parquet.`/x`",
        "parquet",
        "parquet./x is outside of this derivation",
        "a query reads rates, source",
    ),
    (
        "select sender as account from source, read_files('/x')",
        "read_files",
        "read_files() reaches outside of this derivation",
        None,
    ),
    (
        "select sender as account, reflect('java.lang.System', 'exit', 1) as loose from source",
        "reflect",
        "reflect() reaches outside of this derivation",
        None,
    ),
    (
        "select upcase(sender) as account from source",
        "upcase",
        "Spark has no function upcase()",
        "did you mean ucase()?",
    ),
    (
        "select sender as account, '${env:HOME}' as city from source",
        "${env",
        "Spark would replace ${…}",
        "write '$' || '{…}' if a text must have it",
    ),
    (
        "select sender as account, :p as city from source",
        "p as",
        "a lambda has no parameters: write columns",
        None,
    ),
    (
        "with source as (select 1) select sender as account from source",
        "source as",
        '"source" is taken',
        "give the WITH query another name",
    ),
    (
        "select id as city, sender as account from source",
        "city",
        "/city of acme/last is string, and this is integer",
        "cast(… as string)",
    ),
    (
        "select sender as account, tags as geo from source",
        "geo",
        "/geo of acme/last is object, and this is array",
        None,
    ),
    (
        "select sender as account, flow_published_at as `on` from source",
        "`on`",
        "/on of acme/last is string (date), and this is timestamp",
        "cast(… as date)",
    ),
    (
        "select sender as account, town || 'x' as count from source",
        "count",
        "/count of acme/last is integer, and this is string",
        "cast(… as bigint)",
    ),
    (
        "select town as city from source",
        "town",
        "no column gives /account, the key of acme/last",
        "add `as account` to one",
    ),
    (
        "select sender as account, town as city, sender as city from source",
        "city from",
        "/city is written twice",
        None,
    ),
    (
        "select sender as account, at as geo, town as `geo/city` from source",
        "`geo/city`",
        "/geo/city and /geo are written, one inside the other",
        None,
    ),
    (
        "select sender as account, id + 1 from source",
        "id + 1",
        "this column has no name",
        "add `as` and the name of a member",
    ),
    (
        "select sender as account, flow_document from source",
        "flow_document",
        '"flow_document" is the whole document',
        "write select * for the document, or the members that are wanted",
    ),
    (
        "select sender as account, loose from source union all select sender, sender from source",
        "sender from source",
        '"loose" is a value of any type in one part of UNION, and of one type in another',
        "take it apart with get_json_object first",
    ),
    (
        "select sender as account, id as count from source union all select sender from source",
        "sender from source",
        "the parts of UNION have 2 and 1 columns",
        None,
    ),
]


PRICED = collection(
    "acme/priced",
    {"id": INTEGER, "price": {"type": "string", "format": "number"}, "rate": NUMBER},
)
TOTALS = collection(
    "acme/totals",
    {"id": INTEGER, "price": {"type": "string", "format": "number", "reduce": {"strategy": "sum"}}},
    reduce={"strategy": "merge"},
)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("select id, -price as price from source", "price as"),
        ("select id, price * 2 as price from source", "price *"),
        ("select id, sum(price) as price from source group by id", "price) as"),
        ("select id, max(price) as price from source group by id", "price) as"),
        ("select id, coalesce(price, 0.0) as price from source", "price, 0"),
        (
            "select id, case when rate > 1 then price else rate end as price from source",
            "price else",
        ),
        ("with c as (select id, price as p from source) select id, p + 1 as price from c", "p + 1"),
        (
            "select id, price from source "
            "union all select id, -cast(price as decimal(38,2)) from source",
            "price as decimal",
        ),
    ],
)
def test_text_that_writes_a_number_is_not_added_as_a_double(text: str, at: str) -> None:
    found = judge_lambda(text, source=PRICED, target=TOTALS, views={}, nonlinear=False)
    assert isinstance(found, list)
    (mistake,) = [each for each in found if "writes a number" in each.message]
    assert mistake.code == "E-LAMBDA"
    assert text[mistake.offset :].startswith(at)
    assert "decimal" in (mistake.hint or "")


@pytest.mark.parametrize(
    "text",
    [
        "select id, price from source",
        "select id, coalesce(price, '0') as price from source",
        "select id, sum(cast(price as decimal(38,2))) as price from source group by id",
        "select id, case when cast(price as int) > 1 then price else '0' end as price from source",
    ],
)
def test_text_that_writes_a_number_may_be_copied_and_cast(text: str) -> None:
    found = judge_lambda(text, source=PRICED, target=TOTALS, views={}, nonlinear=False)
    assert isinstance(found, SparkLambda), found


@pytest.mark.parametrize(("text", "at", "message", "hint"), WRONG, ids=[w[2] for w in WRONG])
def test_mistakes(text: str, at: str, message: str, hint: str | None) -> None:
    offset = text.rindex(at)
    want = Mistake(code="E-LAMBDA", offset=offset, message=f"line 1: {message}", hint=hint)
    assert judge(text) == [want]


RETRY = "and a retry must give the same documents"
NONLINEAR: list[tuple[str, str, str, bool]] = [
    (
        "select sender as account from source order by (select max(rate) from rates order by 1)",
        "order by (",
        "ORDER BY sorts the documents of one transaction only",
        True,
    ),
    (
        "select sender as account from source limit 3",
        "limit",
        "LIMIT depends on how documents are batched",
        True,
    ),
    (
        "select sender as account from source order by 1",
        "order",
        "ORDER BY sorts the documents of one transaction only",
        True,
    ),
    (
        "select distinct sender as account from source",
        "distinct",
        "DISTINCT drops rows that are equal within one transaction",
        True,
    ),
    (
        "select sender as account, row_number() over (order by id) as last from source",
        "row_number",
        "a window sees the documents of one transaction only",
        True,
    ),
    (
        "select sender as account from source except select who from rates",
        "except",
        "EXCEPT compares the documents of one transaction",
        True,
    ),
    (
        "select sender as account from source union select sender from source",
        "union",
        "UNION drops rows that are equal within one transaction",
        True,
    ),
    (
        "select a.sender as account from source a join source b on a.id = b.id",
        "source b",
        "this joins documents of one transaction with each other",
        True,
    ),
    (
        "select who as account from rates left join source on who = sender",
        "source",
        "LEFT JOIN gives rows of a view that no document of the transaction matches",
        True,
    ),
    (
        "select 'a' as account",
        "'a'",
        "this does not read source: its rows would be published in every transaction",
        True,
    ),
    (
        "select sender as account from source union all select 'a'",
        "'a'",
        "this part does not read source: its rows would be published in every transaction",
        True,
    ),
    (
        "select sender as account from source where id in (select id from source)",
        "id from",
        "a subquery over source sees the documents of one transaction only",
        True,
    ),
    (
        "select sender as account, avg(amount) as amount from source group by 1",
        "avg",
        "avg() of two transactions does not add up",
        True,
    ),
    (
        "select sender as account, count(distinct id) as amount from source group by 1",
        "count",
        "count(distinct …) of two transactions does not add up",
        True,
    ),
    (
        "select sender as account, sum(amount) + 1 as amount from source group by 1",
        "sum",
        "an expression over aggregates does not add up over transactions",
        True,
    ),
    (
        "select sender as account, max(amount) as amount from source group by 1",
        "amount from",
        "max() of each transaction is published, and /amount does not add up: it has sum",
        True,
    ),
    (
        "select sender as account, max(id) as last from source group by 1 having max(id) > 2",
        "having",
        "HAVING sees the documents of one transaction only",
        True,
    ),
    (
        "select max(sender) as account from source group by id",
        "account",
        "the key /account is an aggregate, so it depends on how documents are batched",
        True,
    ),
    (
        "select sender as account, first_value(id) as last from source group by 1",
        "first_value",
        "first_value() depends on the order in which Spark reads rows",
        False,
    ),
    (
        "select sender as account, rand() as amount from source",
        "rand",
        f"rand() depends on chance, {RETRY}",
        False,
    ),
    (
        "select sender as account, 1 as last from source where now() > flow_published_at",
        "now",
        f"now() depends on the time of the run, {RETRY}",
        False,
    ),
    (
        "select sender as account from source where current_date > date'2026-01-01'",
        "current_date",
        f"current_date() depends on the time of the run, {RETRY}",
        False,
    ),
    (
        "select sender as account from source where timestamp'now' > flow_published_at",
        "'now'",
        "'now' depends on the time of the run",
        False,
    ),
    (
        "select sender as account, monotonically_increasing_id() as last from source",
        "monot",
        f"monotonically_increasing_id() depends on how Spark spreads the rows, {RETRY}",
        False,
    ),
    (
        "select sender as account from source tablesample (5 percent)",
        "tablesample",
        "TABLESAMPLE depends on chance",
        False,
    ),
]


@pytest.mark.parametrize(
    ("text", "at", "message", "allowed"), NONLINEAR, ids=[n[0] for n in NONLINEAR]
)
def test_what_depends_on_transactions(text: str, at: str, message: str, allowed: bool) -> None:
    found = judge(text, SUMS)
    assert isinstance(found, list)
    where = text.rindex(at)
    assert [(m.code, m.offset, m.message) for m in found if m.offset == where] == [
        ("E-NONLINEAR", where, f"line 1: {message}")
    ]
    assert isinstance(judge(text, SUMS, nonlinear=True), SparkLambda) == allowed


def test_order_that_is_lost_is_refused_if_it_matters() -> None:
    text = "select distinct sender as account, town as city from source"
    found = judge(text, nonlinear=True)
    assert isinstance(found, list)
    assert [(m.code, m.offset) for m in found] == [("E-NONLINEAR", text.index("distinct"))]
    assert "depends on the order of documents, which is lost here" in found[0].message


def test_a_closed_target_names_what_a_star_gives() -> None:
    assert judge("select *, sender as account from source", SUMS) == [
        Mistake(
            code="E-LAMBDA",
            offset=7,
            message="line 1: * gives at, id, loose, recipient, sender, tags, "
            "which acme/sums does not have",
            hint="write * except (at, id, loose, recipient, sender, tags)",
        )
    ]


def test_views_are_constant() -> None:
    found = check_views(
        {
            "b": "select x from a",
            "a": "select 1 as x limit 3",
            "c": "select * from source",
            "d": "select now() as t",
            "source": "select 1",
            "e": "select",
        }
    )
    assert {name: [m.message for m in mistakes] for name, mistakes in found.items()} == {
        "a": [],
        "b": [],
        "c": ['line 1: there is no table "source"'],
        "d": [f"line 1: now() depends on the time of the run, {RETRY}"],
        "source": ['"source" is what a lambda reads; it cannot be a view'],
        "e": ["line 1: there is no select list"],
    }


# --- any linear query ---

_NAMES = ("sender", "recipient", "town", "`at/city`", "at.city")


@st.composite
def selects(draw: st.DrawFn, reads: str) -> str:
    """A linear select of two columns, `account` and `city`, from a table."""
    space = st.sampled_from([" ", "\n", "  -- from\n", " /* , from */ "])
    one, other = draw(st.sampled_from(_NAMES)), draw(st.sampled_from(_NAMES))
    alias = draw(st.sampled_from(["", " s", " as `s t`"])) if reads.isidentifier() else ""
    where = draw(st.sampled_from(["", " where id > 1", " lateral view explode(tags) t as tag"]))
    if reads != "source":
        one, other, where = "account", "city", draw(st.sampled_from(["", " where city > 'b'"]))
    cased = draw(st.sampled_from(["select", "SELECT", "SeLeCt all"]))
    gap = draw(space)
    return f"{cased}{gap}{one} as account,{gap}upper({other}) city{gap}from {reads}{alias}{where}"


@st.composite
def queries(draw: st.DrawFn) -> str:
    """A linear query: selects of source, in WITH queries, subqueries and unions."""
    query = draw(selects("source"))
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.sampled_from(["with", "columns", "subquery", "union", "star"])):
            case "with" if "with " not in query:
                query = f"with c as ({query})\n{draw(selects('c'))}"
            case "columns" if "with " not in query:
                query = f"with c(account, city) as ({query}) {draw(selects('c'))}"
            case "subquery":
                query = draw(selects(f"({query}\n) q"))
            case "star":
                query = f"select * from ({query}\n) q"
            case _:
                query = f"{query}\nunion all {draw(selects('source'))}"
    return query + draw(st.sampled_from(["", ";", " -- end"]))


@given(queries())
def test_what_was_inserted_can_be_taken_out(text: str) -> None:
    found = accepted(text)
    assert found.linear
    assert found.ordered_text is not None
    left, at = [], 0
    original = text.replace(";", " ")
    for character in found.ordered_text:  # what people wrote is in it, in the same order
        if at < len(original) and character == original[at]:
            at += 1
        else:
            left.append(character)
    assert at == len(original)
    assert "".join(left).count("$ord") >= text.lower().count("select")
