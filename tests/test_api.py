"""Penstock from Python: the names people use, and what they do."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import penstock
from penstock.errors import UserError
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.state import AckRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id, region]
      properties:
        id: {type: integer}
        region: {type: string}
        total: {type: number}
    projections:
      region: {location: /region, partition: true}
"""


TYPED = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id, must]
      properties:
        id: {type: integer}
        must: {type: [string, "null"], maxLength: 100}
        total: {type: number}
        weight: {type: number}
        price: {type: string, format: number}
        at: {type: string, format: date-time}
        seen: {type: string, format: date-time}
        day: {type: string, format: date}
        noon: {type: string, format: time}
        token: {type: string, format: uuid}
        items:
          type: array
          items: {type: object, properties: {price: {type: string, format: number}}}
"""


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[penstock.Penstock]:
    (tmp_path / "catalog.yaml").write_text(TYPED)
    with penstock.open(data=tmp_path / "data") as p:
        p.apply(tmp_path / "catalog.yaml")
        yield p


@pytest.fixture
def here(tmp_path: Path) -> Iterator[penstock.Penstock]:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    with penstock.open(data=tmp_path / "data") as p:
        p.apply(tmp_path / "catalog.yaml")
        yield p


def order(number: int, **members: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {"id": number, "region": "eu" if number % 2 else "us", **members}


def test_the_public_names_are_these() -> None:
    assert sorted(penstock.__all__) == [
        "ApplyResult",
        "Documents",
        "DocumentsRefused",
        "Frame",
        "Penstock",
        "PenstockError",
        "TaskRun",
        "TaskStatus",
        "Unavailable",
        "UsageError",
        "UserError",
        "__version__",
        "open",
    ]
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
        assert name in dir(penstock)
    with pytest.raises(AttributeError, match="nothing"):
        _ = penstock.nothing


def test_importing_penstock_imports_nothing_heavy() -> None:
    """Every command and every executor does it."""
    heavy = ("pyspark", "pyarrow", "penstock.api", "grpc")
    script = f"import sys, penstock; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.spark
def test_what_is_appended_is_read(here: penstock.Penstock, spark: SparkSession) -> None:
    assert here.append("acme/orders", [order(n, total=n / 2) for n in range(10)]) == 10
    assert here.append("acme/orders", []) == 0
    frame = here.read("acme/orders")
    assert frame.sparkSession is spark
    assert sorted((r["id"], r["total"]) for r in frame.collect()) == [(n, n / 2) for n in range(10)]
    assert here.read("acme/orders", selector="region=eu", columns=["id"]).count() == 5


def test_a_document_that_does_not_fit_keeps_the_others_out(here: penstock.Penstock) -> None:
    with pytest.raises(UserError) as caught:
        here.append("acme/orders", [order(1), {"id": "two", "region": "eu"}, order(3)])
    assert "document:2: /id" in str(caught.value)
    with pytest.raises(UserError, match="not JSON"):
        here.append("acme/orders", [order(1, total=float("nan"))])
    assert here.journals("acme/orders") == ()


def test_journals_are_listed(here: penstock.Penstock) -> None:
    here.append("acme/orders", [order(n) for n in range(4)])
    assert [journal.name for journal in here.journals()] == [
        "acme/orders/region=eu/pivot=00",
        "acme/orders/region=us/pivot=00",
    ]
    [us] = here.journals("acme/orders", selector="region=us")
    assert us.state.end == 3


def test_an_unknown_collection_is_told_with_what_may_be_meant(here: penstock.Penstock) -> None:
    with pytest.raises(UserError) as caught:
        here.append("acme/order", [])
    assert caught.value.fix == "did you mean acme/orders?"


def test_several_threads_may_append_at_once(here: penstock.Penstock) -> None:
    threads = [
        threading.Thread(target=here.append, args=("acme/orders", [order(n)])) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = sum(j.state.end for j in here.journals())
    assert rows == 16, "a document and an ACK of each"


def test_it_may_be_closed_twice(tmp_path: Path) -> None:
    p = penstock.open(data=tmp_path)
    p.close()
    p.close()


# ------------------------------------------------------------------------------- opening, closing


def test_opening_creates_nothing(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "typo") as p:
        assert "not applied yet" in repr(p)
        for call in (
            p.status,
            p.run,
            p.journals,
            lambda: p.append("acme/orders", []),
            lambda: p.read("acme/orders"),
        ):
            with pytest.raises(UserError, match="there is no deployment here") as caught:
                call()
            assert 'p.apply("catalog.yaml")' in str(caught.value)
        (tmp_path / "catalog.yaml").write_text("collections: {a/b: {}}")
        with pytest.raises(UserError):
            p.apply(tmp_path / "catalog.yaml")
        assert not (tmp_path / "typo").exists(), "neither did a catalog with mistakes"
        (tmp_path / "catalog.yaml").write_text(CATALOG)
        p.apply(tmp_path / "catalog.yaml")
        assert p.append("acme/orders", [order(1)]) == 1


def test_a_deployment_that_appears_later_is_found(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    with penstock.open(tmp_path / "data") as early, penstock.open(tmp_path / "data") as p:
        p.apply(tmp_path / "catalog.yaml")
        assert early.append("acme/orders", [order(1)]) == 1


def test_a_store_without_a_catalog_says_how_python_applies_one(tmp_path: Path) -> None:
    script = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).close()"
    (tmp_path / "data").mkdir()
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "data/consensus.db")], check=True)
    with penstock.open(tmp_path / "data") as p:
        with pytest.raises(UserError) as caught:
            p.status()
        assert caught.value.fix == 'p.apply("catalog.yaml")'
        with pytest.raises(UserError, match="no catalog is given"):
            p.apply()


def test_use_after_close_says_so(here: penstock.Penstock) -> None:
    here.close()
    for call in (here.status, here.run, here.journals, lambda: here.append("acme/orders", [])):
        with pytest.raises(UserError, match="this Penstock is closed"):
            call()
    with pytest.raises(UserError, match="this Penstock is closed"):
        here.apply("catalog.yaml")
    assert "closed" in repr(here)


def test_a_lost_store_is_told_in_python(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    with penstock.open(tmp_path / "data") as p:
        p.apply(tmp_path / "catalog.yaml")
        p.append("acme/orders", [order(n, note=os.urandom(9000).hex()) for n in range(9)])
    (tmp_path / "data/consensus.db").unlink()
    with pytest.raises(UserError, match="consensus store is missing") as caught:
        penstock.open(tmp_path / "data")
    assert "--" not in str(caught.value)


# ----------------------------------------------------------------------------------------- values


def stored(p: penstock.Penstock) -> list[dict[str, Any]]:
    """The documents as they were written, without Spark."""
    stores = p._stores

    async def read() -> list[str]:
        reader = CollectionReader(stores.journals, stores.blobs, stores.schemas, "acme/orders")
        return [line async for rows in reader.read() for line in to_lines(rows.batch, rows.root)]

    return sorted(map(json.loads, p._run_on(read())), key=lambda document: document["id"])


def test_python_values_take_the_form_that_the_schema_asks_for(typed: penstock.Penstock) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    values = {
        "id": np.int64(1),
        "total": np.float32(0.5),
        "price": Decimal("9.50"),
        "weight": Decimal("2.25"),
        "at": datetime.datetime(2026, 1, 31, 9, 30, tzinfo=zone),
        "seen": pd.Timestamp("2026-01-31T09:30:00.123456", tz="UTC"),
        "day": datetime.date(2026, 1, 31),
        "noon": datetime.time(12, 0),
        "token": uuid.UUID(int=7),
        "blob": b"abc",
        "flags": np.array([True, False]),
        "grid": np.array([[1, 2], [3, 4]]),
        "days": np.array(["2026-01-31"], "datetime64[D]"),
        "gone": pd.NA,
        "when": pd.NaT,
        "must": pd.NA,
        "items": ({"price": Decimal(3), "sizes": (1, np.uint8(2))},),
        "none": None,
    }
    assert typed.append("acme/orders", [values]) == 1
    assert stored(typed) == [
        {
            "id": 1,
            "total": 0.5,
            "price": "9.50",
            "weight": 2.25,
            "at": "2026-01-31T07:30:00Z",
            "seen": "2026-01-31T09:30:00.123456Z",
            "day": "2026-01-31",
            "noon": "12:00:00Z",
            "token": "00000000-0000-0000-0000-000000000007",
            "blob": "YWJj",
            "flags": [True, False],
            "grid": [[1, 2], [3, 4]],
            "days": ["2026-01-31"],
            "must": None,
            "items": [{"price": "3", "sizes": [1, 2]}],
            "none": None,
        }
    ]


@pytest.mark.parametrize(
    ("value", "why", "fix"),
    [
        (float("nan"), "nan is not a JSON number", "leave the member out"),
        (np.float64("inf"), "inf is not a JSON number", "leave the member out"),
        (Decimal("NaN"), "NaN is not a JSON number", "leave the member out"),
        (datetime.datetime(2026, 1, 31), "has no time zone", "datetime.UTC"),  # noqa: DTZ001
        (np.datetime64("2026-01-31T00:00:00"), "has no time zone", "pandas.Timestamp"),
        ({1, 2}, "is of type set", "convert it"),
        (object(), "is of type object", "convert it"),
        ({"a": [0, {5: 1, "x": {2}}]}, "5, which is of type int", "names of members are text"),
    ],
)
def test_values_that_have_no_json_are_refused_where_they_are(
    typed: penstock.Penstock, value: object, why: str, fix: str
) -> None:
    with pytest.raises(UserError, match="a document is not JSON") as caught:
        typed.append("acme/orders", [{"id": 1}, {"id": 2, "x/y": [0, value]}])
    assert str(caught.value.where).startswith("document 2: /x~1y/1")
    assert why in str(caught.value.why)
    assert fix in str(caught.value.fix)
    assert typed.journals() == ()


@pytest.mark.parametrize(
    ("documents", "what", "fix"),
    [
        ({"id": 1}, "this is one", 'p.append("acme/orders", [document])'),
        ('{"id": 1}', "this is text", "json.loads"),
        (7, "of type int", "a frame of pandas"),
        (None, "of type NoneType", "a frame of pandas"),
        (['{"id": 1}'], "not JSON", "json.loads"),
        ([[1]], "not JSON", "a document is a dict"),
    ],
)
def test_what_is_not_several_documents_is_told_as_that(
    here: penstock.Penstock,
    documents: Any,  # noqa: ANN401
    what: str,
    fix: str,
) -> None:
    with pytest.raises(UserError, match=what) as caught:
        here.append("acme/orders", documents)
    assert fix in str(caught.value.fix)


# ----------------------------------------------------------------------------------------- frames


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "id": [1, 2, 3],
            "total": [0.5, float("nan"), 2.0],
            "price": [Decimal("9.50"), None, Decimal("3.00")],
            "at": pd.to_datetime(["2026-01-31 09:30", None, "2026-01-31 10:00"]),
            "day": [datetime.date(2026, 1, 31)] * 3,
            "token": [uuid.UUID(int=n) for n in range(3)],
            "must": pd.array(["a", pd.NA, "c"], "string"),
            "kind": pd.Categorical(["x", "y", "x"]),
            "count": pd.array([1, pd.NA, 3], "Int64"),
            "items": [[{"price": Decimal(1)}], None, []],
        }
    )


EXPECTED = [
    {
        "id": 1,
        "total": 0.5,
        "price": "9.50",
        "at": "2026-01-31T09:30:00Z",
        "day": "2026-01-31",
        "token": "00000000-0000-0000-0000-000000000000",
        "must": "a",
        "kind": "x",
        "count": 1,
        "items": [{"price": "1"}],
    },
    {
        "id": 2,
        "day": "2026-01-31",
        "token": "00000000-0000-0000-0000-000000000001",
        "must": None,
        "kind": "y",
    },
    {
        "id": 3,
        "total": 2,
        "price": "3.00",
        "at": "2026-01-31T10:00:00Z",
        "day": "2026-01-31",
        "token": "00000000-0000-0000-0000-000000000002",
        "must": "c",
        "kind": "x",
        "count": 3,
        "items": [],
    },
]


def test_a_frame_of_pandas_is_appended(typed: penstock.Penstock) -> None:
    assert typed.append("acme/orders", frame()) == 3
    assert stored(typed) == EXPECTED


def test_a_named_index_is_a_member_and_another_is_not(typed: penstock.Penstock) -> None:
    named = pd.DataFrame({"must": ["a"]}, index=pd.Index([5], name="id"))
    assert typed.append("acme/orders", named) == 1
    assert stored(typed) == [{"id": 5, "must": "a"}]


class Exported:
    """What Polars and others are to Arrow: something with this method."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "form",
    [
        lambda table: table,
        lambda table: table.combine_chunks().to_batches()[0],
        lambda table: table.to_reader(max_chunksize=2),
        Exported,
    ],
    ids=["table", "batch", "reader", "another library"],
)
def test_arrow_is_appended_as_it_is(typed: penstock.Penstock, form: Any) -> None:  # noqa: ANN401
    table = pa.table({"id": [1, 2, 3], "must": ["a", None, "c"], "price": [Decimal("1.10")] * 3})
    assert typed.append("acme/orders", form(table)) == 3
    assert stored(typed) == [
        {"id": n, "must": must, "price": "1.10"} for n, must in ((1, "a"), (2, None), (3, "c"))
    ]


