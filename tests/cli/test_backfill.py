"""`penstock backfill` and `penstock task takeover`: what they say, ask and record."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.consensus.open import open_consensus
from penstock.runtime.requests import Refills, refills

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
  acme/doubled:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
    derive:
      using: {sqlite: {}}
      transforms: [{name: all, source: acme/orders, lambda: "select $id * 2 as id"}]
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings:
      - {source: acme/orders, resource: {table: orders}}
      - {source: acme/doubled, resource: {table: doubled}}
      - {source: acme/doubled, resource: {table: more}, disable: true}
"""


def penstock(*arguments: str, cwd: Path) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    assert penstock("apply", "catalog.yaml", cwd=tmp_path).exit_code == 0
    return tmp_path


def requested(here: Path) -> Refills:
    async def load() -> Refills:
        store = await open_consensus(f"sqlite:///{here}/.penstock/consensus.db")
        try:
            return await refills(store, "acme/views")
        finally:
            await store.close()

    return asyncio.run(load())


def test_nothing_is_requested_unless_somebody_agrees(here: Path) -> None:
    refused = penstock("backfill", "acme/views", cwd=here)
    assert refused.exit_code == 1
    assert "binding 0: reads acme/orders from its start and replaces the rows of orders" in (
        refused.stderr
    )
    assert "replaces the rows of doubled" in refused.stderr
    assert "penstock backfill acme/views --yes" in refused.stderr
    assert requested(here) == Refills()


def test_a_request_names_its_tables_and_is_recorded(here: Path) -> None:
    done = penstock("backfill", "acme/views", "--binding", "1", "--yes", "--json", cwd=here)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "task": "acme/views",
        "requested": [{"binding": 1, "table": "doubled", "collection": "acme/doubled"}],
    }
    first = requested(here)
    assert (set(first.requests), first.takeovers) == ({"doubled"}, frozenset())
    assert penstock("task", "takeover", "acme/views", "--yes", cwd=here).exit_code == 0
    both = requested(here)
    assert (set(both.requests), both.takeovers) == ({"orders", "doubled"}, {"orders", "doubled"})
    assert both.requests["doubled"] > first.requests["doubled"]
    assert penstock("backfill", "acme/views", "--binding", "0", "--yes", cwd=here).exit_code == 0
    assert requested(here).takeovers == {"doubled"}, "a later request takes nothing over"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["backfill", "acme/views", "--binding", "7"], "acme/views has no binding 7"),
        (["backfill", "acme/views", "--binding", "2"], "binding 2 of acme/views is disabled"),
        (["backfill", "acme/doubled"], "acme/doubled is a derivation, and fills no tables"),
        (["backfill", "acme/nothing"], "there is no materialization acme/nothing"),
        (["task", "takeover", "acme/views", "--table", "x"], "acme/views has no table x"),
    ],
)
def test_what_cannot_be_requested_is_said(here: Path, arguments: list[str], said: str) -> None:
    run = penstock(*arguments, "--yes", cwd=here)
    assert run.exit_code == 1
    assert said in run.stderr
    assert "Traceback" not in run.stderr
    assert requested(here) == Refills()
