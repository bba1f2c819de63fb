"""`penstock task`: what one may ask of a task that runs elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.append import current_catalog
from penstock.cli.frame import stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.errors import UserError
from penstock.settings import Settings


def close_now(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the task.", show_default=False)],
) -> None:
    """Close the open transaction of a running task, whatever its minimum duration says.

    It is asked of whoever runs the task now. If nobody does, or no transaction is open, nothing
    happens.

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
                fix=f"one of {', '.join(known)}" if known else "apply a catalog that has one",
            )
        await request(store, name, CLOSE_NOW)
