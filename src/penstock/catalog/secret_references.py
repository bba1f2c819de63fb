"""Check references to secrets: `${env:NAME}` and `${file:path}`, whole values or parts of them.

A catalog is recorded with its references; `runtime.secrets` reads the values when a connector is
opened. Checking only asks whether a value exists, and never reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.catalog.load import Sources
from penstock.catalog.nodes import Node
from penstock.catalog.paths import beside
from penstock.model.spec import SECRET_REFERENCE


def check_references(node: Node, sources: Sources, environ: Mapping[str, str] | None) -> bool:
    """Report every reference below `node` without a value; True if there is none.

    If `environ` is None, nothing is known, and nothing is reported.
    """
    if environ is None:
        return not any(SECRET_REFERENCE.search(value.text or "") for value in node.walk())
    complete = True
    for value in node.walk():
        for missing, hint in _unset(value, environ):
            sources.error(value, "E-SECRET", missing, hint=hint)
            complete = False
    return complete


def _unset(value: Node, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each reference in a text that has no value, and what to do."""
    for reference in SECRET_REFERENCE.finditer(value.text or ""):
        name = reference["name"]
        if reference["kind"] == "env" and name not in environ:
            yield f"environment variable {name} is not set", f"export {name}=…"
        elif reference["kind"] == "file" and not _is_file(beside(name, value)):
            yield f"there is no file {name}", f"write the value to {beside(name, value)}"


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long, or with a zero byte: not a file name
        return False
