"""`penstock bench`: benchmarks, each with its peers in the same run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.tables import Column, print_table
from penstock.errors import PenstockError, Unavailable, UsageError
from penstock.servicekit.secrets import mask
from penstock.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.bench.frame import Listed

RESULTS = Path("bench/results")
PEERS = Path(".venv-peers/bin/python")
_ERROR_LINES = 3


def bench(
    settings: Settings,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="Which ones; all by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller: minutes per benchmark.")] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where results are written.")
    ] = RESULTS,
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers",
            metavar="PYTHON",
            help=f"Interpreter of the venv that has the peers ({PEERS}, if it is there). "
            r"\[env: PENSTOCK_BENCH_PEERS]",
            envvar="PENSTOCK_BENCH_PEERS",
            show_envvar=False,
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the benchmarks, and measure nothing.")
    ] = False,
) -> None:
    r"""Measure this machine: figures, peers side by side, and goals as ratios.

    Each benchmark prints a table, or with --json a line of JSON, and writes
    NAME.json and a NAME-CHART.svg per chart below DIR. Charts need matplotlib:
    pip install 'penstock\[bench]'.

    Peers that are programs of their own are installed by `make bench`, into a
    venv of their own; without it, they are left out.

    A benchmark that fails does not stop the others, and makes the exit code 1.
    A goal that is missed is a finding, and does not.

    Example: penstock bench model --quick
    """
    from penstock.bench import frame, plots, results
    from penstock.engine import EngineOptions

    if list_:
        _print_list(frame.WORKLOADS, as_json=settings.json)
        return
    chosen = frame.choose(names or ())
    run = frame.Bench(
        quick=quick,
        engine=EngineOptions(master=settings.master, conf=settings.conf, app_name="penstock-bench"),
        say=lambda text: stderr.print(text, style="dim", markup=False),
        peers=_find_peers(peers),
    )
    # Contestants are ended by whoever started them, which must then not end without a word.
    signal.signal(signal.SIGTERM, lambda _, __: sys.exit(128 + signal.SIGTERM))
    conditions = results.Conditions.here(quick=quick, peers=run.peers)
    if not plots.can_draw():
        run.say(f"charts are left out: matplotlib is not installed ({plots.INSTALL})")
    failed: dict[str, Exception] = {}
    for name in chosen:
        run.say(f"benchmark {name}: {frame.WORKLOADS[name].about}")
        report, written = None, list[Path]()
        with _failing_alone(name, failed, debug=settings.debug):
            report = frame.load(name)(run)
            written = results.write(out, name, report, conditions)
        if report is not None and settings.json:
            document = results.as_json(name, report, conditions)
            sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
            sys.stdout.flush()
        elif report is not None:
            stdout.print(results.as_table(name, report))
        if written:
            run.say(f"wrote {', '.join(map(str, written))}")
        with _failing_alone(name, failed, debug=settings.debug):
            run.close()  # figures do not depend on the session of those that came before
    if not settings.json:
        stdout.print(str(conditions), style="dim")
    if failed:
        raise Unavailable(
            f"{len(failed)} of {len(chosen)} benchmarks failed: {', '.join(failed)}",
            fix=f"to see where: penstock bench {next(iter(failed))} --debug",
        )


def _print_list(workloads: Mapping[str, Listed], *, as_json: bool) -> None:
    if as_json:
        print_json([{"name": name, "about": each.about} for name, each in workloads.items()])
    else:
        rows = ((name, each.about) for name, each in workloads.items())
        print_table((Column("name"), Column("what it measures")), rows)


def _find_peers(given: Path | None) -> Path | None:
    """An interpreter as it is named: what its link leads to is outside of the venv."""
    python = (given or PEERS).absolute()
    if os.access(python, os.X_OK):
        return python
    if given:
        raise UsageError(
            "there is no Python for peers",
            where=str(given),
            fix=f"give --peers an interpreter, such as {PEERS} after `make bench`",
        )
    return None


@contextlib.contextmanager
def _failing_alone(name: str, failed: dict[str, Exception], *, debug: bool) -> Iterator[None]:
    """Say what goes wrong in the block, note it, and go on after it."""
    try:
        yield
    except Exception as error:
        failed[name] = error
        stderr.print(mask(f"penstock: benchmark {name} failed: {_text(error)}"), markup=False)
        if debug:
            sys.stderr.write(mask("".join(traceback.format_exception(error))))


def _text(error: Exception) -> str:
    """What people need of an error; one of Spark's may have the stack of its JVM in its text."""
    if isinstance(error, PenstockError):
        return str(error)
    try:
        lines = str(error).splitlines()[:_ERROR_LINES]
    except Exception:  # some ask the JVM for their text, and its end may be what went wrong
        lines = ["(it cannot say more)"]
    return "\n".join([f"{type(error).__name__}: {lines[0] if lines else ''}", *lines[1:]])
