"""`penstock test`: run the tests of a catalog."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.cli.catalogs import main_files
from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.meanwhile import said_meanwhile
from penstock.errors import UsageError, UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.catalog.testing.run import Outcome, Variant, Worlds
    from penstock.catalog.testing.running import RunningDerivation
    from penstock.model.spec import Catalog, CatalogTest, CollectionSpec


def run_tests(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Catalog files, or directories with a catalog.yaml; ./catalog.yaml by default.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            help="Run the tests whose names match, such as 'acme/*'; repeatable.",
            metavar="GLOB",
            show_default=False,
        ),
    ] = None,
    spark: Annotated[
        bool,
        typer.Option(
            "--spark", help="Run derivations on Spark, as tasks do, in temporary deployments."
        ),
    ] = False,
    shake: Annotated[
        bool,
        typer.Option(
            "--shake",
            help="Run each test with different transactions and numbers of shards, and compare.",
        ),
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option(
            "--junit", help="Also write the results to this file, as JUnit XML.", metavar="FILE"
        ),
    ] = None,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Allow files outside the catalog's directory."),
    ] = False,
) -> None:
    """Run the tests of a catalog: ingest documents, derive, and verify collections.

    Each test begins with empty collections, in memory, and touches no deployment. Derivations run
    until nothing is left to do; read delays take no time, because time is virtual. Captures and
    materializations do not run. Spark starts only for derivations that use it. With --spark, tests
    run in temporary deployments, as tasks do, and --shake varies only the number of shards.

    A failed test shows the step, and how the documents differ from those expected; the exit code
    is then 1. Members that a test does not name are not compared, and numbers may differ in the
    last digits.

    Example: penstock test catalog.yaml --only 'acme/tests/*' --shake
    """
    from penstock.catalog.build import load_catalog

    mains = main_files(settings, catalogs, "test")
    catalog = load_catalog(mains, environ=None, allow_outside=allow_outside)
    outcomes = _run(catalog, _chosen(catalog, only or ()), settings, shake=shake, spark=spark)
    _report(outcomes, as_json=settings.json, junit=junit, defined=bool(catalog.tests))
    if any(outcome.failure for outcome in outcomes):
        raise typer.Exit(1)


def _chosen(catalog: Catalog, globs: Sequence[str]) -> list[CatalogTest]:
    """The tests that match any of the patterns; all of them without one."""
    found = [
        test
        for test in catalog.tests
        if not globs or any(fnmatch.fnmatchcase(test.name, glob) for glob in globs)
    ]
    if globs and catalog.tests and not found:
        names = ", ".join(test.name for test in catalog.tests[:10])
        raise UserError(f"no test matches {' or '.join(globs)}", fix=f"tests: {names}")
    return found


def _run(
    catalog: Catalog,
    tests: Sequence[CatalogTest],
    settings: Settings,
    *,
    shake: bool,
    spark: bool,
) -> list[Outcome]:
    from penstock.catalog.testing.run import run_test, variants

    shaken = variants(catalog, splits=not spark) if shake else ()
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-test-") as directory,
        _showing(len(tests)) as show,
    ):
        worlds = (_deployments if spark else _worlds)(catalog, settings, Path(directory))
        for test in tests:
            outcome = run_test(catalog, test, worlds, shake=shaken, on_run=show(test.name))
            outcomes.append(outcome)
            if not settings.json:
                _print(outcome)
    return outcomes


def _worlds(catalog: Catalog, settings: Settings, directory: Path) -> Worlds:
    from penstock import wall_clock
    from penstock.catalog.testing.memory import MemoryWorld

    start = wall_clock.now()  # one for all runs of a test, which are compared

    def frames(catalog: Catalog, spec: CollectionSpec) -> RunningDerivation:
        from penstock.catalog.testing.spark_frames import FrameDerivation
        from penstock.engine import EngineOptions, Lifetime, open_spark

        options = EngineOptions(master=settings.master, conf=settings.conf, lifetime=Lifetime.SHORT)
        return FrameDerivation(catalog, spec, lambda: open_spark(options))

    def world(variant: Variant) -> MemoryWorld:
        return MemoryWorld(
            catalog,
            directory=directory,
            start=start,
            split=variant.split,
            shards=variant.shards,
            frames=frames,
        )

    return world


def _deployments(catalog: Catalog, settings: Settings, directory: Path) -> Worlds:
    from penstock.testing.deployment_world import DeploymentWorld

    def world(variant: Variant) -> DeploymentWorld:
        own = Path(tempfile.mkdtemp(dir=directory))
        return DeploymentWorld(catalog, directory=own, settings=settings, shards=variant.shards)

    return world


@contextlib.contextmanager
def _showing(tests: int) -> Iterator[Callable[[str], Callable[[Variant], None]]]:
    """Progress: the test that runs, and how; elsewhere than on a terminal, if it takes long."""
    running = "loading"

    def note(name: str) -> Callable[[Variant], None]:
        def run(variant: Variant) -> None:
            nonlocal running
            running = f"{name}: {variant}"

        return run

    if not stderr.is_terminal:
        with said_meanwhile(lambda: f"testing {running}"):
            yield note
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as bars:
        bar = bars.add_task("loading", total=tests)

        def show(name: str) -> Callable[[Variant], None]:
            return lambda variant: bars.update(bar, description=f"{name}: {variant}")

        yield show


def _print(outcome: Outcome) -> None:
    failure = outcome.failure
    good, bad = ("✓", "✗") if stdout.encoding.lower().startswith("utf") else ("ok  ", "FAIL")
    mark = f"[green]{good}[/]" if failure is None else f"[red]{bad}[/]"
    stdout.print(mark, end=" ")
    runs = f", {outcome.runs} runs" if outcome.runs > 1 else ""
    stdout.print(f"{outcome.test.name} ({outcome.seconds:.2f} s{runs})", markup=False)
    for line in () if failure is None else failure.lines():
        style = {"-": "red", "+": "green", "@": "cyan"}.get(line[:1])
        stdout.print(f"    {line}", style=style, markup=False)


def _report(
    outcomes: Sequence[Outcome], *, as_json: bool, junit: Path | None, defined: bool
) -> None:
    from penstock.catalog.testing import report

    if junit is not None:
        try:
            junit.write_bytes(report.as_junit(outcomes))
        except OSError as error:
            raise UsageError(
                f"cannot write {junit}: {os.strerror(error.errno or 0)}",
                fix="name a file in an existing, writable directory",
            ) from None
    if as_json:
        print_json(report.as_json(outcomes))
        return
    if not defined:
        stdout.print("the catalog has no tests")
        return
    failed = sum(outcome.failure is not None for outcome in outcomes)
    passed = len(outcomes) - failed
    many = f"{passed} test{'s' if passed != 1 else ''} passed"
    stdout.print(f"[red]{failed} failed[/], {many}" if failed else f"[green]ok[/]: {many}")
