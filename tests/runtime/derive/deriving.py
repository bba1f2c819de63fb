"""Row engines for tests, and derivations that run in this process with the tests' Spark."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.batch import TaskRun, run_graph, tasks_to_run
from penstock.catalog import desired
from penstock.model.json_order import Json
from penstock.runtime.derive.engine import (
    Document,
    Finished,
    LambdaFailed,
    ShardContext,
    SourceRead,
)
from penstock.runtime.ops import STATS
from penstock.runtime.session import World
from runtime.sessions import Place


@dataclass(frozen=True)
class RunningSums:
    """Publishes each number with the sum of all before it, by key; fails at a number."""

    stateful: bool = True
    fails_at: int | None = None

    def open(self, context: ShardContext) -> SumsAtWork:
        name = _names(context.state).get(str(context.shard))
        known = {} if name is None else json.loads(context.files.read(name))
        return SumsAtWork(self, context, dict(known))


def _names(state: Json) -> dict[str, str]:
    assert isinstance(state, dict)
    names = state.get("sums", {})
    assert isinstance(names, dict)
    return {shard: str(name) for shard, name in names.items()}


@dataclass
class SumsAtWork:
    engine: RunningSums
    context: ShardContext
    sums: dict[str, int] = field(default_factory=dict)

    def process(self, reads: Iterable[SourceRead]) -> Iterator[tuple[int, Document]]:
        for at, read in enumerate(reads):
            number = read.document["n"]
            assert isinstance(number, int)
            if number == self.engine.fails_at:
                error = LambdaFailed(f"{number} is too much", where="line 3 of the lambda")
                error.read = at
                raise error
            key = str(read.document["key"])
            self.sums[key] = self.sums.get(key, 0) + number
            yield at, {"key": read.document["key"], "n": number, "sum": self.sums[key]}

    def finish(self) -> Finished:
        name = self.context.files.write(json.dumps(self.sums).encode())
        return Finished(patches=({"sums": {str(self.context.shard): name}},))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Splitting:
    """Publishes a document for each letter of a text; keeps no state."""

    stateful: bool = False

    def open(self, context: ShardContext) -> SplittingAtWork:
        return SplittingAtWork()


class SplittingAtWork:
    def process(self, reads: Iterable[SourceRead]) -> Iterator[tuple[int, Document]]:
        for at, read in enumerate(reads):
            text = read.document["text"]
            assert isinstance(text, str)
            for letter in text:
                yield at, {"letter": letter, "count": 1, "last": read.document["id"], "all": [text]}

    def finish(self) -> Finished:
        return Finished()

    def close(self) -> None:
        pass


def caught_up(
    place: Place, *, world: Callable[[World], World] = lambda world: world
) -> dict[str, TaskRun]:
    """Run the whole graph of a place's catalog, as `penstock run` does."""

    async def run() -> list[TaskRun]:
        async with place.store() as store:
            catalog = await desired.load(store)
            return await run_graph(catalog, tasks_to_run(catalog), world(place.world(store)))

    runs = {run.task: run for run in asyncio.run(run())}
    assert [run.error for run in runs.values() if run.error is not None] == []
    return runs


def derived_inputs(place: Place, task: str) -> int:
    """Documents that committed transactions of a derivation have read, by their statistics."""
    return sum(
        transform["input"]["docsTotal"]
        for stats in place.read(STATS.name)
        if stats["shard"]["name"] == task
        for transform in stats["derive"]["transforms"].values()
    )
