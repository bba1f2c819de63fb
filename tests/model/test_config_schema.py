"""Configurations against the schema of their connector."""

from __future__ import annotations

import pytest

from penstock.errors import UserError
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json

SCHEMA = ConfigSchema(
    {
        "address": {
            "type": "string",
            "pattern": "^[a-z]+$",
            "title": "a host; in lower case",
            "examples": ["db"],
        },
        "port": {"type": "integer", "maximum": 65535, "title": "a port"},
        "mode": {"type": "string", "enum": ["on", "off"], "title": "a text"},
        "tags": {"type": "array", "title": "a list of tags"},
    },
    required=("address",),
)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        pytest.param({"address": "db", "port": 1, "mode": "on"}, [], id="right"),
        pytest.param({}, [("", '"address" is missing', "for example address: db")], id="missing"),
        pytest.param([], [("", "expected a mapping, found a list", None)], id="no mapping"),
        pytest.param(
            {"address": "db", "prot": 1},
            [("/prot", 'unknown key "prot"', 'did you mean "port"?')],
            id="nearly a member",
        ),
        pytest.param(
            {"address": "db", "x/y": 1},
            [("/x~1y", 'unknown key "x/y"', "known: address, port, mode, tags")],
            id="not a member at all",
        ),
        pytest.param(
            {"address": 7},
            [("/address", "expected a host, found a number", "for example address: db")],
            id="another type",
        ),
        pytest.param(
            {"address": "DB"},
            [("/address", "expected a host; in lower case", "for example address: db")],
            id="another pattern",
        ),
        pytest.param(
            {"address": "db", "port": 70000}, [("/port", "expected a port", None)], id="too much"
        ),
        pytest.param(
            {"address": "db", "mode": "auto"},
            [("/mode", "expected one of on, off", None)],
            id="none of the choices",
        ),
        pytest.param(
            {"address": "${env:HOST}", "mode": "x${file:mode}"}, [], id="references are texts"
        ),
        pytest.param(
            {"address": "db", "port": "${env:PORT}"},
            [("/port", "expected a port, found a text", None)],
            id="references are no numbers",
        ),
        pytest.param(
            {"address": "$${env:HOST}"},
            [("/address", "expected a host; in lower case", "for example address: db")],
            id="no reference",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    given: Json, wrong: list[tuple[str, str, str | None]]
) -> None:
    found = SCHEMA.problems(given)
    assert [(p.pointer, p.message, p.hint) for p in found] == wrong
    assert {p.code for p in found} <= {"E-CONFIG"}


def test_reading_raises_with_everything_that_is_wrong_and_no_value() -> None:
    assert SCHEMA.read({"address": "db"}, where="task a") == {"address": "db"}
    with pytest.raises(UserError) as refused:
        SCHEMA.read({"address": "HUNTER2", "tags": "hunter2", "hunter": "hunter2"}, where="task a")
    assert refused.value.what == (
        "/address: expected a host; in lower case; /hunter: unknown key "
        '"hunter"; /tags: expected a list of tags, found a text'
    )
    assert refused.value.where == "task a"
    assert "hunter2" not in str(refused.value).lower()
