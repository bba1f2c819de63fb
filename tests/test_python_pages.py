"""What the pages about Python and the notebook show is what happens: all of their code is run."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "orders.ipynb"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RESULT = re.compile(r"  # → (.+)$", re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    return [code for found, code in _BLOCK.findall((ROOT / page).read_text()) if found == language]


def execute(code: str, names: dict[str, Any]) -> Any:  # noqa: ANN401
    """Run code as a notebook does, and return the value of its last line, if it is one.

    An expression that ends in a comment `# → value` must have that value.
    """
    expected = {code[: found.start()].count("\n") + 1: found[1] for found in _RESULT.finditer(code)}
    value = None
    for statement in ast.parse(code).body:
        source = compile(ast.Module([statement], []), "<page>", "exec")
        value = None
        if isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), "<page>", "eval"), names)  # noqa: S307
        else:
            exec(source, names)  # noqa: S102
        if (wanted := expected.pop(statement.end_lineno or 0, None)) is not None:
            assert repr(value) == wanted, ast.unparse(statement)
    assert not expected, "a result belongs to the last line of an expression"
    return value


@pytest.mark.spark
def test_the_page_about_python_is_true(
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (catalog,) = blocks("docs/python.md", "yaml")
    (tmp_path / "catalog.yaml").write_text(catalog)
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming/a.json").write_text('{"id": 300, "customer": "eve", "channel": "shop"}\n')
    names: dict[str, Any] = {}
    shown = blocks("docs/python.md", "python")
    for code in shown:
        execute(code.replace("/srv/acme", str(tmp_path)), names)
    assert sum(code.count("# →") for code in shown) >= 7
    out = capsys.readouterr().out
    assert "document:2: /id" in out
    assert 'p.append("acme/orders", [document])' in out
    assert "acme/customers" in out


@pytest.mark.spark
def test_the_page_about_spark_is_true(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(blocks("docs/python.md", "yaml")[0])
    documents = [{"id": n, "customer": "ada", "channel": None} for n in range(3)]
    batches: list[int] = []
    names = {
        "spark": spark,
        "handle_batch": lambda frame, number: batches.append(frame.count()),
    }
    with penstock.open(tmp_path / ".penstock") as p:
        p.apply(tmp_path / "catalog.yaml")
        p.append("acme/orders", documents)
        for code in blocks("docs/spark.md", "python"):
            execute(code.replace("/srv/acme", str(tmp_path)), names)
            if "query" in names:
                query: Any = names.pop("query")
                query.processAllAvailable()
                query.stop()
        assert names["orders"].count() == 3 + 2 + 3
        assert batches == [3]
        assert p.read("acme/orders").where("id >= 1000").count() == 2 + 3


def cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def test_the_notebook_is_kept_without_results() -> None:
    ids = [cell["id"] for cell in cells()]
    assert len(set(ids)) == len(ids)
    for cell in cells():
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.spark
def test_the_notebook_runs_from_the_first_cell_to_the_last(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    values: list[Any] = []

    async def kernel() -> None:
        """A notebook has an event loop that is running while a cell is."""
        codes = ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]
        values.extend(execute(code, names) for code in codes)

    asyncio.run(kernel())
    first, last = [value for value in values if hasattr(value, "to_dict") and "orders" in value]
    assert first.to_dict("list") == {"customer": ["ada", "bob", "cyd"], "orders": [2, 1, 1]}
    assert last.to_dict("list")["orders"] == [2, 1, 1, 2000]
    assert values[2:4] == [3, 1]
    assert "document:2: /id" in capsys.readouterr().out
    assert not Path(names["here"]).exists()
