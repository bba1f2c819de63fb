"""A blob store is that of one consensus store: whoever comes with another is refused, by name."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sqlite3
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
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings:
      - {source: acme/orders, resource: {table: orders}}
"""

OURS = ("--data", "ours")


def penstock(*arguments: str, cwd: Path, stdin: str | None = None) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments), input=stdin)


def done(*arguments: str, cwd: Path, stdin: str | None = None) -> Result:
    result = penstock(*arguments, cwd=cwd, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def documents(*numbers: int) -> str:
    """Documents that become objects: they are too large to be inline."""
    lines = [{"id": n, "text": secrets.token_hex(4096)} for n in numbers]
    return "\n".join(map(json.dumps, lines))


def fill(cwd: Path, *options: str, count: int = 3) -> None:
    """A deployment of some objects."""
    (cwd / "catalog.yaml").write_text(CATALOG)
    done("apply", "catalog.yaml", *options, cwd=cwd)
    for n in range(count):
        done("append", "acme/orders", *options, cwd=cwd, stdin=documents(n))


def objects(blobs: Path) -> set[str]:
    return {str(path.relative_to(blobs)) for path in blobs.rglob("*.parquet")}


def ids(cwd: Path, *options: str) -> list[int]:
    lines = done("read", "acme/orders", *options, cwd=cwd).stdout.splitlines()
    return [json.loads(line)["id"] for line in lines]


def age(directory: Path, *, hours: int) -> None:
    then = time.time() - hours * 3600
    for file in directory.rglob("*"):
        if file.is_file():
            os.utime(file, (then, then))


def unmark(blobs: Path) -> None:
    """As it was before there were marks."""
    (blobs / "=store").unlink(missing_ok=True)


def lose(database: Path) -> None:
    for file in database.parent.glob(f"{database.name}*"):
        file.unlink()


COMMANDS = {
    "append": ["append", "acme/orders"],
    "run": ["run"],
    "compact": ["compact"],
    "gc": ["gc"],
    "gc --dry-run": ["gc", "--dry-run"],
}


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "of a version without marks"])
@pytest.mark.parametrize("command", COMMANDS)
def test_after_the_consensus_store_was_lost_nothing_is_written_or_collected(
    tmp_path: Path, command: str, marked: bool
) -> None:
    fill(tmp_path, *OURS)
    blobs = tmp_path / "ours/blobs"
    if not marked:
        unmark(blobs)
    age(blobs, hours=1000)
    before = objects(blobs)
    elsewhere = ("--data", "ours", "--consensus", "sqlite:///empty.db")
    (tmp_path / "empty.db").touch()  # of no bytes: as good as no database
    done("apply", "catalog.yaml", *elsewhere, cwd=tmp_path)
    refused = penstock(*COMMANDS[command], *elsewhere, cwd=tmp_path, stdin=documents(7))
    assert refused.exit_code == 1
    assert "not that of these journals" in refused.stderr
    assert "--consensus" in refused.stderr
    assert objects(blobs) == before
    assert ids(tmp_path, *OURS) == [0, 1, 2]


def test_one_append_to_an_emptied_consensus_store_does_not_make_the_objects_its_own(
    tmp_path: Path,
) -> None:
    """It did: the append left an object that both knew, and so gc took all the others."""
    fill(tmp_path, *OURS)
    blobs = tmp_path / "ours/blobs"
    before = objects(blobs)
    empty = ("--data", "ours", "--consensus", "sqlite:///empty.db")
    (tmp_path / "empty.db").touch()
    done("apply", "catalog.yaml", *empty, cwd=tmp_path)
    penstock("append", "acme/orders", *empty, cwd=tmp_path, stdin=documents(7))
    for _ in range(2):
        age(blobs, hours=1000)
        penstock("gc", *empty, cwd=tmp_path)
    assert before <= objects(blobs)
    assert ids(tmp_path, *OURS) == [0, 1, 2]


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("command", COMMANDS)
def test_of_two_deployments_on_one_blob_store_the_second_is_refused(
    tmp_path: Path, first: str, command: str
) -> None:
    def options(name: str) -> tuple[str, ...]:
        return ("--data", name, "--blob", "shared")

    second = "b" if first == "a" else "a"
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    done("apply", "catalog.yaml", *options(second), cwd=tmp_path)
    fill(tmp_path, *options(first))
    before = objects(tmp_path / "shared")
    age(tmp_path / "shared", hours=1000)
    refused = penstock(*COMMANDS[command], *options(second), cwd=tmp_path, stdin=documents(9))
    assert refused.exit_code == 1
    assert "marked as that of the consensus store" in refused.stderr
    assert objects(tmp_path / "shared") == before
    assert ids(tmp_path, *options(first)) == [0, 1, 2]
    done("append", "acme/orders", *options(first), cwd=tmp_path, stdin=documents(9))


