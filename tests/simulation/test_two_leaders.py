"""Thousands of lives of competing leaders, from seeds. A failure names its seed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random

import pytest

from penstock.runtime.connector.materialize import Pattern
from simulation.leaders import Process, Source, World, check_end, check_history

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))
SEEDS = 200
DELICATE = ("persist", "load", "publish stats", "publish stats", "write intents", "persist")
"""Effects that are had in every transaction; those between them are had a little later."""
EFFECTS_MAX = 3_000
"""Far more than any life needs: past it, a leader turns in circles."""


def a_world(seed: int, pattern: Pattern) -> World:
    rng = Random(f"{seed}/{pattern.name}")
    return World(
        rng=rng,
        pattern=pattern,
        shards=rng.choice((1, 1, 1, 2, 3)),
        elide_hints=rng.random() < 0.5,
        flush_barrier=rng.random() < 0.3,
        source=Source.random(rng),
    )


def run_to_the_end(world: World, process: Process | None = None) -> int:
    """Let one leader after the other finish its work, until none is left; counts the effects."""
    effects = 0
    process = process or Process(world)
    while not process.is_idle:
        effects += 1
        assert effects < EFFECTS_MAX, "a leader turns in circles"
        if not process.advance():
            process = Process(world)
    return effects


def judged(seed: int, pattern: Pattern, run: Callable[[World], None]) -> None:
    """Run a world, and judge it; whatever fails, fails with its seed."""
    world = a_world(seed, pattern)
    try:
        run(world)
        run_to_the_end(world)
        check_end(world)
    except BaseException as error:
        error.add_note(f"seed {seed}, {pattern.name}")
        raise


def compete(world: World) -> None:
    """Up to three leaders at once: each goes on for a while, and is paused, resumed or killed."""
    rng = world.rng
    living: list[Process] = []
    for _ in range(rng.randint(4, 16)):
        if not living or (len(living) < 3 and rng.random() < 0.3):
            living.append(Process(world))
        process = living[-1] if rng.random() < 0.7 else rng.choice(living)
        if not go_on(process, rng.choice(DELICATE), rng.randint(0, 2)) or rng.random() < 0.15:
            living.remove(process)
    check_history(world)
    run_to_the_end(world)
    for zombie in living:  # each wakes up at last, when all is done
        go_on(zombie, "nothing in particular", 0)


def go_on(process: Process, effect: str, beyond: int) -> bool:
    """Let it live until it is about to have this effect, and a little longer; whether it does."""
    for _ in range(EFFECTS_MAX):
        if process.is_idle:
            return True
        if not process.advance():
            return False
        if process.about_to == effect:
            return all(process.advance() for _ in range(beyond))
    raise AssertionError("a leader turns in circles")


@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("part", range(4))
def test_whatever_leaders_do_to_each_other_everything_happens_once(
    pattern: Pattern, part: int
) -> None:
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        judged(seed, pattern, compete)


@pytest.mark.parametrize("wakes", [False, True], ids=["dies", "wakes up later"])
@pytest.mark.parametrize("pattern", Pattern)
def test_a_leader_may_stop_before_any_effect(pattern: Pattern, *, wakes: bool) -> None:
    for seed in range(4):
        effects = run_to_the_end(a_world(seed, pattern))
        for stops_at in range(effects):

            def one_stops(world: World, stops_at: int = stops_at) -> None:
                first = Process(world)
                lives = all(first.advance() for _ in range(stops_at + 1))
                run_to_the_end(world)
                while wakes and lives and not first.is_idle:
                    lives = first.advance()

            judged(seed, pattern, one_stops)


@pytest.mark.chaos
@pytest.mark.skipif(not SECONDS, reason="a long run: make chaos")
@pytest.mark.parametrize("pattern", Pattern)
def test_leaders_compete_for_a_long_time(pattern: Pattern) -> None:
    seed, until = time.time_ns(), time.monotonic() + SECONDS
    while time.monotonic() < until:
        judged(seed, pattern, compete)
        seed += 1
