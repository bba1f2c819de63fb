"""Paths in a catalog are relative to the file that names them, wherever a command is run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.cli.main import app
from penstock.connectors.builtin import BUILTIN
from penstock.consensus.open import open_consensus
from penstock.model.spec import Catalog, from_json, to_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CATALOG = """
import: [tasks/views.yaml]
collections:
  acme/orders:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
captures:
  acme/files:
    endpoint: {connector: {image: penstock/source-files, config: {path: data}}}
    bindings: [{resource: {path: "*.jsonl"}, target: acme/orders}]
"""
VIEWS = """
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: ../views.db}}}
    bindings: [{resource: {table: orders}, source: acme/orders}]
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    shop = tmp_path / "shop"
    for name, text in {
        "catalog.yaml": CATALOG,
        "tasks/views.yaml": VIEWS,
        "data/orders.jsonl": '{"id": 1}\n',
    }.items():
        (shop / name).parent.mkdir(parents=True, exist_ok=True)
        (shop / name).write_text(text)
    (tmp_path / "elsewhere").mkdir()
    return shop


def penstock(*arguments: str, cwd: Path) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments))


def ids(database: Path) -> list[int]:
    with contextlib.closing(sqlite3.connect(database)) as opened:
        return [row for (row,) in opened.execute("SELECT id FROM orders ORDER BY id")]


def test_a_catalog_is_checked_applied_and_run_from_anywhere(
    shop: Path, spark: SparkSession
) -> None:
    elsewhere, data = shop.parent / "elsewhere", f"--data={shop / '.penstock'}"
    checked = penstock("check", "../shop/catalog.yaml", cwd=elsewhere)
    assert (checked.exit_code, checked.stdout) == (
        0,
        "ok: 1 collection, 1 capture, 1 materialization\n",
    )
    assert penstock("apply", "../shop", data, cwd=elsewhere).exit_code == 0
    assert penstock("run", data, cwd=elsewhere).exit_code == 0
    assert ids(shop / "views.db") == [1]
    # Applied from its own directory it is the same catalog, and goes on with the same files.
    (shop / "data" / "more.jsonl").write_text('{"id": 2}\n')
    again = penstock("apply", "catalog.yaml", data, "--json", cwd=shop)
    assert json.loads(again.stdout)["changes"] == []
    assert penstock("run", data, cwd=shop).exit_code == 0
    assert ids(shop / "views.db") == [1, 2]
    assert not list(elsewhere.iterdir())


async def applied_by_an_older_release(directory: Path, catalog: Catalog) -> None:
    """Record a catalog with its paths as they were written, as releases did before."""
    text = json.dumps(to_json(catalog)).replace(f"{directory}/shop/", "")
    store = await open_consensus(f"sqlite:///{directory}/shop/.penstock/consensus.db")
    try:
        await desired.apply(store, from_json(Catalog, json.loads(text)))
    finally:
        await store.close()


@pytest.fixture
def older(shop: Path) -> Path:
    """A deployment whose tasks ran in another directory than the catalog's."""
    ran_in = shop.parent / "elsewhere"
    (ran_in / "data").mkdir()
    (ran_in / "views.db").touch()
    (shop / ".penstock").mkdir()
    catalog = load_catalog([shop / "catalog.yaml"], environ={}, connectors=BUILTIN)
    asyncio.run(applied_by_an_older_release(shop.parent, catalog))
    return ran_in


@pytest.mark.parametrize("command", ["check", "apply"])
def test_paths_that_would_lead_elsewhere_are_refused(shop: Path, older: Path, command: str) -> None:
    found = penstock(command, "../shop", f"--data={shop}/.penstock", cwd=older)
    assert found.exit_code == 1
    said = " ".join(found.stderr.split())
    assert f"/path: data was {older}/data until now, and would be {shop}/data" in said
    assert f"/path: views.db was {older}/views.db until now, and would be {shop}/views.db" in said
    assert f"to keep what is there, write {older}/views.db" in said


def test_paths_that_lead_to_the_same_place_are_recorded(shop: Path, older: Path) -> None:
    found = penstock("apply", "catalog.yaml", f"--data={shop}/.penstock", "--json", cwd=shop)
    assert found.exit_code == 0, found.exception
    names = [change["name"] for change in json.loads(found.stdout)["changes"]]
    assert names == ["acme/files", "acme/views"]
    again = penstock("apply", "../shop", f"--data={shop}/.penstock", "--json", cwd=older)
    assert json.loads(again.stdout)["changes"] == []


def test_what_is_only_in_the_working_directory_is_pointed_out(shop: Path) -> None:
    elsewhere = shop.parent / "elsewhere"
    (shop / "data").rename(elsewhere / "data")
    found = penstock("check", "../shop/catalog.yaml", cwd=elsewhere)
    assert found.exit_code == 0
    assert "there is no ../shop/data, but there is data in the working directory" in found.stdout
    assert found.stdout.endswith("; 1 warning\n")


def test_secrets_in_files_are_beside_the_catalog(shop: Path) -> None:
    (shop / "tasks" / "views.yaml").write_text(
        VIEWS.replace("materialize-sqlite", "materialize-postgres").replace(
            "path: ../views.db",
            'address: db, database: d, user: u, password: "${file:secret.txt}"',
        )
    )
    elsewhere = shop.parent / "elsewhere"
    missing = penstock("check", "../shop", cwd=elsewhere)
    assert "there is no file secret.txt [E-SECRET]" in missing.stdout
    assert "write the value to ../shop/tasks/secret.txt" in missing.stdout
    (shop / "tasks" / "secret.txt").write_text("hush")
    assert penstock("check", "../shop", cwd=elsewhere).exit_code == 0
    catalog = load_catalog([shop / "catalog.yaml"], environ={}, connectors=BUILTIN)
    config = catalog.materializations[0].endpoint.config.value
    assert config["password"] == f"${{file:{shop}/tasks/secret.txt}}"


def test_a_discovered_catalog_names_paths_as_seen_from_itself(shop: Path) -> None:
    image = ("discover", "penstock/source-files", "--set", "path=shop/data", "--name", "new/files")
    for out, path in (("shop/new.yaml", "data"), ("elsewhere/new.yaml", str(shop / "data"))):
        assert penstock(*image, "--out", out, cwd=shop.parent).exit_code == 0
        written = yaml.safe_load((shop.parent / out).read_text())
        config = written["captures"]["new/files"]["endpoint"]["connector"]["config"]
        assert config == {"path": path}
        assert penstock("check", out, cwd=shop.parent).exit_code == 0