def test_a_row_that_does_not_fit_keeps_the_frame_out(typed: penstock.Penstock) -> None:
    many = pd.DataFrame({"id": range(40_000), "must": "m", "total": 1.0})
    many.loc[30_000, "must"] = "m" * 200
    with pytest.raises(penstock.DocumentsRefused) as caught:
        typed.append("acme/orders", many)
    assert "row:30001: /must" in str(caught.value)
    with pytest.raises(UserError, match="row:1: /total"):
        typed.append("acme/orders", pa.table({"id": [1], "must": ["m"], "total": [float("nan")]}))
    assert stored(typed) == []


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        (
            {"id": [1, 2], "mixed": [1, "a"]},
            "column mixed of the frame has values of several types",
        ),
        (pd.DataFrame([[1, 2]], columns=["id", "id"]), "two columns called id"),
    ],
)
def test_frames_that_cannot_be_meant_are_refused(
    typed: penstock.Penstock,
    columns: Any,  # noqa: ANN401
    what: str,
) -> None:
    with pytest.raises(UserError, match=what):
        typed.append("acme/orders", pd.DataFrame(columns))


@pytest.mark.spark
def test_a_spark_frame_is_written_by_tasks(here: penstock.Penstock, spark: SparkSession) -> None:
    some = spark.range(0, 1000, numPartitions=4).selectExpr(
        "id", "IF(id % 2 = 0, 'us', 'eu') AS region", "CAST(id AS DECIMAL(10, 2)) / 2 AS total"
    )
    assert here.append("acme/orders", some) == 1000
    producers = {fragment.producer for j in here.journals() for fragment in acks(j)}
    assert len(producers) == 4, "each task is a producer of its own"
    again = here.read("acme/orders").where("id < 10")
    assert here.append("acme/orders", again) == 10, "what was read may be appended"
    assert here.append("acme/orders", some.where("id < 0")) == 0
    assert here.read("acme/orders").selectExpr("sum(total)").first() == (
        sum(range(1000)) / 2 + 22.5,
    )


