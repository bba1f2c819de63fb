"""Runs catalog tests: each in a world of its own, step by step, up to the first that fails.

A test is *shaken* by running it again under other splits of the same documents into transactions,
and with other numbers of shards. What its steps verify must be the same each time: where documents
are split is an accident of time, and nobody may be able to see it. A step that ingests stays one
transaction, because the test says so; what is split is how derivations read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.catalog.testing.contents import reduced
from penstock.catalog.testing.match import Comparison, compare, without_uuid
from penstock.catalog.testing.memory import ALL_AT_ONCE, Split
from penstock.catalog.testing.world import TestWorld
from penstock.errors import Bug, PenstockError
from penstock.model.json_order import Json
from penstock.model.spec import Catalog, CatalogTest, CollectionSpec, Step

SHARDS: Final = (1, 2, 3)
SPLITS: Final = (
    ALL_AT_ONCE,
    Split(name="one by one", largest=1),
    Split(name="in pairs", largest=2),
    *(Split(name=f"at random, seed {seed}", largest=5, seed=seed) for seed in (1, 2, 3)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a test."""

    split: Split = ALL_AT_ONCE
    shards: int = 1

    def __str__(self) -> str:
        return f"documents {self.split.name}, {self.shards} shard{'s' if self.shards > 1 else ''}"


PLAIN: Final = Variant()

Worlds: TypeAlias = Callable[[Variant], TestWorld]
"""Makes a new, empty world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The step that failed: its result differs, or it could not be done at all."""

    number: int
    """Of the step in its test; the first is 0."""
    step: Step
    comparison: Comparison | None = None
    error: PenstockError | None = None
    variant: Variant = PLAIN

    @property
    def what(self) -> str:
        """The failure, in one line."""
        if self.error is not None:
            return self.error.what
        where = self.step.collection
        if self.variant != PLAIN:
            return f"the documents of {where} depend on transactions: {self.variant}"
        return f"the documents of {where} are not as expected"

    def lines(self) -> list[str]:
        """The failure for people: where, what, and a diff."""
        said = f": {self.step.description}" if self.step.description else ""
        lines = [f"{self.step.origin}: {self.step.action} {self.step.collection}{said}"]
        if self.variant != PLAIN:
            lines.append(f"differs with {self.variant}, from {PLAIN}")
        if self.error is not None:
            lines += str(self.error).splitlines()
        if self.comparison is not None:
            shaken = self.variant != PLAIN
            names = (str(PLAIN), str(self.variant)) if shaken else ("expected", "actual")
            lines += self.comparison.render(names)
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one test."""

    test: CatalogTest
    seconds: float
    runs: int
    """Worlds that it was run in."""
    failure: Failure | None = None


def variants(catalog: Catalog, *, splits: bool = True) -> list[Variant]:
    """The ways to shake a test, other than the plain one; without `splits`, by shards alone.

    The number of shards matters to code that works on documents, which may keep state.
    """
    used = {spec.derivation.using for spec in catalog.collections if spec.derivation is not None}
    shards = SHARDS if used & {"sqlite", "python"} else SHARDS[:1]
    every = [
        Variant(split=split, shards=count)
        for split in (SPLITS if splits else SPLITS[:1])
        for count in shards
    ]
    return [variant for variant in every if variant != PLAIN]


def run_test(
    catalog: Catalog,
    test: CatalogTest,
    worlds: Worlds,
    *,
    shake: Sequence[Variant] = (),
    on_run: Callable[[Variant], None] = lambda _: None,
) -> Outcome:
    """Run a test, and if it passes, shake it. The first failure counts."""
    began = time.monotonic()
    on_run(PLAIN)
    verified, failure = _plain(catalog, test, worlds(PLAIN))
    runs = 1
    for variant in shake:
        if failure is not None or not verified:
            break
        on_run(variant)
        failure = _shaken(catalog, test, worlds(variant), variant, verified)
        runs += 1
    return Outcome(test=test, seconds=time.monotonic() - began, runs=runs, failure=failure)


Verified: TypeAlias = list[Json]
"""The content of a collection at a step: its documents, reduced and in the order of keys."""


class _StepFailed(Exception):
    """A step that could not be done."""

    def __init__(self, number: int, step: Step, error: PenstockError) -> None:
        super().__init__(number, step, error)
        self.number = number
        self.step = step
        self.error = error


def _plain(
    catalog: Catalog, test: CatalogTest, world: TestWorld
) -> tuple[list[Verified], Failure | None]:
    verified: list[Verified] = []
    try:
        for number, step, actual in _verified(catalog, test, world):
            expected = [without_uuid(document) for document in step.documents.value]
            comparison = compare(expected, actual, _spec(catalog, step).key)
            if not comparison.matches:
                return verified, Failure(number=number, step=step, comparison=comparison)
            verified.append(actual)
    except _StepFailed as failed:
        return verified, Failure(number=failed.number, step=failed.step, error=failed.error)
    finally:
        world.close()
    return verified, None


def _shaken(
    catalog: Catalog,
    test: CatalogTest,
    world: TestWorld,
    variant: Variant,
    plain: Sequence[Verified],
) -> Failure | None:
    """Compare what steps verify with a plain run, which has passed."""
    try:
        found = _verified(catalog, test, world)
        for before, (number, step, actual) in zip(plain, found, strict=True):
            comparison = compare(before, actual, _spec(catalog, step).key, whole=True)
            if not comparison.matches:
                return Failure(number=number, step=step, comparison=comparison, variant=variant)
    except _StepFailed as failed:
        return Failure(number=failed.number, step=failed.step, error=failed.error, variant=variant)
    finally:
        world.close()
    return None


def _verified(
    catalog: Catalog, test: CatalogTest, world: TestWorld
) -> Iterator[tuple[int, Step, Verified]]:
    """Do the steps of a test, and yield what the collections of its verify steps hold."""
    for number, step in enumerate(test.steps):
        try:
            if step.action == "ingest":
                world.ingest(step.collection, step.documents.value)
                world.settle()
                continue
            while world.advance_to_next_due(step.collection):
                world.settle()
            documents = world.read(step.collection, step.selector)
            actual = reduced(_spec(catalog, step), documents)
        except PenstockError as error:
            if isinstance(error, Bug):
                raise
            raise _StepFailed(number, step, error) from error
        yield number, step, actual


def _spec(catalog: Catalog, step: Step) -> CollectionSpec:
    spec = catalog.collection(step.collection)
    if spec is None:
        raise Bug(f"a test names {step.collection}, which a checked catalog has")
    return spec
