"""JSON lines are accepted or refused line by line."""

import io
from importlib.resources import files
from pathlib import Path

import pytest

from penstock.catalog import intake as intake_module
from penstock.catalog.build import build_catalog
from penstock.catalog.intake import Intake
from penstock.model.schema import CompiledSchema, compiled
from penstock.native import take
from penstock.native.arrow import to_json

TEMPLATE = Path(str(files("penstock.catalog") / "templates" / "demo"))
SCHEMA = CompiledSchema(
    {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "integer"}, "total": {"type": "number"}},
    }
)


def outcomes(data: bytes, schema: CompiledSchema = SCHEMA) -> tuple[list[str], list[str]]:
    """What is accepted, and what is said of the rest."""
    intake = Intake(schema)
    accepted, refused = [], []
    for chunk in intake.read(io.BytesIO(data), "in.jsonl"):
        if chunk.documents is not None:
            accepted += to_json(chunk.documents, intake.root)
        refused += [line.render() for line in chunk.refused]
    return accepted, refused


def test_good_lines_beside_bad_ones_are_kept() -> None:
    assert outcomes(
        b'\xef\xbb\xbf{"id": 1}\n'
        b"\n"
        b'{"id": "x", "total": "y"}\n'
        b"[1]\n"
        b'{"total": 1}\n'
        b'{"id": 18446744073709551615}\n'
        b'{"id": 2, "id": 3}'
    ) == (
        ['{"id":1}', '{"id":3}'],
        [
            'in.jsonl:3: /id: "x" is not an integer\nin.jsonl:3: /total: "y" is not a number',
            "in.jsonl:4: the document: the array of 1 item is not an object",
            "in.jsonl:5: /id: is required but missing",
            "in.jsonl:6: /id: 18446744073709551615 does not fit 64 bits",
        ],
    )


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
    accepted, (refused,) = outcomes(line + b'\n{"id": 1}\n')
    assert accepted == ['{"id":1}']
    assert refused.startswith("in.jsonl:1: the document: is not a JSON document")


@pytest.mark.parametrize("chunk", [4, 50, 1 << 20])
def test_a_line_without_end_is_skipped(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(intake_module, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(intake_module, "TEXT_MAX", 20)
    monkeypatch.setattr(take, "TEXT_MAX", 20)
    long = b'{"id": 1, "note": "' + b"x" * 100 + b'"}'
    assert outcomes(b'{"id": 1}\n' + long + b'\n{"id": 2}\n' + long) == (
        ['{"id":1}', '{"id":2}'],
        [f"in.jsonl:{line}: the document: is longer than 20 bytes" for line in (2, 4)],
    )


@pytest.mark.parametrize(("name", "count"), [("orders", 200), ("stock", 213)])
def test_the_sample_data_fits_its_collection(name: str, count: int) -> None:
    spec = build_catalog([TEMPLATE], environ={}).catalog.collection(f"shop/{name}")
    assert spec is not None
    data = (TEMPLATE / "data" / f"{name}.jsonl").read_bytes()
    accepted, refused = outcomes(data, compiled(spec.write_schema.text))
    assert (len(accepted), refused) == (count, [])
