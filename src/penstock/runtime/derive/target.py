"""The collection that a derivation writes to: how documents are laid out, checked and combined."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import cached_property

from penstock.journal.schemas import layout
from penstock.model.columns import Column
from penstock.model.redact import has_redactions
from penstock.model.reduce import Strategy
from penstock.model.schema import CompiledSchema, compiled
from penstock.model.spec import CollectionSpec
from penstock.native.plan import PlanKind, ReductionPlan, Value, compile_reduction, walk

_ORDERLESS = frozenset({Strategy.SUM, Strategy.MINIMIZE, Strategy.MAXIMIZE})


@dataclass(frozen=True, eq=False)
class DerivedTarget:
    """The derived collection, as its documents are published."""

    spec: CollectionSpec

    @cached_property
    def schema(self) -> CompiledSchema:
        return compiled(self.spec.write_schema.text)

    @cached_property
    def root(self) -> Column:
        return layout(self.spec.write_schema.text)

    @cached_property
    def plan(self) -> ReductionPlan:
        """How documents of one key are combined before they are published."""
        return compile_reduction(self.schema, self.spec.key)

    @cached_property
    def combines(self) -> bool:
        """True if documents of one key may be combined.

        Readers reduce by the read schema. Where that is another one, its annotations may tell apart
        what the write schema would fold into one.
        """
        return self.spec.write_schema == self.spec.read_schema

    @cached_property
    def keeps_documents(self) -> bool:
        """True if combining documents can do no more than drop those that are written over.

        Then there is nothing to gain by it where no two documents are of one key.
        """
        last = self.plan.kind is PlanKind.LAST and self.plan.apart is None
        return last or not self.combines

    @cached_property
    def leaves_one_alone(self) -> bool:
        """True if combining does nothing to a document that is the only one of its key."""
        plan = self.plan
        flat = plan.kind in (PlanKind.LAST, PlanKind.FLAT) and plan.apart is None
        return flat or not self.combines

    @cached_property
    def is_ordered(self) -> bool:
        """True if the outcome depends on the order of a key's documents.

        Sums, minima and maxima do not: their documents may come in any order. Of members that the
        schema does not name the last write wins; transforms that publish such members need order.
        """
        plan = self.plan
        if not self.combines or plan.apart is not None or plan.fold is not None:
            return True
        if plan.barrier is not None or plan.root is None:
            return True
        return not all(node.at in plan.key or _is_orderless(node) for node in walk(plan.root))

    @cached_property
    def hides(self) -> bool:
        """True if its schema redacts something."""
        return has_redactions(self.schema.shape)

    @cached_property
    def salt(self) -> bytes:
        derivation = self.spec.derivation
        return base64.b64decode((derivation and derivation.redact_salt) or "")


def _is_orderless(node: object) -> bool:
    return isinstance(node, Value) and node.strategy in _ORDERLESS and not node.ordered
