"""`penstock schema`, as editors get it."""

import json
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from typer.testing import CliRunner

from penstock.catalog.editor_schema import COMMENT, FILE_NAME
from penstock.cli.main import app


def test_it_is_a_json_schema_for_what_init_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    assert printed.stderr == ""
    schema = json.loads(printed.stdout)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert CliRunner().invoke(app, ["init"]).exit_code == 0
    assert json.loads(Path(FILE_NAME).read_text()) == schema
    written = Path("catalog.yaml").read_text()
    assert COMMENT in written
    catalog = yaml.load(written, Loader=yaml.CSafeLoader)
    assert [e.message for e in jsonschema_rs.Draft7Validator(schema).iter_errors(catalog)] == []
    catalog["collections"]["shop/orders"]["projectoins"] = {}
    assert not jsonschema_rs.is_valid(schema, catalog)


def test_the_help_has_the_line_that_editors_look_for() -> None:
    assert COMMENT in " ".join(CliRunner().invoke(app, ["schema", "--help"]).stdout.split())
