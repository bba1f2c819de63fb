"""The `penstock` command."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Final

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
    logs,
    persistd,
    prepare,
    preview,
    read,
    retain,
    run,
    schema,
    shuffle,
    status,
    task,
    test,
    up,
    verify,
)
from penstock.cli.frame import INTERRUPTED, CommandGroup, register, stdout, with_common_options
from penstock.cli.stopping import stops

app = typer.Typer(
    name="penstock",
    cls=CommandGroup,
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
@with_common_options
def _penstock(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Exactly-once data pipelines on Apache Spark, declared in YAML."""


_KEPT: Final = "committed transactions are kept, and it continues after them when started again"
_REQUESTED: Final = "the request may have been recorded: see penstock status"

register(app, init.init, if_stopped="some files may have been written")
register(app, check.check)
register(app, schema.schema)
register(app, test.run_tests, "test")
register(app, discover.discover, if_stopped="no file was written")
register(app, apply.apply, if_stopped="nothing was applied")
register(app, append.append, if_stopped="nothing was appended")
register(app, read.read)
register(
    app,
    run.run,
    if_stopped=_KEPT,
)
register(
    app,
    up.up,
    if_stopped=_KEPT,
)
register(app, status.status)
register(app, backfill.backfill, if_stopped=_REQUESTED)
register(app, logs.logs)
register(app, preview.preview, if_stopped="nothing was published")
register(app, journals.journals)
register(app, fragments.fragments)
register(app, shuffle.shuffle)
register(app, demo.demo, if_stopped="run it again: it continues after the last transaction")
register(app, compact.compact, if_stopped="run it again for the rest")
register(app, retain.retain, if_stopped="run it again for the rest")
register(app, gc.gc, if_stopped="run it again for the rest")
register(app, verify.verify)
register(app, persistd.persistd, if_stopped="")
register(
    app,
    cluster.cluster,
    if_stopped=_KEPT,
)
register(app, controller.controller, if_stopped="the cluster keeps running its tasks")
register(
    app,
    local_stack.local_stack,
    if_stopped=_KEPT,
)
register(app, list_failpoints.failpoints)
register(app, bench.bench, if_stopped="there is no result")
register(app, doctor.doctor)
register(app, prepare.prepare, if_stopped="there is no archive; run it again")

tasks = typer.Typer(
    name="task",
    cls=CommandGroup,
    help="Stop, start and delete tasks, or take tables over.",
    no_args_is_help=True,
)
register(tasks, task.close_now, if_stopped=_REQUESTED)
register(tasks, task.stop, if_stopped=_REQUESTED)
register(tasks, task.start, if_stopped=_REQUESTED)
register(tasks, task.delete, if_stopped="the task may be half deleted; run it again")
register(tasks, backfill.takeover, if_stopped=_REQUESTED)
app.add_typer(tasks)

connectors = typer.Typer(
    name="connector",
    cls=CommandGroup,
    help="List, install and try connectors.",
    no_args_is_help=True,
)
register(connectors, connector.list_connectors, "list")
register(connectors, connector.install, if_stopped="the package is not installed; run it again")
register(connectors, connector.remove, if_stopped="the package may be half removed; run it again")
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
    except KeyboardInterrupt:  # before or after the command itself
        stops.tell()
        stops.leave(INTERRUPTED)
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise  # Python prints what it says
        if ended.code == INTERRUPTED:
            stops.tell()
        stops.leave(ended.code)


if __name__ == "__main__":
    main()
