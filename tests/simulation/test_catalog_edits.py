"""A catalog that is edited between a crash and the next life of the task, at every crash point.

Bindings are disabled and enabled, removed and added again, moved, renamed and backfilled, and the
number of shards changes. Every table must hold what was read for it, all the time, and all there is
in the end. A failure names its seed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import pytest

from penstock.runtime.connector.materialize import Pattern
from simulation.leaders import BOTH, Bound, Catalog, Process, World, check_end, check_history
from simulation.test_two_leaders import DELICATE, a_world, go_on, run_to_the_end

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))
SEEDS = 150

Edit = Callable[[Random, World], Catalog]


def one(rng: Random, catalog: Catalog, change: Callable[[Bound], Bound]) -> Catalog:
    at = rng.randrange(len(catalog))
    return tuple(change(each) if n == at else each for n, each in enumerate(catalog))


def disable(rng: Random, world: World) -> Catalog:
    return one(rng, world.catalog, lambda bound: replace(bound, disabled=not bound.disabled))


def backfill(rng: Random, world: World) -> Catalog:
    return one(rng, world.catalog, lambda bound: replace(bound, backfill=bound.backfill + 1))


def rename(rng: Random, world: World) -> Catalog:
    """To a table that there was not, or one that it had before; under the counter it had then."""
    free = {"orders", "totals", "third"} - {bound.table for bound in world.catalog}
    if not free:
        return world.catalog
    table = rng.choice(sorted(free))
    there = world.endpoint.tables.get(table)
    counter = 0 if there is None else int(there.state_key.rpartition(".v")[2])
    return one(rng, world.catalog, lambda _: Bound(table, counter))


def remove(rng: Random, world: World) -> Catalog:
    if len(world.catalog) == 1:
        return world.catalog
    gone = rng.randrange(len(world.catalog))
    return tuple(each for n, each in enumerate(world.catalog) if n != gone)


def add(rng: Random, world: World) -> Catalog:
    free = sorted({"orders", "totals", "third"} - {bound.table for bound in world.catalog})
    if not free:
        return world.catalog
    at = rng.randrange(len(world.catalog) + 1)
    table = rng.choice(free)
    there = world.endpoint.tables.get(table)
    counter = 0 if there is None else int(there.state_key.rpartition(".v")[2])
    return (*world.catalog[:at], Bound(table, counter), *world.catalog[at:])


def reorder(rng: Random, world: World) -> Catalog:
    return tuple(rng.sample(world.catalog, len(world.catalog)))


def reshard(rng: Random, world: World) -> Catalog:
    world.shards = rng.randint(1, 3)
    return world.catalog


EDITS: Mapping[str, Edit] = {
    edit.__name__: edit for edit in (disable, backfill, rename, remove, add, reorder, reshard)
}


def edited(rng: Random, world: World) -> None:
    for name in rng.choices(tuple(EDITS), k=rng.choice((1, 1, 2, 3))):
        world.catalog = EDITS[name](rng, world)


def settled(world: World) -> None:
    """With every binding enabled that there is, and both that there were first."""
    known = {bound.table for bound in world.catalog}
    for bound in BOTH:
        if bound.table not in known:
            there = world.endpoint.tables.get(bound.table)
            counter = 0 if there is None else int(there.state_key.rpartition(".v")[2])
            world.catalog = (*world.catalog, Bound(bound.table, counter))
    world.catalog = tuple(replace(bound, disabled=False) for bound in world.catalog)
    run_to_the_end(world)
    check_end(world)


def has_any(world: World) -> bool:
    return any(not bound.disabled for bound in world.catalog)


def judged(seed: int, pattern: Pattern, run: Callable[[World], None]) -> None:
    world = a_world(seed, pattern)
    try:
        run(world)
        settled(world)
    except BaseException as error:
        error.add_note(f"seed {seed}, {pattern.name}: {world.catalog}")
        raise


def live_through_edits(world: World) -> None:
    """Leaders die one after the other, some only sleep, and each finds another catalog."""
    rng = world.rng
    sleeping: list[Process] = []
    for _ in range(rng.randint(2, 7)):
        if has_any(world):
            process = Process(world)
            lives = go_on(process, rng.choice(DELICATE), rng.randint(0, 3))
            if lives and rng.random() < 0.25:
                sleeping.append(process)
            if rng.random() < 0.2:
                run_to_the_end(world)
        if sleeping and rng.random() < 0.3:
            go_on(sleeping.pop(rng.randrange(len(sleeping))), "persist", 1)
        edited(rng, world)
    check_history(world)
    settled(world)
    for zombie in sleeping:
        go_on(zombie, "nothing in particular", 0)


@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("part", range(2))
def test_whatever_becomes_of_the_catalog_every_table_holds_what_was_read_for_it(
    pattern: Pattern, part: int
) -> None:
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        judged(seed, pattern, live_through_edits)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("pattern", Pattern)
def test_a_catalog_may_be_edited_after_a_crash_before_any_effect(
    pattern: Pattern, edit: str
) -> None:
    """And be edited back, or elsewhere, after the life that had it; which may crash, too."""
    for seed in range(2):
        effects = run_to_the_end(a_world(seed, pattern))
        for dies_at in range(effects):

            def one_dies(world: World, dies_at: int = dies_at) -> None:
                before, shards = world.catalog, world.shards
                first = Process(world)
                for _ in range(dies_at + 1):
                    if not first.advance():
                        first = Process(world)
                world.catalog = EDITS[edit](world.rng, world)
                if world.rng.random() < 0.5:
                    run_to_the_end(world)
                else:
                    go_on(Process(world), world.rng.choice(DELICATE), world.rng.randint(0, 3))
                if edit in ("disable", "remove", "reorder", "reshard"):
                    world.catalog, world.shards = before, shards

            judged(seed, pattern, one_dies)


@pytest.mark.chaos
@pytest.mark.skipif(not SECONDS, reason="a long run: make chaos")
@pytest.mark.parametrize("pattern", Pattern)
def test_catalogs_are_edited_for_a_long_time(pattern: Pattern) -> None:
    seed, until = time.time_ns(), time.monotonic() + SECONDS
    while time.monotonic() < until:
        judged(seed, pattern, live_through_edits)
        seed += 1
