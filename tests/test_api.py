"""Penstock from Python: the names people use, and what they do."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.errors import UserError

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


@pytest.fixture
def here(tmp_path: Path) -> Iterator[penstock.Penstock]:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    with penstock.open(data=tmp_path / "data") as p:
        p.apply(tmp_path / "catalog.yaml")
        yield p


def order(number: int, **members: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {"id": number, "region": "eu" if number % 2 else "us", **members}


def test_the_public_names_are_these() -> None:
    assert sorted(penstock.__all__) == ["Penstock", "__version__", "open"]
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
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


@pytest.mark.parametrize("document", [order(1, note="\ud800"), {"\udfff": 1, **order(2)}])
def test_half_a_surrogate_pair_is_told_as_that(
    here: penstock.Penstock, document: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="half of a surrogate pair"):
        here.append("acme/orders", [document])
