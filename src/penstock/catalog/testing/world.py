"""The world of a test: collections that are empty at first, and derivations that run on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.model.spec import Selector
from penstock.runtime.derive.engine import Document


class TestWorld(Protocol):
    """Where the steps of one test happen. Every method raises `PenstockError` if a step fails."""

    def ingest(self, collection: str, documents: Sequence[Document]) -> None:
        """Append documents as one transaction."""
        ...

    def settle(self) -> None:
        """Run every derivation until nothing is ready at the current time."""
        ...

    def advance_to_next_due(self, collection: str) -> bool:
        """Advance the time to the next delayed read that may lead to documents of a collection.

        False if there is none; then nothing happens. The read happens when the world settles.
        """
        ...

    def read(self, collection: str, selector: Selector) -> list[Document]:
        """Return the documents of some partitions in the order in which they reduce.

        They are as published, without their UUIDs, and not yet reduced.
        """
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...
