"""Leaders of derivations that slept while another took over: nothing that they publish counts.

The state of the SQLite derivation lies in files of the blob store, because its notes are long and
do not compress; copies of this machine are removed, so that only those files can be used.
"""

from __future__ import annotations

import random
import shutil
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime.derive.state_files import STATE
from runtime.derive.deriving import derived_inputs
from runtime.forks import start
from runtime.sessions import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Document = dict[str, Any]

NUMBERS: Document = {
    "key": ["/id"],
    "schema": {
        "type": "object",
        "required": ["id", "key", "n", "note"],
        "properties": {
            "id": {"type": "integer"},
            "key": {"type": "string"},
            "n": {"type": "integer"},
            "note": {"type": "string"},
        },
    },
}
SQLITE: Document = {
    "key": ["/key", "/id"],
    "schema": {
        "type": "object",
        "required": ["key", "id", "sum"],
        "properties": {
            "key": {"type": "string"},
            "id": {"type": "integer"},
            "sum": {"type": "integer"},
        },
    },
    "derive": {
        "using": {
            "sqlite": {
                "migrations": [
                    "create table sums (key text primary key, n integer);"
                    "create table notes (id integer primary key, note text)"
                ]
            }
        },
        "transforms": [
            {
                "name": "fromNumbers",
                "source": "acme/numbers",
                "shuffle": {"key": ["/key"]},
                "lambda": "insert into sums values ($key, $n)"
                " on conflict (key) do update set n = n + excluded.n;"
                "insert into notes values ($id, $note);"
                "select $key as key, $id as id, n as sum from sums where key = $key;",
            }
        ],
    },
}
PYTHON: Document = {
    **SQLITE,
    "derive": {
        "using": {
            "python": {
                "module": """
from acme.sums import Document, IDerivation

class Derivation(IDerivation):
    def from_numbers(self, read):
        sums = self.keyed.setdefault(read.doc.key, {"n": 0})
        sums["n"] += read.doc.n
        return [Document(key=read.doc.key, id=read.doc.id, sum=sums["n"])]
"""
            }
        },
        "transforms": [
            {"name": "fromNumbers", "source": "acme/numbers", "shuffle": {"key": ["/key"]}}
        ],
    },
}
SPARK: Document = {
    "key": ["/key"],
    "schema": {
        "type": "object",
        "required": ["key"],
        "additionalProperties": False,
        "reduce": {"strategy": "merge"},
        "properties": {
            "key": {"type": "string"},
            "sum": {"type": "integer", "reduce": {"strategy": "sum"}},
        },
    },
    "derive": {
        "using": {"spark": {}},
        "transforms": [
            {
                "name": "fromNumbers",
                "source": "acme/numbers",
                "shuffle": "any",
                "lambda": "select key, n as sum from source",
            }
        ],
    },
}
LANGUAGES = {"sqlite": SQLITE, "python": PYTHON, "spark": SPARK}


def numbers(start: int, count: int) -> list[Document]:
    rng = random.Random(start)
    return [
        {"id": i, "key": "abc"[i % 3], "n": i * 7 % 31, "note": rng.randbytes(3000).hex()}
        for i in range(start, start + count)
    ]


def check(place: Place, language: str, docs: list[Document]) -> None:
    """Compare what is visible with what can be worked out by hand."""
    found: dict[str, list[int]] = {}
    for doc in place.read("acme/sums"):
        found.setdefault(doc["key"], []).append(doc["sum"])
    wanted = {key: [doc["n"] for doc in docs if doc["key"] == key] for key in "abc"}
    if language != "spark":
        assert found == {key: list(accumulate(each)) for key, each in wanted.items()}
    else:
        assert {k: sum(v) for k, v in found.items()} == {k: sum(v) for k, v in wanted.items()}
    assert derived_inputs(place, "acme/sums") == len(docs)


def lose_local_copies(place: Place) -> None:
    for local in (place.directory / "data").rglob(f"between/{STATE}"):
        shutil.rmtree(local)


@pytest.mark.parametrize(
    ("language", "frozen_at"),
    [
        ("sqlite", "leader.after-epoch"),
        ("sqlite", "derive.after-publish"),
        ("sqlite", "leader.after-commit-record"),
        ("python", "derive.after-publish"),
        ("python", "leader.after-commit-record"),
        ("spark", "leader.after-stats"),
    ],
)
def test_a_leader_that_slept_while_another_took_over_publishes_nothing_that_counts(
    tmp_path: Path, spark: SparkSession, language: str, frozen_at: str
) -> None:
    place = Place(tmp_path, spark)
    place.apply({"acme/numbers": NUMBERS, "acme/sums": LANGUAGES[language]}, {})
    place.append({"acme/numbers": numbers(0, 20)})
    zombie = start(place, freeze_at=frozen_at)
    zombie.frozen()
    place.append({"acme/numbers": numbers(20, 20)})
    assert start(place).outcome() == ""
    check(place, language, numbers(0, 40))

    zombie.thaw()
    outcome = zombie.outcome()
    committed = frozen_at == "leader.after-commit-record"
    assert outcome == "" if committed else outcome.startswith("Fenced: "), outcome
    check(place, language, numbers(0, 40))

    lose_local_copies(place)
    place.append({"acme/numbers": numbers(40, 10)})
    assert start(place).outcome() == "", "the third leader continues from the second"
    check(place, language, numbers(0, 50))