def test_two_deployments_that_shared_a_store_before_there_were_marks(tmp_path: Path) -> None:
    """Who comes first has it. What is the other's is quarantined, and can still be read."""
    for name in ("a", "b"):
        fill(tmp_path, "--data", name, "--blob", f"{name}-blobs")
    both = tmp_path / "shared"
    for name in ("a", "b"):
        unmark(tmp_path / f"{name}-blobs")
        for path in objects(tmp_path / f"{name}-blobs"):
            (both / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"{name}-blobs" / path).rename(both / path)
    a, b = (("--data", name, "--blob", "shared") for name in ("a", "b"))
    before = objects(both)
    age(both, hours=1000)
    told = done("gc", *a, cwd=tmp_path)
    assert "3 objects" in told.stderr
    assert "quarantine" in told.stderr
    assert objects(both) == before
    refused = penstock("append", "acme/orders", *b, cwd=tmp_path, stdin=documents(4))
    assert refused.exit_code == 1
    assert "marked as that of the consensus store" in refused.stderr
    assert ids(tmp_path, *a) == ids(tmp_path, *b) == [0, 1, 2]
    back = done("gc", "--restore", *a, cwd=tmp_path)
    assert len(back.stdout.splitlines()) == 3
    age(both, hours=1000)
    done("gc", *a, cwd=tmp_path)
    assert objects(both) == before, "they are in quarantine from now on, not from then"


