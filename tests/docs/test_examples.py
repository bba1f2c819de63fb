"""What the documentation shows is true: catalogs are checked, tests and commands are run.

Blocks of all pages are tried, by what they are:

    yaml, a whole catalog       `penstock check` accepts it, and its `tests:` pass
    yaml, a part of one         is YAML; with a mark, it is checked inside of a whole catalog
    console, or "$ …"           commands are run in order, in one directory for each page
    sh                          Bash can parse it
    python                      compiles, and what it imports from penstock exists
    sql                         can be parsed

A block with a file name (```yaml orders.yaml) is that file, which the other blocks of the page see.
Marks are comments on the line above a block, which readers do not see:

    <!-- into: shared/orders.yaml -->                   checked as a part of that catalog
    <!-- into: shared/orders.yaml /collections/acme~1a -->    at this place of it
    <!-- excerpt: src/…/catalog.yaml -->                everything in it is also in that file
    <!-- not run: starts Spark -->                      left out, for a reason

A command that needs the network, another server, or Spark has to be left out: CI has a minute.

Of what a command prints, stdout or stderr may be left out. Digits may differ, and a line of …
stands for any lines.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import sqlglot

from penstock.catalog.diagnostics import Diagnostics
from penstock.catalog.editor_schema import editor_schema
from penstock.catalog.grammar import CATALOG
from penstock.catalog.nodes import parse
from penstock.connectors.builtin import BUILTIN
from penstock.model import pointer
from penstock_docs.checked import MAIN, directory_of, penstock
from penstock_docs.pages import ROOT, Block, blocks, pages, regions

HERE = Path(__file__).parent
EDITOR = jsonschema_rs.Draft7Validator(editor_schema(BUILTIN))
CHECKED = {(r.page, b.line) for p in pages() for r in regions(p) for b in r.blocks_above()}
"""Blocks that are shown with what `penstock check` says of them: test_generated.py."""


def found(*languages: str) -> list[Any]:
    """The blocks of these languages that are to be tried."""
    tried = [
        block
        for page in pages()
        for block in blocks(page)
        if kind(block) in languages
        and block.mark("not run") is None
        and not (page.name == "troubleshooting.md" and (page, block.line) in CHECKED)
    ]
    return [pytest.param(block, id=block.place) for block in tried]


def kind(block: Block) -> str:
    """The language of a block; commands with a prompt are `console`, whatever they say they are."""
    return "console" if block.text.startswith("$ ") else block.language


def files_of(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.file is not None]


def read(text: str, place: str) -> Any:  # noqa: ANN401 - any JSON value
    diagnostics = Diagnostics()
    node = parse(text, place, diagnostics)
    assert [each.render() for each in diagnostics] == []
    assert node is not None
    return node.plain()


# ------------------------------------------------------------------------------------------- yaml


def merged(whole: Any, part: Any) -> Any:  # noqa: ANN401
    """A value with another one put into it. Lists are replaced."""
    if not isinstance(whole, dict) or not isinstance(part, dict):
        return part
    return whole | {name: merged(whole.get(name), value) for name, value in part.items()}


def missing(whole: Any, part: Any, at: str = "") -> Iterator[str]:  # noqa: ANN401
    """Where a part has something that the whole has not."""
    if isinstance(whole, dict) and isinstance(part, dict):
        for name, value in part.items():
            below = pointer.child(at, name)
            yield from missing(whole[name], value, below) if name in whole else [below]
    elif isinstance(whole, list) and isinstance(part, list):
        for item in part:
            if all([*missing(each, item)] for each in whole):
                yield f"{at}: {item}"
    elif isinstance(whole, str) and isinstance(part, str) and "\n" in part:
        words = iter(whole.replace(",", " ").split())
        if not all(word in words for word in part.replace(",", " ").split()):
            yield at  # not all of its words, in their order
    elif whole != part:
        yield at


def catalog_of(block: Block) -> dict[str, Any] | None:
    """The whole catalog that a block is, or is a part of; None if it is neither."""
    value = read(block.text, block.place)
    if (into := block.mark("into")) is not None:
        file, _, place = into.partition(" ")
        whole = read((HERE / file).read_text(encoding="utf-8"), file)
        for token in reversed(pointer.parse(place)):
            value = {token: value}
        joined: dict[str, Any] = merged(whole, value)
        return joined
    is_catalog = isinstance(value, dict) and value.keys() <= CATALOG.keys.keys()
    return value if is_catalog and value else None


@pytest.mark.parametrize("block", found("yaml"))
def test_catalogs_are_right(block: Block) -> None:
    if (excerpt := block.mark("excerpt")) is not None:
        whole = read((ROOT / excerpt).read_text(encoding="utf-8"), excerpt)
        assert [*missing(whole, read(block.text, block.place))] == []
        return
    catalog = catalog_of(block)
    if catalog is None or block.file is not None:
        return  # a part that is YAML, or a file that others use
    with directory_of(files_of(block.page)) as directory:
        shutil.copytree(HERE / "shared", directory, dirs_exist_ok=True)
        as_it_is = block.mark("into") is None
        Path(MAIN).write_text(block.text if as_it_is else json.dumps(catalog), encoding="utf-8")
        code, output = penstock("check", MAIN, "--without-secrets", "--allow-outside")
        assert code == 0, output
        assert [found.message for found in EDITOR.iter_errors(catalog)] == [], "penstock schema"
        if catalog.get("tests") and '"spark":' not in json.dumps(catalog):
            code, output = penstock("test", MAIN)
            assert code == 0, output


IN_EDITORS = [
    *("E-KEY", "E-REQUIRED", "E-TYPE", "E-NAME", "E-OLD", "E-OLD-DERIVE", "E-TS", "E-DEKAF"),
    *("E-SHUFFLE-LAMBDA", "E-CONN-IMAGE", "E-CONFIG", "E-REDUCE", "E-SCHEMA"),
]
"""Mistakes of form, which editors mark while they are typed. The others need the whole catalog."""


@pytest.mark.parametrize("code", IN_EDITORS)
def test_editors_mark_mistakes_of_form(code: str) -> None:
    shown = {region.heading: region for region in regions(ROOT / "docs" / "troubleshooting.md")}
    [block] = shown[code].blocks_above()
    assert not EDITOR.is_valid(read(block.text, block.place))


@pytest.mark.spark
def test_tests_of_catalogs_with_spark_pass(tmp_path: Path) -> None:
    """All of them in one process, because each starts Spark."""
    mains = []
    for parameter in found("yaml"):
        [block] = parameter.values
        catalog = catalog_of(block) if block.mark("excerpt") is None else None
        if catalog and catalog.get("tests") and '"spark":' in json.dumps(catalog):
            directory = tmp_path / str(len(mains))
            with directory_of(files_of(block.page)) as made:
                Path(MAIN).write_text(json.dumps(catalog), encoding="utf-8")
                made.rename(directory)
                made.mkdir()
            mains.append(directory / MAIN)
    assert len(mains) >= 1
    for main in mains:
        run = subprocess.run(
            [sys.executable, "-m", "penstock", "test", str(main)],
            capture_output=True,
            text=True,
            check=False,
            cwd=main.parent,
        )
        assert run.returncode == 0, run.stdout + run.stderr


# ---------------------------------------------------------------------------------------- console


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block, each with the lines that it is said to print."""
    command, printed = "", []
    for line in block.text.rstrip("\n").split("\n"):
        if line.startswith("$ "):
            if command:
                yield command, printed
            command, printed = line.removeprefix("$ "), []
        else:
            printed.append(line)
    yield command, printed


