"""Commands that need no Spark do not import it: that alone takes longer than most of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.documents import CATALOG, jsonl, penstock, with_catalog

PROGRAM = """
import sys

class NoSpark:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise SystemExit(f"{name} is imported")

sys.meta_path.insert(0, NoSpark())
from penstock.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = with_catalog(tmp_path_factory.mktemp("deployment"))
    done = penstock("append", "acme/plain", data=data, stdin=jsonl([{"id": 1}]))
    assert done.returncode == 0, done.stderr
    return data


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["append", "acme/orders", "FILE", "--redact-salt", "c2FsdA=="], id="append"),
        pytest.param(["append", "acme/plain", "FILE", "--catalog", "CATALOG"], id="with a catalog"),
        pytest.param(["read", "acme/orders"], id="read"),
        pytest.param(["apply", "CATALOG"], id="apply"),
        pytest.param(["check", "CATALOG", "--explain"], id="check"),
        pytest.param(["test", "CATALOG", "--shake"], id="test"),
        pytest.param(["journals"], id="journals"),
        pytest.param(["fragments", "acme/plain/pivot=00"], id="fragments"),
        pytest.param(["compact"], id="compact"),
        pytest.param(["gc"], id="gc"),
        pytest.param(["verify"], id="verify"),
    ],
)
def test_a_command_without_spark_jobs_does_not_import_spark(
    arguments: list[str], data: Path, tmp_path: Path
) -> None:
    files = {"FILE": tmp_path / "orders.jsonl", "CATALOG": tmp_path / "catalog.yaml"}
    files["FILE"].write_bytes(jsonl([{"id": 1, "region": "eu", "email": "a@b.c"}]))
    files["CATALOG"].write_text(CATALOG)
    given = [str(files.get(argument, argument)) for argument in arguments]
    run = [sys.executable, "-c", PROGRAM, *given]
    if given[0] not in ("check", "test"):
        run += ["--data", str(data)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_hook_sees_an_import_of_spark() -> None:
    run = [sys.executable, "-c", PROGRAM.replace("main()", "import pyspark")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (1, "pyspark is imported")
