"""JSON lines are accepted or refused line by line."""

import io
from importlib.resources import files
from pathlib import Path

import pytest

from penstock.catalog import intake
from penstock.catalog.build import build_catalog
from penstock.catalog.intake import AcceptedLine, RefusedLine, read_lines
from penstock.model.schema import CompiledSchema, compiled

TEMPLATE = Path(str(files("penstock.catalog") / "templates" / "demo"))
SCHEMA = CompiledSchema(
    {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "integer"}, "total": {"type": "number"}},
    }
)


def outcomes(data: bytes) -> list[str]:
    return [
        f"{found.line}: {found.document}" if isinstance(found, AcceptedLine) else found.render()
        for found in read_lines(io.BytesIO(data), "in.jsonl", SCHEMA)
    ]


def test_good_lines_beside_bad_ones_are_kept() -> None:
    assert outcomes(
        b'\xef\xbb\xbf{"id": 1}\n'
        b"\n"
        b'{"id": "x", "total": "y"}\n'
        b"[1]\n"
        b'{"total": 1}\n'
        b'{"id": 18446744073709551615}\n'
        b'{"id": 2, "id": 3}'
    ) == [
        "1: {'id': 1}",
        'in.jsonl:3: /id: "x" is not an integer\nin.jsonl:3: /total: "y" is not a number',
        "in.jsonl:4: the document: the array of 1 item is not an object",
        "in.jsonl:5: /id: is required but missing",
        "in.jsonl:6: /id: 18446744073709551615 does not fit 64 bits",
        "7: {'id': 3}",
    ]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"id": 1', id="not closed"),
        pytest.param(b'{"id": \xff}', id="not UTF-8"),
        pytest.param(b'{"id": NaN}', id="not a JSON number"),
        pytest.param(b"\x00", id="a zero byte"),
    ],
)
def test_what_is_not_json_is_refused_by_line(line: bytes) -> None:
    bad, good = read_lines(io.BytesIO(line + b'\n{"id": 1}\n'), "in.jsonl", SCHEMA)
    assert isinstance(bad, RefusedLine)
    assert bad.render().startswith("in.jsonl:1: the document: is not a JSON document")
    assert good == AcceptedLine(line=2, document={"id": 1})


def test_a_line_without_end_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "LINE_BYTES_MAX", 20)
    long = b'{"id": 1, "note": "' + b"x" * 100 + b'"}'
    assert outcomes(b'{"id": 1}\n' + long + b'\n{"id": 2}\n' + long) == [
        "1: {'id': 1}",
        "in.jsonl:2: the document: is longer than 20 bytes",
        "3: {'id': 2}",
        "in.jsonl:4: the document: is longer than 20 bytes",
    ]


@pytest.mark.parametrize(("name", "count"), [("orders", 200), ("stock", 213)])
def test_the_sample_data_fits_its_collection(name: str, count: int) -> None:
    spec = build_catalog([TEMPLATE], environ={}).catalog.collection(f"shop/{name}")
    assert spec is not None
    with (TEMPLATE / "data" / f"{name}.jsonl").open("rb") as stream:
        found = list(read_lines(stream, name, compiled(spec.write_schema.text)))
    assert [f.render() for f in found if isinstance(f, RefusedLine)] == []
    assert len(found) == count
