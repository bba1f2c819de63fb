"""`penstock preview`: one task against a store of its own, to see what it would do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.durations import seconds_of
from penstock.cli.frame import stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.errors import UsageError, UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.model.json_order import Json
    from penstock.model.spec import Catalog, MaterializationSpec
    from penstock.runtime.connector.materialize import Materialization
    from penstock.runtime.control import Control
    from penstock.runtime.kinds import TaskSpec
    from penstock.runtime.session import RunnableTask, World

_log = logging.getLogger("penstock.preview")


def preview(
    settings: Settings,
    source: Annotated[
        Path, typer.Option("--source", help="The catalog that has the task.", show_default=False)
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="The task; may be left out if there is only one."),
    ] = None,
    sessions: Annotated[
        str,
        typer.Option(
            "--sessions",
            help="Transactions per session, such as 2,2,2; -1 is unlimited.",
        ),
    ] = "-1",
    shards: Annotated[int, typer.Option("--shards", min=1, help="Shards of the task.")] = 1,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help="Stop after this long: 90s, 5m.", metavar="TIME")
    ] = None,
    output_state: Annotated[
        bool,
        typer.Option("--output-state", help="Print the connector's state patches of each commit."),
    ] = False,
    output_apply: Annotated[
        bool, typer.Option("--output-apply", help="Print what was applied, once per session.")
    ] = False,
) -> None:
    """Run a task against scratch state, to see what it would do.

    It reads the collections of the data directory from their beginning, publishes nothing, and
    calls no webhook. A derivation prints what it would publish. A materialization runs with its
    real connector, in separate, empty tables at the task's endpoint. It changes none of the task's
    own tables, and removes its tables at the end; if it is killed, the next preview at that
    endpoint removes them.

    Several sessions share one state, and every session but the last one stops with work left over,
    as a crash would.

    Each output is one line ["kind", …] on stdout; everything else goes to stderr. Ctrl-C and the
    timeout end it normally.

    Example: penstock preview --source catalog.yaml --name acme/views --sessions 2,2,2 --shards 3
    """
    counts = _counts(sessions)
    limit_s = None if timeout is None else seconds_of(timeout, "--timeout")
    run = _Preview(settings, counts, shards, output_state=output_state, output_apply=output_apply)
    stops.run(run.run(source, name, limit_s))


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or 0 in counts:
        raise UsageError(
            f"{text!r} is not a list of numbers",
            where="--sessions",
            fix="give the transactions of each session: 2,2,2; -1 is unlimited",
        )
    return counts


class _Preview:
    """A preview that runs."""

    def __init__(
        self,
        settings: Settings,
        counts: Sequence[int],
        shards: int,
        *,
        output_state: bool,
        output_apply: bool,
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._shards = shards
        self._output_state = output_state
        self._output_apply = output_apply
        self._image = ""

    async def run(self, source: Path, name: str | None, limit_s: float | None) -> None:
        from penstock.batch import make_world
        from penstock.catalog.build import load_catalog
        from penstock.connectors.builtin import BUILTIN
        from penstock.consensus.open import open_consensus
        from penstock.model.spec import MaterializationSpec

        catalog = load_catalog([source], environ=None, connectors=BUILTIN)
        spec = _task(catalog, name)
        if isinstance(spec, MaterializationSpec):
            self._image = spec.endpoint.image or spec.endpoint.kind
        with tempfile.TemporaryDirectory(prefix="penstock-preview-") as directory:
            async with opened(self._settings) as store, contextlib.AsyncExitStack() as stack:
                preview_store = await open_consensus(f"sqlite:///{directory}/state.db")
                stack.push_async_callback(preview_store.close)
                world = dataclasses.replace(
                    make_world(self._settings, store), preview_store=preview_store
                )
                await self._stoppable(catalog, spec, world, limit_s)

    async def _stoppable(
        self, catalog: Catalog, spec: TaskSpec, world: World, limit_s: float | None
    ) -> None:
        """Run sessions until they are done, or until a stop."""
        from penstock.runtime.control import Control, StoppedEarly

        control = Control(
            on_applied=self._applied, on_state=self._committed, on_document=_print_document
        )
        timer = None
        if limit_s is not None:
            timer = asyncio.get_running_loop().call_later(limit_s, control.stop)
        try:
            with stops.finishing(control.stop), contextlib.suppress(StoppedEarly):
                await control.stoppable(self._sessions(catalog, spec, world, control))
        finally:
            if timer is not None:
                timer.cancel()
        if control.is_stopping():
            stops.ends_with(0)

    async def _sessions(
        self, catalog: Catalog, spec: TaskSpec, world: World, control: Control
    ) -> None:
        from penstock.batch import build_stoppably
        from penstock.model.spec import MaterializationSpec

        name = f"{spec.name}/preview"
        if not isinstance(spec, MaterializationSpec):
            stderr.print(f"previewing {spec.name}: nothing is published", markup=False)
            task = await build_stoppably(catalog, spec, control, shards=self._shards, name=name)
            await self._run_sessions(task, world, control)
            return
        stderr.print(f"previewing {spec.name}, in separate tables at its endpoint", markup=False)
        async with _preview_tables(spec, control) as connector:
            task = await build_stoppably(
                catalog, spec, control, shards=self._shards, name=name, connector=connector
            )
            await self._run_sessions(task, world, control)

    async def _run_sessions(self, task: RunnableTask, world: World, control: Control) -> None:
        from penstock.runtime.session import Ended

        for number, count in enumerate(self._counts):
            if control.is_stopping():
                return
            if number:
                _log.warning("session %d meets an endpoint that was applied before", number + 1)
            control.drain = number == len(self._counts) - 1
            before = control.transactions
            while True:
                # A replay is a session of its own, and counts as one of the transactions.
                done = control.transactions - before
                control.transactions_max = max(count - done, 0)
                control.nothing_to_finish = True
                ended = await task.run_session(world, control)
                if ended is Ended.STOPPED or control.is_stopping():
                    break
                if 0 < count <= control.transactions - before:
                    break

    def _applied(self, description: str) -> None:
        if self._output_apply:
            _print("applied", {"image": self._image, "action": description})

    def _committed(self, patches: Sequence[Json]) -> None:
        if self._output_state:
            _print("connectorState", list(patches))


def _print(kind: str, value: Json) -> None:
    sys.stdout.write(json.dumps([kind, value], ensure_ascii=False, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def _print_document(collection: str, document: str) -> None:
    sys.stdout.write(f"[{json.dumps(collection, ensure_ascii=False)},{document}]\n")
    sys.stdout.flush()


def _task(catalog: Catalog, name: str | None) -> TaskSpec:
    from penstock.runtime.kinds import runnable_tasks

    tasks = runnable_tasks(catalog)
    found = [spec for spec in tasks if name in (None, spec.name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(spec.name for spec in tasks)
    if found:
        what = f"several tasks are called {name}" if name else "the catalog has several tasks"
        raise UsageError(what, fix=f"choose one with --name: {known}")
    raise UserError(
        f"there is no task {name}" if name else "the catalog has no tasks",
        fix=f"one of {known}" if known else "derivations and materializations can be previewed",
    )


@contextlib.asynccontextmanager
async def _preview_tables(
    spec: MaterializationSpec, control: Control
) -> AsyncIterator[Materialization]:
    """The task's connector, for tables that nobody else uses."""
    from penstock.connectors.builtin import materialization
    from penstock.runtime.awaited import ENDPOINT
    from penstock.runtime.waiting import blocked, in_thread, interruptible

    connector = materialization(spec.endpoint, spec.name)
    paths = [connector.path(each.resource.value) for each in spec.bindings if not each.disable]
    with contextlib.ExitStack() as stack:
        with control.waits.on(spec.name, ENDPOINT, blocked(connector.waits_for, ENDPOINT)):
            preview = await interruptible(
                lambda: stack.enter_context(connector.preview(paths)), connector.interrupt
            )
        try:
            yield preview
        finally:
            # Also of a preview that is cancelled: what would remove its tables is not.
            await asyncio.shield(in_thread(stack.close))
