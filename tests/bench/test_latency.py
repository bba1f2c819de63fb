"""The latency benchmark: its schedule, sightings of appends, and a leader in another process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from subprocess import Popen

import numpy as np
import psycopg
import pytest

from penstock.consensus.open import open_consensus
from penstock.errors import Unavailable
from penstock.testing.postgres import PostgresServer
from penstock_bench import latency, leading, processes
from penstock_bench.events import (
    REGIONS,
    Appender,
    Events,
    Table,
    apply_catalog,
    catalog_text,
    settings_in,
    sqlite_endpoint,
    sqlite_table,
)
from penstock_bench.frame import OURS, Bench
from penstock_bench.latency import (
    PROBE,
    STREAMING,
    Contestant,
    Load,
    Outcome,
    Poller,
    Schedule,
    Sighting,
    latencies,
    quantile,
)

# ------------------------------------------------------------------------------------- the load


def test_appends_are_due_at_even_intervals_and_the_first_only_warm_up() -> None:
    schedule = Schedule(per_s=4, warmup_s=1, counted_s=2)
    assert schedule.appends == 1 + 4 + 8
    assert list(schedule.counted) == list(range(5, 13))
    assert [schedule.due_s(number) for number in (1, 2, 5, 12)] == [0, 0.25, 1, 2.75]


def test_each_append_has_its_events_and_one_probe_with_its_number() -> None:
    load = Load(count=12, files=3, accounts=50)
    for number in range(3):
        made = load.generate(number)
        assert len(made["account"]) == 5
        assert made["amount"][made["account"] == PROBE].tolist() == [number]
        assert load.batch(number).num_rows == load.table(number).num_rows == 5
    sequence = np.concatenate([load.generate(number)["seq"] for number in range(3)])
    assert len(set(sequence.tolist())) == len(sequence)


def test_the_oracle_matches_the_input_of_peers_and_of_penstock() -> None:
    load = Load(count=300, files=4, accounts=20)
    rows: dict[int, list[tuple[int, int, str]]] = {}
    for number in range(4):
        table = load.table(number)
        columns = [table.column(name).to_pylist() for name in ("account", "seq", "amount")]
        for account, seq, amount, region in zip(
            *columns, table.column("region").to_pylist(), strict=True
        ):
            rows.setdefault(account, []).append((seq, amount, region))
        assert load.batch(number).to_pydict()["amount"] == table.column("amount").to_pylist()
    expected = Table.of(
        [
            (
                account,
                len(some),
                sum(amount for _, amount, _ in some),
                max(amount for _, amount, _ in some),
                max(some)[2],
            )
            for account, some in rows.items()
        ]
    )
    assert expected.wrong_rows(load.oracle) == 0
    assert load.oracle.region[0] in REGIONS
    assert Events(300, 4, 20).oracle.wrong_rows(load.oracle) == 1


# ------------------------------------------------------------------------------------ sightings


@pytest.mark.parametrize(
    ("due", "seen", "expected"),
    [
        pytest.param({1: 10.0}, [(10.5, 1)], [0.5], id="alone"),
        pytest.param({1: 10.0, 2: 11.0}, [(10.5, 1), (13.0, 2)], [0.5, 2.0], id="one by one"),
        pytest.param(
            {1: 10.0, 2: 11.0, 3: 12.0}, [(13.0, 3)], [3.0, 2.0, 1.0], id="several at once"
        ),
        pytest.param(
            {2: 11.0, 3: 12.0}, [(10.5, 1), (13.0, 4), (14.0, 5)], [2.0, 1.0], id="only with later"
        ),
    ],
)
def test_an_append_is_visible_from_the_first_sighting_that_includes_it(
    due: dict[int, float], seen: list[tuple[float, int]], expected: list[float]
) -> None:
    assert latencies(due, [Sighting(*each) for each in seen]) == expected


def test_an_append_that_was_never_seen_is_an_error() -> None:
    with pytest.raises(ValueError, match="append 3 was never seen"):
        latencies({1: 0.0, 3: 0.0}, [Sighting(1.0, 2)])


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_a_value_that_occurred(q: float, expected: float) -> None:
    values = np.random.default_rng(1).permutation(np.arange(1.0, 101.0))
    assert quantile(values.tolist(), q) == expected


def test_the_report_compares_round_by_round_and_has_a_line_for_each_contestant() -> None:
    def outcome(ms: float, cpu: float) -> Outcome:
        return Outcome(latencies_s=[ms / 1000], cpu_per_s=cpu, commits_per_s=5)

    ours = [outcome(100, 0.5), outcome(1000, 1.0), outcome(100, 0.5)]
    theirs = [outcome(300, 1.0), outcome(3000, 1.0), outcome(200, 1.0)]
    found = latency.report(200, {OURS: ours, STREAMING: theirs})
    assert [goal.measured for goal in found.goals] == pytest.approx([3, 3, 2])
    assert [goal.holds for goal in found.goals] == [True, True, True]
    assert {result.name: result.value for result in found.results}[
        "200 documents/s: Penstock, p50"
    ] == pytest.approx(100)
    *_, lines = found.charts
    assert [name for name, _ in lines.series] == [OURS, STREAMING]  # type: ignore[union-attr]


def test_without_peers_there_is_nothing_to_compare_with() -> None:
    said: list[str] = []
    alone = latency.contestants(Bench(say=said.append))
    assert [each.name for each in alone] == [OURS]
    assert len(said) == 1
    only = {OURS: [Outcome(latencies_s=[0.1], cpu_per_s=1, commits_per_s=5)]}
    assert latency.report(200, only).goals == ()


# ------------------------------------------------------------------------------------ processes

SMALL = Schedule(per_s=5, warmup_s=1, counted_s=2)


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.create_database()


async def test_a_leader_in_another_process_is_measured(url: str) -> None:
    load = Load(9 * SMALL.appends, SMALL.appends)
    (ours,) = latency.contestants(Bench())
    outcome = await latency.measure(ours, load, SMALL, url)
    assert len(outcome.latencies_s) == 10
    assert min(outcome.latencies_s) > 0
    assert outcome.cpu_per_s > 0


async def test_waiting_ends_when_the_contestant_ends(url: str) -> None:
    (ours,) = latency.contestants(Bench())
    ending = Contestant(
        name="short",
        command=lambda *_: ["sh", "-c", "echo gone >&2; exit 3"],
        appending=ours.appending,
    )
    load = Load(SMALL.appends, SMALL.appends)
    with pytest.raises(Unavailable, match="exit code 3") as raised:
        await latency.measure(ending, load, SMALL, url)
    assert (raised.value.where, raised.value.why) == ("short", "gone\n")


async def test_the_poller_reports_sightings_and_ends(url: str) -> None:
    async with Poller.polling(url) as poller:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE accounts (account BIGINT PRIMARY KEY, largest BIGINT)")
            connection.execute("INSERT INTO accounts VALUES (-1, 0), (7, 99)")
            await _eventually(lambda: bool(poller.seen))
            connection.execute("UPDATE accounts SET largest = 5 WHERE account = -1")
            await _eventually(lambda: len(poller.seen) == 2)
    assert [sighting.number for sighting in poller.seen] == [0, 5]
    assert poller.seen[0].moment < poller.seen[1].moment


@contextlib.asynccontextmanager
async def _deployed(data: Path) -> AsyncIterator[Appender]:
    """A deployment whose table is in a file beside it."""
    catalog = data / "catalog.yaml"
    catalog.write_text(catalog_text(sqlite_endpoint(data / "accounts.db")))
    settings = settings_in(data)
    store = await open_consensus(settings.consensus)
    try:
        yield Appender(store, settings, await apply_catalog(store, catalog))
    finally:
        await store.close()


async def test_a_leader_follows_appends_until_its_input_is_closed(tmp_path: Path) -> None:
    events, command = Events(count=40, files=2, accounts=10), leading.command(tmp_path, report=True)
    async with _deployed(tmp_path) as appender:
        with processes.running_process(command, log=tmp_path / "log") as leader:
            for file in range(events.files):
                await appender.append(events.batch(file))
                said = json.loads(await _line(leader))
                assert (said["documents"], said["jobs"]) == (20, 0)
            assert leader.stdin is not None
            leader.stdin.close()
            assert await asyncio.to_thread(leader.wait, 60) == 0
    assert sqlite_table(tmp_path / "accounts.db").wrong_rows(events.oracle) == 0


async def test_an_idle_leader_stops_on_a_signal(tmp_path: Path) -> None:
    async with _deployed(tmp_path):
        with processes.running_process(leading.command(tmp_path), log=tmp_path / "log") as leader:
            await _eventually((tmp_path / "accounts.db").exists)
            leader.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(leader.wait, 60) == 0


async def _line(process: Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return await asyncio.to_thread(process.stdout.readline)


async def _eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)
