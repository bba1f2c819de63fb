"""`penstock append` and `penstock read` for tests: inside of this process, or in one of its own.

As a program, it is the two commands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.testing import CliRunner

from penstock.cli import append, read
from penstock.cli.frame import register

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id, region]
      properties:
        id: {type: integer}
        region: {type: string}
        total: {type: number}
        email: {type: string, redact: {strategy: sha256}}
        note: {type: string, redact: {strategy: block}}
    projections:
      region: {location: /region, partition: true}
  acme/plain:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {id: {type: integer}}
"""

app = typer.Typer()
register(app, append.append)
register(app, read.read)


class Done(NamedTuple):
    """What a command printed, and how it ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.stdout.splitlines()]


def penstock(*arguments: str, data: Path, stdin: bytes = b"") -> Done:
    """The command, inside of this process."""
    result = CliRunner().invoke(app, [*arguments, "--data", str(data)], input=stdin)
    return Done(result.exit_code, result.stdout, result.stderr)


def start(
    *arguments: str, data: Path, environ: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, *arguments, "--data", str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environ or {})},
    )


def jsonl(documents: list[Any]) -> bytes:
    return b"".join(json.dumps(document).encode() + b"\n" for document in documents)


def with_catalog(directory: Path) -> Path:
    """A data directory in which the catalog was applied."""
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG)
    data = directory / "data"
    done = penstock("append", "acme/plain", "--catalog", str(catalog), data=data)
    assert done.returncode == 0, done.stderr
    return data


if __name__ == "__main__":
    app()
