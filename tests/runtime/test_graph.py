"""Stages of tasks: upstream first, circles together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.graph import TaskNode, stages


def node(name: str, reads: str, writes: str = "") -> TaskNode:
    return TaskNode(name=name, reads=frozenset(reads), writes=frozenset(writes))


def named(tasks: list[TaskNode]) -> list[tuple[str, bool]]:
    return [
        ("".join(tasks[at].name for at in stage.tasks), stage.circular) for stage in stages(tasks)
    ]


def test_a_chain_runs_from_its_source_on() -> None:
    chain = [node("v", "c"), node("c", "b", "c"), node("b", "a", "b")]
    assert named(chain) == [("b", False), ("c", False), ("v", False)]


def test_tasks_that_do_not_depend_on_each_other_wait_for_nobody() -> None:
    assert all(not stage.after for stage in stages([node("b", "a", "b"), node("c", "a", "c")]))


def test_a_derivation_that_reads_itself_is_a_circle() -> None:
    assert named([node("b", "ab", "b"), node("v", "b")]) == [("b", True), ("v", False)]


def test_a_circle_is_one_stage() -> None:
    tasks = [node("v", "c"), node("b", "ac", "b"), node("c", "b", "c"), node("d", "a", "d")]
    assert ("bc", True) in named(tasks)
    assert named(tasks).index(("bc", True)) < named(tasks).index(("v", False))


@given(
    st.lists(
        st.builds(node, st.just("x"), st.text("abcdef", max_size=3), st.text("abcdef", max_size=2)),
        max_size=8,
    )
)
def test_every_task_is_in_one_stage_after_those_that_write_what_it_reads(
    tasks: list[TaskNode],
) -> None:
    found = stages(tasks)
    assert sorted(at for stage in found for at in stage.tasks) == list(range(len(tasks)))
    stage_of = {at: number for number, stage in enumerate(found) for at in stage.tasks}
    for at, task in enumerate(tasks):
        for other, writer in enumerate(tasks):
            if not task.reads & writer.writes:
                continue
            if stage_of[other] == stage_of[at]:
                assert found[stage_of[at]].circular
            else:
                assert stage_of[other] < stage_of[at]
                assert stage_of[other] in found[stage_of[at]].after
