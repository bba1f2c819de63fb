"""The `penstock` command."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated

import typer

from penstock.cli import (
    append,
    apply,
    backfill,
    bench,
    check,
    cluster,
    compact,
    connector,
    controller,
    demo,
    discover,
    doctor,
    fragments,
    gc,
    init,
    journals,
    list_failpoints,
    local_stack,
    persistd,
    prepare,
    preview,
    read,
    run,
    shuffle,
    status,
    task,
    test,
    up,
    verify,
)
from penstock.cli.frame import register, stdout
from penstock.cli.stopping import stops

app = typer.Typer(
    name="penstock",
    help="Exactly-once data pipelines on Apache Spark, declared in YAML.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        stdout.print(f"penstock {__version__}", markup=False)
        raise typer.Exit


@app.callback()
def _penstock(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Exactly-once data pipelines on Apache Spark, declared in YAML."""


register(app, init.init)
register(app, check.check)
register(app, test.run_tests, "test")
register(app, discover.discover)
register(app, apply.apply)
register(app, append.append)
register(app, read.read)
register(app, run.run)
register(app, up.up)
register(app, status.status)
register(app, backfill.backfill)
register(app, preview.preview)
register(app, journals.journals)
register(app, fragments.fragments)
register(app, shuffle.shuffle)
register(app, demo.demo)
register(app, compact.compact)
register(app, gc.gc)
register(app, verify.verify)
register(app, persistd.persistd)
register(app, cluster.cluster)
register(app, controller.controller)
register(app, local_stack.local_stack)
register(app, list_failpoints.failpoints)
register(app, bench.bench)
register(app, doctor.doctor)
register(app, prepare.prepare)

tasks = typer.Typer(
    name="task", help="Stop, start and delete tasks, or take tables over.", no_args_is_help=True
)
register(tasks, task.close_now)
register(tasks, task.stop)
register(tasks, task.start)
register(tasks, task.delete)
register(tasks, backfill.takeover)
app.add_typer(tasks)

connectors = typer.Typer(
    name="connector", help="List, install and try connectors.", no_args_is_help=True
)
register(connectors, connector.list_connectors, "list")
register(connectors, connector.install)
register(connectors, connector.remove)
register(connectors, connector.check)
app.add_typer(connectors)


@functools.cache
def commands() -> Callable[..., None]:
    """All of the above, as something to call."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line, and end the process; its exit code says how it went."""
    stops.own_process()
    try:
        commands()(prog_name="penstock")
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise  # Python prints what it says
        stops.leave(ended.code)


if __name__ == "__main__":
    main()