def acks(journal: Any) -> list[Any]:  # noqa: ANN401
    return [record for record in journal.state.records if isinstance(record, AckRecord)]


@pytest.mark.spark
def test_a_spark_frame_with_a_bad_row_is_kept_out(
    here: penstock.Penstock, spark: SparkSession
) -> None:
    some = spark.range(0, 100, numPartitions=2).selectExpr("id", "IF(id = 70, NULL, 'eu') region")
    with pytest.raises(penstock.DocumentsRefused) as caught:
        here.append("acme/orders", some)
    assert "partition 1, row 21: /region" in str(caught.value)
    assert here.read("acme/orders").count() == 0
    with pytest.raises(penstock.PenstockError, match="two columns called id"):
        here.append("acme/orders", some.selectExpr("id", "id", "region"))
    stream = spark.readStream.format("rate").load()
    with pytest.raises(UserError, match="is a stream"):
        here.append("acme/orders", stream)


def test_redacted_values_need_a_salt_that_python_can_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_REDACT_SALT", raising=False)
    hashed = CATALOG.replace("{type: number}", "{type: string, redact: {strategy: sha256}}")
    (tmp_path / "catalog.yaml").write_text(hashed)
    with penstock.open(tmp_path / "data") as p:
        p.apply(tmp_path / "catalog.yaml")
        with pytest.raises(UserError, match="no salt is given") as caught:
            p.append("acme/orders", [order(1, total="secret")])
        assert caught.value.fix == "pass one in base64: redact_salt=…, or PENSTOCK_REDACT_SALT"
        p.append("acme/orders", [order(1, total="secret")], redact_salt="c2FsdA==")
        monkeypatch.setenv("PENSTOCK_REDACT_SALT", "c2FsdA==")
        p.append("acme/orders", pd.DataFrame([order(2, total="secret")]))
        first, second = (document["total"] for document in stored(p))
        assert first == second
        assert first.startswith("sha256:")