def pattern(lines: list[str]) -> str:
    """What output must look like: any digits, any amount of space, any lines for …"""
    parts = []
    for line in lines:
        words = re.sub(r"\d+", "0", " ".join(line.split()))
        parts.append(r"(?:.*\n)*?" if words == "…" else re.escape(words) + r"\n")
    return "".join(parts)


def looks_like(output: str, lines: list[str]) -> bool:
    plain = "".join(f"{' '.join(line.split())}\n" for line in output.rstrip("\n").split("\n"))
    return re.fullmatch(pattern(lines), re.sub(r"\d+", "0", plain)) is not None


PAGES = sorted({parameter.values[0].page for parameter in found("console")})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_print_what_is_shown(page: Path) -> None:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PENSTOCK_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    with directory_of(files_of(page)) as directory:
        environment["XDG_DATA_HOME"] = str(directory / "share")  # nothing is left at home
        place = directory
        for parameter in found("console"):
            [block] = parameter.values
            if block.page != page:
                continue
            for command, printed in commands(block):
                if command.startswith("cd "):
                    place = place / command.removeprefix("cd ")
                    continue
                run = subprocess.run(
                    ["bash", "-c", command],
                    cwd=place,
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                said = f"{block.place}: $ {command}\n{run.stdout}{run.stderr}"
                assert run.returncode == 0 or printed, said
                seen = (run.stdout, run.stderr, run.stdout + run.stderr, run.stderr + run.stdout)
                assert not printed or any(looks_like(each, printed) for each in seen), said


def test_output_that_differs_is_noticed() -> None:
    assert looks_like("ok: 3 collections\n", ["ok: 4 collections"])
    assert looks_like("a  12\nx\ny\nend\n", ["a 7", "…", "end"])
    assert not looks_like("ok: 3 collections\n", ["ok: 3 captures"])
    assert not looks_like("a\nb\n", ["a"])


# --------------------------------------------------------------------------- sh, python and sql


@pytest.mark.parametrize("block", found("sh"))
def test_scripts_can_be_parsed(block: Block) -> None:
    parsed = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.parametrize("block", found("python"))
def test_python_compiles_and_imports_what_exists(block: Block) -> None:
    tree = ast.parse(block.text, block.place)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "penstock":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "penstock":
                    importlib.import_module(alias.name)


@pytest.mark.parametrize("block", found("sql"))
def test_sql_can_be_parsed(block: Block) -> None:
    dialect = "sqlite" if block.file else "postgres"
    assert sqlglot.parse(re.sub(r"\$(?=\w)", ":", block.text), dialect=dialect)


# ------------------------------------------------------------------------------------------ marks


def test_no_mark_is_misspelt_and_every_exception_has_a_reason() -> None:
    known = ["into", "excerpt", "not run", "generated", "end"]
    for page in pages():
        for block in blocks(page):
            for mark in block.marks:
                name = mark.partition(":")[0]
                meant = difflib.get_close_matches(name, known, n=1)
                assert meant in ([], [name]), f"{block.place}: {mark}"
            reason = block.mark("not run")
            assert reason is None or len(reason.split()) >= 2, f"{block.place}: say why"


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```yaml\ncollections: {a: {key: [/id], schema: {type: object}}}\n```\n")
    [block] = blocks(page)
    with pytest.raises(AssertionError, match="E-KEY-MISSING"):
        test_catalogs_are_right(block)


def test_parts_are_compared_with_the_whole() -> None:
    whole = {"a": {"b": 1, "c": [1, {"x": 1, "y": 2}]}, "sql": "select a,\n  b\nfrom t\n"}
    assert [*missing(whole, {"a": {"c": [{"x": 1}]}, "sql": "select a\nfrom t"})] == []
    assert [*missing(whole, {"a": {"b": 2, "d": 1, "c": [2]}})] == ["/a/b", "/a/d", "/a/c: 2"]
    assert [*missing(whole, {"sql": "select b, a\nfrom t"})] == ["/sql"]
    assert merged(whole, {"a": {"b": 2, "c": [3]}})["a"] == {"b": 2, "c": [3]}
