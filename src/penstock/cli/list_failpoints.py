"""`penstock failpoints`: the crash points tests can arm."""

from __future__ import annotations

from importlib import import_module

from penstock.cli.frame import print_json, stdout
from penstock.failpoints import FAILPOINTS
from penstock.settings import Settings

DECLARED_IN = (
    "penstock.consensus.postgres",
    "penstock.consensus.sqlite",
    "penstock.consensus.statelog",
    "penstock.journal.ownership",
    "penstock.journal.publisher",
    "penstock.journal.sealing",
    "penstock.journal.sweeping",
    "penstock.journal.upkeep",
    "penstock.shuffle.log",
    "penstock.connectors.postgres",
    "penstock.connectors.postgres_rows",
    "penstock.connectors.sqlite",
    "penstock.runtime.materialize.leader",
    "penstock.runtime.renames",
)
"""Points are declared where they stand, and known once their module is imported."""


def failpoints(settings: Settings) -> None:
    """List the crash points; PENSTOCK_FAILPOINT=NAME[:N] kills the process at the N-th hit of one.

    Example: PENSTOCK_FAILPOINT=statelog.after-send:3 penstock persistd
    """
    for module in DECLARED_IN:
        import_module(module)
    if settings.json:
        print_json([{"name": n, "where": w} for n, w in sorted(FAILPOINTS.items())])
        return
    for name, where in sorted(FAILPOINTS.items()):
        stdout.print(f"{name:<32} {where}", markup=False)
