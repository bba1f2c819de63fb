"""A writer token for `journal/acme/` appends to collections of acme, and does nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.documents import Done, jsonl
from consensus.committer.daemon import Daemon, running_persistd
from penstock.cli import append, apply, gc, journals, read
from penstock.cli.frame import register
from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.store import ConsensusError, ErrorKind, VersionedData
from penstock.journal.schemas import schema_key

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id, region]
      properties: {id: {type: integer}, region: {type: string}}
    projections: {region: {location: /region, partition: true}}
  acmecorp/orders: &plain
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
  other/orders: *plain
"""

app = typer.Typer()
for command in (append.append, apply.apply, read.read, journals.journals, gc.gc):
    register(app, command)


@dataclass
class Deployment:
    """A committer with tokens, and a catalog that its operator has applied."""

    daemon: Daemon
    directory: Path

    def url(self, who: str) -> str:
        return f"{self.daemon.url}?token_file={self.directory / who}.token"

    def penstock(self, who: str, *arguments: str, stdin: bytes = b"") -> Done:
        result = CliRunner().invoke(
            app,
            [
                *arguments,
                "--data",
                str(self.directory / "data"),
                "--consensus",
                self.url(who),
            ],
            input=stdin,
        )
        return Done(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Deployment]:
    lines = []
    for name, role, prefix in (
        ("ops", "admin", "*"),
        ("acme", "writer", "journal/acme/"),
        ("reader", "reader", "journal/acme/"),
    ):
        (tmp_path / f"{name}.token").write_text(f"token of {name}\n")
        digest = hashlib.sha256(f"token of {name}".encode()).hexdigest()
        lines.append(f"{name} {role} {prefix} {digest}\n")
    (tmp_path / "tokens").write_text("".join(lines))
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    tokens = ("--token-file", str(tmp_path / "tokens"))
    with running_persistd(tmp_path, f"sqlite:///{tmp_path}/c.db", *tokens) as daemon:
        deployment = Deployment(daemon, tmp_path)
        applied = deployment.penstock("ops", "apply", str(tmp_path / "catalog.yaml"))
        assert applied.returncode == 0, applied.stderr
        yield deployment


def documents(count: int) -> bytes:
    return jsonl([{"id": i, "region": ("eu", "us")[i % 2]} for i in range(count)])


def test_it_appends_to_its_collections_from_the_first_document_on(here: Deployment) -> None:
    """New journals, journals that are there, entry and large: an append in all its ways."""
    for count in (2, 5, 30_000):
        done = here.penstock("acme", "append", "acme/orders", "--json", stdin=documents(count))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["documents"] == count
    for who in ("acme", "reader"):
        read_back = here.penstock(who, "read", "acme/orders", "--limit", "3")
        assert read_back.returncode == 0, read_back.stderr
        assert len(read_back.lines) == 3
    listed = here.penstock("reader", "journals", "acme/orders", "--json")
    assert listed.returncode == 0, listed.stderr


@pytest.mark.parametrize("collection", ["acmecorp/orders", "other/orders"])
def test_it_appends_to_no_other_collection(here: Deployment, collection: str) -> None:
    done = here.penstock("acme", "append", collection, stdin=jsonl([{"id": 1}]))
    assert done.returncode == 1
    assert "permission denied" in done.stderr
    assert "prefix" in done.stderr
    assert "Traceback" not in done.stderr
    everything = here.penstock("ops", "read", collection)
    assert everything.stdout == ""


def test_it_changes_no_catalog_and_lists_nothing_of_others(
    here: Deployment, tmp_path: Path
) -> None:
    new = (
        "  acme/new:\n    key: [/n]\n"
        "    schema: {type: object, required: [n], properties: {n: {type: string}}}\n"
    )
    for text in (CATALOG.replace("  other/orders: *plain\n", ""), CATALOG + new):
        (tmp_path / "catalog.yaml").write_text(text)
        changed = here.penstock("acme", "apply", str(tmp_path / "catalog.yaml"))
        assert (changed.returncode, "permission denied" in changed.stderr) == (1, True)
        assert "internal error" not in changed.stderr
    for arguments in (("journals",), ("read", "other/orders"), ("gc",)):
        refused = here.penstock("acme", *arguments)
        assert refused.returncode == 1, arguments
        assert "permission denied" in refused.stderr, arguments
        assert "Traceback" not in refused.stderr


def test_a_reader_appends_nothing(here: Deployment) -> None:
    done = here.penstock("reader", "append", "acme/orders", stdin=documents(1))
    assert (done.returncode, "permission denied" in done.stderr) == (1, True)


FOREIGN = (
    "catalog/main",
    schema_key("0" * 32),
    "LIVENESS",
    "journal/",
    "journal/acme",
    "journal/acmecorp/orders/pivot=00",
    "journal/other/orders/pivot=00",
    "task/acme/orders",
    "journalx/acme/",
    "x",
)


async def test_over_the_wire_it_writes_below_its_prefix_and_nowhere_else(here: Deployment) -> None:
    """Every operation that writes, on every kind of key, whatever a command would send."""
    entry, large = VersionedData(0, b"x"), VersionedData(0, bytes(1 << 20))
    store = RpcConsensus(here.url("acme"))

    async def denied(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(ConsensusError) as caught:
            await call()
        assert caught.value.kind is ErrorKind.PERMISSION_DENIED

    try:
        await store.compare_and_set("journal/acme/z", entry)
        for key in FOREIGN:
            await denied(lambda key=key: store.compare_and_set(key, entry))
            await denied(lambda key=key: store.compare_and_set(key, large))
            await denied(
                lambda key=key: store.compare_and_set_all([("journal/acme/y", entry), (key, entry)])
            )
            await denied(lambda key=key: store.truncate(key, 0))
            [outcome] = await store.compare_and_set_many([(key, entry)])
            assert isinstance(outcome, ConsensusError)
            assert outcome.kind is ErrorKind.PERMISSION_DENIED
        assert await store.head("journal/acme/y", fresh=True) is None  # all or nothing
        for prefix in ("", "journal/", "journal/acme", "catalog/", "schema", "task/"):
            await denied(lambda prefix=prefix: anext(store.watch(prefix, 0)))
            await denied(lambda prefix=prefix: anext(store.snapshot(prefix)))
            await denied(lambda prefix=prefix: anext(store.list_keys(prefix)))
        await denied(lambda: store.head("task/acme/orders"))
        await denied(lambda: anext(store.subscribe("journal/other/orders/pivot=00", 0)))
    finally:
        await store.close()
