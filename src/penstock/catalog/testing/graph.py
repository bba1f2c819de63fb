"""PURE: which derivations read which collections, their own included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from penstock.model.spec import Catalog


@dataclass(frozen=True, slots=True)
class Graph:
    """The derivations that run: those that are disabled or deleted, and transforms that are
    disabled, are not part of it.
    """

    sources: Mapping[str, frozenset[str]]
    """The collections that a derived collection is computed from, by its name."""

    @classmethod
    def of(cls, catalog: Catalog) -> Self:
        return cls(
            {
                spec.name: frozenset(
                    each.source.collection
                    for each in spec.derivation.transforms
                    if not each.disable
                )
                for spec in catalog.collections
                if spec.derivation is not None and not spec.derivation.shards.disable
            }
        )

    def in_order(self) -> list[str]:
        """All derivations, each after those it reads; in a cycle, the first name goes first."""
        left = dict(sorted(self.sources.items()))
        ordered: list[str] = []
        while left:
            ready = [name for name, read in left.items() if not (read & left.keys()) - {name}]
            for name in ready or [next(iter(left))]:
                del left[name]
                ordered.append(name)
        return ordered

    def writers_of(self, collection: str) -> frozenset[str]:
        """The derivations whose output may lead to documents of a collection, its own included."""
        found: set[str] = set()
        left = [collection]
        while left:
            name = left.pop()
            if name in self.sources and name not in found:
                found.add(name)
                left += self.sources[name]
        return frozenset(found)

    def cycle_through(self, name: str) -> list[str]:
        """The shortest way from a derivation back to itself; empty if there is none."""
        ways = [[name]]
        seen: set[str] = set()
        for way in ways:  # which grows: shorter ways come first
            for source in sorted(self.sources.get(way[0], ())):
                if source == name:
                    return [source, *way]
                if source not in seen:
                    seen.add(source)
                    ways.append([source, *way])
        return []
