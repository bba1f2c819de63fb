"""`penstock fragments`: the records of one journal, in the order of offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.frame import print_json, stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.cli.tables import TableColumn, print_table, size_text
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.journal.state import AckRecord, Fragment, JournalState, Page
    from penstock.model.runs import Run

_COLUMNS = (
    TableColumn("KIND"),
    TableColumn("OFFSETS", number=True),
    TableColumn("ROWS", number=True),
    TableColumn("BYTES", number=True),
    TableColumn("REVISION", number=True),
    TableColumn("SCHEMA"),
    TableColumn("AT"),
    TableColumn("RUNS"),
)
_RUNS_SHOWN = 3


def fragments(
    settings: Settings,
    journal: Annotated[str, typer.Argument(help="Name of the journal; see penstock journals.")],
) -> None:
    """List the fragments and ACKs of a journal, and the pages that hold older ones.

    Example: penstock fragments acme/orders/region=eu/pivot=00
    """
    state = stops.run(_load(settings, journal))
    if settings.json:
        print_json(describe(state))
        return
    print_table(_COLUMNS, [_row(item) for item in describe(state)])
    if not state.pages and not state.records:
        stderr.print("the journal is empty", markup=False)


async def _load(settings: Settings, name: str) -> JournalState:
    from penstock.journal.journals import Journals

    async with opened(settings) as store:
        return await Journals(store).load(name)


def describe(state: JournalState) -> list[dict[str, Any]]:
    """The records for machines: pages first, which are the oldest."""
    from penstock.journal.state import Fragment

    return [
        *(_page(page) for page in state.pages),
        *(_fragment(r) if isinstance(r, Fragment) else _ack(r) for r in state.records),
    ]


def _page(page: Page) -> dict[str, Any]:
    return {
        "kind": "page",
        "begin": page.begin,
        "end": page.end,
        "rows": page.rows,
        "bytes": page.bytes,
        "records": page.records,
        "revision": page.revision_max,
        "path": page.path,
    }


def _fragment(fragment: Fragment) -> dict[str, Any]:
    from penstock.journal.state import Blob

    at = fragment.at
    return {
        "kind": "fragment",
        "begin": fragment.begin,
        "end": fragment.end,
        "rows": fragment.rows,
        "bytes": fragment.bytes,
        "revision": fragment.revision,
        "schema": fragment.schema,
        "path": at.path if isinstance(at, Blob) else None,
        "row": at.row if isinstance(at, Blob) else None,
        "key_hash_min": fragment.key_hash_min,
        "key_hash_max": fragment.key_hash_max,
        "runs": [_run(run) for run in fragment.runs_at()],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "producer": str(run.producer),
        "kind": run.kind.name,
        "rows": run.rows,
        "first_offset": run.first_offset,
        "last_offset": run.last_offset,
        "clock_min": run.clock_min,
        "clock_max": run.clock_max,
        "increasing": run.increasing,
    }


def _ack(ack: AckRecord) -> dict[str, Any]:
    return {
        "kind": "ack",
        "begin": ack.begin,
        "end": ack.end,
        "revision": ack.revision,
        "producer": str(ack.producer),
        "clock": ack.clock,
        "hints": [
            {"journal": hint.journal, "producer": str(hint.producer), "clock": hint.clock}
            for hint in ack.hints
        ],
    }


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    place = (item["kind"], f"{item['begin']}..{item['end']}")
    revision = str(item["revision"])
    match item["kind"]:
        case "ack":
            said = f"{item['producer']} at {item['clock']:#x}"
            if count := len(item["hints"]):
                said += f", {count} hint{'s' if count > 1 else ''}"
            return (*place, "-", "-", revision, "-", "-", said)
        case "page":
            at, said = item["path"], f"{item['records']} records"
            schema = "-"
        case _:
            at = "inline" if item["path"] is None else f"{item['path']}[{item['row']}]"
            said, schema = _runs_text(item["runs"]), item["schema"][:8]
    return (*place, str(item["rows"]), size_text(item["bytes"]), revision, schema, at, said)


def _runs_text(runs: list[dict[str, Any]]) -> str:
    shown = [
        f"{run['producer']} {run['kind'].removesuffix('_TXN').lower()} {run['rows']}"
        f"{'' if run['increasing'] else ' unordered'}"
        for run in runs[:_RUNS_SHOWN]
    ]
    left = len(runs) - len(shown)
    return ", ".join(shown) + (f", and {left} more" if left else "")
