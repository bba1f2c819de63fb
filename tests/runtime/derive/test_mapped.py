"""Derivations that keep no state: combined by key, in the order of their sources' commits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime import reading
from penstock.runtime.derive import build
from runtime.derive.deriving import Splitting
from runtime.sessions import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

Document = dict[str, Any]

LETTERS: Document = {
    "type": "object",
    "required": ["letter"],
    "additionalProperties": False,
    "reduce": {"strategy": "merge"},
    "properties": {
        "letter": {"type": "string", "maxLength": 1},
        "count": {"type": "integer", "reduce": {"strategy": "sum"}},
        "last": {"type": "integer"},
        "all": {
            "type": "array",
            "items": {"type": "string"},
            "reduce": {"strategy": "append"},
        },
    },
}


def collections(schema: Document) -> Document:
    return {
        "acme/texts": {
            "key": ["/id"],
            "schema": {
                "type": "object",
                "required": ["id", "text"],
                "properties": {"id": {"type": "integer"}, "text": {"type": "string"}},
            },
        },
        "acme/letters": {
            "key": ["/letter"],
            "schema": schema,
            "derive": {
                "using": {"sqlite": {}},
                "transforms": [
                    {
                        "name": "fromTexts",
                        "source": "acme/texts",
                        "shuffle": "any",
                        "lambda": "select $text as letter;",
                    }
                ],
            },
        },
    }


def texts(start: int, count: int) -> list[Document]:
    return [{"id": i, "text": "abcab"[i % 3 : i % 3 + 3]} for i in range(start, start + count)]


def oracle(docs: list[Document]) -> dict[str, Document]:
    rows: dict[str, Document] = {}
    for doc in docs:
        for letter in doc["text"]:
            row = rows.setdefault(letter, {"count": 0, "all": []})
            row["count"] += 1
            row["last"] = doc["id"]
            row["all"] = [*row["all"], doc["text"]]
    return rows


def folded(published: list[Document]) -> dict[str, Document]:
    """Documents as they come, folded by hand."""
    rows: dict[str, Document] = {}
    for doc in published:
        row = rows.setdefault(doc["letter"], {"count": 0, "all": []})
        row["count"] += doc["count"]
        row["last"] = doc["last"]
        row["all"] = [*row["all"], *doc["all"]]
    return rows


@pytest.fixture(params=[True, False], ids=["small", "through tasks"])
def place(
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Place:
    monkeypatch.setattr(build, "row_engine", lambda _, __: Splitting())
    monkeypatch.setattr(build, "spark_lambdas", lambda _, __: None)
    if not request.param:
        monkeypatch.setattr(reading, "SMALL_BYTES", -1)
    return Place(tmp_path, spark)


@pytest.mark.parametrize("apart", [False, True], ids=["combined", "apart"])
def test_documents_are_combined_in_the_order_of_commits(place: Place, apart: bool) -> None:
    schema = LETTERS | {"reduce": {"strategy": "merge", "associative": False}} if apart else LETTERS
    place.apply(collections(schema), {})
    for start in (0, 40, 80):
        place.append({"acme/texts": texts(start, 20)})
        place.append({"acme/texts": texts(start + 20, 20)})
        (run,) = place.run().values()
        assert run.error is None
        assert run.jobs_per_transaction_max == 1
    published = place.read("acme/letters")
    assert folded(published) == oracle(texts(0, 120))
    if not apart:
        assert len(published) == 3 * 3, "one document of a key for each transaction"


def test_a_document_that_is_refused_is_shown(place: Place) -> None:
    schema = LETTERS | {
        "properties": LETTERS["properties"] | {"letter": {"enum": ["a", "b"], "type": "string"}}
    }
    place.apply(collections(schema), {})
    place.append({"acme/texts": texts(0, 5)})
    (run,) = place.run().values()
    assert "a document published to acme/letters is refused: /letter" in str(run.error)
    assert place.read("acme/letters") == []


def test_what_is_redacted_is_not_published(place: Place) -> None:
    hidden = {"type": "array", "items": {"type": "string"}, "redact": {"strategy": "block"}}
    schema = LETTERS | {"properties": LETTERS["properties"] | {"all": hidden}}
    place.apply(collections(schema), {})
    place.append({"acme/texts": texts(0, 5)})
    (run,) = place.run().values()
    assert run.error is None
    assert all("all" not in doc for doc in place.read("acme/letters"))
