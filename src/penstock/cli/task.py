"""`penstock task`: requests to a task that runs in another process."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.frame import stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.errors import UserError
from penstock.settings import Settings


def close_now(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the task.", show_default=False)],
) -> None:
    """Close the open transaction of a running task before its minimum duration.

    The request goes to the process that runs the task now. If there is none, or no transaction is
    open, nothing happens.

    Example: penstock task close-now acme/views
    """
    stops.run(_close_now(settings, name))
    stderr.print(f"asked {name} to close its transaction", markup=False)


async def _close_now(settings: Settings, name: str) -> None:
    from penstock.runtime.requests import CLOSE_NOW, request

    async with opened(settings) as store:
        catalog = await current_catalog(store, settings)
        known = [spec.name for spec in catalog.materializations]
        if name not in known:
            raise UserError(
                f"there is no task {name}",
                fix=f"known tasks: {', '.join(known)}" if known else "apply a catalog with tasks",
            )
        await request(store, name, CLOSE_NOW)
