"""Tests of catalogs whose derivations are SQLite and Python: real code, without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.small_engine import START, built
from penstock.catalog.testing.memory import MemoryWorld
from penstock.catalog.testing.run import Outcome, Variant, run_test, variants
from penstock.model.spec import Catalog

EVENTS = """
collections:
  acme/events:
    key: [/id]
    schema:
      type: object
      required: [id, of]
      properties: {id: {type: integer}, of: {type: string}}
  acme/counts:
    key: [/of]
    schema:
      type: object
      required: [of]
      reduce: {strategy: merge}
      properties:
        of: {type: string}
        n: {type: integer, reduce: {strategy: sum}}
        running: {type: integer, reduce: {strategy: maximize}}
    derive:
"""
TESTS = """
tests:
  acme/tests/counts:
    - ingest:
        collection: acme/events
        documents: [{id: 1, of: a}, {id: 2, of: b}, {id: 3, of: a}, {id: 5, of: c}]
    - verify:
        collection: acme/counts
        documents: [{of: a, n: 2, running: 2}, {of: b, n: 1}, {of: c, n: 1, running: 1}]
    - ingest: {collection: acme/events, documents: [{id: 4, of: a}]}
    - verify:
        collection: acme/counts
        documents: [{of: a, n: 3, running: 3}, {of: b, n: 1}, {of: c, n: 1}]
"""

SQLITE = """
      using: {sqlite: {migrations: ["create table seen (of text primary key, n integer)"]}}
      transforms:
        - name: fromEvents
          source: acme/events
          shuffle: {key: [/of]}
          lambda: |
            insert into seen values ($of, 1) on conflict (of) do update set n = n + 1;
            select $of as of, 1 as n, n as running from seen where of = $of;
"""
KEYED = """
      using:
        python:
          module: |
            from acme.counts import Document, IDerivation

            class Derivation(IDerivation):
                async def from_events(self, read):
                    of = read.doc.of
                    self.keyed[of] = self.keyed.get(of, 0) + 1
                    yield Document(of=of, n=1, running=self.keyed[of])
      transforms: [{name: fromEvents, source: acme/events, shuffle: {key: [/of]}}]
"""
ONE_STATE = """
      using:
        python:
          module: |
            from acme.counts import Document, IDerivation, Response

            class Derivation(IDerivation):
                def __init__(self, open):
                    super().__init__(open)
                    self.seen = dict(open.state.get("seen", {}))

                async def from_events(self, read):
                    of = read.doc.of
                    self.seen[of] = self.seen.get(of, 0) + 1
                    yield Document(of=of, n=1, running=self.seen[of])

                def start_commit(self, start_commit):
                    state = Response.StartedCommit.State(updated={"seen": self.seen})
                    return Response.StartedCommit(state=state)
      transforms: [{name: fromEvents, source: acme/events, shuffle: {key: [/of]}}]
"""


def run(catalog: Catalog, directory: Path) -> Outcome:
    def world(variant: Variant) -> MemoryWorld:
        return MemoryWorld(
            catalog,
            directory=directory,
            start=START,
            split=variant.split,
            shards=variant.shards,
        )

    (test,) = catalog.tests
    return run_test(catalog, test, world, shake=variants(catalog))


@pytest.mark.parametrize(
    "derive",
    [
        pytest.param(SQLITE, id="tables of SQLite"),
        pytest.param(KEYED, id="Python, by key"),
        pytest.param(ONE_STATE, id="Python, one state, which has one shard"),
    ],
)
def test_running_counts_in_state_can_be_shaken(tmp_path: Path, derive: str) -> None:
    outcome = run(built(tmp_path, EVENTS + derive + TESTS), tmp_path)
    assert outcome.failure is None, "\n".join(outcome.failure.lines())
    assert outcome.runs == 18


def test_state_that_forgets_is_found_by_shaking(tmp_path: Path) -> None:
    """Counts that begin anew with each transaction differ as soon as there are several."""
    module = KEYED.replace(
        "async def from_events",
        "def __init__(self, open):\n"
        "                    super().__init__(open)\n"
        "                    self.seen = {}\n\n"
        "                async def from_events",
    ).replace("self.keyed", "self.seen")
    only_first = TESTS[: TESTS.index("    - ingest: {collection")]
    outcome = run(built(tmp_path, EVENTS + module + only_first), tmp_path)
    assert outcome.failure is not None
    assert str(outcome.failure.variant) == "documents one by one, 1 shard"
    assert "-/running: 2" in outcome.failure.lines()


def test_a_lambda_that_fails_names_its_transform_and_document(tmp_path: Path) -> None:
    module = KEYED.replace("yield Document(of=of", "yield Document(of=str(1 // (read.doc.id - 3))")
    outcome = run(built(tmp_path, EVENTS + module + TESTS), tmp_path)
    assert outcome.failure is not None
    assert outcome.failure.number == 0
    assert "ZeroDivisionError" in "\n".join(outcome.failure.lines())
    assert "document [3] of acme/events" in "\n".join(outcome.failure.lines())


def test_a_test_that_is_deleted_is_none(tmp_path: Path) -> None:
    steps = TESTS.replace("acme/tests/counts:", "acme/tests/counts:\n    delete: true\n    steps:")
    assert built(tmp_path, EVENTS + SQLITE + steps).tests == ()