# ------------------------------------------------------------------------------------------ types

USER_SCRIPT = """
from typing import assert_type

import pandas  # type: ignore[import-untyped]
import pyarrow
from pyspark.sql import DataFrame

import penstock

with penstock.open(data="./.penstock", conf={"spark.driver.memory": "1g"}) as p:
    assert_type(p, penstock.Penstock)
    assert_type(p.apply("catalog.yaml"), penstock.ApplyResult)
    assert_type(p.append("acme/orders", [{"id": 1, "total": 9.5}]), int)
    p.append("acme/orders", ({"id": n} for n in range(3)))
    p.append("acme/orders", pandas.DataFrame({"id": [1]}))
    p.append("acme/orders", pyarrow.table({"id": [1]}))
    frame = p.read("acme/orders", columns=["id"])
    assert_type(frame, DataFrame)
    p.append("acme/orders", frame)
    for row in p.status():
        task: str = row.task
        behind: int | None = row.lag_docs
        waits: str | None = row.waits_for
    for run in p.run("acme/views"):
        documents: int = run.documents
    try:
        p.append("acme/orders", [{"id": "x"}])
    except penstock.DocumentsRefused as refused:
        print(refused.what, refused.why)
    version: str = penstock.__version__
"""


@pytest.mark.slow
def test_editors_and_type_checkers_understand_what_people_write(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(USER_SCRIPT)
    mistakes = '    p.append("acme/orders", {"id": 1})\n    p.reed("acme/orders")\n'
    wrong.write_text(USER_SCRIPT + mistakes)
    # With the settings of `make lint`, which are strict, and what it has found out already.
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(right), str(wrong)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    found = (checked.stdout + checked.stderr).splitlines()
    assert [line for line in found if "right.py" in line] == []
    end = len(USER_SCRIPT.splitlines())
    assert any(f"wrong.py:{end + 1}: error:" in line for line in found), "one dict"
    assert any(f"wrong.py:{end + 2}: error:" in line for line in found), "a wrong name"


@pytest.mark.parametrize("document", [order(1, note="\ud800"), {"\udfff": 1, **order(2)}])
def test_half_a_surrogate_pair_is_told_as_that(
    here: penstock.Penstock, document: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="half of a surrogate pair"):
        here.append("acme/orders", [document])
