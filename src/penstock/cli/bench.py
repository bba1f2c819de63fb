"""`penstock bench`: benchmarks, each with its peers in the same run."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from penstock.cli.frame import stderr, stdout
from penstock.settings import Settings


def bench(
    settings: Settings,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="Which ones; all by default.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller: a minute or two per benchmark.")
    ] = False,
) -> None:
    """Measure this machine: figures, peers side by side, and goals as ratios.

    With --json, one line per benchmark: {"workload", "machine", "results", "goals"}.

    Example: penstock bench model --quick
    """
    from penstock.bench import frame
    from penstock.engine import EngineOptions

    workloads = frame.find_workloads(names or ())
    run = frame.Bench(
        quick=quick,
        engine=EngineOptions(master=settings.master, conf=settings.conf, app_name="penstock-bench"),
        say=lambda text: stderr.print(text, style="dim", markup=False),
    )
    try:
        for name, workload in workloads.items():
            report = workload(run)
            if settings.json:
                sys.stdout.write(json.dumps(frame.as_json(name, report)) + "\n")
                sys.stdout.flush()
            else:
                stdout.print(frame.as_table(name, report))
        if not settings.json:
            stdout.print(", ".join(f"{k} {v}" for k, v in frame.machine().items()), style="dim")
    finally:
        run.close()
