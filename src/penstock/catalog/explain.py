"""What a collection's schema comes to: each location, its type, and how it is reduced."""

from __future__ import annotations

import dataclasses

from penstock.model.check import locations
from penstock.model.infer import infer
from penstock.model.shape import Reduction, Shape
from penstock.model.spec import CollectionSpec

_ROOT = "(document)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """One location. `*` in a pointer stands for items and members that have no name."""

    pointer: str
    types: tuple[str, ...]
    required: bool
    reduction: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A collection, location by location."""

    name: str
    key: tuple[str, ...]
    partitions: tuple[str, ...]
    locations: tuple[Location, ...]

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def render(self) -> str:
        """A table for people."""
        head = f"{self.name}: key {', '.join(self.key)}"
        if self.partitions:
            head += f"; partitioned by {', '.join(self.partitions)}"
        rows = [
            (at.pointer or _ROOT, _types(at), at.reduction or "lastWriteWins")
            for at in self.locations
        ]
        left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(
            [head, *(f"  {at:<{left}}  {types:<{middle}}  {how}" for at, types, how in rows)]
        )


def explain_collection(spec: CollectionSpec) -> Explanation:
    """How documents of a collection look to readers, and what becomes of each location."""
    shape = infer(spec.read_schema.value)
    return Explanation(
        name=spec.name,
        key=spec.key,
        partitions=tuple(field.name for field in spec.partitions),
        locations=tuple(
            Location(
                pointer=at,
                types=tuple(sorted(inner.types)),
                required=required,
                reduction=_reduction(inner),
            )
            for at, required, inner in locations(shape)
            if not at.endswith("/*") or inner.reductions
        ),
    )


def _types(at: Location) -> str:
    types = "any" if len(at.types) == 6 else " | ".join(at.types) or "never"
    return types if at.required else f"{types}?"


def _reduction(shape: Shape) -> str:
    match shape.fixed_reduction():
        case None:
            return ""
        case Reduction() as fixed:
            return _described(fixed)
        case _:
            return "by document: " + " or ".join(
                dict.fromkeys(_described(r) for r in shape.reductions)
            )


def _described(reduction: Reduction) -> str:
    options = {k: v for k, v in reduction.annotation.items() if k != "strategy"}
    listed = ", ".join(f"{name} {value}" for name, value in options.items())
    return f"{reduction.strategy} ({listed})" if listed else reduction.strategy
