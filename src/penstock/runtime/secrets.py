"""Secrets behind references, read at the moment they are used.

A configuration is kept, compared, and sent to Spark tasks with its references in it: `${env:NAME}`
and `${file:path}`, whole values or parts of them; `$${` is a literal `${`. Only the
code that opens a connection resolves them, in its own process, and keeps the result to itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.errors import UserError
from penstock.model import pointer
from penstock.model.json_order import Json
from penstock.servicekit.secrets import conceal, sounds_secret

_REFERENCE: Final = re.compile(r"\$(?P<literal>\$\{)|\$\{(?P<kind>env|file):(?P<name>[^}]*)\}")


def resolve(value: Json, *, where: str, environ: Mapping[str, str] = os.environ) -> Json:
    """A configuration with the values that its references stand for."""
    return _resolved(value, "", where, environ)


def referenced(text: str, *, where: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The values that the references in a text stand for."""
    return [
        _value(found, "", where, environ)
        for found in _REFERENCE.finditer(text)
        if not found["literal"]
    ]


def _resolved(value: Json, at: str, where: str, environ: Mapping[str, str]) -> Json:
    match value:
        case dict():
            return {
                name: _resolved(member, pointer.child(at, name), where, environ)
                for name, member in value.items()
            }
        case list():
            return [
                _resolved(item, pointer.child(at, index), where, environ)
                for index, item in enumerate(value)
            ]
        case str():
            return _REFERENCE.sub(lambda found: _concealed(found, at, where, environ), value)
        case _:
            return value


def _concealed(found: re.Match[str], at: str, where: str, environ: Mapping[str, str]) -> str:
    """The value of a reference, which is not shown any more if it, or its place, sounds secret."""
    value = _value(found, at, where, environ)
    if not found["literal"]:
        names = (at.rpartition("/")[2], found["name"].rpartition("/")[2])
        if any(sounds_secret(name) or "auth" in name.lower() for name in names):
            conceal(value)
    return value


def _value(found: re.Match[str], at: str, where: str, environ: Mapping[str, str]) -> str:
    if found["literal"]:
        return "${"
    name, place = found["name"], f"{where}{': ' + at if at else ''}"
    if found["kind"] == "env":
        if name not in environ:
            raise UserError(
                f"environment variable {name} is not set", where=place, fix=f"export {name}=…"
            )
        return environ[name]
    try:
        return Path(name).read_text().rstrip("\n")
    except (OSError, ValueError) as error:
        raise UserError(
            f"the file {name} cannot be read",
            where=place,
            why=getattr(error, "strerror", None) or type(error).__name__,
            fix=f"write the value to {name}, readable by the user who runs the task",
        ) from None
