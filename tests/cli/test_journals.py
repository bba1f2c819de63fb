"""`penstock journals` and `penstock fragments`, as people run them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from journal.publishing import seal_as
from penstock.cli.main import app
from penstock.consensus.open import open_consensus
from penstock.journal.journals import Journals, creation
from penstock.journal.names import JournalName
from penstock.journal.state import AckRecord, Blob, Fragment, Inline, Page
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.hints import Commit
from penstock.model.runs import Run

ONE, TWO = (Producer(Producer.MULTICAST | n) for n in (1, 2))
EU, US = (JournalName.of("acme/orders", {"region": region}) for region in ("eu", "us"))
ELSEWHERE = JournalName.of("acme/a-collection-with-quite-a-long-name", {"city": "São Paulo"})


def penstock(*arguments: str, cwd: Path) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments))


def fragment(rows: int, *producers: Producer, at: Blob | Inline) -> Fragment:
    runs = tuple(
        Run(
            producer=producer,
            kind=Flag.CONTINUE_TXN,
            first_offset=n * rows,
            last_offset=(n + 1) * rows - 1,
            rows=rows,
            clock_min=Clock(1),
            clock_max=Clock(rows),
            clock_max_offset=(n + 1) * rows - 1,
            increasing=n == 0,
        )
        for n, producer in enumerate(producers)
    )
    return Fragment(
        rows=rows * len(producers),
        bytes=3000,
        at=at,
        schema="0123456789abcdef",
        runs=runs,
        key_hash_min=0,
        key_hash_max=7,
    )


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with three journals."""
    directory = tmp_path_factory.mktemp("journals")

    async def fill() -> None:
        (directory / ".penstock").mkdir()
        store = await open_consensus(f"sqlite:///{directory}/.penstock/consensus.db")
        journals = Journals(store)
        await journals.create_all({name: creation(name) for name in (EU, US, ELSEWHERE)})
        hints = (Commit(str(US), ONE, Clock(9)),)
        await journals.append(str(EU), [fragment(2, ONE, at=Blob(path="old"))])
        await journals.append(
            str(EU),
            [
                fragment(3, ONE, TWO, at=Blob(path="acme/orders/x.parquet", row=4)),
                AckRecord(producer=ONE, clock=Clock(9), hints=hints),
                fragment(1, ONE, at=Inline(data=b"")),
            ],
        )
        page = Page(
            path="p", begin=0, end=2, records=1, rows=2, bytes=3000, revision_min=1, revision_max=2
        )
        await seal_as(journals, str(EU), page)
        await store.close()

    asyncio.run(fill())
    return directory


def test_journals_are_listed_one_per_line(here: Path) -> None:
    result = penstock("journals", cwd=here)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["NAME", "STATUS", "OFFSETS", "ROWS", "FRAGMENTS", "BYTES", "PRODUCERS", "LABELS"],
        [str(ELSEWHERE), "active", "0..0", "0", "0", "0", "B", "0", "city=S%C3%A3o%20Paulo"],
        [str(EU), "active", "0..10", "9", "2", "8.8", "KiB", "2", "region=eu"],
        [str(US), "active", "0..0", "0", "0", "0", "B", "0", "region=us"],
    ]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param(["acme/orders"], [EU, US], id="of a collection"),
        pytest.param(["--selector", "region in (eu)"], [EU], id="by label"),
        pytest.param(["--selector", 'city="São Paulo"'], [ELSEWHERE], id="by a label with spaces"),
        pytest.param(["acme/orders", "--selector", "!region"], [], id="none"),
    ],
)
def test_journals_are_chosen(here: Path, arguments: list[str], names: list[JournalName]) -> None:
    result = penstock("journals", *arguments, "--json", cwd=here)
    assert [journal["name"] for journal in json.loads(result.stdout)] == [str(n) for n in names]


def test_a_journal_for_machines(here: Path) -> None:
    [journal, _] = json.loads(penstock("journals", "acme/orders", "--json", cwd=here).stdout)
    assert journal == {
        "name": str(EU),
        "collection": "acme/orders",
        "status": "active",
        "begin": 0,
        "end": 10,
        "rows": 9,
        "bytes": 9000,
        "fragments": 2,
        "pages": 1,
        "producers": [str(ONE), str(TWO)],
        "generation": 1,
        "key_begin": 0,
        "key_end": 0xFFFFFFFF,
        "labels": {"region": "eu"},
    }


def test_no_journals_are_not_a_failure(here: Path) -> None:
    result = penstock("journals", "nothing", cwd=here)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "no journals of nothing\n"


def test_fragments_are_listed_in_the_order_of_offsets(here: Path) -> None:
    result = penstock("fragments", str(EU), cwd=here)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    revisions = [line.split()[4 if line.startswith("ack") else 5] for line in lines[1:]]
    assert lines == [
        "KIND OFFSETS ROWS BYTES REVISION SCHEMA AT RUNS",
        f"page 0..2 2 2.9 KiB {revisions[0]} - p 1 records",
        f"fragment 2..8 6 2.9 KiB {revisions[1]} 01234567 acme/orders/x.parquet[4] "
        f"{ONE} continue 3, {TWO} continue 3 unordered",
        f"ack 8..9 - - {revisions[2]} - - {ONE} at 0x9, 1 hint",
        f"fragment 9..10 1 2.9 KiB {revisions[3]} 01234567 inline {ONE} continue 1",
    ]
    assert revisions[1] == revisions[2] == revisions[3]


def test_fragments_for_machines(here: Path) -> None:
    page, first, ack, second = json.loads(penstock("fragments", str(EU), "--json", cwd=here).stdout)
    assert (page["kind"], page["path"], page["records"]) == ("page", "p", 1)
    assert (first["begin"], first["end"], first["path"], first["row"]) == (
        2, 8, "acme/orders/x.parquet", 4,
    )  # fmt: skip
    assert [(run["first_offset"], run["last_offset"]) for run in first["runs"]] == [(2, 4), (5, 7)]
    assert ack["hints"] == [{"journal": str(US), "producer": str(ONE), "clock": 9}]
    assert (second["path"], second["schema"]) == (None, "0123456789abcdef")


def test_an_empty_journal_has_no_lines(here: Path) -> None:
    result = penstock("fragments", str(US), cwd=here)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "the journal is empty\n")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        pytest.param(
            ["fragments", "acme/orders/region=ue/pivot=00"],
            ["does not exist", "did you mean", str(EU)],
            id="a journal that is not there",
        ),
        pytest.param(["journals", "--selector", "a="], ["a=, character 3"], id="a selector"),
        pytest.param(
            ["journals", "--selector", "regoin=eu"],
            ["there is no label regoin", "did you mean region?"],
            id="an unknown label",
        ),
        pytest.param(
            ["journals", "--data", "elsewhere"],
            ["there is no deployment here yet"],
            id="no directory",
        ),
    ],
)
def test_a_mistake_is_told(here: Path, arguments: list[str], messages: list[str]) -> None:
    result = penstock(*arguments, cwd=here)
    assert (result.exit_code, result.stdout) == (1, "")
    assert all(message in result.stderr for message in messages)
    assert not (here / "elsewhere").exists()
