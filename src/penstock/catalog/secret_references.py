"""Check references to secrets: `${env:NAME}` and `${file:path}`, whole values or parts of them.

A catalog is recorded with its references; `runtime.secrets` reads the values when a connector is
opened. Checking only asks whether a value exists, and never reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.catalog.load import Sources
from penstock.catalog.nodes import Node
from penstock.model.spec import SECRET_REFERENCE


def check_references(node: Node, sources: Sources, environ: Mapping[str, str] | None) -> None:
    """Report every reference below `node` without a value; do nothing if `environ` is None."""
    if environ is None:
        return
    for value in node.walk():
        for missing, hint in _unset(value.text or "", environ):
            sources.error(value, "E-SECRET", missing, hint=hint)


def _unset(text: str, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each reference in a text that has no value, and what to do."""
    for reference in SECRET_REFERENCE.finditer(text):
        name = reference["name"]
        if reference["kind"] == "env" and name not in environ:
            yield f"environment variable {name} is not set", f"export {name}=…"
        elif reference["kind"] == "file" and not _is_file(name):
            yield f"there is no file {name}", f"write the value to {name}"


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long, or with a zero byte: not a file name
        return False
