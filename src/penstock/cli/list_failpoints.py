"""`penstock failpoints`: the crash points that tests can arm."""

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
    "penstock.journal.staging",
    "penstock.journal.sweeping",
    "penstock.journal.upkeep",
    "penstock.retention",
    "penstock.connectors.postgres.session",
    "penstock.connectors.postgres.rows",
    "penstock.connectors.sql.sink",
    "penstock.connectors.sqlite.sink",
    "penstock.runtime.capture.leader",
    "penstock.runtime.derive.leader",
    "penstock.runtime.materialize.leader",
    "penstock.runtime.reading_session",
    "penstock.runtime.renames",
    "penstock.runtime.session",
)
"""Modules that declare crash points; a point is known once its module is imported."""


def failpoints(settings: Settings) -> None:
    """List the crash points that tests can arm.

    PENSTOCK_FAILPOINT=NAME[:N] kills the process when it reaches that point for the N-th time.

    Example: PENSTOCK_FAILPOINT=statelog.after-send:3 penstock persistd
    """
    for module in DECLARED_IN:
        import_module(module)
    if settings.json:
        print_json([{"name": n, "where": w} for n, w in sorted(FAILPOINTS.items())])
        return
    for name, where in sorted(FAILPOINTS.items()):
        stdout.print(f"{name:<32} {where}", markup=False)
