"""The pipeline benchmark: the expected table, whole reads, and the arithmetic of its reports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.catalog.build import load_catalog
from penstock_bench import languages, pipeline, pipeline_rates, processes
from penstock_bench.events import REGIONS, pq, sqlite_endpoint
from penstock_bench.frame import OURS, Bench, Samples
from penstock_bench.latency import Sighting
from penstock_bench.pipeline import DECLARATIVE, FIRST, MORE, STREAMING, contestants
from penstock_bench.pipeline_events import (
    RawEvents,
    Row,
    catalog_text,
    customers,
    oracle,
    parquet_rows,
    write_file,
    wrong_rows,
)
from penstock_bench.pipeline_reads import FAILED, Read, Reader, Reads, Sums, read_parquet

EVENTS = RawEvents(2_000, files=20, accounts=300)
MORE_EVENTS = RawEvents(20, files=1, accounts=300, seed=8, first_id=2_000)


# ------------------------------------------------------------------------------ events and oracle


def by_hand(directory: Path, accounts: int) -> list[Row]:
    """Clean, add up and join in dictionaries, one event at a time."""
    tiers = {row["account"]: row["tier"] for row in customers(accounts).to_pylist()}
    found: dict[int, tuple[int, int, int, int]] = dict.fromkeys(tiers, (0, 0, 0, 0))
    for path in directory.glob("*.parquet"):
        for row in pq.read_table(path).to_pylist():
            region = row["region"].strip().lower()
            if row["amount"] is None or row["amount"] <= 0 or region not in REGIONS:
                continue
            events, amount, largest, eu = found.get(row["account"], (0, 0, 0, 0))
            found[row["account"]] = (
                events + 1,
                amount + row["amount"],
                max(largest, row["amount"]),
                eu + (row["amount"] if region == "eu" else 0),
            )
    return [(account, *figures, tiers.get(account)) for account, figures in found.items()]


def test_the_oracle_matches_the_files(tmp_path: Path) -> None:
    EVENTS.write_files(tmp_path)
    expected = by_hand(tmp_path, EVENTS.accounts)
    assert sorted(oracle([EVENTS])) == sorted(expected)
    assert 0 < sum(row[1] for row in expected) < EVENTS.count, "some events are invalid"
    assert any(row[1] == 0 for row in expected), "a customer without events"
    assert any(row[5] is None for row in expected), "an account without customer"

    MORE_EVENTS.write_files(tmp_path)
    assert len(list(tmp_path.iterdir())) == 21, "no file replaces another"
    assert sorted(oracle([EVENTS, MORE_EVENTS])) == sorted(by_hand(tmp_path, EVENTS.accounts))


def test_events_arrive_with_every_flaw_and_many_spellings(tmp_path: Path) -> None:
    rows = [row for file in range(EVENTS.files) for row in EVENTS.rows(file).to_pylist()]
    assert [row["id"] for row in rows] == list(range(EVENTS.count))
    assert any(row["amount"] is None for row in rows)
    assert any(row["amount"] is not None and row["amount"] < 0 for row in rows)
    regions = {row["region"] for row in rows}
    assert {"eu", "EU", " eu", "EU ", "  eu ", "??"} <= regions


def test_documents_match_the_events_in_the_files() -> None:
    documents: Any = EVENTS.batch(3)
    rows = EVENTS.rows(3)
    for column in rows.column_names:
        assert documents.column(column).to_pylist() == rows[column].to_pylist()


ROWS = oracle([EVENTS])


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        pytest.param(ROWS, 0, id="as expected"),
        pytest.param(ROWS[::-1], 0, id="in another order"),
        pytest.param(ROWS[1:], 1, id="one is missing"),
        pytest.param([*ROWS, (-7, 1, 1, 1, 0, None)], 1, id="one unexpected"),
        pytest.param([*ROWS, ROWS[3]], 1, id="one duplicated"),
        pytest.param([*ROWS[1:], (*ROWS[0][:5], "other")], 1, id="tier differs"),
        pytest.param([], len(ROWS), id="nothing"),
    ],
)
def test_wrong_rows_are_counted(rows: list[Row], wrong: int) -> None:
    assert wrong_rows(rows, ROWS) == wrong


@pytest.mark.parametrize("which", ["pipeline", "languages"])
def test_catalogs_of_the_benchmark_are_sound(which: str, tmp_path: Path) -> None:
    endpoint = sqlite_endpoint(tmp_path / "t.db")
    text = catalog_text(endpoint) if which == "pipeline" else languages.catalog_text()
    (tmp_path / "catalog.yaml").write_text(text)
    (tmp_path / "by_python.py").write_text(languages.MODULE)
    catalog = load_catalog([tmp_path / "catalog.yaml"], environ={})
    assert len(catalog.collections) == 4


# ------------------------------------------------------------------------------------- the reads

BEFORE, AFTER = Sums(10, 100), Sums(11, 103)


@pytest.mark.parametrize(
    ("read", "judged"),
    [
        pytest.param(Read(5, BEFORE), Reads(total=1), id="as it was"),
        pytest.param(Read(5, AFTER), Reads(total=1), id="as it is to be"),
        pytest.param(Read(0, Sums(0, 0)), Reads(total=1, empty=1), id="no rows"),
        pytest.param(Read(0, None), Reads(total=1, empty=1), id="no table"),
        pytest.param(Read(4, Sums(11, 100)), Reads(total=1, torn=1), id="between both"),
        pytest.param(FAILED, Reads(total=1, torn=1), id="a file vanished"),
    ],
)
def test_a_read_is_whole_empty_or_torn(read: Read, judged: Reads) -> None:
    assert Reads.judge([read], {BEFORE, AFTER}) == judged


def test_shares_of_whole_reads() -> None:
    some = Reads(total=6, empty=1) + Reads(total=4, torn=2)
    assert some == Reads(total=10, empty=1, torn=2)
    assert some.whole_share == pytest.approx(0.7)
    assert not Reads().whole_share >= 1, "without reads nothing is shown"


def test_files_are_read_as_a_table_and_broken_ones_fail(tmp_path: Path) -> None:
    assert read_parquet(tmp_path / "absent") == Read(0, Sums(0, 0))
    names = ("account", "events", "amount", "largest", "eu", "tier")
    columns = dict(zip(names, zip(*ROWS, strict=True), strict=True))
    write_file(pipeline_table(columns), tmp_path, "part-0.parquet")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".part-0.parquet.crc").touch()
    assert parquet_rows(tmp_path) == ROWS
    assert read_parquet(tmp_path) == Read(len(ROWS), Sums.of(ROWS))
    (tmp_path / "part-1.parquet").write_bytes(b"PAR1 half of it")
    assert read_parquet(tmp_path) == FAILED


def pipeline_table(columns: dict[str, Any]) -> Any:  # noqa: ANN401 - pyarrow
    from penstock_bench.events import pa

    return pa.table({name: list(values) for name, values in columns.items()})


def test_a_reader_reads_until_the_end_and_raises_what_a_read_raised() -> None:
    def broken() -> Read:
        raise psycopg.OperationalError("gone")

    with pytest.raises(psycopg.OperationalError, match="gone"):
        asyncio.run(_reading(Reader(broken)))
    reader = Reader(lambda: Read(5, BEFORE))
    asyncio.run(_reading(reader))
    assert reader.reads


async def _reading(reader: Reader) -> None:
    with reader.reading():
        await asyncio.sleep(0.6)


# ----------------------------------------------------------------------------------- the reports


def update(wall_s: float, cpu_s: float, wrong: int = 0) -> pipeline.Update:
    usage = processes.Usage(cpu_s=cpu_s, peak_rss_bytes=1_000_000)
    run = processes.Run(seconds=wall_s, usage=usage, output={}, code=0)
    return pipeline.Update(run=run, wrong=wrong, rows=50)


def outcome(first: float, more: float, *, wrong: int = 0, torn: int = 0) -> pipeline.Outcome:
    return pipeline.Outcome(
        first=update(first, 2 * first, wrong),
        more=update(more, 2 * more),
        reads=Reads(total=10, torn=torn),
    )


def test_goals_of_updates_compare_with_the_peers_that_ran() -> None:
    alone = pipeline.Outcomes(1_000, {OURS: [outcome(10, 5)]})
    assert {goal.name: goal.measured for goal in pipeline.build_report(alone).goals} == {
        "1,000 events: share of right rows": 1.0,
        f"1,000 events: share of reads during {MORE} that are neither empty nor torn": 1.0,
    }
    everybody = pipeline.Outcomes(
        1_000,
        {
            OURS: [outcome(10, 5, wrong=1, torn=1)],
            STREAMING: [outcome(16, 6)],
            DECLARATIVE: [outcome(30, 20, torn=4)],
        },
    )
    report = pipeline.build_report(everybody)
    assert {goal.name: (goal.measured, goal.goal) for goal in report.goals} == {
        f"1,000 events: {FIRST}, wall of {STREAMING} / {OURS}": (1.6, 1.5),
        f"1,000 events: {FIRST}, wall of {DECLARATIVE} / {OURS}": (3.0, 1.5),
        f"1,000 events: {MORE}, CPU of {DECLARATIVE} / {OURS}": (4.0, 5.0),
        "1,000 events: share of right rows": (0.99, 1.0),
        f"1,000 events: share of reads during {MORE} that are neither empty nor torn": (0.9, 1.0),
    }
    results = {result.name: result.value for result in report.results}
    assert results[f"1,000 events: {DECLARATIVE}, torn reads during {MORE}"] == 4
    assert results[f"1,000 events: {OURS}, {MORE}, CPU"] == 10
    assert results[f"1,000 events: {OURS}, {FIRST}, CPU"] == 20
    assert all(f"{OURS} left 1 wrong rows" in chart.note for chart in report.charts)


def test_updates_by_a_running_process_are_reported_beside_the_cold_ones() -> None:
    updates = [
        pipeline.WarmUpdate(seconds=seconds, cpu_s=2 * seconds, wrong=wrong)
        for seconds, wrong in ((1.0, 0), (3.0, 2), (2.0, 1))
    ]
    report = pipeline.warm_report(1_000, updates)
    what = f"1,000 events: {OURS}, {MORE} while penstock up runs"
    assert {result.name: (result.value, result.unit) for result in report.results} == {
        f"{what}, wall": (2.0, "s"),
        f"{what}, CPU": (4.0, "s of CPU"),
        f"{what}, wrong rows in all rounds": (3, "rows"),
    }


def test_a_peer_that_is_not_installed_is_left_out_and_named(tmp_path: Path) -> None:
    said: list[str] = []
    assert list(contestants(Bench(say=said.append))) == [OURS]
    assert "alone" in said.pop()

    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$3" = pyspark ]\n')  # has only that module
    python.chmod(0o755)
    assert list(contestants(Bench(say=said.append, peers=python))) == [OURS, STREAMING]
    assert said == [
        "Declarative Pipelines is not installed, and left out",
        "dlt is not installed, and left out",
    ]


LOAD = pipeline_rates.Load(180, files=20, accounts=40)


def test_each_append_has_a_probe_and_all_its_prefixes_are_whole(tmp_path: Path) -> None:
    LOAD.write_files(tmp_path)
    expected = by_hand(tmp_path, LOAD.accounts)
    assert sorted(LOAD.expected, key=str) == sorted(expected, key=str)
    assert len(LOAD.prefixes) == LOAD.files
    assert Sums.of(expected) in LOAD.prefixes
    (probe,) = (row for row in LOAD.expected if row[0] == -1)
    assert probe[1] == LOAD.files
    seen = pipeline_rates.appends_seen([Sighting(7.5, probe[3])])
    assert seen == [Sighting(7.5, LOAD.files - 1)], "the largest amount tells the last append"


def rates(ms: float, idle_cores: float, reads: Reads) -> pipeline_rates.Outcome:
    return pipeline_rates.Outcome(
        latencies_s=[ms / 1000] * 10, cores=0.5, idle_cores=idle_cores, reads=reads
    )


def test_goals_of_rates_are_larger_if_better() -> None:
    report = pipeline_rates.build_report(
        200,
        {
            OURS: [rates(250, 0.1, Reads(total=4, torn=1))],
            STREAMING: [rates(1_000, 0.9, Reads(total=4))],
        },
    )
    at = "two hops at 200 documents/s"
    goals = {goal.name: goal for goal in report.goals}
    assert goals[f"{at}: p50 of {STREAMING} / {OURS}"].measured == pytest.approx(4)
    assert goals[f"{at}: p50 of {STREAMING} / {OURS}"].goal == pytest.approx(1 / 0.3)
    assert goals[f"{at}: p99 of {STREAMING} / {OURS}"].goal == pytest.approx(1 / 0.35)
    assert goals[f"{at}: 0.05 cores / idle CPU of {OURS}"].measured == pytest.approx(0.5)
    whole = goals[f"{at}: share of reads that are neither empty nor torn"]
    assert whole.measured == pytest.approx(0.75)
    assert not whole.holds

    idle = pipeline_rates.build_report(200, {OURS: [rates(1, 0.0, Reads(total=4))]})
    assert all(goal.holds for goal in idle.goals), "no idle CPU at all is well below the limit"
    assert len(idle.goals) == 2, "without the peer, there is nothing to compare with"


# ------------------------------------------------------------------------------------- languages


def test_work_by_hand_is_what_the_lambdas_say(tmp_path: Path) -> None:
    EVENTS.write_files(tmp_path / "files")
    no_spark: Any = None
    languages.clean_by_hand(tmp_path / "files", tmp_path / "clean", no_spark)
    cleaned: Any = languages.documents_by_hand(tmp_path / "clean")
    assert len(cleaned) == sum(row[1] for row in ROWS)
    assert {document["region"] for document in cleaned.values()} == set(REGIONS)

    languages.total_by_hand(tmp_path / "files", tmp_path / "totals", no_spark)
    totals: Any = languages.documents_by_hand(tmp_path / "totals")
    # A lambda drops events without a valid amount, but does not look at regions.
    assert cleaned.keys() < totals.keys()
    assert totals[max(totals)]["events"] >= 1
    last = {each["account"]: each["events"] for _, each in sorted(totals.items())}
    assert sum(last.values()) == len(totals)


def test_documents_that_differ_are_counted() -> None:
    one: Any = {1: {"id": 1, "region": "eu"}, 2: {"id": 2, "region": "us"}}
    other: Any = {1: {"id": 1, "region": "eu"}, 2: {"id": 2, "region": "ap"}, 3: {"id": 3}}
    assert languages.different(languages.SPARK, one, one) == 0
    assert languages.different(languages.SPARK, one, other) == 2

    def total(key: int, amount: int, events: int) -> dict[str, int]:
        return {"id": key, "account": 7, "total": amount, "events": events}

    in_order: Any = {1: total(1, 5, 1), 2: total(2, 8, 2)}
    reordered: Any = {1: total(1, 8, 2), 2: total(2, 3, 1)}
    assert languages.different(languages.SQLITE, in_order, reordered) == 0
    lost: Any = {1: total(1, 5, 1), 2: total(2, 5, 1)}
    assert languages.different(languages.SQLITE, lost, in_order) == 1


def test_goals_of_languages_are_ratios_and_wrong_documents_are_never_fast() -> None:
    per_s = Samples({OURS: [80.0, 90.0, 70.0], languages.BY_HAND: [100.0, 100.0, 100.0]})
    report = languages.build_report(
        {
            languages.SPARK: languages.Outcome(per_s=per_s, different=0),
            languages.SQLITE: languages.Outcome(per_s=per_s, different=0),
            languages.PYTHON: languages.Outcome(per_s=per_s, different=3),
        },
        cores=2,
    )
    measured = {goal.name: goal.measured for goal in report.goals}
    assert measured == {
        f"Spark SQL: documents/s of {OURS} / by hand": pytest.approx(0.8),
        f"SQLite: documents/s and core of {OURS} / by hand": pytest.approx(0.4),
        f"Python: documents/s of {OURS} / by hand": 0.0,
    }
    assert {result.name for result in report.results} >= {"Python: documents that differ"}
