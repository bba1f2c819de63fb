"""Tasks that are alike share the queries of their small transactions; others do not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime import prepared
from penstock.runtime.prepared import Queries
from runtime.sessions import ACCOUNTS, Place, accounts, reduced, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TASKS = 6


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Place:
    return Place(tmp_path, spark)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was planned, for as long as the test runs."""
    found: list[object] = []
    plan = Queries._plan

    def counting(self: Queries, *arguments: Any) -> Any:  # noqa: ANN401
        found.append(self)
        return plan(self, *arguments)

    monkeypatch.setattr(Queries, "_plan", counting)
    monkeypatch.setattr(prepared, "ALIKE_MAX", 1)
    monkeypatch.setattr(prepared, "WAIT_S", 60.0)
    return found


def table(place: Place, number: int, source: str, name: str = "accounts") -> dict[str, Any]:
    resource = {"source": source, "resource": {"table": name}}
    return task("sqlite", {"path": place.database(str(number))}, [resource])


def test_materializations_that_are_alike_plan_once(place: Place, planned: list[object]) -> None:
    """Of other collections, with other documents, to other tables."""
    numbers = range(TASKS)
    place.apply(
        {f"acme/accounts-{n}": ACCOUNTS for n in numbers},
        {f"acme/views-{n}": table(place, n, f"acme/accounts-{n}") for n in numbers},
    )
    for n in numbers:
        place.append({f"acme/accounts-{n}": accounts(n, 10 + n)})
    for run in place.run().values():
        assert run.error is None, run.error
    for n in numbers:
        assert place.table("accounts", database=str(n)) == reduced(accounts(n, 10 + n))
    assert len(planned) == 1


def test_a_derivation_with_another_lambda_or_schema_plans_its_own(
    place: Place, planned: list[object]
) -> None:
    """Two are alike, one has another lambda, one reads and one writes another schema."""
    schema = {
        "type": "object",
        "required": ["id", "text"],
        "properties": {"id": {"type": "integer"}, "text": {"type": "string"}},
    }
    loud = {**schema, "properties": {**schema["properties"], "more": {"type": "integer"}}}  # type: ignore[dict-item]

    def derived(source: str, lambda_: str, to: dict[str, Any] = schema) -> dict[str, Any]:
        transform = {"name": "from", "source": source, "shuffle": "any", "lambda": lambda_}
        derive = {"using": {"spark": {}}, "transforms": [transform]}
        return {"key": ["/id"], "schema": to, "derive": derive}

    upper = "select id, upper(text) as text from source"
    sources = {
        "acme/a": {"key": ["/id"], "schema": schema},
        "acme/b": {"key": ["/id"], "schema": schema},
        "acme/c": {"key": ["/id"], "schema": loud},
    }
    place.apply(
        {
            **sources,
            "acme/one": derived("acme/a", upper),
            "acme/two": derived("acme/b", upper),
            "acme/reversed": derived("acme/a", "select id, reverse(text) as text from source"),
            "acme/reads": derived("acme/c", upper),
            "acme/writes": derived("acme/a", upper, loud),
        },
        {},
    )
    for name in sources:
        place.append({name: [{"id": n, "text": f"{name[-1]}{n}"} for n in range(3)]})
    for run in place.run().values():
        assert run.error is None, run.error

    def texts(name: str) -> list[str]:
        return sorted(document["text"] for document in place.read(name))

    assert texts("acme/one") == texts("acme/writes") == ["A0", "A1", "A2"]
    assert texts("acme/two") == ["B0", "B1", "B2"]
    assert texts("acme/reversed") == ["0a", "1a", "2a"]
    assert texts("acme/reads") == ["C0", "C1", "C2"]
    assert len(planned) == 4
