"""`penstock append`, as people run it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cli.documents import jsonl, penstock, start, with_catalog
from penstock.catalog import intake
from penstock.journal.frame_append import REFUSALS_SHOWN
from penstock.native.take import TEXT_MAX


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return with_catalog(tmp_path)


def orders(count: int) -> list[Any]:
    return [{"id": i, "region": ("eu", "us")[i % 2], "total": i / 4} for i in range(count)]


def ids(data: Path, collection: str = "acme/orders") -> list[int]:
    return sorted(line["id"] for line in penstock("read", collection, data=data).lines)


@pytest.fixture(params=[300, 1 << 20], ids=["small chunks", "one chunk"])
def _chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "CHUNK_BYTES", request.param)


def test_json_lines_are_appended_as_one_transaction(data: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_bytes(jsonl(orders(5)))
    files[1].write_bytes(jsonl([{"id": 9, "region": "ap"}]).rstrip(b"\n"))
    done = penstock(
        "append", "acme/orders", *map(str, files), "--json", "--redact-salt", "c2FsdA==", data=data
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["documents"], result["skipped"], len(result["journals"])) == (6, 0, 3)
    assert result["bytes"] > 0
    committed = penstock(
        "read", "acme/orders", "--from", f"revision={result['revision']}", data=data
    )
    assert sorted(line["id"] for line in committed.lines) == [0, 1, 2, 3, 4, 9]
    later = penstock(
        "read", "acme/orders", "--from", f"revision={result['revision'] + 1}", data=data
    )
    assert later.stdout == ""


@pytest.mark.usefixtures("_chunked")
def test_a_bad_document_on_line_777_is_named_and_nothing_is_appended(data: Path) -> None:
    documents = [{"id": i} for i in range(1000)]
    documents[776] = {"id": "seven"}  # type: ignore[dict-item]
    done = penstock("append", "acme/plain", data=data, stdin=jsonl(documents))
    assert done.returncode == 1
    assert "stdin:777: /id: " in done.stderr
    assert "nothing was appended: 1 document does not fit" in done.stderr
    assert ids(data, "acme/plain") == []


@pytest.mark.usefixtures("_chunked")
def test_skip_invalid_appends_the_rest_and_reports_the_count(data: Path, tmp_path: Path) -> None:
    lines = jsonl([{"id": i} for i in range(1000)]).splitlines(keepends=True)
    lines[10] = b'{"id": 10,}\n'
    lines[20] = b"\n"
    lines[30] = b'{"id": null}\n'
    lines[40] = b"[]\n"
    lines[50] = b'{"id": 1e300}\n'
    file = tmp_path / "orders.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    done = penstock("append", "acme/plain", str(file), "--skip-invalid", "--json", data=data)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["documents"], result["skipped"]) == (995, 4)
    named = [line.partition(": ")[0] for line in done.stderr.splitlines()]
    assert named == [f"{file}:{line}" for line in (11, 31, 41, 51)]
    assert len(ids(data, "acme/plain")) == 995


@pytest.mark.usefixtures("_chunked")
def test_many_bad_lines_are_named_up_to_a_number(data: Path) -> None:
    stdin = jsonl([{"id": str(i)} for i in range(100)])
    refused = penstock("append", "acme/plain", data=data, stdin=stdin)
    assert refused.stderr.count("stdin:") == REFUSALS_SHOWN
    assert "perhaps others" in refused.stderr
    skipped = penstock("append", "acme/plain", "--skip-invalid", "--json", data=data, stdin=stdin)
    assert json.loads(skipped.stdout) == {
        "collection": "acme/plain",
        "documents": 0,
        "bytes": 0,
        "journals": [],
        "skipped": 100,
        "revision": None,
    }
    assert skipped.stderr.count("stdin:") == REFUSALS_SHOWN


def test_a_line_that_is_too_long_is_refused_and_the_next_ones_are_read(data: Path) -> None:
    long = b'{"id": 1, "x": "' + b"x" * (TEXT_MAX + (3 << 20)) + b'"}\n'
    stdin = b'{"id": 0}\n' + long + b'{"id": 2}\n{"id": "x"}\n'
    done = penstock("append", "acme/plain", "--skip-invalid", data=data, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert "stdin:2: the document: is longer than" in done.stderr
    assert "stdin:4: /id" in done.stderr
    assert ids(data, "acme/plain") == [0, 2]


def test_one_document_on_a_line_and_one_line_for_a_document(data: Path) -> None:
    stdin = b'{"id": 1} {"id": 2}\n{"id":\n3}\n'
    done = penstock("append", "acme/plain", data=data, stdin=stdin)
    assert done.returncode == 1
    assert [line[:7] for line in done.stderr.splitlines()[:3]] == ["stdin:1", "stdin:2", "stdin:3"]


def test_redacted_values_never_reach_the_store(data: Path) -> None:
    stdin = jsonl([{"id": 1, "region": "eu", "email": "a@example.org", "note": "secret"}])
    refused = penstock("append", "acme/orders", data=data, stdin=stdin)
    assert refused.returncode == 2
    assert "no salt" in refused.stderr
    done = penstock("append", "acme/orders", "--redact-salt", "c2FsdA==", data=data, stdin=stdin)
    assert done.returncode == 0, done.stderr
    hashed = "sha256:" + hashlib.sha256(b"salta@example.org").hexdigest()
    [read] = penstock("read", "acme/orders", data=data).lines
    assert read == {"id": 1, "region": "eu", "email": hashed}


def test_an_unknown_collection_and_a_missing_file_are_told(data: Path, tmp_path: Path) -> None:
    unknown = penstock("append", "acme/plane", data=data)
    assert unknown.returncode == 1
    assert "did you mean acme/plain?" in unknown.stderr
    missing = penstock("append", "acme/plain", str(tmp_path / "none.jsonl"), data=data)
    assert missing.returncode == 1
    assert "cannot read" in missing.stderr
    assert "nothing was appended" in missing.stderr


def test_without_a_catalog_there_is_nothing_to_append_to(tmp_path: Path) -> None:
    done = penstock("append", "acme/plain", data=tmp_path / "none")
    assert done.returncode == 1
    assert "penstock apply" in done.stderr
    assert not (tmp_path / "none").exists()


def test_a_process_that_dies_before_its_commit_appended_nothing(data: Path) -> None:
    stdin = jsonl([{"id": i} for i in range(50)])
    for failpoint, committed in (("publisher.object", []), ("publisher.done", list(range(50)))):
        environ = {"PENSTOCK_FAILPOINT": failpoint}
        with start("append", "acme/plain", data=data, environ=environ) as process:
            process.communicate(stdin, timeout=120)
        assert process.returncode == 137
        assert ids(data, "acme/plain") == committed


def test_a_partition_value_that_no_path_holds_is_refused_and_nothing_is_appended(
    data: Path,
) -> None:
    documents = [*orders(4), {"id": 9, "region": "x" * 300}]
    salt = ("--redact-salt", "c2FsdA==")
    done = penstock("append", "acme/orders", *salt, data=data, stdin=jsonl(documents))
    assert done.returncode == 1
    assert "a value of the partition region of acme/orders is too long" in done.stderr
    assert "Traceback" not in done.stderr
    assert ids(data) == []


def test_half_a_surrogate_pair_is_told_as_that(data: Path) -> None:
    done = penstock("append", "acme/plain", data=data, stdin=b'{"id": 1, "x": "\\ud800"}\n')
    assert done.returncode == 1
    assert "stdin:1" in done.stderr
    assert "\\ud800 is half of a surrogate pair" in done.stderr
