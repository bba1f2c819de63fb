"""What `penstock check` says about the examples on a page."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from typer.testing import CliRunner

from penstock.cli.main import app
from penstock_docs.pages import Block, Region

MAIN: Final = "catalog.yaml"
BEFORE: Final = "before.yaml"
"""A catalog that is applied before the other one is checked."""

VARIABLES: Final = {"ACME_DATA": "data", "PENSTOCK_CATALOG": "", "NO_COLOR": "1", "TERM": "dumb"}
"""The environment of examples. `ACME_DATA` is the only variable that they may refer to."""


@contextlib.contextmanager
def directory_of(examples: Iterable[Block]) -> Iterator[Path]:
    """Write blocks to a new directory, and be there. YAML without a name is the catalog."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for block in examples:
            file = block.file or (MAIN if block.language == "yaml" else None)
            if file is not None:
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                Path(file).write_text(block.text, encoding="utf-8")
        yield Path(name)


def penstock(*arguments: str) -> tuple[int, str]:
    """Run a command in this process. Returns its exit code and all that it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    result = CliRunner().invoke(app, list(arguments), env=kept | VARIABLES)
    return result.exit_code, result.output


def check(examples: list[Block], *, secrets: bool = False) -> tuple[int, str]:
    """Check the catalog that blocks are."""
    with directory_of(examples):
        if Path(BEFORE).exists():
            _apply(BEFORE, examples)
        return penstock("check", MAIN, *([] if secrets else ["--without-secrets"]))


def _apply(catalog: str, examples: list[Block]) -> None:
    """Apply a catalog, and append to each collection the documents that are named as it is."""
    files = [block.file for block in examples if (block.file or "").endswith(".jsonl")]
    appends = [("append", file.removesuffix(".jsonl"), file) for file in files if file]
    for command in (("apply", catalog), *appends):
        code, output = penstock(*command)
        if code != 0:
            raise RuntimeError(f"{examples[0].place}: penstock {' '.join(command)}: {output}")


def generate(region: Region) -> str:
    """Return what is said about the blocks above, as a block."""
    _, output = check(region.blocks_above(), secrets=True)
    return f"```text\n{output.strip()}\n```"
