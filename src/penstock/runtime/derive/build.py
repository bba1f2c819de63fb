"""A derivation, from what a catalog says of it to what its leader runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.errors import Bug, UserError
from penstock.journal.schemas import layout
from penstock.model import spec as specs
from penstock.model.clock import duration
from penstock.model.columns import Column
from penstock.model.spec import Catalog, CollectionSpec
from penstock.runtime.close_policy import Band, ClosePolicy
from penstock.runtime.control import Control
from penstock.runtime.derive.engine import RowEngine
from penstock.runtime.derive.languages import row_engine, spark_lambdas
from penstock.runtime.derive.leader import run_session
from penstock.runtime.derive.target import DerivedTarget
from penstock.runtime.derive.task import KIND, DeriveLeaderTask, LeaderTransform
from penstock.runtime.ops import TaskKindName
from penstock.runtime.session import Ended, World
from penstock.runtime.task_log import LEVELS
from penstock.shuffle.binding import Binding, columns_of, derivation_bindings

if TYPE_CHECKING:
    from penstock.runtime.derive.spark_sql import SparkLambda

COMBINER_BYTES_MAX: Final = 8 << 30
"""Stored bytes that a shard may read before a transaction closes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivationTask:
    """A derivation that can be run (`session.RunnableTask`)."""

    leader_task: DeriveLeaderTask
    """As its leader's machine sees it."""
    bindings: tuple[Binding, ...]
    target: DerivedTarget
    engine: RowEngine | None = field(repr=False)
    """The code that runs on documents one by one; None if `lambdas` are run by Spark."""
    lambdas: Mapping[int, SparkLambda] = field(repr=False)
    """By transform."""
    explicit_nulls: bool
    """A NULL that a lambda returns is null, rather than nothing."""
    ordered: bool
    """The outcome depends on the order of documents."""
    columns: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Top-level columns that a transform looks at; all if it is absent here."""
    log_level: int = logging.INFO

    @property
    def name(self) -> str:
        return self.leader_task.name

    @property
    def kind(self) -> TaskKindName:
        return KIND

    @property
    def collections(self) -> tuple[str, ...]:
        """The collections that it reads."""
        return tuple(binding.collection.name for binding in self.bindings)

    @staticmethod
    def source_root(binding: Binding) -> Column:
        """Return the layout of a binding's documents."""
        return _layout(binding.collection.read_schema.text)

    async def run_session(self, world: World, control: Control) -> Ended:
        return await run_session(self, world, control)


_layout = functools.lru_cache(maxsize=256)(layout)


def build(
    catalog: Catalog, spec: CollectionSpec, *, shards: int | None = None, name: str | None = None
) -> DerivationTask:
    """Build the derivation of a collection. Reads no document, and starts nothing."""
    derivation = spec.derivation
    bindings = derivation_bindings(catalog, spec)
    if derivation is None or not bindings:
        raise UserError(
            f"derivation {spec.name} has nothing to do",
            why="all of its transforms are disabled, or it has none",
            fix="add a transform, or enable one",
        )
    target = DerivedTarget(spec)
    lambdas = spark_lambdas(catalog, spec)
    engine = row_engine(catalog, spec) if lambdas is None else None
    if lambdas is None and engine is None:
        raise Bug(f"nothing runs the transforms of {spec.name}")
    return DerivationTask(
        leader_task=DeriveLeaderTask(
            name=name or spec.name,
            build=specs.fingerprint(spec)[:16],
            transforms=tuple(
                LeaderTransform(name=transform.name, source=transform.source.collection)
                for transform in derivation.transforms
            ),
            shards=shards or derivation.shards.count or 1,
            policy=ClosePolicy(
                open_age=Band(
                    min=duration(derivation.shards.min_txn_s),
                    max=duration(derivation.shards.max_txn_s),
                ),
                combiner_bytes=Band(max=COMBINER_BYTES_MAX),
            ),
        ),
        bindings=bindings,
        target=target,
        engine=engine,
        lambdas=lambdas or {},
        explicit_nulls=derivation.using == "sqlite",
        ordered=_is_ordered(target, engine, lambdas or {}),
        columns=_columns(bindings, lambdas or {}),
        log_level=LEVELS[derivation.shards.log_level],
    )


def _columns(
    bindings: Sequence[Binding], lambdas: Mapping[int, SparkLambda]
) -> dict[int, tuple[str, ...]]:
    """Return the top-level columns that lambdas look at, where that is not all of them."""
    found = {}
    for binding in bindings:
        looks_at = lambdas.get(binding.index)
        if looks_at is None or looks_at.whole:
            continue
        fields = [binding.collection.field(name) for name in looks_at.fields]
        names = columns_of(binding.collection, [f.location for f in fields if f is not None])
        if names is not None and None not in fields:
            found[binding.index] = names
    return found


def _is_ordered(
    target: DerivedTarget, engine: RowEngine | None, lambdas: Mapping[int, SparkLambda]
) -> bool:
    """True if documents are published in an order that counts.

    Of members that a schema does not name the last write wins, and code may publish any.
    """
    if engine is not None:
        return target.is_ordered or target.root.extra is not None
    return any(each.order_matters for each in lambdas.values())
