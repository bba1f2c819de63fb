"""Documents are combined, and kept in order, only if two are of one key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime import reading
from penstock.runtime.derive import publish_jobs, transaction_jobs
from penstock.runtime.derive.target import DerivedTarget
from runtime.derive.deriving import caught_up
from runtime.sessions import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

Document = dict[str, Any]


def collection(derive: Document | None = None) -> Document:
    schema = {
        "type": "object",
        "required": ["id"],
        "additionalProperties": False,
        "properties": {"id": {"type": "integer"}, "n": {"type": "integer"}},
    }
    return {"key": ["/id"], "schema": schema, **({"derive": derive} if derive else {})}


@pytest.fixture(params=["small", "large", "through tasks"])
def place(
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Place:
    if request.param != "small":
        monkeypatch.setattr(reading, "SMALL_BYTES", -1)
    if request.param == "through tasks":
        monkeypatch.setattr(transaction_jobs, "HERE_BYTES", -1)
    place = Place(tmp_path, spark)
    transform = {
        "name": "fromNumbers",
        "source": "acme/numbers",
        "shuffle": "any",
        "lambda": "select id, n + 1 as n from source where n >= 0",
    }
    derive = {"using": {"spark": {}}, "transforms": [transform]}
    place.apply({"acme/numbers": collection(), "acme/more": collection(derive)}, {})
    return place


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each job took."""
    taken: list[str] = []
    for name in ("apart", "documents"):
        way = getattr(publish_jobs.Publishing, name)

        def noted(*args: Any, _way: Any = way, _name: str = name, **options: Any) -> Any:  # noqa: ANN401
            taken.append(_name)
            return _way(*args, **options)

        monkeypatch.setattr(publish_jobs.Publishing, name, noted)
    return taken


def test_documents_of_different_keys_are_not_exchanged(place: Place, ways: list[str]) -> None:
    place.append({"acme/numbers": [{"id": at, "n": at - 2} for at in range(100)]})
    caught_up(place)
    assert ways == ["apart"]
    found = sorted((doc["id"], doc["n"]) for doc in place.read("acme/more"))
    assert found == [(at, at - 1) for at in range(2, 100)]


def test_of_documents_of_one_key_the_last_one_stays(place: Place, ways: list[str]) -> None:
    for n in range(5):
        place.append({"acme/numbers": [{"id": at, "n": n} for at in range(100)]})
    caught_up(place)
    assert ways == ["apart", "documents"]
    assert {doc["id"]: doc["n"] for doc in place.read("acme/more")} == dict.fromkeys(range(100), 5)
    assert len(place.read("acme/more")) == 100


# ------------------------------------------------------------------------ what combining would do

REDUCED: Document = {
    "type": "object",
    "required": ["id"],
    "reduce": {"strategy": "merge"},
    "properties": {
        "id": {"type": "integer"},
        "sum": {"type": "number", "reduce": {"strategy": "sum"}},
        "big": {"type": "integer", "reduce": {"strategy": "sum"}},
        "least": {"type": "string", "reduce": {"strategy": "minimize"}},
        "most": {"type": ["integer", "null"], "reduce": {"strategy": "maximize"}},
        "first": {"type": "string", "reduce": {"strategy": "firstWriteWins"}},
        "within": {
            "type": "object",
            "reduce": {"strategy": "merge"},
            "properties": {"n": {"type": "integer", "reduce": {"strategy": "sum"}}},
        },
        "any": {},
    },
}


@pytest.mark.parametrize("repeats", [False, True], ids=["one of a key", "several of a key"])
def test_small_transactions_publish_what_combining_would(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, *, repeats: bool
) -> None:
    transform = {
        "name": "fromNumbers",
        "source": "acme/numbers",
        "shuffle": "any",
        "lambda": "select * from source",
    }
    derive = {"using": {"spark": {}}, "transforms": [transform]}
    documents: list[Document] = [
        {"id": 1, "sum": 0.1, "big": 2**53, "least": "b", "most": None, "first": "x"},
        {"id": 2, "within": {"n": 3}, "any": [1, None, {"a": "b"}]},
        {"id": 3, "sum": 7, "any": None, "more": {"not": ["named"]}},
        {"id": 1 if repeats else 4, "sum": -1.5, "least": "a", "most": 4, "first": "y"},
        {"id": 2 if repeats else 5, "within": {"n": 4}, "any": "text"},
    ]
    found = []
    for alone in (True, False):
        if not alone:
            monkeypatch.setattr(DerivedTarget, "leaves_one_alone", property(lambda _: False))
        place = Place(tmp_path / str(alone), spark)
        place.directory.mkdir()
        place.apply(
            {
                "acme/numbers": {"key": ["/id"], "schema": REDUCED},
                "acme/more": {"key": ["/id"], "schema": REDUCED, "derive": derive},
            },
            {},
        )
        place.append({"acme/numbers": documents})
        caught_up(place)
        found.append(sorted(place.read("acme/more"), key=lambda doc: int(doc["id"])))
    assert found[0] == found[1]
    assert len(found[0]) == (3 if repeats else 5)


@pytest.mark.parametrize(
    ("text", "comes"),
    [
        pytest.param("select id, n from source", True, id="a row for a document"),
        pytest.param("select id, explode(array(n, n)) as n from source", False, id="several"),
    ],
)
def test_rows_that_a_lambda_multiplies_do_not_come_to_the_leader(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, text: str, comes: bool
) -> None:
    monkeypatch.setattr(reading, "SMALL_BYTES", -1)
    taken: list[str] = []
    for name in ("stage", "stage_here"):
        way = getattr(publish_jobs, name)

        def noted(*given: Any, name: str = name, way: Any = way) -> Any:  # noqa: ANN401
            taken.append(name)
            return way(*given)

        monkeypatch.setattr(publish_jobs, name, noted)
    transform = {"name": "t", "source": "acme/numbers", "shuffle": "any", "lambda": text}
    derive = {"using": {"spark": {}}, "transforms": [transform]}
    place = Place(tmp_path, spark)
    place.apply({"acme/numbers": collection(), "acme/more": collection(derive)}, {})
    place.append({"acme/numbers": [{"id": number, "n": number} for number in range(9)]})
    (run,) = place.run().values()
    assert run.error is None
    assert set(taken) == {"stage_here" if comes else "stage"}
    assert {row["id"] for row in place.read("acme/more")} == set(range(9))
