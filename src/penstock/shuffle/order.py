"""PURE: the order of documents is the order of their commits.

A writer's clock says when a document was written, as far as that writer knows. When it counts is
decided by the store: at the **revision** that committed it, which for a document of a transaction
is that of its ACK. Every transaction of a task takes what was committed up to some revision, so the
order of revisions is the one order that gives the same result however a task splits what it reads;
clocks that run ahead or behind, and transactions that stay open for long, would give others.

Revisions do not compare with clocks, and two things go by clocks: documents of one revision, and
cohorts of one lane, which are merged by the adjusted clocks of what they come to next. So a
revision of a cohort has a **level**: an adjusted clock that is later than all that the cohort has
committed before. A document comes at its own adjusted clock or at its level, whichever is later,
and documents that come at the same one are ordered by clock, then by producer. Mostly clocks rise
with revisions; then levels raise nothing, and are not looked at.

ACKs that did not fit one revision of the store have the level of the first that the cohort reads:
with it the cohort has promised to show the others (`checkpoint`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from penstock.model.clock import CLOCK_MAX, NEVER, Clock
from penstock.shuffle.delivery import Delivery

_LEVEL: Final = attrgetter("level")


class Order(enum.Enum):
    """The columns that sort documents of a binding by commit."""

    CLOCK = "clocks alone: no two are equal, and they rise with revisions"
    STAMP = "clocks, and producers where these are equal"
    COMMIT = "levels first, since clocks do not rise with revisions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """Deliveries of one binding, and how their documents are ordered."""

    order: Order
    deliveries: tuple[Delivery, ...]
    """By level. Levels are the least that order these deliveries among themselves."""


def level_after(level: Clock, latest: Clock) -> Clock:
    """The level of the next revision, after one that committed up to an adjusted clock."""
    return min(Clock(max(level, latest) + 1), CLOCK_MAX)


def arranged(deliveries: Iterable[Delivery], *, delay: int) -> Arranged:
    """Deliveries of one binding, which has this read delay, by themselves."""
    found: list[Delivery] = []
    level = NEVER
    late = ambiguous = False
    for _, revision in groupby(sorted(deliveries, key=_LEVEL), key=_LEVEL):
        some = sorted(revision, key=attrgetter("first"))
        is_late = some[0].first + delay < level
        own = level if is_late else NEVER
        found += (each if each.level == own else replace(each, level=own) for each in some)
        late |= is_late
        ambiguous |= _interleave(some)
        level = level_after(level, Clock(max(each.last for each in some) + delay))
    order = Order.COMMIT if late else Order.STAMP if ambiguous else Order.CLOCK
    return Arranged(order=order, deliveries=tuple(found))


def _interleave(by_first: list[Delivery]) -> bool:
    """True if two producers may have stamped the same clock."""
    if len({each.producer for each in by_first}) == 1:
        return False
    return any(after.first <= before.last for before, after in pairwise(by_first))
