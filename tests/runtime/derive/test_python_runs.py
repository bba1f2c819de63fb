"""Python derivations run by their leader: documents, batches, and failures that are named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime import reading
from runtime.sessions import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

Document = dict[str, Any]

ROWS = """
from acme.words import Document, IDerivation

class Derivation(IDerivation):
    def from_texts(self, read):
        for word in read.doc.text.split():
            yield Document(word=word, count=1, length=len(word))
"""

BATCHES = """
import pyarrow.compute as pc
from acme.words import IDerivation
import pyarrow as pa

class Derivation(IDerivation):
    def from_texts(self, batch):
        words = pc.list_flatten(pc.utf8_split_whitespace(batch.column("text")))
        ones = pa.array([1] * len(words), pa.int64())
        yield pa.RecordBatch.from_arrays([ones, words], names=["count", "word"])
"""


def collections(module: str, *, batch: bool = False) -> Document:
    return {
        "acme/texts": {
            "key": ["/id"],
            "schema": {
                "type": "object",
                "required": ["id", "text"],
                "properties": {"id": {"type": "integer"}, "text": {"type": "string"}},
            },
        },
        "acme/words": {
            "key": ["/word"],
            "schema": {
                "type": "object",
                "required": ["word"],
                "additionalProperties": False,
                "reduce": {"strategy": "merge"},
                "properties": {
                    "word": {"type": "string"},
                    "count": {"type": "integer", "reduce": {"strategy": "sum"}},
                    "length": {"type": "integer", "maximum": 9},
                },
            },
            "derive": {
                "using": {"python": {"module": module, "batch": batch}},
                "transforms": [{"name": "fromTexts", "source": "acme/texts", "shuffle": "any"}],
            },
        },
    }


@pytest.fixture(params=[True, False], ids=["small", "through tasks"])
def place(
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Place:
    if not request.param:
        monkeypatch.setattr(reading, "SMALL_BYTES", -1)
    return Place(tmp_path, spark)


@pytest.mark.parametrize("batch", [False, True], ids=["documents", "batches"])
def test_words_are_counted(place: Place, batch: bool) -> None:
    place.apply(collections(BATCHES if batch else ROWS, batch=batch), {})
    place.append({"acme/texts": [{"id": i, "text": "to be or not to be"} for i in range(5)]})
    (run,) = place.run().values()
    assert run.error is None
    counts = {doc["word"]: doc["count"] for doc in place.read("acme/words")}
    assert counts == {"to": 10, "be": 10, "or": 5, "not": 5}


def test_a_document_that_is_refused_names_the_one_it_comes_from(place: Place) -> None:
    place.apply(collections(ROWS), {})
    place.append({"acme/texts": [{"id": 1, "text": "short"}]})
    place.append({"acme/texts": [{"id": 2, "text": "an-unusually-long-word"}]})
    (run,) = place.run().values()
    for part in ("acme/words is refused: /length", "transform fromTexts", "offset 2"):
        assert part in str(run.error), part
    assert place.read("acme/words") == []
