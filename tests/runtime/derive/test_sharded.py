"""Derivations that keep state: order, state over transactions, failures that are named."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime.derive import build, row_jobs
from runtime.derive.deriving import RunningSums
from runtime.sessions import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

Document = dict[str, Any]

COLLECTIONS: Document = {
    "acme/numbers": {
        "key": ["/id"],
        "schema": {
            "type": "object",
            "required": ["id", "key", "n"],
            "properties": {
                "id": {"type": "integer"},
                "key": {"type": "string"},
                "n": {"type": "integer"},
            },
        },
    },
    "acme/sums": {
        "key": ["/key"],
        "schema": {
            "type": "object",
            "required": ["key", "sum"],
            "properties": {
                "key": {"type": "string"},
                "n": {"type": "integer"},
                "sum": {"type": "integer", "maximum": 10**12},
            },
        },
        "derive": {
            "using": {"sqlite": {"migrations": ["create table t (a integer primary key)"]}},
            "transforms": [
                {
                    "name": "fromNumbers",
                    "source": "acme/numbers",
                    "shuffle": {"key": ["/key"]},
                    "lambda": "select $key as key, $n as n, $n as sum;",
                }
            ],
        },
    },
}


def numbers(start: int, count: int) -> list[Document]:
    return [{"id": i, "key": "abc"[i % 3], "n": i * 7 % 31} for i in range(start, start + count)]


def expected(docs: list[Document]) -> dict[str, list[int]]:
    return {key: list(accumulate(doc["n"] for doc in docs if doc["key"] == key)) for key in "abc"}


def sums(place: Place) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for doc in place.read("acme/sums"):
        found[doc["key"]].append(doc["sum"])
    return found


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Place:
    use(monkeypatch, RunningSums())
    made = Place(tmp_path, spark)
    made.apply(COLLECTIONS, {})
    return made


def use(monkeypatch: pytest.MonkeyPatch, engine: RunningSums) -> None:
    monkeypatch.setattr(build, "row_engine", lambda _, __: engine)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("inline", [True, False])
def test_state_carries_on_over_transactions(
    place: Place, monkeypatch: pytest.MonkeyPatch, shards: int, inline: bool
) -> None:
    if not inline:
        monkeypatch.setattr(row_jobs, "INLINE_BYTES", -1)
    for start in (0, 10, 20):
        place.append({"acme/numbers": numbers(start, 10)})
        (run,) = place.run(shards=shards).values()
        assert run.error is None
        assert (run.transactions, run.documents) == (1, 10)
    found = sums(place)
    wanted = expected(numbers(0, 30))
    assert {key: sorted(values) for key, values in found.items()} == {
        key: sorted(values) for key, values in wanted.items()
    }
    assert found == wanted
    (stats, *_) = place.read("ops/stats")
    assert stats["derive"]["transforms"]["fromNumbers"]["input"]["docsTotal"] == 10
    assert stats["derive"]["out"]["docsTotal"] == 10
    files = list((place.directory / "data").rglob("*state/*/*"))
    assert len(files) == shards, "files of states that are no longer committed are removed"


def test_a_failure_names_the_document_and_loses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.append({"acme/numbers": numbers(0, 5)})
    place.append({"acme/numbers": [{"id": 99, "key": "a", "n": 77}]})
    use(monkeypatch, RunningSums(fails_at=77))
    (run,) = place.run().values()
    assert run.error is not None
    assert str(run.error).startswith("77 is too much\n")
    for part in ("line 3 of the lambda", "transform fromNumbers", "acme/numbers/", "offset 6"):
        assert part in str(run.error), part
    assert sums(place) == {"a": [], "b": [], "c": []}
    use(monkeypatch, RunningSums())
    (run,) = place.run().values()
    assert run.error is None
    assert sums(place)["a"] == [0, 21, 98]


def test_a_document_that_the_collection_refuses_stops_the_task(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.append({"acme/numbers": [{"id": 1, "key": "a", "n": 10**15}]})
    (run,) = place.run().values()
    assert "a document published to acme/sums is refused: /sum" in str(run.error)
    assert "offset 0" in str(run.error)
    assert sums(place) == {"a": [], "b": [], "c": []}
