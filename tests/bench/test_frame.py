"""What benchmarks share: fair turns, honest figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.errors import UsageError
from penstock_bench import frame
from penstock_bench.frame import Bench, Goal, Samples, seconds_of


def test_peers_take_turns_and_warm_ups_do_not_count() -> None:
    turns: list[str] = []

    def peer(name: str, figures: list[float]) -> Callable[[], float]:
        def run() -> float:
            turns.append(name)
            return figures.pop(0)

        return run

    said: list[str] = []
    samples = Bench(quick=True, say=said.append).interleave(
        "race", {"a": peer("a", [99, 1, 2, 3, 4, 5]), "b": peer("b", [99, 6, 7, 8, 9, 10])}
    )
    assert samples.by_peer == {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8, 9, 10]}
    assert turns == list("ba" + "ab" + "ba" + "ab" + "ba" + "ab")
    assert said == ["race: warm-up", *(f"race: round {n} of 5" for n in range(1, 6))]


def test_a_full_run_has_more_rounds_and_larger_sizes() -> None:
    full, quick = Bench(), Bench(quick=True)
    peers = {"only": lambda: 1.0}
    rounds = [len(run.interleave("x", peers).by_peer["only"]) for run in (full, quick)]
    assert rounds == [7, 5]
    assert len(full.interleave("x", peers, rounds=3).by_peer["only"]) == 3
    assert (full.size(full=10, quick=1), quick.size(full=10, quick=1)) == (10, 1)


def test_ratios_are_taken_round_by_round() -> None:
    # The second round was ten times slower for both; the ratio of the medians would be 3.
    samples = Samples({"a": [2.0, 20.0, 6.0], "b": [1.0, 10.0, 2.0]})
    assert samples.median("a") == 6
    assert samples.ratio("a", "b") == 2


def test_only_the_work_itself_is_timed() -> None:
    times = iter([10.0, 12.5])
    done: list[str] = []
    timed = seconds_of(lambda: done.append("work"), clock=lambda: next(times))
    assert timed() == 2.5
    assert done == ["work"]


@pytest.mark.parametrize(
    ("measured", "holds"), [(0.9, True), (1.1, True), (0.8999, False), (float("nan"), False)]
)
def test_a_goal_holds_from_its_ratio_upwards(measured: float, holds: bool) -> None:
    assert Goal(name="g", measured=measured, goal=0.9).holds is holds


@pytest.mark.parametrize("name", frame.WORKLOADS)
def test_every_listed_workload_can_be_imported(name: str) -> None:
    assert callable(frame.load(name))


@pytest.mark.parametrize("about", [listed.about for listed in frame.WORKLOADS.values()])
def test_every_workload_has_a_one_line_description(about: str) -> None:
    assert about.strip()
    assert len(about) < 80


@pytest.mark.parametrize(
    ("names", "chosen"),
    [((), list(frame.WORKLOADS)), (("shuffle", "model", "shuffle"), ["shuffle", "model"])],
)
def test_workloads_are_chosen_by_name(names: tuple[str, ...], chosen: list[str]) -> None:
    assert frame.choose(names) == chosen


@pytest.mark.parametrize(
    ("name", "fix"),
    [("modl", 'did you mean "model"?'), ("xyz", "known: model")],
)
def test_an_unknown_workload_is_a_usage_error(name: str, fix: str) -> None:
    with pytest.raises(UsageError, match=f'no benchmark is called "{name}"') as refused:
        frame.choose([name])
    assert refused.value.fix is not None
    assert refused.value.fix.startswith(fix)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0123449, "0.01234"),
        (999.95, "1000"),
        (1_234_567.8, "1,234,568"),
        (-2e3, "-2,000"),
    ],
)
def test_figures_have_four_significant_digits(value: float, shown: str) -> None:
    assert frame.format_figure(value) == shown
