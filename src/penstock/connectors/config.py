"""Reading the configuration of an endpoint or a resource, with errors that name the member."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import UserError
from penstock.model.json_order import Json


def check_members(
    given: Json, known: Sequence[str], *, required: Sequence[str], where: str, example: str
) -> dict[str, Json]:
    """Return an object of a catalog that has only known members; raises `UserError`.

    Values stay out of messages: some are secrets.
    """
    if not isinstance(given, dict):
        raise UserError("an object is expected", where=where, fix=example)
    if unknown := sorted(given.keys() - set(known)):
        raise UserError(
            f"{', '.join(unknown)} is not understood",
            where=where,
            why=f"known are {', '.join(known)}",
            fix=example,
        )
    for name in required:
        if not isinstance(given.get(name), str) or not given[name]:
            raise UserError(f"{name} is missing, or not a text", where=where, fix=example)
    return given


def read_flag(given: dict[str, Json], name: str, *, where: str) -> bool:
    """Return a member that is true or false; false if it is absent."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"{name} is neither true nor false", where=where, fix=f"{name}: true")
    return value


def read_text(given: dict[str, Json], name: str, *, where: str, default: str | None = None) -> str:
    """Return a member that is a text, and not an empty one."""
    value = given.get(name, default)
    if not isinstance(value, str) or not value:
        raise UserError(f"{name} is not a text", where=where, fix=f'{name}: "…"')
    return value
