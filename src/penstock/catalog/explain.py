"""`penstock check --explain`: how a collection's documents are stored, reduced and derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from penstock.model import columns, pointer
from penstock.model.columns import Column, Kind
from penstock.model.schema import compiled
from penstock.model.spec import Catalog, CollectionSpec, DerivationSpec, Transform
from penstock.native.plan import compile_reduction
from penstock.runtime.derive.spark_sql import judge_lambda
from penstock.runtime.derive.sqlite_native import NativeLambda, WhyNot, compile_to_spark

_REST = "(other members)"
_STATEFUL = WhyNot(reason="it keeps tables")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A collection's columns by location, and its reduction plan."""

    name: str
    key: tuple[str, ...]
    partitions: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    """Location and type of each column. `*` stands for items and unnamed members."""
    plan: str
    derivation: tuple[tuple[str, str], ...] = ()
    """The name of each transform, and how it runs."""

    def to_json(self) -> dict[str, object]:
        return {
            "key": list(self.key),
            "partitions": list(self.partitions),
            "columns": [{"location": at, "type": kind} for at, kind in self.columns],
            "plan": self.plan,
            "derivation": [{"transform": name, "runs": how} for name, how in self.derivation],
        }

    def render(self) -> str:
        head = f"{self.name}: key {', '.join(self.key)}"
        if self.partitions:
            head += f"; partitioned by {', '.join(self.partitions)}"
        width = max((len(at) for at, _ in self.columns), default=0)
        stored = [f"    {at:<{width}}  {kind}" for at, kind in self.columns]
        plan = [f"    {line}" for line in self.plan.split("\n")]
        wide = max((len(name) for name, _ in self.derivation), default=0)
        derived = [f"    {name:<{wide}}  {how}" for name, how in self.derivation]
        section = ["  derivation", *derived] if derived else []
        return "\n".join([head, "  columns", *stored, "  reduction", *plan, *section, ""])


def explain_collection(spec: CollectionSpec, catalog: Catalog) -> Explanation:
    """Explain a collection as readers see it, and how it is computed from others."""
    schema = compiled(spec.read_schema.text)
    root = columns.columns(schema.shape)
    rows = [
        (pointer.render(path), _describe(column))
        for path, column in columns.walk_columns(root)
        if path
    ]
    if root.extra is not None:
        rows.append((_REST, "json by name"))
    return Explanation(
        name=spec.name,
        key=spec.key,
        partitions=tuple(field.name for field in spec.partitions),
        columns=tuple(rows),
        plan=compile_reduction(schema, spec.key).explain(),
        derivation=tuple(_transforms(spec, catalog)),
    )


def _transforms(spec: CollectionSpec, catalog: Catalog) -> Iterator[tuple[str, str]]:
    derivation = spec.derivation
    if derivation is None:
        return
    twins = _twins(spec, derivation, catalog)
    for transform in derivation.transforms:
        source = catalog.collection(transform.source.collection)
        if transform.disable:
            yield transform.name, "disabled"
        elif derivation.using == "spark" and source is not None:
            yield transform.name, _explain_spark(transform, derivation, source, spec)
        elif transform.name in twins:
            yield transform.name, twins[transform.name].explain()
        else:
            yield transform.name, f"document by document, in {derivation.using}"


def _twins(
    spec: CollectionSpec, derivation: DerivationSpec, catalog: Catalog
) -> dict[str, NativeLambda | WhyNot]:
    """Return the twins in Spark SQL of SQLite lambdas, by transform. They run if all have one."""
    if derivation.using != "sqlite":
        return {}
    if derivation.migrations:
        return {each.name: _STATEFUL for each in derivation.transforms}
    twins = {
        transform.name: compile_to_spark(transform.code or "", source, spec)
        for transform in derivation.transforms
        if not transform.disable
        and (source := catalog.collection(transform.source.collection)) is not None
    }
    without = next((name for name, twin in twins.items() if isinstance(twin, WhyNot)), None)
    if without is None:
        return twins
    beside = WhyNot(reason=f"it has a twin in Spark, but {without} has none")
    return {
        name: beside if isinstance(twin, NativeLambda) else twin for name, twin in twins.items()
    }


def _explain_spark(
    transform: Transform, derivation: DerivationSpec, source: CollectionSpec, target: CollectionSpec
) -> str:
    judged = judge_lambda(
        transform.code or "",
        source=source,
        target=target,
        views=dict(derivation.views),
        nonlinear=derivation.nonlinear,
    )
    return "the lambda has mistakes" if isinstance(judged, list) else judged.explain()


def _describe(column: Column) -> str:
    kind = column.kind.value
    if column.kind is Kind.DECIMAL:
        kind += f"({column.precision},{column.scale})"
    notes = [column.logical, "redacted" if column.redact else None]
    listed = ", ".join(note for note in notes if note)
    return f"{kind} ({listed})" if listed else kind
