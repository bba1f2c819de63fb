"""`penstock check` finds what is wrong with a capture in Python, or with one over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.catalog.build import load_catalog
from penstock.connectors.builtin import BUILTIN, capture
from penstock.errors import PenstockError
from penstock.runtime.capture.python_code import check


@pytest.mark.parametrize(
    "text",
    [
        "def read(config, state): yield 1",
        "def read(config, state, *, limit=10): yield 1",
        "def read(*everything): yield 1",
        "class Capture:\n    def read(self, state): yield 1",
        "class Capture(Base): pass",
        "from pages import read",
        "from pages import Capture",
        "read = make()",
        "if True:\n    def read(config, state): yield 1",
        "dlt:shop.orders:orders",
    ],
)
def test_modules_that_may_be_right(text: str) -> None:
    assert check(text) is None


@pytest.mark.parametrize(
    ("text", "at", "part"),
    [
        ("x = 1", 0, "there is no function read, and no class Capture"),
        ("", 0, "there is no function read"),
        ("\ndef read(:", 10, "line 2"),
        ("\ndef read(config): yield 1", 1, "takes other arguments"),
        ("\ndef read(config, state, more): yield 1", 1, "takes other arguments"),
        ("\nasync def read(config, state): yield 1", 1, "read is async"),
        ("\nclass Capture: pass", 1, "Capture has no method read"),
        ("class Capture:\n    def read(self): yield 1", 19, "takes other arguments"),
        ("dlt:orders", 0, "names no dlt resource"),
    ],
)
def test_mistakes(text: str, at: int, part: str) -> None:
    mistake = check(text)
    assert mistake is not None
    assert part in mistake.message
    assert mistake.offset == at


def catalog(tmp_path: Path, endpoint: dict[str, Any], resource: dict[str, Any]) -> Path:
    file = tmp_path / "catalog.json"
    schema = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}
    file.write_text(
        json.dumps(
            {
                "collections": {"acme/orders": {"key": ["/id"], "schema": schema}},
                "captures": {
                    "acme/in": {
                        "endpoint": endpoint,
                        "bindings": [{"resource": resource, "target": "acme/orders"}],
                    }
                },
            }
        )
    )
    return file


@pytest.mark.parametrize(
    ("endpoint", "resource", "parts"),
    [
        (
            {"python": {"module": "orders.py"}},
            {"stream": "orders"},
            ["orders.py:2:1", "E-CAPTURE", "takes other arguments"],
        ),
        (
            {"python": {"module": "def read(config, state):\n    yield 1\n"}},
            {"table": "orders"},
            ['unknown key "table"', '"stream" is missing'],
        ),
        ({"ingest": {"listne": "x"}}, {"path": "orders"}, ['unknown key "listne"', "listen"]),
        ({"ingest": {}}, {"path": "/orders"}, ["the path of a URL"]),
        ({"ingest": {}}, {"path": "healthz"}, ["not healthz or openapi.json"]),
        (
            {"connector": {"image": "penstock/source-http-ingest", "config": {"token": 7}}},
            {"path": "orders"},
            ["expected a text"],
        ),
    ],
)
def test_a_catalog_with_mistakes(
    tmp_path: Path, endpoint: dict[str, Any], resource: dict[str, Any], parts: list[str]
) -> None:
    (tmp_path / "orders.py").write_text("\ndef read(config): yield 1\n")
    with pytest.raises(PenstockError) as raised:
        load_catalog([catalog(tmp_path, endpoint, resource)], environ=None, connectors=BUILTIN)
    for part in parts:
        assert part in str(raised.value)


def test_an_error_names_the_file_that_the_catalog_names(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(
        "def read(config, state):\n    raise ValueError\n    yield\n"
    )
    file = catalog(tmp_path, {"python": {"module": "orders.py"}}, {"stream": "orders"})
    (spec,) = load_catalog([file], environ=None, connectors=BUILTIN).captures
    assert spec.endpoint.module_file == "orders.py"
    capture(spec.endpoint, spec.name).check()