def test_a_lost_database_is_not_made_anew_beside_its_objects(tmp_path: Path) -> None:
    fill(tmp_path, *OURS)
    backup = tmp_path / "backup.db"
    with contextlib.closing(sqlite3.connect(tmp_path / "ours/consensus.db")) as database:
        database.execute("VACUUM INTO ?", (str(backup),))
    lose(tmp_path / "ours/consensus.db")
    for command in (["apply", "catalog.yaml"], ["gc"], ["append", "acme/orders"], ["read", "x"]):
        refused = penstock(*command, *OURS, cwd=tmp_path, stdin=documents(5))
        assert refused.exit_code == 1
        assert "consensus.db is missing, but the blob store has objects" in refused.stderr
        assert "backup" in refused.stderr
    assert not (tmp_path / "ours/consensus.db").exists()
    backup.rename(tmp_path / "ours/consensus.db")
    assert ids(tmp_path, *OURS) == [0, 1, 2]
    done("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(3))


def test_a_store_of_a_version_without_marks_goes_on_and_is_marked(tmp_path: Path) -> None:
    fill(tmp_path, *OURS)
    blobs = tmp_path / "ours/blobs"
    unmark(blobs)
    done("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(3))
    assert (blobs / "=store").exists()
    assert not (blobs / "=claim").exists() or not list((blobs / "=claim").iterdir())
    assert ids(tmp_path, *OURS) == [0, 1, 2, 3]


def test_an_empty_directory_is_not_the_blob_store_of_journals_that_name_objects(
    tmp_path: Path,
) -> None:
    """A wrong --blob would leave the documents of one collection in two places."""
    fill(tmp_path, *OURS)
    wrong = (*OURS, "--blob", "wrong")
    for command in (["append", "acme/orders"], ["gc"], ["compact"], ["run"]):
        refused = penstock(*command, *wrong, cwd=tmp_path, stdin=documents(5))
        assert refused.exit_code == 1, refused.output
        assert "has none of the objects that the journals name" in refused.stderr
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b'{"version":1}', b'{"version":1,"store":7}'],
)
def test_a_mark_that_cannot_be_read_stops_everything_until_it_is_taken_over(
    tmp_path: Path, content: bytes
) -> None:
    fill(tmp_path, *OURS)
    (tmp_path / "ours/blobs/=store").write_bytes(content)
    for command in COMMANDS.values():
        refused = penstock(*command, *OURS, cwd=tmp_path, stdin=documents(7))
        assert refused.exit_code == 1
        assert "cannot be read" in refused.stderr
        assert "--take-over" in refused.stderr
    done("gc", "--take-over", *OURS, cwd=tmp_path)
    done("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(3))
    assert ids(tmp_path, *OURS) == [0, 1, 2, 3]


def test_a_mark_of_a_later_version_says_so(tmp_path: Path) -> None:
    fill(tmp_path, *OURS)
    (tmp_path / "ours/blobs/=store").write_text('{"version":99,"whatever":1}')
    refused = penstock("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(7))
    assert refused.exit_code == 1
    assert "later version" in refused.stderr


def test_the_mark_of_an_earlier_version_counts(tmp_path: Path) -> None:
    """Its gc wrote the incarnation of the consensus store, in hex, and nothing else."""
    fill(tmp_path, *OURS)
    with contextlib.closing(sqlite3.connect(tmp_path / "ours/consensus.db")) as database:
        [[incarnation]] = database.execute("SELECT v FROM consensus_meta WHERE k = 'incarnation'")
    mark = tmp_path / "ours/blobs/=store"
    mark.write_text(incarnation.hex())
    done("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(3))
    mark.write_text("ab" * 16)
    refused = penstock("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(4))
    assert refused.exit_code == 1
    assert "abababab" in refused.stderr


def test_take_over_is_refused_where_it_would_make_garbage_of_everything(tmp_path: Path) -> None:
    fill(tmp_path, *OURS)
    empty = ("--data", "ours", "--consensus", "sqlite:///empty.db")
    (tmp_path / "empty.db").touch()
    done("apply", "catalog.yaml", *empty, cwd=tmp_path)
    refused = penstock("gc", "--take-over", *empty, cwd=tmp_path)
    assert refused.exit_code == 1
    assert "names none of them" in refused.stderr
    done("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(3))


def test_a_blob_store_inside_of_another_is_not_collected_with_it(tmp_path: Path) -> None:
    fill(tmp_path, "--data", "outer", "--blob", "blobs")
    fill(tmp_path, "--data", "inner", "--blob", "blobs/inner")
    before = objects(tmp_path / "blobs")
    for _ in range(2):
        age(tmp_path / "blobs", hours=1000)
        done("gc", "--data", "outer", "--blob", "blobs", cwd=tmp_path)
    assert objects(tmp_path / "blobs") == before
    assert ids(tmp_path, "--data", "inner", "--blob", "blobs/inner") == [0, 1, 2]


# ------------------------------------------------------------------------------ restored copies


def snapshot(cwd: Path, to: str) -> None:
    with contextlib.closing(sqlite3.connect(cwd / "ours/consensus.db")) as database:
        database.execute("VACUUM INTO ?", (str(cwd / to),))


def collect_something(cwd: Path, *options: str) -> None:
    """A collection that finds garbage, and so leaves its trace in the mark."""
    stray = cwd / "ours/blobs/acme/orders" / f"{secrets.token_hex(16)}-dead.parquet"
    stray.write_bytes(b"x")
    os.utime(stray, (0, 0))
    done("gc", *options, cwd=cwd)


def test_a_consensus_store_from_a_backup_goes_on_if_nothing_was_collected_since(
    tmp_path: Path,
) -> None:
    fill(tmp_path, *OURS)
    snapshot(tmp_path, "backup.db")
    done("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(3))
    lose(tmp_path / "ours/consensus.db")
    (tmp_path / "backup.db").rename(tmp_path / "ours/consensus.db")
    assert ids(tmp_path, *OURS) == [0, 1, 2]
    done("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(4))
    assert ids(tmp_path, *OURS) == [0, 1, 2, 4]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_older_copy_of_a_consensus_store_is_refused_until_it_takes_over(
    tmp_path: Path, command: str
) -> None:
    """It has the incarnation of the mark, but what was written since is unknown to it."""
    fill(tmp_path, *OURS)
    snapshot(tmp_path, "copy.db")
    done("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(3))
    collect_something(tmp_path, *OURS)
    copy = (*OURS, "--consensus", "sqlite:///copy.db")
    refused = penstock(*COMMANDS[command], *copy, cwd=tmp_path, stdin=documents(4))
    assert refused.exit_code == 1
    assert "older" in refused.stderr
    assert "--take-over" in refused.stderr
    assert ids(tmp_path, *copy) == [0, 1, 2], "reading harms nobody"

    told = done("gc", "--take-over", *copy, cwd=tmp_path)
    assert re.search(
        r"2 of \d+ objects not in any journal", told.stderr
    )  # the fourth append, the stray
    done("append", "acme/orders", *copy, cwd=tmp_path, stdin=documents(4))
    assert ids(tmp_path, *copy) == [0, 1, 2, 4]
    refused = penstock("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(5))
    assert refused.exit_code == 1
    assert "older" in refused.stderr, "the one that was replaced is the stranger now"
    assert ids(tmp_path, *OURS) == [0, 1, 2, 3], "its objects are not gone yet"


def test_a_copy_with_an_incarnation_of_its_own_has_to_take_over(tmp_path: Path) -> None:
    fill(tmp_path, *OURS)
    snapshot(tmp_path, "copy.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "copy.db")) as database:
        database.execute(
            "UPDATE consensus_meta SET v = ? WHERE k = 'incarnation'", (secrets.token_bytes(16),)
        )
        database.commit()
    copy = (*OURS, "--consensus", "sqlite:///copy.db")
    refused = penstock("append", "acme/orders", *copy, cwd=tmp_path, stdin=documents(4))
    assert refused.exit_code == 1
    assert "marked as that of the consensus store" in refused.stderr
    done("gc", "--take-over", *copy, cwd=tmp_path)
    done("append", "acme/orders", *copy, cwd=tmp_path, stdin=documents(4))
    refused = penstock("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(5))
    assert "marked as that of the consensus store" in refused.stderr


def test_what_went_into_quarantine_and_is_named_again_comes_back_by_itself(tmp_path: Path) -> None:
    """A copy took over by mistake and collected. The right one takes over again."""
    fill(tmp_path, *OURS)
    snapshot(tmp_path, "copy.db")
    done("append", "acme/orders", *OURS, cwd=tmp_path, stdin=documents(3))
    copy = (*OURS, "--consensus", "sqlite:///copy.db")
    age(tmp_path / "ours/blobs", hours=1000)
    quarantined = json.loads(done("gc", "--json", *copy, cwd=tmp_path).stdout)
    assert len(quarantined["quarantined"]) == 1
    assert quarantined["deleted"] == 0
    assert ids(tmp_path, *OURS) == [0, 1, 2, 3]
    refused = penstock("gc", *OURS, cwd=tmp_path)
    assert "older" in refused.stderr
    done("gc", "--take-over", *OURS, cwd=tmp_path)
    for _ in range(3):
        age(tmp_path / "ours/blobs", hours=1000)
        told = json.loads(done("gc", "--json", *OURS, cwd=tmp_path).stdout)
        assert told["deleted"] == 0
    assert ids(tmp_path, *OURS) == [0, 1, 2, 3]
