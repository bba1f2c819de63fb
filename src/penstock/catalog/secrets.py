"""References to secrets: `${env:NAME}` and `${file:path}`, whole values or parts of them.

A catalog is recorded with its references; values are read when a connector is opened. Checking only
asks whether a value can be had, and never looks at it. `$${` is a literal `${`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.catalog.load import Sources
from penstock.catalog.nodes import Node

_REFERENCE = re.compile(r"(?<!\$)\$\{(?P<kind>env|file):(?P<name>[^}]*)\}")


def check_references(node: Node, sources: Sources, environ: Mapping[str, str] | None) -> None:
    """Report every reference below `node` that leads to nothing; without `environ`, do not ask."""
    if environ is None:
        return
    for value in node.walk():
        for missing, hint in _unset(value.text or "", environ):
            sources.error(value, "E-SECRET", missing, hint=hint)


def _unset(text: str, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What a text refers to that cannot be had, and what to do."""
    for reference in _REFERENCE.finditer(text):
        name = reference["name"]
        if reference["kind"] == "env" and name not in environ:
            yield f"environment variable {name} is not set", f"export {name}=…"
        elif reference["kind"] == "file" and not _is_file(name):
            yield f"there is no file {name}", f"write the value to {name}"


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long, or with a zero byte: no file has that name
        return False
