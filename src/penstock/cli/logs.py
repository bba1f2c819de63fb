"""`penstock logs`: the log of a task."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.durations import seconds_of
from penstock.cli.frame import stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.cli.task import TaskName
from penstock.errors import UsageError, UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.journal.journals import Journals
    from penstock.journal.selector import LabelSelector

_LEVELS: Final = ("debug", "info", "warning", "error")


def logs(
    settings: Settings,
    name: TaskName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep following new records; stop with Ctrl-C.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="Records from then on: a time (2026-01-31T08:00:00Z), or how long ago (15m, 2h).",
            metavar="TIME",
            show_default=False,
        ),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            "--level",
            help=f"Records of this level and above: {', '.join(_LEVELS)}.",
            metavar="LEVEL",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the log of a task: a capture, a derivation or a materialization.

    Every process that runs the task writes to it: what the task waits for, what failed and why. It
    stays when the task fails, and when it is deleted. A task with renamedFrom has the log of its
    former name, too. New records appear within a few seconds. Does not start Spark.

    Each line is a time in UTC, the level, and the message; --json prints one JSON object per line.

    Example: penstock logs acme/views --since 1h --level warning
    """
    least = _rank(level) if level is not None else 0
    begin = None if since is None else _begin(since)
    stops.run(_logs(settings, name, begin, follow=follow, least=least))


def _rank(level: str) -> int:
    """The place of a level among all; the catalog spells one of them shorter."""
    word = {"warn": "warning"}.get(level.lower(), level.lower())
    if word not in _LEVELS:
        raise UsageError(
            f"{level!r} is not a level", where="--level", fix=f"one of {', '.join(_LEVELS)}"
        )
    return _LEVELS.index(word)


def _begin(since: str) -> str:
    """The time at which to begin, as a reader takes it."""
    if "-" in since:
        return since
    ago = datetime.timedelta(seconds=seconds_of(since, "--since"))
    return (datetime.datetime.now(datetime.UTC) - ago).isoformat().replace("+00:00", "Z")


async def _logs(
    settings: Settings, task: str, begin: str | None, *, follow: bool, least: int
) -> None:
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.reader import CollectionReader, Start
    from penstock.journal.rows import to_lines
    from penstock.journal.schemas import Schemas
    from penstock.runtime.ops import LOGS

    start = Start.parse([] if begin is None else [begin])
    shown = False
    async with opened(settings) as store:
        journals = Journals(store)
        names = await _names(store, journals, task, settings)
        reader = CollectionReader(
            journals,
            open_blobs(settings.blob),
            Schemas(store),
            LOGS.name,
            start=start,
            selector=_of(names),
        )
        async with aclosing(reader.follow() if follow else reader.read()) as found:
            async for rows in found:
                records = [json.loads(line) for line in to_lines(rows.batch, rows.root)]
                wanted = [each for each in records if _rank_of(each) >= least]
                shown = shown or bool(wanted)
                _print(wanted, as_json=settings.json)
    if not shown:
        stderr.print(f"{task} has logged nothing{' of this' if begin or least else ''}")


def _of(names: Iterable[str]) -> LabelSelector:
    """The journals of a task's log: tasks of several kinds may share a name."""
    from penstock.journal.names import encode_value
    from penstock.journal.selector import LabelSelector, Operator, Requirement

    values = frozenset(map(encode_value, names))
    return LabelSelector((Requirement(label="name", operator=Operator.IN, values=values),))


async def _names(
    store: Consensus, journals: Journals, task: str, settings: Settings
) -> frozenset[str]:
    """The names under which a task has logged: its own, and the one that it was renamed from.

    Raises if no catalog and no log knows the task.
    """
    from penstock.catalog.desired import NothingApplied
    from penstock.catalog.diagnostics import did_you_mean
    from penstock.journal.names import decode_value
    from penstock.runtime.kinds import runnable_tasks
    from penstock.runtime.ops import LOGS

    try:
        tasks = runnable_tasks(await current_catalog(store, settings))
    except NothingApplied:
        tasks = []
    known = {spec.name for spec in tasks}
    for journal in await journals.list(LOGS.name):
        known |= {
            str(decode_value(value)) for name, value in journal.state.labels if name == "name"
        }
    if task not in known:
        names = sorted(known)
        listed = f"known: {', '.join(names[:10])}" if names else "apply a catalog with tasks"
        raise UserError(f"there is no task {task}", fix=did_you_mean(task, names, listed))
    former = (getattr(spec, "renamed_from", None) for spec in tasks if spec.name == task)
    return frozenset((task, *(name for name in former if name is not None)))


def _rank_of(record: Mapping[str, Any]) -> int:
    level = record["level"]
    return _LEVELS.index(level) if level in _LEVELS else len(_LEVELS)


def _print(records: list[dict[str, Any]], *, as_json: bool) -> None:
    """Write whole lines at once, and flush: the reader of a pipe sees them, or has gone."""
    lines = [_json(each) if as_json else _line(each) for each in records]
    out = sys.stdout.buffer
    out.write("".join([line + "\n" for line in lines]).encode())
    out.flush()


def _json(record: Mapping[str, Any]) -> str:
    shard = record["shard"]
    return json.dumps(
        {
            "ts": record["ts"],
            "level": record["level"],
            "kind": shard["kind"],
            "task": shard["name"],
            "message": record["message"],
            "fields": record.get("fields") or {},
        },
        ensure_ascii=False,
    )


def _line(record: Mapping[str, Any]) -> str:
    at = f"{record['ts'][:19].replace('T', ' ')} UTC"
    lines = [f"{at}  {record['level']:<7}  {record['message']}"]
    fields = record.get("fields") or {}
    lines += [f"{'':<25}{name:<7}  {value}" for name, value in fields.items()]
    return "\n".join(lines)
