"""Documents through SQLite: every conversion, order, and mistakes of lambdas."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.infer import infer
from penstock.model.json_order import Json
from penstock.model.spec import Field
from penstock.runtime.derive.engine import Document, LambdaFailed, ShardContext, SourceRead
from penstock.runtime.derive.sqlite_values import NotConvertible, each_binder, row_binder
from runtime.derive.sqlite_derivations import UUID, Files, engine_of, reads, transaction

ID = {"id": {"type": "integer"}}


def run(
    code: str,
    documents: list[Document],
    source: dict[str, Any],
    target: dict[str, Any] | None = None,
) -> list[Document]:
    engine = pickle.loads(pickle.dumps(engine_of(code, source, target)))  # noqa: S301
    published, patches = transaction(engine, reads(*documents), Files(Path("/nonexistent")))
    assert patches == ()
    return [document for _, document in published]


@pytest.mark.parametrize(
    ("schema", "value", "kind", "want"),
    [
        pytest.param({"type": "boolean"}, True, "integer", 1, id="true is 1"),
        pytest.param({"type": "boolean"}, False, "integer", 0, id="false is 0"),
        pytest.param({"type": "integer"}, 7, "integer", 7, id="an integer"),
        pytest.param({"type": "integer"}, 2.0, "integer", 2, id="an integral float is an integer"),
        pytest.param({"type": "integer"}, 2**63 - 1, "integer", 2**63 - 1, id="the last integer"),
        pytest.param({"type": "integer"}, -(2**63), "integer", -(2**63), id="the first integer"),
        pytest.param({"type": "number"}, 0.1, "real", 0.1, id="a number"),
        pytest.param({"type": "number"}, 2, "real", 2.0, id="an integral number is REAL"),
        pytest.param({"type": "number"}, 2**70, "real", 2.0**70, id="a large number is REAL"),
        pytest.param({}, 2, "integer", 2, id="of any type: 2 is an integer"),
        pytest.param({}, 2.0, "integer", 2, id="of any type: 2.0 is the same integer"),
        pytest.param({}, 2.5, "real", 2.5, id="of any type: 2.5 is REAL"),
        pytest.param({"type": "string"}, "é\0x", "text", "é\0x", id="a string"),
        pytest.param({"type": "string"}, "12", "text", "12", id="digits without a format"),
        pytest.param(
            {"type": "string", "format": "integer"}, "-12", "integer", -12, id="format integer"
        ),
        pytest.param(
            {"type": "string", "format": "integer"}, "x", "text", "x", id="no integer after all"
        ),
        pytest.param(
            {"type": "string", "format": "number"}, "1e2", "real", 100.0, id="format number"
        ),
        pytest.param(
            {"type": "string", "format": "number"}, "NaN", "text", "NaN", id="NaN stays text"
        ),
        pytest.param(
            {"type": "string", "format": "number"},
            "-Infinity",
            "real",
            "-Infinity",
            id="an infinity goes through",
        ),
        pytest.param(
            {"type": "string", "contentEncoding": "base64"}, "AP8=", "blob", "AP8=", id="base64"
        ),
        pytest.param(
            {"type": "string", "contentEncoding": "base64"}, "?", "text", "?", id="no base64"
        ),
        pytest.param(
            {"type": "array"}, [1, {"b": 1, "a": 0.5}], "text", [1, {"b": 1, "a": 0.5}], id="array"
        ),
        pytest.param(
            {"type": "object"}, {"b": [], "a": None}, "text", {"b": [], "a": None}, id="object"
        ),
        pytest.param({"type": "integer"}, None, "null", None, id="null"),
    ],
)
def test_a_value_goes_in_by_its_type_and_comes_back(
    schema: dict[str, Any], value: Json, kind: str, want: Json
) -> None:
    assert run("select $v as v, typeof($v) as t", [{"id": 1, "v": value}], {**ID, "v": schema}) == [
        {"v": want, "t": kind}
    ]


MONEY = {"type": "string", "format": "number"}


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("decimal_add($a, $b)", "0.3"),
        ("decimal_sub($a, $b)", "-0.1"),
        ("decimal_mul($a, '0.050')", "0.0050"),
        ("decimal_sub($a, '0.10')", "0.00"),
        ("decimal_cmp($a, '0.10')", "0"),
        ("decimal_cmp('10', '9')", "1"),
        ("decimal_add($a, null)", None),
        ("(select decimal_sum(column1) from (values ($a), ($b), ('1e2'), (null)))", "100.3"),
        ("$a", "0.1"),
        ("3", "3"),
        ("1e2", "100"),
    ],
)
def test_money_is_added_exactly_and_written_as_text(expression: str, want: str | None) -> None:
    made = run(
        f"select {expression} as total",
        [{"id": 1, "a": "0.10", "b": "0.2"}],
        {**ID, "a": MONEY, "b": MONEY},
        {"id": {"type": "integer"}, "total": MONEY},
    )
    assert made == [{"total": want}]


def test_what_is_absent_is_null_and_null_is_a_member() -> None:
    assert run(
        "select $id, $a$b, $a$b is null as n",
        [{"id": 1}, {"id": 2, "a": {"b": None}}],
        {**ID, "a": {"type": "object", "properties": {"b": {"type": "string"}}}},
    ) == [{"id": 1, "a/b": None, "n": 1}, {"id": 2, "a/b": None, "n": 1}]


def test_a_document_is_a_parameter_and_so_is_its_time() -> None:
    document: Document = {"id": 1, "b": 2, "_meta": {"uuid": UUID}}
    (got,) = run("select $flow_document as d, $flow_published_at", [document], ID)
    assert got["d"] == document
    assert str(got["flow_published_at"]).endswith("Z")


@pytest.mark.parametrize(
    ("column", "schema", "want"),
    [
        pytest.param("0.1 + 0.2", {}, 0.1 + 0.2, id="numbers keep 17 digits"),
        pytest.param("json_array(0.1 + 0.2)", {}, [0.1 + 0.2], id="in JSON too"),
        pytest.param("9e999", {}, "Infinity", id="infinity is a string"),
        pytest.param("-9e999", {}, "-Infinity", id="so is its negative"),
        pytest.param("9e999 - 9e999", {}, None, id="SQLite has no NaN"),
        pytest.param("1", {"type": "boolean"}, True, id="1 is true where only booleans are"),
        pytest.param("0", {"type": ["boolean", "null"]}, False, id="null aside"),
        pytest.param("2", {"type": "boolean"}, 2, id="2 is no boolean"),
        pytest.param("1", {"type": ["boolean", "integer"]}, 1, id="1 where integers are"),
        pytest.param("null", {"type": "boolean"}, None, id="NULL is no boolean"),
        pytest.param("x'00ff'", {}, "AP8=", id="a blob is base64"),
        pytest.param("' {\"a\": [1]}'", {}, {"a": [1]}, id="JSON text is embedded"),
        pytest.param("'[1'", {}, "[1", id="text that only begins like JSON"),
        pytest.param("'[NaN]'", {}, "[NaN]", id="NaN is not JSON"),
        pytest.param("'[1e999]'", {}, "[1e999]", id="nor is a number beyond doubles"),
        pytest.param("' 1'", {}, " 1", id="other JSON stays text"),
        pytest.param("'[1]'", {"type": "string"}, "[1]", id="where only strings are, text is text"),
        pytest.param("9223372036854775807 + 1", {}, 2.0**63, id="an overflow is REAL"),
    ],
)
def test_a_column_becomes_a_member_by_its_type(
    column: str, schema: dict[str, Any], want: Json
) -> None:
    (got,) = run(f"select {column} as v", [{"id": 1}], ID, {"v": schema})
    assert got == {"v": want}
    assert type(got["v"]) is type(want)


@pytest.mark.parametrize("name", ["json", "JSON_doc", '"Json({x})"'])
def test_a_single_column_that_begins_with_json_is_the_document(name: str) -> None:
    code = f"select json_object('id', $id, 'x', 0.1) as {name}"
    assert run(code, [{"id": 3}], ID) == [{"id": 3, "x": 0.1}]
    code = f"select json_object('id', $id) as {name}, 1 as b"
    assert run(code, [{"id": 3}], ID) == [{name.strip('"'): {"id": 3}, "b": 1}]


@pytest.mark.parametrize(
    ("column", "why"),
    [("null", "NULL"), ("'x'", "not JSON"), ("'[1]'", "not an object"), ("1", "int")],
)
def test_a_whole_document_must_be_an_object(column: str, why: str) -> None:
    with pytest.raises(LambdaFailed, match="failed on a document") as failed:
        run(f"select {column} as json", [{"id": 3}], ID)
    assert why in (failed.value.why or "")


def test_rows_come_in_the_order_of_documents_statements_and_rows() -> None:
    codes = [
        "select $id, 'a' as s; select $id, value as s from json_each('[1,2]')",
        "select $id, 'z' as s",
    ]
    engine = engine_of(codes, ID)
    given = [SourceRead(t, {"id": i}) for i, t in enumerate([0, 1, 0])]
    published, _ = transaction(engine, given, Files(Path("/nonexistent")))
    assert published == [
        (0, {"id": 0, "s": "a"}), (0, {"id": 0, "s": 1}), (0, {"id": 0, "s": 2}),
        (1, {"id": 1, "s": "z"}),
        (2, {"id": 2, "s": "a"}), (2, {"id": 2, "s": 1}), (2, {"id": 2, "s": 2}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "document", "line", "why"),
    [
        pytest.param(
            "select 1;\nselect json_extract($s, '$.a') as a",
            {"s": "{"},
            2,
            "malformed JSON",
            id="SQLite's error",
        ),
        pytest.param(
            "select $id",
            {"id": 2**63},
            1,
            "/id is 9223372036854775808, and an integer of SQLite has 64 bits",
            id="beyond 64 bits",
        ),
        pytest.param("select $id", {"id": -(2**63) - 1}, 1, "64 bits", id="below them"),
        pytest.param(
            "select $s, $id",
            {"id": 2**63},
            1,
            "/id is 9223372036854775808, and an integer of SQLite has 64 bits",
            id="beyond 64 bits, among others",
        ),
        pytest.param("select $n", {"n": 10**400}, 1, "beyond every REAL", id="beyond doubles"),
        pytest.param("select $i", {"i": "9" * 30}, 1, "30 digits", id="digits beyond 64 bits"),
        pytest.param(
            "select $m", {"m": "12345678901234567890.12"}, 1, "decimal_add", id="digits of money"
        ),
        pytest.param(
            "select decimal_add(iif($s = '{}', 1, $s), 1)",
            {"s": "ten"},
            1,
            "expects numbers",
            id="words",
        ),
        pytest.param("select $s", {"s": "\ud800"}, 1, "UTF-8", id="a lone surrogate"),
        pytest.param("select cast(x'ff' as text) as s", {}, 1, "UTF-8", id="text that is none"),
    ],
)
def test_an_error_names_the_document_and_the_line(
    code: str, document: Document, line: int, why: str
) -> None:
    source = {
        **ID, "s": {"type": "string"}, "n": {"type": "number"},
        "i": {"type": "string", "format": "integer"}, "m": MONEY,
    }  # fmt: skip
    with pytest.raises(LambdaFailed) as failed:
        run(code, [{"id": 1, "s": "{}"}, {"id": 1, "s": "{}"} | document], source)
    assert failed.value.read == (1 if "cast(x" not in code else 0)
    assert failed.value.where == f"acme/derived, transform t0, line {line} of its lambda"
    assert why in (failed.value.why or "")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("select 1;\nselect * form t", "line 2"),
        ("select $nothing", "$nothing is not a field of acme/source"),
        ("attach 'x' as y", "ATTACH"),
        ("commit", "the runtime begins"),
        ("savepoint s", "the runtime begins"),
        ("pragma journal_mode = delete", "PRAGMA journal_mode"),
        ("pragma user_version", "PRAGMA user_version"),
        ("create table t (id)", "only migrations"),
        ("create temp table t (id)", "temporary"),
        ("insert into sqlite_sequence values (1, 1)", ""),
        ("select load_extension('x')", "load_extension reaches outside"),
    ],
)
def test_code_that_cannot_run_is_refused_before_any_document(code: str, why: str) -> None:
    with pytest.raises(LambdaFailed) as failed:
        engine_of(code, ID).open(
            ShardContext(shard=0, shards=1, state={}, files=Files(Path("/nonexistent")))
        )
    assert failed.value.read is None
    assert why in f"{failed.value}"


def test_a_lambda_that_does_not_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.derive.sqlite_engine._STEPS_BETWEEN_CHECKS", 1000)
    code = (
        "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) as id from n"
    )
    engine = engine_of(code, ID)
    object.__setattr__(engine, "document_s_max", 0.05)
    with pytest.raises(LambdaFailed) as failed:
        transaction(engine, reads({"id": 1}), Files(Path("/nonexistent")))
    assert failed.value.read == 0
    assert "0.05 s" in (failed.value.why or "")


def test_a_disabled_transform_keeps_the_index_of_others() -> None:
    engine = engine_of(["select $id, 0 as t", "select $id, 1 as t"], ID)
    object.__setattr__(engine, "lambdas", (None, engine.lambdas[1]))
    published, _ = transaction(engine, reads({"id": 5}, transform=1), Files(Path("/nonexistent")))
    assert published == [(0, {"id": 5, "t": 1})]


def test_without_migrations_any_shard_may_run_it() -> None:
    assert not engine_of("select $id", ID).stateful
    assert engine_of("select $id", ID, migrations=["create table t (id)"]).stateful


_MEMBERS = ("i", "s", "n", "t", "b", "o")
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.lists(st.integers(), max_size=2),
)


@given(document=st.dictionaries(st.sampled_from(_MEMBERS), _VALUES), data=st.data())
def test_parameters_are_the_same_at_once_and_one_by_one(
    document: Document, data: st.DataObject
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "i": {"type": "integer"},
            "s": {"type": "string"},
            "n": {"type": "number"},
            "t": {"type": "string", "format": "integer"},
            "b": {"type": ["boolean", "null"]},
            "o": {},
        },
    }
    shape = infer(schema)
    names = data.draw(st.lists(st.sampled_from(_MEMBERS), max_size=4))
    fields = [Field(name=name, location=f"/{name}") for name in names]
    try:
        each = each_binder(fields, shape)(document)
    except NotConvertible:
        return  # the database refuses the parameters of the other
    found = row_binder(fields, shape)(document)
    assert [(type(value), value) for value in found] == [(type(value), value) for value in each]
