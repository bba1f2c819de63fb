"""`penstock failpoints`: the crash points tests can arm."""

from __future__ import annotations

from penstock.cli.frame import print_json, stdout
from penstock.failpoints import FAILPOINTS
from penstock.settings import Settings


def failpoints(settings: Settings) -> None:
    """List the crash points; PENSTOCK_FAILPOINT=NAME[:N] kills the process at the N-th hit of one.

    Example: PENSTOCK_FAILPOINT=coalesce.committed:3 penstock persistd
    """
    if settings.json:
        print_json([{"name": n, "where": w} for n, w in sorted(FAILPOINTS.items())])
        return
    for name, where in sorted(FAILPOINTS.items()):
        stdout.print(f"{name:<32} {where}", markup=False)
