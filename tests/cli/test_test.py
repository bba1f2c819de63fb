"""`penstock test`, as people run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest

from cli.test_check import penstock

CATALOG = """
collections:
  acme/sales:
    key: [/product]
    schema:
      type: object
      required: [product]
      reduce: {strategy: merge}
      properties:
        product: {type: string}
        revenue: {type: number, reduce: {strategy: sum}}

materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: "${env:NOT_SET}"}}}
    bindings: [{source: acme/sales, resource: {table: sales}}]

tests:
  acme/tests/right:
    - ingest:
        collection: acme/sales
        documents: [{product: tea, revenue: 23.2}, {product: tea, revenue: 20.9}]
    - verify: {collection: acme/sales, documents: [{product: tea, revenue: 44.1}]}
  acme/tests/wrong:
    - ingest: {collection: acme/sales, documents: [{product: tea, revenue: 1}]}
    - verify:
        description: "[bold]what was sold"
        collection: acme/sales
        documents: [{product: tea, revenue: 2}, {product: pot}]
"""
DIFF = """\
    catalog.yaml:26: verify acme/sales: [bold]what was sold
    --- expected: 2 documents
    +++ actual: 1 document
    @@ key ["pot"]: missing @@
    -{"product":"pot"}
    @@ key ["tea"] @@
     /product: "tea"
    -/revenue: 2
    +/revenue: 1
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    return tmp_path


def without_times(text: str) -> str:
    return "".join(
        f"{line.partition(' (')[0]}\n" if " s)" in line or " runs)" in line else f"{line}\n"
        for line in text.splitlines()
    )


def test_a_line_per_test_and_a_diff_for_each_that_fails(here: Path) -> None:
    done = penstock("test", "catalog.yaml", cwd=here)
    assert (done.returncode, done.stderr) == (1, "")
    assert without_times(done.stdout) == (
        f"✓ acme/tests/right\n✗ acme/tests/wrong\n{DIFF}1 failed, 1 test passed\n"
    )


def test_only_some(here: Path) -> None:
    done = penstock("test", ".", "--only", "*/right", cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    assert without_times(done.stdout) == "✓ acme/tests/right\nok: 1 test passed\n"


def test_shaken(here: Path) -> None:
    done = penstock("test", ".", "--only", "*/right", "--shake", cwd=here)
    assert done.returncode == 0
    assert " s, 6 runs)" in done.stdout


def test_a_pattern_that_matches_nothing_is_a_mistake(here: Path) -> None:
    done = penstock("test", ".", "--only", "acme/right", cwd=here)
    assert done.returncode == 1
    assert done.stderr == (
        "penstock: no test matches acme/right\n  fix   tests: acme/tests/right, acme/tests/wrong\n"
    )


def test_a_catalog_without_tests_says_so(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(CATALOG[: CATALOG.index("tests:")])
    done = penstock("test", ".", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "the catalog has no tests\n")


def test_a_catalog_with_mistakes_is_not_tested(here: Path) -> None:
    (here / "catalog.yaml").write_text(CATALOG.replace("strategy: sum", "strategy: add"))
    done = penstock("test", ".", cwd=here)
    assert done.returncode == 1
    assert "penstock: the catalog has 1 error" in done.stderr
    assert 'unknown strategy "add"' in done.stderr
    assert done.stdout == ""


def test_no_catalog_is_a_wrong_command_line(tmp_path: Path) -> None:
    done = penstock("test", cwd=tmp_path)
    assert done.returncode == 2
    assert "penstock: no catalog given" in done.stderr


def test_json_is_for_machines(here: Path) -> None:
    done = penstock("test", ".", "--json", cwd=here)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["summary"] == {"tests": 2, "passed": 1, "failed": 1}
    assert [(test["name"], test["ok"]) for test in found["tests"]] == [
        ("acme/tests/right", True),
        ("acme/tests/wrong", False),
    ]
    failure = found["tests"][1]["failure"]
    assert failure["at"] == "catalog.yaml:26"
    assert failure["differences"] == [
        {"key": ["pot"], "pointer": "", "expected": {"product": "pot"}},
        {"key": ["tea"], "pointer": "/revenue", "expected": 2, "actual": 1},
    ]


def test_junit_is_written_for_ci(here: Path) -> None:
    done = penstock("test", ".", "--junit", "results.xml", cwd=here)
    assert done.returncode == 1
    suites = Xml.parse(here / "results.xml").getroot()  # noqa: S314 - it is ours
    (suite,) = suites
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("2", "1")
    assert "-/revenue: 2" in str(suite[1][0].text)


def test_junit_in_a_directory_that_is_not_there(here: Path) -> None:
    done = penstock("test", ".", "--junit", "no/such/results.xml", cwd=here)
    assert done.returncode == 2
    assert "cannot write no/such/results.xml: No such file or directory" in done.stderr


def test_a_terminal_without_unicode_reads_words(here: Path) -> None:
    run = [sys.executable, "-m", "penstock.cli.main", "test", "."]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(run, cwd=here, env=environ, capture_output=True, timeout=60)
    assert done.returncode == 1
    lines = without_times(done.stdout.decode("ascii")).splitlines()
    assert lines[0] == "ok   acme/tests/right"
    assert lines[1] == "FAIL acme/tests/wrong"
