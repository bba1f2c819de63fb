"""`penstock bench`: benchmarks, each beside its peers in the same run."""

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
from penstock.cli.tables import TableColumn, print_table
from penstock.errors import PenstockError, Unavailable, UsageError
from penstock.servicekit.secrets import mask
from penstock.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock_bench.frame import WorkloadEntry

RESULTS = Path("bench/results")
PEERS = Path(".venv-peers/bin/python")
_ERROR_LINES = 3


def bench(
    settings: Settings,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Benchmarks to run; all by default.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run smaller benchmarks, of a few minutes each.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Directory for results.")
    ] = RESULTS,
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers",
            metavar="PYTHON",
            help=f"Python of the venv with the peers (default {PEERS}, if it exists). "
            r"\[env: PENSTOCK_BENCH_PEERS]",
            envvar="PENSTOCK_BENCH_PEERS",
            show_envvar=False,
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the benchmarks without running them.")
    ] = False,
) -> None:
    r"""Run benchmarks on this machine, with peers for comparison.

    Each benchmark prints a table, or with --json a line of JSON, and writes NAME.json and a
    NAME-CHART.svg per chart to DIR. Charts need matplotlib: pip install 'penstock\[bench]'.

    `make bench` installs peers that are separate programs into a venv; without it, they are left
    out.

    If a benchmark fails, the others still run, and the exit code is 1. A missed goal is a result,
    not a failure.

    Example: penstock bench model --quick
    """
    from penstock.engine import EngineOptions

    try:
        from penstock_bench import frame, plots, results
    except ModuleNotFoundError:
        raise UsageError(
            "the benchmarks are not installed",
            why="they are part of the repository, not of the package",
            fix="clone the repository and run `make bench` there",
        ) from None

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
    # Peers are ended by the benchmark that started them, so SIGTERM must unwind the stack.
    signal.signal(signal.SIGTERM, lambda _, __: sys.exit(128 + signal.SIGTERM))
    conditions = results.Conditions.here(quick=quick, peers=run.peers)
    if not plots.can_draw():
        run.say(f"no charts: matplotlib is not installed ({plots.INSTALL})")
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
            run.close()  # a benchmark must not depend on the session of the one before
    if not settings.json:
        stdout.print(str(conditions), style="dim")
    if failed:
        raise Unavailable(
            f"{len(failed)} of {len(chosen)} benchmarks failed: {', '.join(failed)}",
            fix=f"to see where: penstock bench {next(iter(failed))} --debug",
        )


def _print_list(workloads: Mapping[str, WorkloadEntry], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [{"name": name, "about": workload.about} for name, workload in workloads.items()]
        )
    else:
        rows = ((name, workload.about) for name, workload in workloads.items())
        print_table((TableColumn("name"), TableColumn("what it measures")), rows)


def _find_peers(given: Path | None) -> Path | None:
    """Return the interpreter as named: following its link would leave the venv."""
    python = (given or PEERS).absolute()
    if os.access(python, os.X_OK):
        return python
    if given:
        raise UsageError(
            "cannot find the Python for peers",
            where=str(given),
            fix=f"pass an interpreter to --peers, such as {PEERS} after `make bench`",
        )
    return None


@contextlib.contextmanager
def _failing_alone(name: str, failed: dict[str, Exception], *, debug: bool) -> Iterator[None]:
    """Report and record an error of the block, and continue after it."""
    try:
        yield
    except Exception as error:
        failed[name] = error
        stderr.print(mask(f"penstock: benchmark {name} failed: {_summarize(error)}"), markup=False)
        if debug:
            sys.stderr.write(mask("".join(traceback.format_exception(error))))


def _summarize(error: Exception) -> str:
    """Summarize an error: those of Spark may include the stack trace of the JVM."""
    if isinstance(error, PenstockError):
        return str(error)
    try:
        lines = str(error).splitlines()[:_ERROR_LINES]
    except Exception:  # some ask the JVM for their text, and it may be gone
        lines = ["(no details)"]
    return "\n".join([f"{type(error).__name__}: {lines[0] if lines else ''}", *lines[1:]])
