"""`penstock check --explain`: how a collection's documents are stored and reduced."""

from __future__ import annotations

import dataclasses

from penstock.model import columns, pointer
from penstock.model.columns import Column, Kind
from penstock.model.schema import compiled
from penstock.model.spec import CollectionSpec
from penstock.native.plan import compile_reduction

_REST = "(other members)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A collection's columns by location, and its reduction plan."""

    name: str
    key: tuple[str, ...]
    partitions: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    """Location and type of each column. `*` stands for items and unnamed members."""
    plan: str

    def to_json(self) -> dict[str, object]:
        return {
            "key": list(self.key),
            "partitions": list(self.partitions),
            "columns": [{"location": at, "type": kind} for at, kind in self.columns],
            "plan": self.plan,
        }

    def render(self) -> str:
        head = f"{self.name}: key {', '.join(self.key)}"
        if self.partitions:
            head += f"; partitioned by {', '.join(self.partitions)}"
        width = max((len(at) for at, _ in self.columns), default=0)
        stored = [f"    {at:<{width}}  {kind}" for at, kind in self.columns]
        plan = [f"    {line}" for line in self.plan.split("\n")]
        return "\n".join([head, "  columns", *stored, "  reduction", *plan, ""])


def explain_collection(spec: CollectionSpec) -> Explanation:
    """Explain the columns and the reduction plan of a collection as readers see it."""
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
    )


def _describe(column: Column) -> str:
    kind = column.kind.value
    if column.kind is Kind.DECIMAL:
        kind += f"({column.precision},{column.scale})"
    notes = [column.logical, "redacted" if column.redact else None]
    listed = ", ".join(note for note in notes if note)
    return f"{kind} ({listed})" if listed else kind
