"""`penstock compact`, `retain` and `gc`, as people run them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli.main import app

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {id: {type: integer}, text: {type: string}}
"""


def penstock(*arguments: str, cwd: Path, stdin: str | None = None) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A collection of five appends, each an object of its own."""
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    assert penstock("apply", "catalog.yaml", cwd=tmp_path).exit_code == 0
    for n in range(5):
        document = json.dumps({"id": n, "text": secrets.token_hex(4096)})
        assert penstock("append", "acme/orders", cwd=tmp_path, stdin=document).exit_code == 0
    return tmp_path


def objects(here: Path) -> list[Path]:
    return sorted((here / ".penstock/blobs/acme").rglob("*.parquet"))


def read(here: Path) -> list[int]:
    lines = penstock("read", "acme/orders", cwd=here).stdout.splitlines()
    return [json.loads(line)["id"] for line in lines]


def age(*files: Path, hours: int) -> None:
    for file in files:
        then = time.time() - hours * 3600
        os.utime(file, (then, then))


def test_fragments_are_compacted_and_what_they_were_is_collected_a_day_later(here: Path) -> None:
    done = penstock("compact", "acme/orders", "--json", cwd=here)
    assert done.exit_code == 0, done.output
    counts = json.loads(done.stdout)
    assert (counts["objects"], counts["fragments"], counts["rows"]) == (1, 5, 5)
    assert penstock("compact", cwd=here).stdout == "nothing to compact\n"
    assert penstock("gc", cwd=here).stderr == "removed 0 of 6 objects, 0 bytes\n"
    age(*objects(here), *(here / ".penstock/blobs/=replaced").iterdir(), hours=25)
    dry = json.loads(penstock("gc", "--dry-run", "--json", cwd=here).stdout)
    assert (dry["listed"], dry["deleted"], dry["garbage"], len(dry["quarantined"])) == (6, 0, {}, 5)
    waiting = sum(dry["quarantined"].values())
    first = penstock("gc", cwd=here)
    assert first.stdout == ""
    assert first.stderr == (
        f"removed 0 of 6 objects, 0 bytes; in quarantine: 5 objects, {waiting:,} bytes, for 72h\n"
    )
    age(*(here / ".penstock/blobs/=quarantine").iterdir(), hours=71)
    assert len(json.loads(penstock("gc", "--json", cwd=here).stdout)["quarantined"]) == 5
    age(*(here / ".penstock/blobs/=quarantine").iterdir(), hours=73)
    gone = penstock("gc", cwd=here)
    assert gone.stdout.splitlines() == sorted(dry["quarantined"])
    assert gone.stderr == f"removed 5 of 6 objects, {waiting:,} bytes\n"
    assert len(objects(here)) == 1
    assert read(here) == list(range(5))


def test_the_quarantine_may_be_shorter_and_still_takes_two_collections(here: Path) -> None:
    assert penstock("compact", cwd=here).exit_code == 0
    age(*objects(here), *(here / ".penstock/blobs/=replaced").iterdir(), hours=25)
    counts = []
    for _ in range(3):
        told = json.loads(penstock("gc", "--quarantine", "0s", "--json", cwd=here).stdout)
        counts.append((told["deleted"], len(told["quarantined"])))
    assert counts == [(0, 5), (5, 0), (0, 0)]
    assert read(here) == list(range(5))


@pytest.mark.parametrize("failpoint", ["blobs.turned", "gc.listed", "gc.removed", "gc.relisted"])
def test_a_collection_that_dies_anywhere_is_finished_by_the_next(
    here: Path, failpoint: str
) -> None:
    assert penstock("compact", cwd=here).exit_code == 0
    blobs = here / ".penstock/blobs"
    age(*objects(here), *(blobs / "=replaced").iterdir(), hours=25)
    if failpoint == "gc.removed":
        assert penstock("gc", cwd=here).exit_code == 0
        age(*(blobs / "=quarantine").iterdir(), hours=73)
    if failpoint == "gc.relisted":
        some = [str(path.relative_to(blobs)) for path in objects(here)]
        (blobs / "=quarantine").mkdir()
        (blobs / "=quarantine" / secrets.token_hex(16)).write_text("\n".join(some))
    died = subprocess.run(
        [sys.executable, "-m", "penstock", "gc"],
        cwd=here,
        env={**os.environ, "PENSTOCK_FAILPOINT": failpoint},
        check=False,
        capture_output=True,
    )
    assert died.returncode == 137, died.stderr
    assert read(here) == list(range(5))
    for _ in range(2):
        assert penstock("gc", cwd=here).exit_code == 0
        age(*(blobs / "=quarantine").iterdir(), hours=73)
        assert read(here) == list(range(5))
    assert penstock("gc", cwd=here).exit_code == 0
    assert len(objects(here)) == 1
    assert not list((blobs / "=quarantine").iterdir())
    document = json.dumps({"id": 5, "text": secrets.token_hex(4096)})
    assert penstock("append", "acme/orders", cwd=here, stdin=document).exit_code == 0
    assert read(here) == list(range(6))


def test_people_are_told_what_compaction_did(here: Path) -> None:
    told = penstock("compact", cwd=here).stdout
    assert told.startswith("rewrote 5 fragments of 1 journal as 1 object: 5 documents, ")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        pytest.param(["gc", "--grace", "30m"], "too short", id="a grace period writers outlast"),
        pytest.param(["gc", "--grace", "2"], "unit", id="a duration without a unit"),
        pytest.param(["gc", "--restore", "--take-over"], "choose one", id="two things at once"),
        pytest.param(["compact", "--target", "big"], "unit", id="a size without a unit"),
    ],
)
def test_what_cannot_be_meant_is_refused(here: Path, arguments: list[str], what: str) -> None:
    refused = penstock(*arguments, cwd=here)
    assert refused.exit_code == 2
    assert what in refused.stderr


def test_a_blob_store_of_somebody_else_is_left_alone(here: Path, tmp_path: Path) -> None:
    age(*objects(here), hours=48)
    other = f"sqlite:///{tmp_path}/other.db"
    (tmp_path / "other.db").touch()
    assert penstock("apply", "catalog.yaml", "--consensus", other, cwd=here).exit_code == 0
    refused = penstock("gc", "--consensus", other, cwd=here)
    assert refused.exit_code == 1
    assert "not that of these journals" in refused.stderr
    assert len(objects(here)) == 5


def test_where_there_is_nothing_nothing_is_made(tmp_path: Path) -> None:
    for command in ("compact", "gc"):
        assert penstock(command, cwd=tmp_path).exit_code == 1
    assert not (tmp_path / ".penstock").exists()


def test_retain_forgets_what_is_older_than_the_collection_keeps_it(here: Path) -> None:
    everything = penstock("retain", cwd=here)
    assert (everything.exit_code, everything.stdout) == (0, "")
    assert everything.stderr == "no collection has a retention: every document is kept\n"
    wrong = penstock("retain", "acme/orders", cwd=here)
    assert wrong.exit_code == 1
    assert "acme/orders has no retention" in wrong.stderr

    catalog = f"{CATALOG}    journals: {{fragments: {{retention: 1s}}}}\n"
    (here / "catalog.yaml").write_text(catalog)
    assert penstock("apply", "catalog.yaml", cwd=here).exit_code == 0
    time.sleep(1.1)  # nothing is younger than the retention
    planned = penstock("retain", "acme/orders", "--dry-run", cwd=here)
    assert planned.exit_code == 0, planned.stderr
    heading, row = planned.stdout.splitlines()
    assert heading.split() == ["COLLECTION", "RETENTION", "DOCUMENTS", "BYTES", "JOURNALS", "HELD"]
    assert row.split()[:3] == ["acme/orders", "1s", "5"]
    assert planned.stderr.startswith("would forget 5 documents, ")
    assert read(here) == [0, 1, 2, 3, 4]

    done = json.loads(penstock("retain", "--json", cwd=here).stdout)
    assert done["dry_run"] is False
    [found] = done["collections"]
    assert (found["documents"], found["journals"], found["held"]) == (5, 1, None)
    assert read(here) == []
    assert len(objects(here)) == 5, "they are left to gc"
    assert penstock("read", "acme/orders", "--from", "offset=0", cwd=here).stdout == ""


def test_a_retention_of_nothing_is_refused_where_it_is_written(tmp_path: Path) -> None:
    catalog = f"{CATALOG}    journals: {{fragments: {{retention: 0d}}}}\n"
    (tmp_path / "catalog.yaml").write_text(catalog)
    refused = penstock("check", "catalog.yaml", cwd=tmp_path)
    assert refused.exit_code == 1
    assert "a retention of nothing would forget every document" in refused.stdout
    assert "catalog.yaml:9:" in refused.stdout
