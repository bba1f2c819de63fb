"""Which reduction rules can come to act at the locations of a schema, known before any document.

A rule at a location is *fixed* if it acts in every document. Where a condition decides, documents
differ, and reducing some of them before the rest is known may change the outcome: the combined
document may meet another rule than the documents it was made of.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.model.reduce import Rule, Strategy
from penstock.model.shape import Reduction, Shape


def fixed_rule(shape: Shape) -> Rule | None:
    """The rule that acts at a location in every document; None if documents differ."""
    fixed = shape.fixed_reduction()
    if fixed is None:
        return Rule()
    return Rule.parse(dict(fixed.annotation)) if isinstance(fixed, Reduction) else None


def acting_rules(shape: Shape) -> Iterator[Rule | None]:
    """The rules that can come to act at a location and below it; None where documents differ."""
    rule = fixed_rule(shape)
    yield rule
    descends = rule is None or rule.key or rule.strategy in (Strategy.MERGE, Strategy.SET)
    if not descends:
        return
    if shape.cut:
        yield None
        return
    for _, _, below in shape.children():
        yield from acting_rules(below)


def why_not_combined(shape: Shape) -> str | None:
    """Why documents cannot be combined before the stored one is known; None if they can.

    `reduce(reduce(a, b), c) == reduce(a, combine(b, c))` holds where the same rules act in every
    document, none of them deletes, and nobody says that they are not associative. Conditions can
    be written so that it holds as well, but whether they were cannot be told from a schema.
    """
    for rule in acting_rules(shape):
        if rule is None:
            return "what acts in a document depends on it"
        if rule.delete:
            return "documents delete"
        if not rule.associative:
            return "a reduction is not associative"
    return None
