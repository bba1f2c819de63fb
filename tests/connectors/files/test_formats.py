"""Files as documents: whatever way they are cut, the documents are those of the file."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.connectors.files import splits
from penstock.connectors.files.formats import CsvOptions, FilePart, FileReading, read_split
from penstock.connectors.files.places import FilePlace
from penstock.journal.schemas import layout
from penstock.model.json_order import canonical_json
from penstock.native.plain import plain_rows
from penstock.runtime.connector.capture import Documents
from penstock.runtime.connector.common import ConnectorError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "price": {"type": "number"},
        "ok": {"type": "boolean"},
        "zip": {"type": "string"},
        "note": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}


def reading(directory: Path, **options: object) -> FileReading:
    root = layout(canonical_json(SCHEMA))
    return FileReading(place=FilePlace(str(directory)), format=None, root=root, **options)  # type: ignore[arg-type]


def rows(documents: Sequence[Documents]) -> list[Any]:
    made: list[Any] = []
    for each in documents:
        if each.columns is not None:
            made += plain_rows(each.columns)
        else:
            made += [json.loads(text) for text in each.texts or ()]
    return made


def read(directory: Path, path: str, **options: object) -> list[Documents]:
    how = reading(directory, **options)
    (found,) = how.place.list(path)
    return list(read_split(how, FilePart(file=found)))


def planned(directory: Path, path: str, **options: object) -> list[Documents]:
    how = reading(directory, **options)
    groups = splits.plan(how, how.place.list(path))
    made = [[d for s in group.splits for d in read_split(how, s)] for group in groups]
    for group, some in zip(groups, made, strict=True):
        assert sum(each.count for each in some) <= group.rows_max
    return [each for some in made for each in some]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    text = '\ufeff{"id": 1}\r\n\r\n{"id": 2, "note": "ä"}\n{"id": 3}'.encode()
    if suffix == ".gz":
        text = gzip.compress(text)
    if suffix == ".zst":
        text = pa.Codec("zstd").compress(text, asbytes=True)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(text)
    documents = read(tmp_path, f"a.jsonl{suffix}", meta=True)
    assert rows(documents) == [{"id": 1}, {"id": 2, "note": "ä"}, {"id": 3}]
    assert [m for d in documents if d.meta for m in d.meta.to_pydict()["row"]] == [1, 3, 4]
    assert documents[0].origin(1) == f"{tmp_path}/a.jsonl{suffix}:3"


def test_csv_fields_become_what_the_schema_says_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'id,price,ok,zip,note\n1,2.5,true,00420,"a ""b"",\nc"\n2,,false,,""\n'
    )
    assert rows(read(tmp_path, "a.csv")) == [
        {"id": 1, "price": 2.5, "ok": True, "zip": "00420", "note": 'a "b",\nc'},
        {"id": 2, "ok": False, "note": ""},
    ]


def test_csv_text_that_is_not_what_the_schema_says_stays_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'id,price,ok,tags,more\n007,1e3,True,"[""x""]",5\n12345678901234567890,x,1,y,\n'
    )
    assert rows(read(tmp_path, "a.csv")) == [
        {"id": "007", "price": 1000.0, "ok": "True", "tags": ["x"], "more": "5"},
        {"id": 12345678901234567890, "price": "x", "ok": "1", "tags": "y"},
    ]


def test_a_csv_row_with_too_many_fields_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,zip\n1,a\n2,b,c\n3,d\n")
    documents = read(tmp_path, "a.csv")
    assert rows(documents) == [{"id": 1, "zip": "a"}, {"id": 3, "zip": "d"}]
    (broken,) = [b for d in documents for b in d.broken]
    assert (broken.text, broken.reason) == ("2,b,c", "a row has 3 fields instead of 2")
    assert broken.origin == f"{tmp_path}/a.csv, line 3"


def test_csv_options(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\t'x\ty'\n2\tNULL\n")
    options = CsvOptions(quote="'", header=False, columns=("id", "note"), nulls=("NULL",))
    assert rows(read(tmp_path, "a.tsv", csv=options)) == [{"id": 1, "note": "x\ty"}, {"id": 2}]


@pytest.mark.parametrize("text", ["id,id\n1,2\n", "id,\n1,2\n"])
def test_a_header_that_is_not_usable_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ConnectorError, match="header of a CSV file is not usable"):
        read(tmp_path, "a.csv")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_an_empty_file_has_no_documents(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    assert rows(read(tmp_path, name)) == []


def test_parquet_types_as_json(tmp_path: Path) -> None:
    import datetime
    import decimal

    table = pa.table(
        {
            "id": pa.array([1, None], pa.int16()),
            "at": pa.array(
                [datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC), None],
                pa.timestamp("us", "UTC"),
            ),
            "day": pa.array([datetime.date(2026, 1, 2), None]),
            "price": pa.array([decimal.Decimal("1.10"), None], pa.decimal128(10, 2)),
            "big": pa.array([2**60, None]),
            "raw": pa.array([b"\x00\x01", None]),
            "list": pa.array([[1, None], None]),
            "to": pa.array([{"city": "x", "zip": None}, None]),
            "nan": pa.array([float("nan"), 1.5]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert rows(read(tmp_path, "a.parquet")) == [
        {
            "id": 1,
            "at": "2026-01-02T03:04:05Z",
            "day": "2026-01-02",
            "price": 1.1,
            "big": 2**60,
            "raw": "AAE=",
            "list": [1, None],
            "to": {"city": "x"},
            "nan": "NaN",
        },
        {"nan": 1.5},
    ]


TEXT = st.text(st.sampled_from('ab",\n\r é'), max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(TEXT, TEXT), max_size=30), st.integers(1, 60), st.integers(1, 20))
def test_csv_is_the_same_wherever_it_is_cut(
    tmp_path: Path,
    monkeypatch_module: pytest.MonkeyPatch,
    pairs: list[tuple[str, str]],
    split: int,
    scan: int,
) -> None:
    monkeypatch_module.setattr(splits, "SPLIT_BYTES", split)
    monkeypatch_module.setattr(splits, "_SCAN_BYTES", scan)
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([("zip", "note"), *pairs])
    (tmp_path / "a.csv").write_text(out.getvalue(), newline="")
    documents = planned(tmp_path, "a.csv", meta=True)
    assert rows(documents) == [{"zip": a, "note": b} for a, b in pairs]
    numbers = [n for d in documents if d.meta for n in d.meta.to_pydict()["row"]]
    assert numbers == sorted(numbers)
    (tmp_path / "a.csv").unlink()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=8), max_size=30), st.integers(1, 60), st.integers(1, 20))
def test_json_lines_are_the_same_wherever_they_are_cut(
    tmp_path: Path,
    monkeypatch_module: pytest.MonkeyPatch,
    notes: list[str],
    split: int,
    scan: int,
) -> None:
    monkeypatch_module.setattr(splits, "SPLIT_BYTES", split)
    monkeypatch_module.setattr(splits, "_SCAN_BYTES", scan)
    text = "".join(f"{json.dumps({'note': note})}\n" for note in notes)
    (tmp_path / "a.jsonl").write_text(text)
    documents = planned(tmp_path, "a.jsonl", meta=True)
    assert rows(documents) == [{"note": note} for note in notes]
    numbers = [n for d in documents if d.meta for n in d.meta.to_pydict()["row"]]
    assert numbers == list(range(1, len(notes) + 1))
    (tmp_path / "a.jsonl").unlink()


@pytest.fixture
def monkeypatch_module(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


def test_a_parquet_file_is_cut_between_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"id": list(range(100))}), tmp_path / "a.parquet", row_group_size=9)
    monkeypatch.setattr(splits, "SPLIT_BYTES", 200)
    documents = planned(tmp_path, "a.parquet", meta=True)
    assert rows(documents) == [{"id": at} for at in range(100)]
    assert [n for d in documents if d.meta for n in d.meta.to_pydict()["row"]] == [*range(1, 101)]


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": 1}\n' * 10)
    how = reading(tmp_path)
    (found,) = how.place.list("a.jsonl")
    reader = read_split(how, FilePart(file=found))
    next(reader)
    file.write_text('{"id": 1}\n' * 11)
    with pytest.raises(ConnectorError, match="changed while it was read") as caught:
        list(reader)
    assert caught.value.transient
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", ["a/1.jsonl", "a/b/2.jsonl", "c.csv"]),
        ("a", ["a/1.jsonl", "a/b/2.jsonl"]),
        ("a/*.jsonl", ["a/1.jsonl"]),
        ("a/**/*.jsonl", ["a/1.jsonl", "a/b/2.jsonl"]),
        ("**/2.*", ["a/b/2.jsonl"]),
        ("c.csv", ["c.csv"]),
        ("[cd].csv", ["c.csv"]),
        ("?.csv", ["c.csv"]),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, found: list[str]) -> None:
    for name in ("a/1.jsonl", "a/b/2.jsonl", "c.csv", ".hidden.csv", "_staging/3.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert sorted(f.path for f in FilePlace(str(tmp_path)).list(pattern)) == found
