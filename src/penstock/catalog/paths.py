"""Paths in configurations: relative to the file that names them, as imports and schemas are.

A recorded catalog is run from anywhere, so a relative path becomes an absolute one when the catalog
is built. That is done where a connector's schema calls a member a path (`"path": True`), and with
the file of a `${file:…}`, wherever it stands. What begins with `${env:…}` is a path as it is, and
has to be absolute.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from os.path import normpath
from pathlib import Path
from urllib.parse import urlsplit

from penstock.catalog.load import Sources
from penstock.catalog.nodes import Node
from penstock.model import pointer
from penstock.model.json_order import Json
from penstock.model.spec import SECRET_REFERENCE


def beside(path: str, node: Node) -> str:
    """Return a path as seen from here, of one that is relative to the file of a node."""
    return normpath(Path(node.at.file).parent / path)


def _absolute(path: str, node: Node) -> str:
    return normpath(Path.cwd() / beside(path, node))


def placed(node: Node, paths: Collection[str] = (), at: str = "") -> Json:
    """Return a value with absolute paths. `paths` are pointers to its members that are one."""
    match node.value:
        case tuple() as items:
            return [placed(item, paths, pointer.child(at, i)) for i, item in enumerate(items)]
        case Mapping() as members:
            return {n: placed(each, paths, pointer.child(at, n)) for n, each in members.items()}
        case str() as text:
            return placed_text(text, node, is_path=at in paths)
        case scalar:
            return scalar


def placed_text(text: str, node: Node, *, is_path: bool = False) -> str:
    """Return a text of a node, in which paths are absolute."""

    def absolute(found: re.Match[str]) -> str:
        return (
            f"${{file:{_absolute(found['name'], node)}}}" if found["kind"] == "file" else found[0]
        )

    text = SECRET_REFERENCE.sub(absolute, text)
    return _absolute(text, node) if is_path and _is_relative(text) else text


def check_paths(
    config: Node, paths: Collection[str], sources: Sources, environ: Mapping[str, str] | None
) -> None:
    """Report paths that may not lead where their author thinks."""
    for at in paths:
        node = config.find(at)
        if node is None or node.text is None:
            continue
        text = node.text
        reference = SECRET_REFERENCE.match(text)
        if reference is None:
            _warn_of_move(node, text, sources)
        elif reference["kind"] == "env" and environ and reference["name"] in environ:
            value = environ[reference["name"]] + text[reference.end() :]
            if value and _is_relative(value):
                message = f"the path in {reference['name']} is relative"
                hint = "give an absolute one: it is not known what it would be relative to"
                sources.error(node, "E-PATH", message, hint=hint)


def _warn_of_move(node: Node, text: str, sources: Sources) -> None:
    there = beside(text, node)
    if _is_relative(text) and not _exists(there) and _exists(text) and normpath(text) != there:
        sources.error(
            node,
            "W-PATH",
            f"there is no {there}, but there is {text} in the working directory",
            hint="paths are relative to the file that contains them, wherever penstock is run",
        )


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def _is_relative(path: str) -> bool:
    return not (path.startswith("/") or urlsplit(path).scheme or SECRET_REFERENCE.match(path))
