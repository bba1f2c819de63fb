"""Documents that only write over each other keep no order, unless two are of one key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime.derive import publish_jobs, transaction_jobs
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


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(transaction_jobs, "SMALL_BYTES", -1)
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
