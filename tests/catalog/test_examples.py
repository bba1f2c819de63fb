"""The catalogs under `examples/` are right: each passes its tests, and they cannot be shaken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.catalog.build import build_catalog
from penstock.catalog.testing.memory import FrameDerivations, MemoryWorld
from penstock.catalog.testing.run import Variant, run_test, variants
from penstock.connectors.builtin import BUILTIN
from penstock.model.clock import Clock, from_rfc3339
from penstock.model.spec import Catalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"
CATALOGS = {
    str(path.parent.relative_to(EXAMPLES)): path for path in sorted(EXAMPLES.rglob("catalog.yaml"))
}
START: Clock = from_rfc3339("2026-01-31T08:00:00Z")


def checked(path: Path) -> Catalog:
    """The catalog of a file, about which `penstock check` has nothing to say."""
    result = build_catalog([path], environ=None, connectors=BUILTIN)
    assert [found.render() for found in result.diagnostics] == []
    return result.catalog


def needs_spark(path: Path) -> bool:
    return "using: { spark:" in path.read_text()


def worlds(
    catalog: Catalog, directory: Path, frames: FrameDerivations | None = None
) -> Callable[[Variant], MemoryWorld]:
    return lambda variant: MemoryWorld(
        catalog,
        directory=directory,
        start=START,
        split=variant.split,
        shards=variant.shards,
        frames=frames,
    )


def pass_and_hold(catalog: Catalog, run_in: Callable[[Variant], MemoryWorld]) -> None:
    for test in catalog.tests:
        outcome = run_test(catalog, test, run_in, shake=variants(catalog))
        assert outcome.failure is None, "\n".join(outcome.failure.lines())
        assert outcome.runs == 1 + len(variants(catalog)), f"{test.name} verifies nothing"


@pytest.mark.parametrize("name", CATALOGS)
def test_an_example_says_when_to_use_it_and_verifies_all_that_it_derives(name: str) -> None:
    path = CATALOGS[name]
    catalog = checked(path)
    comment = path.read_text().split("\n\n", 1)[0]
    assert re.match(r"# .+\.\n#\n# Use it (when|for) ", comment), "begin with what, and when"
    verified = {s.collection for t in catalog.tests for s in t.steps if s.action == "verify"}
    assert {each.name for each in catalog.derivations} <= verified


@pytest.mark.parametrize("name", [n for n, path in CATALOGS.items() if not needs_spark(path)])
def test_an_example_passes_its_tests_however_it_is_shaken(name: str, tmp_path: Path) -> None:
    catalog = checked(CATALOGS[name])
    pass_and_hold(catalog, worlds(catalog, tmp_path))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, path in CATALOGS.items() if needs_spark(path)])
def test_an_example_in_spark_sql_passes_its_tests(
    name: str, tmp_path: Path, spark: SparkSession
) -> None:
    from penstock.catalog.testing.spark_frames import FrameDerivation

    catalog = checked(CATALOGS[name])
    frames: FrameDerivations = lambda catalog, spec: FrameDerivation(catalog, spec, lambda: spark)  # noqa: E731
    pass_and_hold(catalog, worlds(catalog, tmp_path, frames))


def test_the_page_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert sorted(re.findall(r"\]\((\S+)/catalog\.yaml\)", page)) == sorted(CATALOGS)
