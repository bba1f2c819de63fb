"""`penstock backfill` and `penstock task takeover`: fill tables of a materialization again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.frame import print_json, stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.errors import UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.model.spec import Catalog
    from penstock.refilling import Refill

TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help="Name of the materialization.", show_default=False)
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]


def backfill(
    settings: Settings,
    name: TaskName,
    binding: Annotated[
        list[int] | None,
        typer.Option("--binding", help="Only this binding, by its index; repeatable."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Fill tables of a materialization again, from the start of their collections.

    Readers see the rows that are there until the new ones replace them, all at once. The request
    is recorded: `penstock run`, `penstock up` or the process that runs the task now meets it, once.

    Example: penstock backfill acme/views --binding 0
    """
    from penstock.refilling import plan_refills

    _refill(
        settings,
        name,
        lambda catalog: plan_refills(catalog, name, binding or ()),
        says="reads {collection} from its start and replaces the rows of {table}",
        command=f"penstock backfill {name} --yes",
        yes=yes,
    )


def takeover(
    settings: Settings,
    name: TaskName,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", help="Only this table of the task; repeatable."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Give tables to a task that belong to another one, and fill them again.

    The former task is refused from then on. A table that is this task's already is filled again.

    Example: penstock task takeover acme/views --table orders
    """
    from penstock.refilling import plan_takeover

    _refill(
        settings,
        name,
        lambda catalog: plan_takeover(catalog, name, table or ()),
        says="takes {table} over and replaces its rows by {collection}, read from its start",
        command=f"penstock task takeover {name} --yes",
        yes=yes,
        is_takeover=True,
    )


def _refill(
    settings: Settings,
    name: str,
    plan: Callable[[Catalog], list[Refill]],
    *,
    says: str,
    command: str,
    yes: bool,
    is_takeover: bool = False,
) -> None:
    refills = stops.run(_planned(settings, plan))
    for each in refills:
        what = says.format(table=each.table, collection=each.collection)
        stderr.print(f"binding {each.binding}: {what}", markup=False)
    if not yes and not _agreed(name):
        raise UserError("nothing was requested: nobody has agreed to it", fix=command)
    stops.run(_request(settings, name, refills, is_takeover=is_takeover))
    if settings.json:
        listed = [
            {"binding": each.binding, "table": each.table, "collection": each.collection}
            for each in refills
        ]
        print_json({"task": name, "requested": listed})
    stderr.print(
        f"requested: a process that runs {name} begins with it now, or penstock run does",
        markup=False,
    )


def _agreed(name: str) -> bool:
    return sys.stdin.isatty() and typer.confirm(f"rebuild these tables of {name}?", err=True)


async def _planned(settings: Settings, plan: Callable[[Catalog], list[Refill]]) -> list[Refill]:
    async with opened(settings) as store:
        return plan(await current_catalog(store, settings))


async def _request(
    settings: Settings, name: str, refills: list[Refill], *, is_takeover: bool
) -> None:
    from penstock.refilling import request

    async with opened(settings) as store:
        await request(store, name, refills, takeover=is_takeover)
