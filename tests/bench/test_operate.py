"""The operate benchmark: its deployments, its arithmetic, and a real `penstock up`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.catalog.build import load_catalog
from penstock.errors import Bug, Unavailable
from penstock.runtime.kinds import kind_of, runnable_tasks, shards_of
from penstock_bench import operate, processes, running_up
from penstock_bench.frame import Report, Samples
from penstock_bench.operate import COLD, WARM, Applied, Beside, IdleUsage, MixedTasks, Restart
from penstock_bench.running_up import Up
from penstock_bench.scale_tasks import TaskDeployment


def values(report: Report) -> dict[str, float]:
    return {result.name: result.value for result in report.results}


def goals(report: Report) -> dict[str, tuple[float, bool]]:
    return {goal.name: (goal.measured, goal.holds) for goal in report.goals}


# ------------------------------------------------------------------------------------ deployments


@pytest.mark.parametrize(
    ("count", "kinds"),
    [
        pytest.param(1, {"materialization": 1}, id="one"),
        pytest.param(2, {"materialization": 1, "derivation": 1}, id="both domains"),
        pytest.param(20, {"materialization": 7, "derivation": 7, "capture": 6}, id="twenty"),
    ],
)
def test_tasks_are_of_all_kinds_and_each_has_events_to_read(
    tmp_path: Path, count: int, kinds: dict[str, int]
) -> None:
    tasks = MixedTasks(tmp_path, count)
    (tmp_path / "catalog.yaml").write_text(tasks.catalog())
    specs = runnable_tasks(load_catalog([tmp_path / "catalog.yaml"], environ={}))
    found = [kind_of(spec) for spec in specs]
    assert {kind: found.count(kind) for kind in found} == kinds
    assert tasks.documents == {spec.name: operate.IDLE_EVENTS for spec in specs}


def test_tasks_for_penstock_run_are_not_those_of_up(tmp_path: Path) -> None:
    beside = Beside(tmp_path / "data", 2, restarts=1, runs=3)
    beside.apply()
    catalog = load_catalog([tmp_path / "data" / "catalog.yaml"], environ={})
    enabled = {spec.name: not shards_of(spec).disable for spec in runnable_tasks(catalog)}
    assert enabled == {
        **dict.fromkeys(("bench/accounts-0-0", "bench/accounts-0-1"), True),
        **dict.fromkeys(("bench/run-0", "bench/run-1", "bench/run-2"), False),
    }


# ---------------------------------------------------------------------------------------- reports

IDLE = IdleUsage(tasks=200, start_s=20, for_s=60, cores=0.02, jobs=0, memory_bytes=800_000_000)


@pytest.mark.parametrize(
    ("cores", "jobs", "cpu_goal", "jobs_goal"),
    [
        pytest.param(0.02, 0, (1.5, True), (1.0, True), id="well below"),
        pytest.param(0.03, 0, (1.0, True), (1.0, True), id="just"),
        pytest.param(0.06, 1, (0.5, False), (0.5, False), id="too much"),
    ],
)
def test_goals_are_for_the_most_idle_tasks(
    cores: float, jobs: int, cpu_goal: tuple[float, bool], jobs_goal: tuple[float, bool]
) -> None:
    few = replace(IDLE, tasks=1, cores=0.9, jobs=7)
    report = operate.idle_report([few, replace(IDLE, cores=cores, jobs=jobs)])
    assert goals(report) == {
        "200 idle tasks: 3% of a core / used": (pytest.approx(cpu_goal[0]), cpu_goal[1]),
        "200 idle tasks: 1 / (1 + Spark jobs)": jobs_goal,
    }
    assert values(report)["idle: 1 task, CPU"] == pytest.approx(90)
    assert values(report)["idle: 200 tasks, memory"] == 800
    assert {chart.name for chart in report.charts} == {"idle-cpu", "idle-memory"}


def test_no_cpu_at_all_is_well_below_the_limit() -> None:
    assert all(goal.holds for goal in operate.idle_report([replace(IDLE, cores=0.0)]).goals)


def test_busy_tasks_are_compared_round_by_round() -> None:
    report = operate.busy_report(1_000, Samples({"1": [1.0, 10.0, 1.0], "20": [2.0, 12.5, 1.25]}))
    assert goals(report) == {"busy: throughput of 20 tasks / one": (pytest.approx(0.8), True)}
    assert values(report) == {
        "busy: 1,000 events, 1 task": 1_000,
        "busy: 1,000 events, 20 tasks": 500,
    }


def test_forms_are_compared_by_their_memory() -> None:
    report = operate.forms_report({operate.UNIFIED: 500_000_000, operate.SPLIT: 800_000_000})
    name = "cluster with 20 tasks: memory, a process for each domain / one process"
    assert goals(report) == {name: (pytest.approx(1.6), True)}


def test_a_new_task_counts_from_the_start_of_the_command() -> None:
    applied = [Applied(command_s=0.5, first_s=seconds) for seconds in (0.75, 1.25, 2.0)]
    ran = Samples({COLD: [6.0, 5.0, 7.0], WARM: [0.25, 0.2, 0.4]})
    report = operate.changes_report(applied, ran, [Restart(first_s=4, all_s=6)])
    assert goals(report) == {
        "apply: 1 s / from its start to the first commit": (pytest.approx(0.8), False),
        "run: 0.5 s / 1,000 documents, warm": (pytest.approx(2), True),
    }
    assert values(report) == {
        "apply: from its start to the first commit of a new task": 1.25,
        "apply: from its end to the first commit of a new task": 0.75,
        "run: 1,000 documents, cold": 6,
        "run: 1,000 documents, warm": 0.25,
        "restart: after kill -9, to the first commit": 4,
        "restart: after kill -9, until 20 tasks have caught up": 6,
    }


# ---------------------------------------------------------------------------------- what Spark ran


def test_jobs_are_counted_in_whole_lines_of_the_event_log(tmp_path: Path) -> None:
    def line(name: str) -> str:
        return json.dumps({"Event": name}) + "\n"

    log = tmp_path / "local-1.inprogress"
    log.write_text(line("SparkListenerApplicationStart"))
    assert operate.count_jobs(tmp_path) == 0
    log.write_text(log.read_text() + 2 * line("SparkListenerJobStart") + line("Other") + '{"Eve')
    assert operate.count_jobs(tmp_path) == 2


def test_no_event_log_is_not_no_jobs(tmp_path: Path) -> None:
    with pytest.raises(Bug, match="no event log"):
        operate.count_jobs(tmp_path)


# ------------------------------------------------------------------------------ a process that runs


def test_the_admin_address_is_in_the_log() -> None:
    said = "applied\nstate of tasks: http://127.0.0.1:4711/introspection/v1\nmore\n"
    assert running_up.find_address(said) == ("127.0.0.1", 4711)
    assert running_up.find_address("applied\n") is None


def test_waiting_ends_when_the_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such catalog')"]
    with processes.running_process(command, log=tmp_path / "log") as process:
        up = Up(process, 0.0, tmp_path / "log")
        with pytest.raises(Unavailable, match="has ended with 1") as raised:
            up.wait(lambda: False, "nothing happened")
    assert raised.value.why is not None
    assert "no such catalog" in raised.value.why


@pytest.mark.timeout(120)
def test_a_process_is_asked_what_its_tasks_have_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Java, captures run all the same, and other tasks wait for Spark."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    tasks = MixedTasks(tmp_path / "data", 3)
    tasks.fill()
    with Up.running(tasks.data) as up:
        up.wait_until_read({"bench/files-0": operate.IDLE_EVENTS})
        assert up.documents["bench/table-0"] == 0
        assert all(committed > up.began for committed in up.commits())
        assert len(up.commits("bench/files-0")) == len(up.commits()) > 0
        with pytest.raises(Bug, match="more documents than there are"):
            up.wait_until_read({"bench/files-0": operate.IDLE_EVENTS - 1})
    with pytest.raises(Unavailable, match="does not answer"):
        _ = up.documents


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_idle_tasks_are_measured_when_they_have_caught_up(tmp_path: Path) -> None:
    usage = operate.watch_idle(MixedTasks(tmp_path / "data", 3), 0.5, settle_s=0.1)
    assert usage.jobs == 0
    assert usage.start_s > 0
    assert usage.memory_bytes > 100_000_000


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_cluster_of_two_processes_is_measured_as_a_whole(tmp_path: Path) -> None:
    used = operate.watch_form(operate.SPLIT, MixedTasks(tmp_path / "data", 2), 0.1)
    assert used > 300_000_000


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_tasks_come_and_go_beside_others(tmp_path: Path) -> None:
    """One process: a new task by apply, runs with its Spark and with another, and a restart."""
    beside = Beside(tmp_path / "data", 2, restarts=1, runs=2)
    beside.apply()
    with beside.started() as up:
        applied = beside.apply_task(up)
        assert applied.command_s > 0
        assert applied.first_s > 0
        assert beside.run_task(COLD) > 0
        assert beside.run_task(WARM) > 0
    restarted = beside.restart()
    assert 0 < restarted.first_s <= restarted.all_s
    beside.check()


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_busy_tasks_are_new_tasks_of_a_process_that_runs(tmp_path: Path) -> None:
    deployment = TaskDeployment(tmp_path / "data", 2, 400)
    deployment.fill(rounds=0)
    with Up.running(deployment.data) as up:
        once = operate.busy_round(deployment, up)
        assert once() > 0
        assert once() > 0
    assert deployment.rounds == 2
    deployment.check()
